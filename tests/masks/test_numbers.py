"""Masks and layouts against the float64 reference, forward and backward: sizes that do not go together, bad input."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor

import flashgen
from flashgen.op.op import AttentionOp
from tests.numeric.helpers import assert_close, normal

D = 32

# Blocks that tiles do not divide, tiles that blocks do not divide, both by pins of the schedule and by the planner.
LAYOUTS = {
    "prime": "layout block 37: I == J or J == 0 or popcount(I ^ J) == 1",
    "small": "layout block 5: hash(I, J, 3) % 4 == 0",
    "single positions": "layout block 1: (I + J) % 3 == 0",
    "pinned": "layout block 64: I == J or I == 1\n schedule { Br = 48 Bc = 40 backward_Br = 80 backward_Bc = 50 }",
    "register blocks that reach over": "layout block 30: abs(I - J) <= 1\n schedule { Bc = 30 backward_Bc = 30 }",
    "few long rows": "layout block 16: I == 3 or I == J",
    "few long columns": "layout block 16: J == 3 or I == J",
}
BLOCKS = "tensor keep: bool[H, ceildiv(Nq, 24), ceildiv(Nk, 24)]\n layout block 24: keep[h, I, J]"
DOCUMENTS = "tensor doc: i32[B, Nk]\n mask causal and same_document(doc)"


@functools.cache
def op(statements: str) -> AttentionOp:
    return flashgen.loads(f"attention under_test {{ head_dim {D}\n {statements} }}")


@pytest.fixture(params=[1, 3], ids=["1 thread", "3 threads"])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    """Both ways of cutting the work: a head a task, and several tasks a head."""
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def compare(
    statements: str,
    captured: Mapping[str, Any] | None = None,
    *,
    q_len: int = 203,
    kv_len: int = 203,
    heads: int = 2,
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Output and gradients against the reference."""
    kernel, named = op(statements), dict(captured or {})
    batch = next((x.shape[0] for name, x in named.items() if name == "doc"), 1)
    lengths = (q_len, kv_len, kv_len)
    leaves = [normal(batch, heads, n, D, seed=k).requires_grad_() for k, n in enumerate(lengths)]
    exact = [x.detach().double().requires_grad_() for x in leaves]
    seed = normal(batch, heads, q_len, D, seed=9)
    o = kernel(*leaves, **named)
    truth = kernel.reference(*exact, **named, dtype=torch.float64)
    assert_close(o, truth, what="o")
    gradients = torch.autograd.grad(o, leaves, seed)
    for name, found, right in zip("qkv", gradients, torch.autograd.grad(truth, exact, seed.double()), strict=True):
        assert_close(found, right, what=f"d{name}")
    return o, gradients


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("name", LAYOUTS)
def test_blocks_and_tiles_that_do_not_go_together(name: str) -> None:
    compare(LAYOUTS[name])


def test_a_shard_begins_inside_a_block() -> None:
    kernel = op(LAYOUTS["prime"])
    q, k, v = (normal(1, 2, 203, D, seed=seed) for seed in range(3))
    whole = kernel(q, k, v)
    part = kernel(q[:, :, 51:130], k, v, q_start=51, q_total=203)
    assert_close(part, whole[:, :, 51:130])


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("kept", [0.0, 0.2, 1.0])
def test_a_tensor_of_blocks(kept: float) -> None:
    shape = (2, -(-203 // 24), -(-203 // 24))
    keep = torch.rand(shape, generator=torch.Generator().manual_seed(4)) < kept
    compare(BLOCKS, {"keep": keep})


@pytest.mark.parametrize(
    ("keep", "error", "message"),
    [
        (torch.ones(2, 8, 8, dtype=torch.bool), ValueError, r"'keep' has shape \[2, 8, 8\].*\[2, 9, 9\]"),
        (torch.ones(9, 9, dtype=torch.bool), ValueError, r"'keep' has shape \[9, 9\].*\[2, 9, 9\]"),
        (torch.ones(2, 9, 9, dtype=torch.int32), TypeError, "'keep' is torch.int32; the spec declares bool"),
        (torch.ones(2, 9, 9), TypeError, "'keep' is torch.float32; the spec declares bool"),
    ],
)
def test_a_layout_tensor_of_the_wrong_shape_or_type(keep: Tensor, error: type[Exception], message: str) -> None:
    q = normal(1, 2, 203, D)
    with pytest.raises(error, match=message):
        op(BLOCKS)(q, q, q, keep=keep)


def documents(kind: str) -> Tensor:
    """[2, 203] document numbers."""
    sorted_ids = torch.arange(203, dtype=torch.int32).div(29, rounding_mode="floor").to(torch.int32).repeat(2, 1)
    generator = torch.Generator().manual_seed(1)
    shuffled = sorted_ids[:, torch.randperm(203, generator=generator)]
    largest = 2**31 - 1
    return {
        "sorted": sorted_ids,
        "falling": -sorted_ids,
        "negative": sorted_ids - 4,
        "shuffled": shuffled,
        "as far apart as can be": torch.where(shuffled % 2 == 0, -largest - 1, largest).to(torch.int32),
        "strided": torch.stack([sorted_ids, shuffled], dim=-1)[..., 1],
    }[kind].clone(memory_format=torch.preserve_format)


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("kind", ["sorted", "falling", "negative", "shuffled", "as far apart as can be", "strided"])
def test_any_document_numbers(kind: str) -> None:
    compare(DOCUMENTS, {"doc": documents(kind)})


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize(
    "statements",
    ["mask false", "mask j % 5 == 7 and i - j < 2", "layout block 7: false"],
)
def test_nothing_is_kept(statements: str) -> None:
    """Zeros, a log-sum-exp of -inf, zero gradients."""
    leaves = [normal(2, 2, 101, D, seed=seed).requires_grad_() for seed in range(3)]
    o, lse = op(statements)(*leaves, return_lse=True)
    assert not o.any()
    assert torch.equal(lse, torch.full_like(lse, -torch.inf))
    gradients = torch.autograd.grad((o.sum(), torch.where(lse.isfinite(), lse, 0.0).sum()), leaves)
    assert all(torch.equal(gradient, torch.zeros_like(gradient)) for gradient in gradients)


@pytest.mark.usefixtures("threads")
def test_keys_that_no_query_sees_have_zero_gradients() -> None:
    """Their memory is never written to by a tile, only by what adds the tiles up."""
    _, (_, dk, dv) = compare("mask 60 <= j and j < 70 or (j == 180 and h == 1)", heads=3)
    unseen = torch.ones(203, dtype=torch.bool)
    unseen[60:70] = unseen[180] = False
    assert not dk[:, :, unseen].any()
    assert not dv[:, :, unseen].any()
    assert not dk[:, 0, 180].any()
    assert dk[:, 1, 180].any()


def test_the_number_of_threads_changes_no_output() -> None:
    """Order and shares of the work follow what rows keep; a row's result does not."""
    statements = LAYOUTS["few long rows"]
    before = torch.get_num_threads()
    found = []
    for count in (1, 2, 5):
        torch.set_num_threads(count)
        q, k, v = (normal(1, 1, 400, D, seed=seed).requires_grad_() for seed in range(3))
        o = op(statements)(q, k, v)
        found.append((o, torch.autograd.grad(o.sum(), q)[0]))
    torch.set_num_threads(before)
    assert all(torch.equal(o, found[0][0]) and torch.equal(dq, found[0][1]) for o, dq in found[1:])
