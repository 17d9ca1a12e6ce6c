"""Attention over ranks on paper: bytes are those that ranks send, and what is hidden follows from work and links."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
import torch.distributed as dist

import flashgen
from flashgen.analysis.tiles import Boxes, TileClass, classify_boxes, loads_of
from flashgen.analysis.variant import analyse
from flashgen.compiler.pipeline import device_named
from flashgen.distributed import context_parallel, partition
from flashgen.distributed.blocks import Span, cuts, kept, mask_of
from flashgen.ir.shape import Shape
from tests.distributed.ranks import run
from tools.simulation.simulate import METHODS, Simulation, in_words, simulate

CAUSAL = "attention causal { head_dim 64 dtype f32 mask causal }"
WINDOW = "attention near { head_dim 64 dtype f32 mask window_left(300) and causal }"
DOCUMENTS = "attention packed { head_dim 64 dtype f32 tensor doc: i32[B, Nq] mask doc[b, i] == doc[b, j] and causal }"
BUTTERFLY = "attention strides { head_dim 64 mask (i - j) % 7 == 0 or i == 2 * j }"


def simulated(text: str, ranks: int, length: int, link: float = 450e9, device: str = "zen3") -> Simulation:
    spec = flashgen.loads(text, backend="reference").spec
    return simulate(analyse(spec, spec.head_dims[0]), device_named(device), Shape(1, 8, 4, length, length), ranks, link)


def _sent() -> list[tuple[int, ...]]:
    """The bytes that ranks say they will send: all_gather, then ulysses, of each mask."""
    found = []
    for text in (CAUSAL, WINDOW):
        op = flashgen.loads(text, backend="reference")
        dealt = partition(op, 4000, dist.get_world_size(), heads=8, kv_heads=4)
        n = dealt.lengths[dist.get_rank()]
        q, k = torch.zeros(1, 8, n, 64), torch.zeros(1, 4, n, 64)
        methods = (context_parallel(op, None, method, dealt) for method in ("all_gather", "ulysses"))
        found += [tuple(each.explain(q, k, k).sent) for each in methods]
    return found


def test_bytes_are_those_that_ranks_send() -> None:
    (found, *_) = run(_sent, 2)
    for text, (gathered, swapped) in zip((CAUSAL, WINDOW), zip(found[::2], found[1::2], strict=True), strict=True):
        paper = {each.name: each.passes[0].sent for each in simulated(text, 2, 4000).methods}
        assert paper == {"ring": gathered, "all_gather": gathered, "ulysses": swapped}


def test_work_is_shared_and_waiting_follows_the_link() -> None:
    fast, slow = (simulated(CAUSAL, 4, 8192, link) for link in (1e12, 1e6))
    assert fast.partition.imbalance < 0.05
    for name in ("ring", "all_gather"):
        passes = (next(by.passes for by in each.methods if by.name == name) for each in (fast, slow))
        for quick, late in zip(*passes, strict=True):
            assert quick.is_hidden
            assert not late.is_hidden
            assert quick.work == late.work >= 0.95 * fast.alone[quick.name] / 4  # shorter calls are slower
            assert quick.sent == late.sent
            assert late.seconds >= late.travel
            assert late.seconds == pytest.approx(late.work + late.waited)
    assert [
        line for line in in_words([fast]) if line == "ring, forward: communication hides behind the work at 4 ranks"
    ]
    assert [line for line in in_words([slow]) if line.startswith("ring, backward: communication stops hiding at 4")]


def test_a_window_sends_what_it_needs_however_many_ranks_there_are() -> None:
    few, many = (simulated(WINDOW, ranks, 1024 * ranks) for ranks in (8, 64))
    for each in (few, many):
        ring = each.methods[0].passes[0]
        assert max(ring.sent) <= 3 * 1024 * 4 * 2 * 64 * 4  # of at most three ranks' keys
    assert {each.name: each.refused for each in many.methods}["ulysses"].startswith("8 query heads cannot be dealt out")
    assert many.best.name in METHODS
    assert simulated(WINDOW, 1, 1024).methods[0].passes[0].sent == (0,)


def test_a_thousand_ranks_and_masks_that_nobody_knows() -> None:
    found = simulated(CAUSAL, 1024, 1024 * 64)
    assert found.partition.imbalance < 0.05
    assert len(found.methods[0].passes[0].sent) == 1024
    unknown = simulated(DOCUMENTS, 2, 2048)
    assert unknown.unknown == ("doc",)
    assert unknown.to_json()["at_most"] is True


def test_work_of_documents_is_that_of_what_they_keep() -> None:
    """The blocks that are looked at say how many pairs a mask keeps, where what it reads is known."""
    spec = flashgen.loads(DOCUMENTS, backend="reference").spec
    N, ends = 4096, [500, 1500, 1700, 3000, 4096]
    doc = np.searchsorted(np.array(ends), np.arange(N), side="right").astype(np.int32)[None]
    variant, device, shape = analyse(spec, spec.head_dims[0]), device_named("zen3"), Shape(1, 8, 4, N, N)
    unknown, known = (simulate(variant, device, shape, 2, 450e9, given) for given in ({}, {"doc": doc}))
    assert known.unknown == ()
    pairs = sum((end - first) ** 2 / 2 for first, end in itertools.pairwise([0, *ends]))
    causal = simulated(CAUSAL, 2, N)
    for name in ("forward", "backward"):
        assert known.alone[name] / causal.alone[name] == pytest.approx(pairs / (N * N / 2), rel=0.1)
        assert known.alone[name] < 0.5 * unknown.alone[name]
    ring = {each.name: each.passes[0] for each in known.methods}["ring"]
    assert max(ring.sent) < max({each.name: each.passes[0] for each in unknown.methods}["ring"].sent) / 2
    with pytest.raises(ValueError, match=r"tensor 'doc' has shape \[1, 7\]; at 1,8,4,4096,4096 it is \[1, 4096\]"):
        simulate(variant, device, shape, 2, 450e9, {"doc": doc[:, :7]})


@pytest.mark.parametrize(
    ("shape", "ranks", "link", "says"),
    [
        (Shape(1, 8, 4, 64, 32), 2, 1e9, "Nq is 64 and Nk 32"),
        (Shape(1, 8, 4, 4096, 4096), 2000, 1e9, "2000 ranks; 1 to 1024"),
        (Shape(1, 8, 4, 64, 64), 2, 0.0, "the rate of a link is 0.0"),
        (Shape(1, 8, 4, 4, 4), 8, 1e9, "some would have nothing to do"),
    ],
)
def test_what_cannot_be_simulated_is_said(shape: Shape, ranks: int, link: float, says: str) -> None:
    spec = flashgen.loads(CAUSAL, backend="reference").spec
    with pytest.raises(ValueError, match=says):
        simulate(analyse(spec, spec.head_dims[0]), device_named("zen3"), shape, ranks, link)


@pytest.mark.parametrize("text", [CAUSAL, WINDOW, BUTTERFLY])
def test_shares_of_many_boxes_are_those_of_each(text: str) -> None:
    spec = flashgen.loads(text, backend="reference").spec
    N = 3000
    mask = mask_of(spec, spec.head_dims[0], {"B": 1, "H": 1, "Hkv": 1, "Nq": N, "Nk": N}, {})
    queries: list[Span] = [*reversed(cuts(0, N, 90)), (7, 7)]
    keys: list[Span] = cuts(0, N, 70)[::2]
    q, k = (np.repeat(np.array(queries[:-1]), len(keys), 0), np.tile(np.array(keys), (len(queries) - 1, 1)))
    zeros = np.zeros(len(q), np.int64)
    boxes = Boxes(zeros, zeros, q[:, 0], q[:, 1] - 1, k[:, 0], k[:, 1] - 1, mask.sizes, mask.params)
    classes = classify_boxes(mask.variant.keep, boxes, loads_of({}))
    shares = np.where(classes == TileClass.EMPTY, 0.0, np.where(classes == TileClass.FULL, 1.0, 0.5))
    wanted = shares.reshape(-1, len(keys))
    found = kept(mask, queries, keys)
    assert np.array_equal(found[:-1], wanted)
    assert not found[-1].any()
