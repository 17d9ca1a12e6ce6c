"""``flash_attn_combine``: merges attention over different keys of the same rows.

In: o and lse of each part. Out: o and lse over all keys, by PyTorch's operators, with gradients.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from flashgen.flash.options import check_rows

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def flash_attn_combine(
    out_partial: Tensor, lse_partial: Tensor, out: Tensor | None = None, out_dtype: torch.dtype | None = None
) -> tuple[Tensor, Tensor]:
    """``(o, lse)`` of all keys, of ``out_partial`` [splits, B, Nq, H, D] and ``lse_partial`` [splits, B, Nq, H].

    These are float32; of sequences one behind the other [splits, Tq, H, D] and [splits, Tq, H]. ``o`` is
    [B, Nq, H, D], of ``out_dtype``, by default float32, or is written to ``out``; ``lse`` is [B, Nq, H], float32. A
    part whose lse is −inf has no key; a row of which no part has one is 0, its lse −inf.

    Raises ``ValueError`` and ``TypeError`` by name for arguments that do not fit.
    """
    given: Any = out_partial
    is_ragged = isinstance(given, Tensor) and given.dim() == 4
    form = "[splits, Tq, H, D]" if is_ragged else "[splits, B, Nq, H, D]"
    check_rows({"out_partial": (out_partial, form), "lse_partial": (lse_partial, form.replace(", D]", "]"))})
    if lse_partial.shape != out_partial.shape[:-1]:
        wanted = list(out_partial.shape[:-1])
        raise ValueError(f"'lse_partial' has shape {list(lse_partial.shape)}; {wanted} is expected")
    for name, x in (("out_partial", out_partial), ("lse_partial", lse_partial)):
        if x.dtype is not torch.float32:
            raise TypeError(f"'{name}' is {x.dtype}; torch.float32 is expected")
    dtype = out_dtype or (torch.float32 if out is None else out.dtype)
    if dtype not in _DTYPES or (out is not None and (out.dtype is not dtype or out.shape != out_partial.shape[1:])):
        given = "" if out is None else f", and 'out' {out.dtype} {list(out.shape)}"
        raise ValueError(
            f"'out_dtype' is {out_dtype}{given}; one of {', '.join(map(str, _DTYPES))} is expected, of shape "
            f"{list(out_partial.shape[1:])}"
        )
    o, lse = _combined(out_partial, lse_partial)
    return (o.to(dtype) if out is None else out.copy_(o)), lse


def _combined(o: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
    if lse.shape[0] == 0:
        return o.sum(0), lse.new_full(lse.shape[1:], -math.inf)
    largest = lse.detach().amax(0)
    largest = torch.where(largest == -math.inf, 0.0, largest)
    weights = torch.exp(lse - largest)
    total = weights.sum(0)
    has_key = total > 0
    total = torch.where(has_key, total, 1.0)
    # What a part without a key holds is not read: it may be NaN.
    parts = torch.where((weights > 0)[..., None], o, 0.0) * (weights / total)[..., None]
    return parts.sum(0), torch.where(has_key, largest + total.log(), -math.inf)
