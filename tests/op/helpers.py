"""Ops and arguments for the tests of the runtime."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

import flashgen
from flashgen.op.op import AttentionOp, OpParts

CAUSAL = "attention causal { head_dim 16, 16/8  mask causal }"
SIGMOID = "attention sigmoid { head_dim 16  mask causal  weights sigmoid(s) }"
# A bit of everything that an op can be given.
RICH = """
attention rich {
    head_dim 16
    param bias: f32 = 1 / Nk
    param cut: i32 = 2
    param ell: f32 = 1.0 grad
    tensor slope: f32[H] grad
    tensor doc: i32[B, Nk]
    tensor table: bf16[8] grad
    score ell * s - slope[h] * abs(i - j) + bias + table[(i + j) % 8]
    mask doc[b, i] == doc[b, j] or i - j < cut
    dropout 0.25
}
"""


@functools.cache
def op(text: str, backend: str | None) -> AttentionOp:
    """The op of a spec on a backend; ``tiled`` is what stands in where there is no compiler."""
    if backend == "tiled":
        return AttentionOp(OpParts(flashgen.loads(text, backend="reference").spec, {"cpu": None}, label="tiled"))
    return flashgen.loads(text, backend=backend)


def random(*sizes: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    """Seeded normal numbers."""
    return torch.randn(sizes, generator=torch.Generator().manual_seed(seed)).to(dtype)


def qkv(
    n: int = 37, *, heads: int = 4, kv_heads: int = 2, v: int = 16, dtype: torch.dtype = torch.float32
) -> list[Tensor]:
    """Queries, keys and values that require gradients."""
    return [
        random(2, count, n, width, seed=seed, dtype=dtype).requires_grad_()
        for seed, (count, width) in enumerate(((heads, 16), (kv_heads, 16), (kv_heads, v)))
    ]


def captured(n: int = 37) -> dict[str, Any]:
    """The tensors of ``RICH`` and a seed; those that learn require gradients."""
    return {
        "slope": random(4, seed=5).requires_grad_(),
        "doc": torch.arange(n, dtype=torch.int32).div(10, rounding_mode="floor").to(torch.int32).expand(2, n),
        "table": random(8, seed=6, dtype=torch.bfloat16).requires_grad_(),
        "seed": 42,
    }


def error(value: Tensor, truth: Tensor) -> float:
    """Relative distance in the Frobenius norm."""
    value, truth = value.detach().double(), truth.detach().double()
    return float((value - truth).norm() / truth.norm().clamp(min=1e-30))


def of_rich(n: int = 9) -> dict[str, Any]:
    """What ``RICH`` captures, floats ready to be differentiated by."""
    found = {**captured(n), "ell": torch.tensor(1.5), "bias": torch.tensor(0.25)}
    return {key: x.detach() if isinstance(x, Tensor) else x for key, x in found.items()}


def close(found: Any, truth: Any, limit: float = 1e-4) -> None:
    """Finite, and equal but for rounding; tensors, or tuples of them."""
    found, truth = ([x] if isinstance(x, Tensor) else list(x) for x in (found, truth))
    for x, y in zip(found, truth, strict=True):
        assert x.isfinite().all()
        assert error(x, y) < max(limit, 2 * torch.finfo(x.dtype).eps)
