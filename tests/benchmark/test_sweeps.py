"""The sweeps measure what they say: attention that is right, at the places that were asked for, reasons for gaps."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator

import pytest
import torch

from flashgen.hosts.emulated import recording
from flashgen.ir.shape import Shape
from flashgen.ir.spec import AttentionSpec
from flashgen.ir.types import ElementType
from flashgen.language import parse_text
from flashgen.op.loading import load_spec
from flashgen.op.signature import TORCH_DTYPES
from flashgen.plan import paper
from flashgen.tuning import tune
from flashgen.verification import random_inputs
from flashgen.verification.hbm import hbm_bytes
from flashgen.verification.verify import dense
from tools.benchmarks.peak_memory import available_bytes, peak_bytes
from tools.benchmarks.peers import kept_share, rabe_staats_peer, sdpa_peer, standard_peer
from tools.benchmarks.sweep import Absent, Point
from tools.benchmarks.sweeps import (
    PADDING,
    Task,
    block_sweep,
    length_sweep,
    proportional,
    sparsity_sweep,
    task_for,
    totals_sweep,
    with_dropout,
    with_padding,
)
from tools.benchmarks.traffic import kernel_bytes, standard_bytes
from tools.paper import forms

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def one_call_a_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is measured matters here, and not how well."""
    monkeypatch.setattr(tune, "_TURN_SECONDS", 1e-9)


def spec_of(statements: str) -> AttentionSpec:
    (spec,) = parse_text(f"attention a {{ head_dim 16 {statements} }}").specs
    return spec


def points_of(found: list[Point | Absent]) -> list[Point]:
    return [each for each in found if isinstance(each, Point)]


def test_length_sweep_measures_time_memory_and_bytes() -> None:
    task = task_for(spec_of("mask causal"), Shape(1, 2, 2, 1, 1), peers=("standard", "sdpa"), budget=600)
    found = list(length_sweep(task, (64, 128)))
    points = points_of(found)
    assert len(points) == len(found) == 2 * 2 * 3
    assert {point.x for point in points} == {64, 128}
    assert [point.who for point in points[:3]] == ["flashgen", "standard", "sdpa"]
    for point in points:
        assert point.seconds.low <= point.seconds.median <= point.seconds.high
        assert (point.ratio.median == 1) == (point.who == "flashgen")
        assert point.kept_share == pytest.approx((point.x + 1) / 2 / point.x)
        assert (point.hbm_bytes is None) == (point.who == "sdpa")


@pytest.mark.slow
def test_dropout_and_padding_are_part_of_what_runs() -> None:
    task = task_for(
        spec_of(""), Shape(2, 2, 2, 1, 1), peers=("standard", "flex"), budget=600, dropout=0.25, padding=True
    )
    assert task.setting.drop == 0.25
    found = list(length_sweep(task, (64,)))
    assert {point.who for point in points_of(found)} == {"flashgen", "standard"}
    assert all(0.5 <= point.kept_share < 1 for point in points_of(found))
    assert {each.reason for each in found if isinstance(each, Absent)} == {"it has no dropout"}


def test_padding_masks_what_lies_behind() -> None:
    spec = with_dropout(with_padding(spec_of("mask causal")), 0.0)
    given = random_inputs(spec, Shape(2, 2, 2, 33, 33), spec.head_dims[0], torch.float32)
    given = dataclasses.replace(given, captured={PADDING: torch.tensor([20, 33], dtype=torch.int32)})
    op = load_spec(spec)
    expected, _ = dense(spec, given.q, given.k, given.v, given.named, torch.float64)
    torch.testing.assert_close(op(given.q, given.k, given.v, **given.named).double(), expected, rtol=1e-4, atol=1e-5)
    k = given.k.clone()
    k[0, :, 20:] = 7
    torch.testing.assert_close(op(given.q, k, given.v, **given.named), op(given.q, given.k, given.v, **given.named))


