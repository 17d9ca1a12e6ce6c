"""FlexAttention's own eager formula, in float64, differentiated by autograd: the judge of flashgen.flex."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch._higher_order_ops.flex_attention import math_attention
from torch.nn.attention import flex_attention as torch_flex
from torch.overrides import TorchFunctionMode

from flashgen.flex import noop_mask


def inputs(
    *, batch: int = 2, heads: int = 4, kv_heads: int = 4, q_len: int = 24, kv_len: int = 24, d: int = 8
) -> list[Tensor]:
    generator = torch.Generator().manual_seed(q_len)
    shapes = ((batch, heads, q_len, d), (batch, kv_heads, kv_len, d), (batch, kv_heads, kv_len, d))
    return [torch.randn(shape, generator=generator).requires_grad_() for shape in shapes]


class _PlainIndexing(TorchFunctionMode):
    """Indexes by symbolic positions, as FlexAttention's own mode does, by an operation that autograd differentiates.

    The gradient of FlexAttention's does not exist for ``t[h][i]``.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.__getitem__:
            key = args[1] if isinstance(args[1], tuple) else (args[1],)
            if all(isinstance(each, Tensor | int) for each in key):
                return torch.ops.aten.index(args[0], [torch.as_tensor(each) for each in key])
        return func(*args, **(kwargs or {}))


def judged(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    score_mod: Any = None,
    mask_mod: Any = None,
    scale: float | None = None,
    dtype: torch.dtype = torch.float64,
) -> tuple[Tensor, Tensor]:
    """o and lse in ``dtype``; o in float64 is checked against FlexAttention's own formula."""
    score_mod, mask_mod = score_mod or (lambda score, *_: score), mask_mod or noop_mask
    group = q.shape[1] // k.shape[1]
    keys, values = (x.to(dtype).repeat_interleave(group, 1) for x in (k, v))
    factor = scale or 1 / math.sqrt(q.shape[-1])
    positions = [torch.arange(count) for count in (*q.shape[:3], k.shape[2])]
    scores = q.to(dtype) @ keys.transpose(-1, -2) * factor
    with _PlainIndexing():
        kept = torch_flex._vmap_for_bhqkv(mask_mod, prefix=())(*positions)
        scored = torch_flex._vmap_for_bhqkv(score_mod, prefix=(0,))(scores.clone(), *positions)
    scored = torch.where(kept, scored, -math.inf).to(dtype)
    lse = scored.logsumexp(-1)
    o = torch._safe_softmax(scored, -1) @ values
    if dtype is not torch.float64:
        return o, lse
    with torch.no_grad():
        flex, *_ = math_attention(q.double(), k.double(), v.double(), score_mod, (mask_mod,), factor, {})
    torch.testing.assert_close(o, flex)
    return o, lse


def gradients(result: tuple[Tensor, Tensor], wanted: list[Tensor]) -> list[Tensor]:
    """Of a weighted sum of o and of the finite entries of lse."""
    o, lse = result
    weights = torch.linspace(-1, 1, o.numel(), dtype=o.dtype).view(o.shape)
    total = (o * weights).sum() + 0.1 * torch.where(torch.isfinite(lse), lse, 0).sum()
    return list(torch.autograd.grad(total, wanted))


def assert_close(mine: Tensor, theirs: Tensor, tolerance: float = 2e-5) -> None:
    torch.testing.assert_close(mine.double(), theirs.double(), rtol=tolerance, atol=tolerance)
