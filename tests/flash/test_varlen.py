"""``flash_attn_varlen_func`` is ``flash_attn_func`` of each sequence."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from flashgen.flash import flash_attn_func, flash_attn_varlen_func

LENGTHS = ((7, 9), (0, 3), (1, 1), (40, 25))
Q_STARTS, K_STARTS = (torch.tensor([0, *each]).cumsum(0).to(torch.int32) for each in zip(*LENGTHS, strict=True))


def inputs() -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    return torch.randn(48, 4, 16), torch.randn(38, 2, 16), torch.randn(38, 2, 16)  # test_dense.py's kernels


@pytest.mark.parametrize(
    "options",
    [
        {"causal": True, "s_aux": torch.tensor([0.5, -1.0, 2.0, 0.0])},
        {"causal": True, "window_size": (5, 0), "softcap": 20.0, "alibi_slopes": torch.rand(4, 4)},
    ],
)
def test_each_sequence_is_a_call(options: dict[str, Any]) -> None:
    q, k, v = (x.requires_grad_() for x in inputs())
    o, lse, _ = flash_attn_varlen_func(q, k, v, Q_STARTS, K_STARTS, 40, 25, return_attn_probs=True, **options)
    parts, sums = [], []
    for b in range(len(LENGTHS)):
        rows, keys = slice(*Q_STARTS[b : b + 2].tolist()), slice(*K_STARTS[b : b + 2].tolist())
        own = {name: x[b] if name == "alibi_slopes" else x for name, x in options.items()}
        part = flash_attn_func(q[rows][None], k[keys][None], v[keys][None], return_attn_probs=True, **own)
        parts.append(part[0][0])
        sums.append(part[1][0])
    torch.testing.assert_close(o, torch.cat(parts))
    torch.testing.assert_close(lse, torch.cat(sums, 1))
    arriving = torch.randn_like(o)
    found = torch.autograd.grad(o, (q, k, v), arriving)
    for x, y in zip(found, torch.autograd.grad(torch.cat(parts), (q, k, v), arriving), strict=True):
        torch.testing.assert_close(x, y)


def test_what_does_not_fit_is_named() -> None:
    q, k, v = inputs()
    with pytest.raises(ValueError, match="'block_table': keys in pages"):
        flash_attn_varlen_func(q, k, v, Q_STARTS, K_STARTS, block_table=Q_STARTS)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="'q' has shape"):
        flash_attn_varlen_func(q[None], k, v, Q_STARTS, K_STARTS)
    with pytest.raises(ValueError, match="'alibi_slopes' has shape"):
        flash_attn_varlen_func(q, k, v, Q_STARTS, K_STARTS, alibi_slopes=torch.rand(3))
    with pytest.raises(ValueError, match="'cu_seqlens_k' ends at 25"):
        flash_attn_varlen_func(q, k, v, Q_STARTS, K_STARTS.clamp(max=25))
    with pytest.raises(ValueError, match=r"'cu_seqlens_q' has shape \[0\]; \[B \+ 1\] is expected"):
        flash_attn_varlen_func(q, k, v, Q_STARTS[:0], K_STARTS, alibi_slopes=torch.rand(4))
