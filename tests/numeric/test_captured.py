"""Captured tensors that are drawn as users have them: by their type, their shape, and what the mask does with them."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from flashgen.ir.shape import Shape
from flashgen.ir.spec import AttentionSpec
from flashgen.ir.types import ElementType
from flashgen.language import parse_text
from flashgen.tuning.tune import Job
from flashgen.verification import random_inputs
from flashgen.verification.inputs import realistic_captured
from tools.benchmarks.sweeps import task_for

SHAPE = Shape(3, 2, 2, 400, 400)


def spec_of(statements: str) -> AttentionSpec:
    (spec,) = parse_text(f"attention a {{ head_dim 16 {statements} }}").specs
    return spec


def drawn(statements: str, shape: Shape = SHAPE, seed: int = 0) -> dict[str, Tensor]:
    spec = spec_of(statements)
    found = dict(realistic_captured(spec, shape, spec.head_dims[0], seed=seed))
    again = realistic_captured(spec, shape, spec.head_dims[0], seed=seed)
    assert all(torch.equal(each, again[name]) for name, each in found.items())
    return found


def changes(ids: Tensor) -> Tensor:
    return (ids[..., 1:] != ids[..., :-1]).sum(-1)


def test_documents_are_sorted_runs_and_the_same_in_every_tensor() -> None:
    found = drawn(
        "tensor q_doc: i32[B, Nq] tensor k_doc: i64[B, Nk] mask q_doc[b, i] == k_doc[b, j]", Shape(3, 2, 2, 200, 400)
    )
    ids = found["k_doc"]
    assert ids.dtype is torch.int64
    assert (ids[:, 1:] >= ids[:, :-1]).all()
    assert (changes(ids) > 3).all()
    assert len(torch.unique(ids)) <= 10  # of √400 / 2
    # The same documents at half of the length, up to rounding of where they end.
    assert float((found["q_doc"].long() - ids[:, ::2]).abs().ne(0).double().mean()) < 0.1
    assert not torch.equal(drawn("tensor doc: i32[B, Nk] mask doc[b, i] == doc[b, j]", seed=1)["doc"], ids)


@pytest.mark.parametrize(
    ("mask", "padded"),
    [("valid[b, j]", False), ("causal and not valid[b, j]", True), ("not valid[b, min(i, j)]", True)],
)
def test_padding_is_a_run(mask: str, padded: bool) -> None:
    valid = drawn(f"tensor valid: bool[B, Nk] mask {mask}")["valid"] ^ padded
    assert (valid[:, 1:] <= valid[:, :-1]).all()
    assert valid[:, :200].all()
    assert not valid.all()


def test_pairs_and_blocks() -> None:
    pairs = drawn("tensor keep: bool[B, Nq, Nk] mask keep[b, i, j]", Shape(2, 1, 1, 20, 50))["keep"]
    assert torch.equal(pairs[1], torch.ones(20, 50).tril(30).bool())
    blocks = drawn("tensor keep: bool[H, ceildiv(Nq, 16), ceildiv(Nk, 16)] layout block 16: keep[h, I, J]")["keep"]
    assert blocks.diagonal(dim1=-2, dim2=-1).all()
    assert blocks[:, 0].all()
    assert blocks[:, :, 0].all()
    assert 0.15 < float(blocks.double().mean()) < 0.4
    assert not torch.equal(blocks[0], blocks[1])


@pytest.mark.parametrize(
    ("mask", "low", "high"),
    [
        ("j < length[b]", 200, 400),
        ("causal and length[b] > j", 200, 400),
        ("causal or j < length[b]", 50, 200),  # a prefix, beside which others are kept
    ],
)
def test_lengths(mask: str, low: int, high: int) -> None:
    length = drawn(f"tensor length: i32[B] mask {mask}", Shape(64, 1, 1, 400, 400))["length"]
    assert low <= int(length.min()) < int(length.max()) <= high


def test_bounds_of_documents_follow_them() -> None:
    """What a position is compared with: the pairs that are kept are those of the document."""
    statements = "tensor first: i32[B, Nq] tensor past: i32[B, Nq] tensor last: i32[B, Nq] tensor doc: i32[B, Nk]"
    mask = "first[b, i] <= j and j < past[b, i] and j <= last[b, i] and doc[b, i] == doc[b, j]"
    found = {name: each.long() for name, each in drawn(f"{statements} mask {mask}").items()}
    positions = torch.arange(400)
    same = found["doc"][:, :, None] == found["doc"][:, None]
    for upper in (found["past"] - 1, found["last"]):
        inside = (found["first"][:, :, None] <= positions) & (positions <= upper[:, :, None])
        assert torch.equal(inside, same)


def test_indices_are_permutations_where_there_are_enough_places() -> None:
    pages = "tensor page: i32[B, ceildiv(Nk, 16)] tensor bias: f32[100] score s + bias[page[b, j // 16]]"
    found = drawn(pages)
    assert found["page"].shape == (3, 25)
    assert len(torch.unique(found["page"])) == 75  # no page belongs to two sequences
    own = drawn(pages, Shape(6, 1, 1, 400, 400))["page"]  # fewer pages than places of all, enough for each
    assert all(len(torch.unique(row)) == 25 for row in own)
    few = drawn("tensor kind: i32[B, Nk] tensor bias: f32[4, H] score s + bias[kind[b, j], h]")["kind"]
    assert (few[:, 1:] >= few[:, :-1]).all()
    assert int(few.min()) >= 0
    assert int(few.max()) <= 3


def test_biases_are_of_size_1() -> None:
    bias = drawn("tensor bias: bf16[H, Nq, Nk] score s + bias[h, i, j]")["bias"]
    assert bias.dtype is torch.bfloat16
    assert float(bias.float().std()) == pytest.approx(1, abs=0.05)


@pytest.mark.parametrize("shape", [(0, 2, 2, 5, 5), (1, 1, 1, 0, 3), (1, 1, 1, 3, 0), (1, 1, 1, 1, 1)], ids=str)
def test_sizes_of_nothing(shape: tuple[int, ...]) -> None:
    statements = "tensor doc: i32[B, Nk] tensor valid: bool[B, Nk] tensor length: i32[B] tensor start: i32[B + 1]"
    mask = "doc[b, i] == doc[b, j] and valid[b, j] and j < length[b] and start[b] <= j"
    found = drawn(f"{statements} mask {mask}", Shape(*shape))
    assert {name: tuple(each.shape) for name, each in found.items()} == {
        "doc": (shape[0], shape[4]),
        "valid": (shape[0], shape[4]),
        "length": (shape[0],),
        "start": (shape[0] + 1,),
    }


def test_bench_and_tune_measure_them() -> None:
    spec = spec_of("dtype f32 tensor valid: bool[B, Nk] mask valid[b, j]")
    expected = realistic_captured(spec, SHAPE, spec.head_dims[0])["valid"]
    assert torch.equal(task_for(spec, SHAPE).inputs(spec, SHAPE).captured["valid"], expected)
    job = Job(spec, spec.head_dims[0], SHAPE, ElementType.F32)
    assert torch.equal(job.inputs().captured["valid"], expected)
    noise = random_inputs(spec, SHAPE, spec.head_dims[0], torch.float32)
    assert not torch.equal(noise.captured["valid"], expected)
