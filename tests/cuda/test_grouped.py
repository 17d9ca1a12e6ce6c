"""A list for each query: heads that share it are rows of a tile, of which few keys are read; planted mistakes show."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import Tensor

import flashgen
from flashgen.hosts.emulated import recording
from flashgen.op.op import AttentionOp
from flashgen.verification.verify import relative_error

TEXT = """
attention grouped_{name} {{
    head_dim 64
    dtype bf16, f32
    tensor idx: i32[B, {heads}, Nq, 2]
    tensor slope: f32[H] grad
    select 32: idx[b, {head}, i, :]
    score s - slope[h] * abs(i - j) / 100
    mask causal
    weights {weights}
}}
"""
N = 1030


@functools.cache
def emulated(head: str = "hkv", weights: str = "softmax") -> AttentionOp:
    text = TEXT.format(name=head, head=head, heads=head.capitalize() if head == "hkv" else "H", weights=weights)
    return flashgen.loads(text, backend="emulator", target="sm_90a")


def arguments(
    dtype: torch.dtype = torch.bfloat16, *, queries: int = 16, heads: int = 16, lists: int = 2
) -> dict[str, Any]:
    """The last queries of a sequence, and lists with numbers that no block has, or that occur twice."""
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    q, k, v = random(1, heads, queries, 64), random(1, 2, N, 64), random(1, 2, N, 64)
    idx = torch.randint(-2, N // 32 + 3, (1, lists, N, 2), generator=generator).int()
    idx[:, :, -7] = -1
    idx[:, :, -9, 1] = idx[:, :, -9, 0]
    slope = random(heads).abs()
    return {"q": q.to(dtype), "k": k.to(dtype), "v": v.to(dtype), "idx": idx, "slope": slope, "q_start": N - queries}


def runs_grouped(op: AttentionOp, given: dict[str, Any]) -> bool:
    with recording() as counted, torch.no_grad():
        op(**given)
    return any("_cached_" in launch.kernel for each in counted for launch in each.launches.launches)


@pytest.mark.parametrize("weights", ["softmax", "normalize(softplus(s))"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_results_and_gradients(dtype: torch.dtype, weights: str) -> None:
    """What the forward pass leaves of rows, over caches, is what the backward pass of other kernels reads."""
    op, given = emulated(weights=weights), arguments(dtype)
    assert runs_grouped(op, given)
    leaves = [given[name].requires_grad_() for name in ("q", "k", "v", "slope")]
    o, lse = op(**given, return_lse=True)
    exact, exact_lse = op.reference(**given, return_lse=True)
    tolerance = 1e-5 if dtype is torch.float32 else 0.01
    assert relative_error(o, exact) < tolerance
    assert relative_error(lse.nan_to_num(neginf=-9), exact_lse.nan_to_num(neginf=-9)) < tolerance
    d_o = torch.randn(o.shape, generator=torch.Generator().manual_seed(1)).to(dtype)
    own = torch.autograd.grad(o, leaves, d_o)
    for x, y in zip(own, torch.autograd.grad(exact, leaves, d_o.double()), strict=True):
        assert relative_error(x, y) < 2 * tolerance


WHOLE = """
attention grouped_whole {
    head_dim 16
    dtype bf16, f32
    tensor idx: i32[B, Hkv, Nq, 1]
    tensor slope: f32[H] grad
    select 8: idx[b, hkv, i, :]
    score s - slope[h] * abs(i - j) / 100
    mask causal and (h + Nq) % 5 != i % 5
    weights softmax(sink = slope[h])
}
"""


@functools.cache
def whole() -> AttentionOp:
    return flashgen.loads(WHOLE, backend="emulator", target="sm_90a")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("deterministic", [False, True])
def test_whole_sequences_have_heads_as_rows_backward_too(dtype: torch.dtype, deterministic: bool) -> None:
    """Scores, masks, sinks and captured tensors by head mean the same; what nobody asks for is left out."""
    op, generator = whole(), torch.Generator().manual_seed(0)
    q, k, v, d_o = (torch.randn(2, n, 133, 16, generator=generator).to(dtype) for n in (16, 2, 2, 16))
    given: dict[str, Any] = {
        "idx": torch.randint(-2, 19, (2, 2, 133, 1), generator=generator).int(),
        "slope": torch.randn(16, generator=generator),
    }
    given |= dict(zip("qkv", (q, k, v), strict=True))
    leaves = [given[name].requires_grad_() for name in ("q", "k", "v", "slope")]
    o, lse = op(**given, return_lse=True, deterministic=deterministic)
    d_lse = torch.randn(lse.shape, generator=generator)
    exact, exact_lse = op.reference(**given, return_lse=True)
    with recording() as counted:
        own = torch.autograd.grad((o, lse), leaves, (d_o, d_lse), retain_graph=True)
    assert {each.launches.launches[-1].kernel.startswith("grouped_whole_by_8_") for each in counted} == {True}
    truth = torch.autograd.grad((exact, exact_lse), leaves, (d_o.double(), d_lse.double()), retain_graph=True)
    for x, y in zip(own, truth, strict=True):
        assert relative_error(x, y) < (2e-5 if dtype is torch.float32 else 0.02)
    (only,) = torch.autograd.grad((o, lse), leaves[1:2], (d_o, d_lse))
    assert relative_error(only, truth[1]) < (2e-5 if dtype is torch.float32 else 0.02)


def test_extreme_scores_have_gradients() -> None:
    """Their lse is more than float32 holds: kernels over caches leave its parts, as others do."""
    op, given = emulated(), arguments(torch.float32)
    given["q"] = (given["q"] * 1e6).requires_grad_()
    assert runs_grouped(op, given)
    d_o = torch.randn(given["q"].shape, generator=torch.Generator().manual_seed(1))
    (own,) = torch.autograd.grad(op(**given), given["q"], d_o)
    (exact,) = torch.autograd.grad(op.reference(**given), given["q"], d_o.double())
    assert relative_error(own, exact) < 1e-4


def test_calls_that_go_the_other_way() -> None:
    """Heads with lists of their own, few heads, part of the keys; and it is said of the others."""
    op, given = emulated(), arguments()
    assert "the heads that share a list are the rows of a tile" in str(op.explain(**given))
    assert not runs_grouped(op, arguments(heads=4))
    assert "rows of a tile" not in str(op.explain(**arguments(heads=4)))
    assert not runs_grouped(op, {**given, "q_start": N - 30, "q_total": N})
    assert not runs_grouped(emulated("h"), arguments(lists=16))


def test_few_keys_are_read() -> None:
    op, given = emulated(), arguments()
    with recording() as counted, torch.no_grad():
        op(**given)
    (run,) = [each for each in counted if any("_cached_" in launch.kernel for launch in each.launches.launches)]
    tiles = 2 * 16 // 2  # 16 rows, of two queries each, which name two blocks
    assert 0 < run.report.traffic["k"].loaded <= tiles * 4 * 64 * 64 * 2