@pytest.mark.parametrize(
    "statements",
    ["", "mask causal", "mask window(9)", "score s - alibi_slope(h) * abs(i - j)", "score s + h * 0.1 mask causal"],
)
def test_standard_attention_computes_what_the_spec_says(statements: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(paper, "RABE_STAATS_QUERIES", 16)
    spec = spec_of(statements)
    given = random_inputs(spec, Shape(2, 4, 2, 40, 40), spec.head_dims[0], torch.float32)
    expected, _ = dense(spec, given.q, given.k, given.v, given.named, torch.float64)
    for make in (standard_peer, sdpa_peer, rabe_staats_peer):
        o = make(spec, given).run(given.q, given.k, given.v, given.named)
        torch.testing.assert_close(o.double(), expected, rtol=1e-4, atol=1e-5)


def test_chunks_under_checkpoints_have_the_same_gradients() -> None:
    spec = spec_of("mask causal score s - 0.1 * (i - j)")
    given = random_inputs(spec, Shape(1, 4, 2, 40, 40), spec.head_dims[0], torch.float32)
    gradients = []
    for dtype in (torch.float32, torch.float64):
        q, k, v = (each.detach().to(dtype).requires_grad_() for each in (given.q, given.k, given.v))
        if dtype is torch.float64:
            o, _ = dense(spec, q, k, v, {}, dtype)
        else:
            o = rabe_staats_peer(spec, given).run(q, k, v, {})
        gradients.append(torch.autograd.grad(o, (q, k, v), given.d_o.to(dtype)))
    for found, expected in zip(*gradients, strict=True):
        torch.testing.assert_close(found.double(), expected, rtol=1e-4, atol=1e-5)


def test_totals_are_those_of_the_paper() -> None:
    """Flops and HBM bytes: what the algorithms count, and half of the flops of flashgen where half is kept."""
    spec = spec_of("mask causal")
    task = task_for(spec, Shape(1, 2, 2, 64, 64), peers=("standard", "rabe_staats"), budget=20)
    points = {(point.who, point.backward): point for point in points_of(list(totals_sweep(task)))}
    lengths = paper.Lengths(2, 2, 64, 64, 16, 16)
    chunks = paper.rabe_staats_blocks(64, 64)
    assert points["standard", False].flops == paper.forward_flops(lengths)
    assert points["flashgen", False].flops == pytest.approx(65 / 128 * paper.forward_flops(lengths))
    both = paper.forward_flops(lengths) + forms.rabe_staats_backward_flops(lengths)
    assert points["rabe_staats", True].flops == both
    moved = 4 * (paper.rabe_staats_forward(lengths, chunks) + paper.rabe_staats_backward(lengths, chunks))
    assert points["rabe_staats", True].hbm_bytes == moved


@pytest.mark.slow
def test_the_length_sweep_has_a_block_sparse_line() -> None:
    task = task_for(spec_of(""), Shape(1, 1, 1, 1, 1), peers=("block_sparse",), budget=60)
    points = [point for point in points_of(list(length_sweep(task, (512,)))) if point.who == "block_sparse"]
    assert [point.backward for point in points] == [False, True]
    assert all(point.kept_share == pytest.approx((3 + 1) / 8) for point in points)  # (log2 n + 1) / n of 8 blocks
    own = task_for(spec_of("layout block 64: I == J"), Shape(1, 1, 1, 1, 1), peers=("block_sparse",), budget=60)
    reasons = [each.reason for each in length_sweep(own, (64,)) if isinstance(each, Absent)]
    assert reasons == ["the spec has a layout of its own"]


def test_a_peer_drops_what_it_is_told_to() -> None:
    spec = spec_of("dropout 0.5")
    given = random_inputs(spec, Shape(1, 1, 1, 64, 64), spec.head_dims[0], torch.float32)
    v = torch.eye(64).expand(1, 1, 64, 64)[..., :16].contiguous()
    for make in (standard_peer, sdpa_peer, rabe_staats_peer):
        weights = make(spec, given, 0.5).run(given.q, given.k, v, {})
        assert 0.35 < float((weights == 0).double().mean()) < 0.65


def test_what_would_take_too_long_is_left_out_with_a_reason() -> None:
    task = task_for(spec_of(""), Shape(1, 4, 4, 1, 1), peers=("dense",), budget=0.5)
    *_, last = length_sweep(task, (256, 16384))
    assert isinstance(last, Absent)
    assert last.x == 16384
    assert "of the budget are left" in last.reason


def test_a_peer_that_needs_more_memory_than_there_is_does_not_run() -> None:
    free = available_bytes(CPU)
    assert free is not None
    length = 2 ** math.ceil(math.log2(math.sqrt(free / 16)))
    task = task_for(spec_of("mask false"), Shape(1, 1, 1, 1, 1), peers=("standard",), budget=1)
    found = list(length_sweep(task, (length,)))
    assert all(point.who == "flashgen" for point in points_of(found))
    reasons = [each.reason for each in found if isinstance(each, Absent)]
    assert reasons
    assert all("GiB are free" in reason for reason in reasons)


def test_a_spec_that_refuses_a_length_says_why() -> None:
    spec = spec_of("tensor t: f32[Nk - 100] score s + t[clamp(j, 0, Nk - 101)]")
    (only,) = length_sweep(task_for(spec, Shape(1, 1, 1, 1, 1), budget=1), (64,))
    assert isinstance(only, Absent)
    assert "'t'" in only.reason


def test_block_sweep_pins_what_it_says() -> None:
    task = task_for(spec_of(""), Shape(1, 2, 2, 128, 128), budget=60)
    found = list(block_sweep(task, (24, 32, 64)))
    labels = [(point.series, point.label) for point in points_of(found) if not point.backward]
    assert labels == [("planner", labels[0][1]), ("B_r = B_c", "32 × 32"), ("B_r = B_c", "64 × 64")]
    (refused,) = (each for each in found if isinstance(each, Absent))
    assert refused.label == "24 × 24"
    assert "multiple of 16" in refused.reason
    small, large = (p.hbm_bytes for p in points_of(found) if p.series != "planner" and not p.backward)
    assert small is not None
    assert large is not None
    assert small > large  # smaller blocks of queries read K and V more often


@pytest.mark.slow
def test_sparsity_sweep_keeps_what_it_says() -> None:
    task = task_for(spec_of("mask causal"), Shape(1, 2, 2, 512, 512), budget=60)
    points = [point for point in points_of(list(sparsity_sweep(task, (1.0, 0.3)))) if not point.backward]
    butterfly = [point for point in points if point.series == "butterfly"]
    # 8, 4 and 2 blocks a side, with those above the diagonal masked, and those on it in part.
    expected = []
    for stretch in (4, 2, 1):
        kept = [(i // stretch, j // stretch) for i in range(8) for j in range(i + 1)]
        inside = [a == b or (a ^ b).bit_count() == 1 for a, b in kept]
        whole = sum(inside) - 8
        expected.append((whole * 64 * 64 + 8 * 64 * 65 / 2) / 512**2)
    assert [point.kept_share for point in butterfly] == pytest.approx(expected)
    assert [point.series for point in points].count("random blocks") == 2
    multiples = proportional(points)
    assert multiples[butterfly[0]] == pytest.approx(butterfly[0].ratio.median)
    assert all(multiple > 0 for multiple in multiples.values())


@pytest.mark.parametrize("sweep", [block_sweep, sparsity_sweep])
def test_a_budget_that_is_spent_ends_a_sweep(sweep: Callable[[Task], Iterator[Point | Absent]]) -> None:
    found = list(sweep(task_for(spec_of(""), Shape(1, 1, 1, 128, 128), budget=1e-9)))
    assert {each.reason for each in found if isinstance(each, Absent)} >= {"the budget is spent"}


def test_predicted_bytes_are_those_that_the_emulator_counts() -> None:
    spec = spec_of("dtype f16 mask causal")
    head_dim = spec.head_dims[0]
    given = random_inputs(spec, Shape(2, 4, 2, 100, 100), head_dim, TORCH_DTYPES[ElementType.F16])
    predicted = kernel_bytes(spec, given, ElementType.F16)
    op = load_spec(spec, "emulator")
    with recording() as counted:
        leaves = [x.clone().requires_grad_() for x in (given.q, given.k, given.v)]
        torch.autograd.grad(op(*leaves), leaves, given.d_o)
    found = hbm_bytes(op, given, counted)
    assert predicted is not None
    # One batch entry and key/value head stand for all: blocks of threads are rounded up once more for each.
    assert predicted.forward == pytest.approx(found["forward"].counted, rel=0.03)
    assert predicted.both == pytest.approx(found["forward"].counted + found["backward"].counted, rel=0.03)


def test_standard_attention_moves_every_matrix() -> None:
    spec = spec_of("")
    shape = Shape(1, 1, 1, 1024, 1024)
    found = standard_bytes(shape, spec.head_dims[0], ElementType.F32)
    assert found.forward > 4 * 4 * 1024**2
    assert found.both > found.forward


def test_the_peak_of_memory_is_seen() -> None:
    size = 64 * 2**20
    found = peak_bytes(lambda: torch.ones(size // 4), CPU)
    assert found is None or size * 0.9 < found < size * 1.5
    assert peak_bytes(lambda: None, CPU) in (None, 0) or peak_bytes(lambda: None, CPU) < 2**20  # type: ignore[operator]


def test_the_share_of_a_sweep_is_that_of_its_inputs() -> None:
    spec = with_padding(spec_of(""))
    given = random_inputs(spec, Shape(2, 1, 1, 10, 10), spec.head_dims[0], torch.float32)
    given = dataclasses.replace(given, captured={PADDING: torch.tensor([5, 10], dtype=torch.int32)})
    assert kept_share(spec, given) == pytest.approx(0.75)
