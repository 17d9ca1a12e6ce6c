"""What the tests of the reference share: specs from text, and tensors to call them with."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from flashgen.ir.spec import AttentionSpec
from flashgen.language import parse_text


@functools.cache
def spec(body: str, head_dim: str = "8") -> AttentionSpec:
    """The spec of an attention block with these statements."""
    return parse_text(f"attention example {{ head_dim {head_dim}\n{body}\n}}").specs[0]


def random(*sizes: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    """Seeded normal numbers."""
    return torch.randn(sizes, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def qkv(
    batch: int = 2, heads: int = 4, kv_heads: int = 4, q_len: int = 9, kv_len: int = 9, qk: int = 8, v: int = 8
) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values in float64."""
    return (
        random(batch, heads, q_len, qk, seed=1),
        random(batch, kv_heads, kv_len, qk, seed=2),
        random(batch, kv_heads, kv_len, v, seed=3),
    )


def differentiable(*tensors: Tensor) -> list[Tensor]:
    """Copies that require gradients."""
    return [x.detach().clone().requires_grad_() for x in tensors]
