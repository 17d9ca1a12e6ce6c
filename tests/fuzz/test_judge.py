"""Who judges the judge: planted errors are found, borderline inputs are told apart, crashes are findings."""

from __future__ import annotations

import dataclasses
import os
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch

import flashgen
from flashgen.ir.spec import HeadDim
from flashgen.ir.types import ElementType
from flashgen.op.forward_mode import ForwardMode
from flashgen.op.op import AttentionOp
from tools.fuzz import judge as judge_module
from tools.fuzz.comparing import compare
from tools.fuzz.compiling import compiled
from tools.fuzz.draws import Build, CallDraw, Case, Machine, draw
from tools.fuzz.inputs import arguments, plain, shown
from tools.fuzz.judge import judge
from tools.fuzz.running import reference, run
from tools.fuzz.workers import Workers

CALL = CallDraw(0, "f32", (1, 2, 1, 20, 33), seed=3)
CACHED = CallDraw(0, "f32", (1, 2, 1, 20, 33), seed=3, page=4, new=1, spare=1).of_cache([(20, 3), (9, 0)], 33, 2)
TILED = Machine("tiled")
PLAIN = "attention drawn { head_dim 16  mask causal }"


def test_nothing_is_wrong_with_what_is_right(tmp_path: Path) -> None:
    shard = CallDraw(0, "bf16", (1, 2, 1, 20, 33), starts=(1, 2, 16, 5), more=(0, 2, 0, 16), totals=True, wants="q")
    verdict = judge(Case(PLAIN, (CALL, shard, CACHED), TILED), tmp_path)
    assert (verdict.findings, verdict.refused, verdict.results) == ((), "", 5 + 3 + 2)


def test_empty_calls_of_types_that_no_tile_fits_are_right(tmp_path: Path) -> None:
    """float32 at head dimension 256 is refused on Turing once there is something to compute."""
    calls = tuple(CallDraw(0, "f32", (1, 1, 1, rows, 1)) for rows in (0, 1))
    verdict = judge(Case("attention drawn { head_dim 256 }", calls[:1], Machine("emulator", "sm_75")), tmp_path)
    assert (verdict.findings, verdict.refused, verdict.kinds) == ((), "", ("no kernels",))
    verdict = judge(Case("attention drawn { head_dim 256 }", calls[1:], Machine("emulator", "sm_75")), tmp_path)
    assert "no tile fits" in verdict.refused


@pytest.mark.parametrize(
    ("wrong", "names"),
    [
        ("attention drawn { head_dim 16  mask causal  score 1.001 * s }", {"o", "lse", "dq", "dk", "dv"}),
        ("attention drawn { head_dim 16  mask j < i }", {"o", "lse", "dq", "dk", "dv"}),
        ("attention drawn { head_dim 16  mask causal  score s + 0.001 }", {"lse"}),
    ],
)
def test_a_planted_error_is_found(wrong: str, names: set[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels of a spec that differs a little, judged by the formula of the right one."""
    right = flashgen.loads(PLAIN, backend="reference").spec

    class Swapped(AttentionOp):
        @property
        def spec(self):  # type: ignore[no-untyped-def]
            return right

    def swapped(case: Case, scratch: Path) -> AttentionOp:
        return Swapped(compiled(Case(wrong, case.calls, case.machine), scratch)._parts)

    monkeypatch.setattr(judge_module, "compiled", swapped)
    for call, seen in ((CALL, names), (CACHED, names & {"o", "lse"})):
        verdict = judge(Case(PLAIN, (call,), TILED), tmp_path)
        assert {each.kind.removeprefix("wrong ") for each in verdict.findings} == seen


SECOND = "attention drawn { head_dim 16  tensor z: f32[H] grad  mask causal  weights softmax(sink = z[h]) }"


@pytest.mark.parametrize("mixed", [False, True])
def test_derivatives_of_the_second_order_are_judged(
    mixed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Values that are too large where kernels of tangents read them show here, and in nothing of the first order."""
    call = CallDraw(0, "f32", (1, 2, 1, 20, 33), seed=3, order=2, mixed=mixed)
    case = Case(SECOND, (call,), Machine("cpu"))
    second = {"t_o", "t_lse", *(f"dd{name}" for name in ("q", "k", "v", "z", "_o", "_lse"))}
    if mixed:
        names = ("q", "k", "v", "z")
        second = {kind.format(name) for kind in ("dt_{}", "dt_t({})", "td_{}") for name in names}
    verdict = judge(case, tmp_path)
    assert (verdict.findings, verdict.refused, verdict.results) == ((), "", 6 + len(second))
    run_kernel = ForwardMode._run

    def spoilt(self: ForwardMode, own: Any, problem: Any, read: Any, *others: Any) -> None:
        run_kernel(self, own, problem, {**read, "v": read["v"] * 1.001}, *others)

    monkeypatch.setattr(ForwardMode, "_run", spoilt)
    found = {each.kind.removeprefix("wrong ") for each in judge(case, tmp_path).findings}
    assert found
    assert found <= second


def test_rows_without_keys_are_judged_by_their_sinks() -> None:
    """lse is finite there: what says -inf is wrong, and so is what says 0."""
    text = "attention drawn { head_dim 16  mask i % 5 != 0  weights softmax(sink = 0.25 * h) }"
    spec = flashgen.loads(text, backend="reference").spec
    call = CallDraw(0, "f32", (1, 2, 1, 20, 33), seed=3)
    values = arguments(spec, call)
    own = reference(spec, values, plain(values.inputs), call, torch.float32)
    assert not compare(spec, call, values, own)[0]
    for said in (-torch.inf, 0.0):
        lse = own["lse"].clone()
        lse[:, 1, ::5] = said
        assert "lse" in compare(spec, call, values, {**own, "lse": lse})[0]


def test_a_step_within_rounding_is_borderline_and_a_wrong_step_is_not() -> None:
    """Steps so small that float32 and float64 take some of them differently, in results that are otherwise the same."""
    spec = flashgen.loads("attention drawn { head_dim 16  score floor(s * 100000) / 50000 }", backend="reference").spec
    call = CallDraw(0, "f32", (1, 1, 1, 64, 64), seed=1)
    values = arguments(spec, call)
    single = reference(spec, values, plain(values.inputs), call, torch.float32)
    shifted = {name: x + 1e-3 * x.abs().max() for name, x in single.items()}
    exact = reference(spec, values, plain(values.inputs), call, torch.float64)
    assert not torch.allclose(single["lse"].double(), exact["lse"], rtol=0, atol=1e-6)
    wrong, _ = compare(spec, call, values, single)
    assert not wrong
    wrong, _ = compare(spec, call, values, shifted)
    assert "o" in wrong
    assert "lse" in wrong


@pytest.mark.parametrize(
    ("weight", "size", "is_wrong"), [("exp(s)", -900, False), ("exp(s)", 900, False), ("relu(s)", -900, True)]
)
def test_rows_that_float64_loses_are_borderline_and_empty_ones_are_not(weight: str, size: int, is_wrong: bool) -> None:
    """exp(-900) is 0 in float64, and exp(900) infinite, where a softmax has weights; relu(-900) is 0 for everyone."""
    head = f"attention drawn {{ head_dim 16  score s + ({size})"
    spec = flashgen.loads(f"{head}  weights normalize({weight}) }}", backend="reference").spec
    softmax = flashgen.loads(f"{head} }}", backend="reference").spec
    call = CallDraw(0, "f32", (1, 1, 1, 8, 9), seed=1)
    values = arguments(spec, call)
    own = reference(softmax, values, plain(values.inputs), call, torch.float32)
    wrong, borderline = compare(spec, call, values, own)
    assert ("lse" in wrong) == is_wrong
    assert (borderline > 0) != is_wrong


def test_a_row_whose_lse_is_nan_has_no_tangent_of_it() -> None:
    """exp(100) is infinite in float32. As v alone has tangents, t_lse is 0 in the formula, whatever lse is."""
    spec = flashgen.loads("attention drawn { head_dim 16  score sin(exp(s)) }", backend="reference").spec
    call = CallDraw(0, "f32", (1, 1, 1, 8, 9), seed=1, spread=8.0, order=2, still=("q", "k"))
    values = arguments(spec, call)
    own = reference(spec, values, plain(values.inputs), call, torch.float32)
    lost = own["lse"].isnan()
    assert 0 < lost.sum() < lost.numel()
    for rows, is_wrong in ((lost, False), (~lost, True)):
        said = own["t_lse"].masked_fill(rows, torch.nan)
        assert ("t_lse" in compare(spec, call, values, {**own, "t_lse": said})[0]) == is_wrong


def test_other_bits_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runs = iter(range(100))

    def unsteady(*given):  # type: ignore[no-untyped-def]
        found = run(*given)
        return found | {"dk": found["dk"] * (1 + 1e-7 * next(runs))}

    monkeypatch.setattr(judge_module, "run", unsteady)
    repeatable = CallDraw(0, "f32", (1, 2, 1, 20, 33), deterministic=True)
    (finding,) = judge(Case(PLAIN, (repeatable,), TILED), tmp_path).findings
    assert finding.kind == "other bits"
    assert "dk" in finding.detail
    assert not judge(Case(PLAIN, (CALL,), TILED), tmp_path).findings


def test_a_refusal_is_no_finding_and_another_error_is(tmp_path: Path) -> None:
    outside = "attention drawn { head_dim 16  tensor t: f32[4]  score s + t[4] }"
    assert judge(Case(outside, (CALL,), TILED), tmp_path).refused.startswith("E211")
    (finding,) = judge(Case("attention drawn { head_dim 16  score t }", (CALL,), TILED), tmp_path).findings
    assert finding.kind == "check E101"


@pytest.mark.parametrize("view", ["strided", "transposed", "offset", "padded", "negated", "conjugated"])
def test_views_show_the_values(view: str) -> None:
    x = torch.randn(2, 3, 5, 4)
    there = shown(x, view)
    assert torch.equal(there, x)
    layout = (there.is_contiguous(), there.is_neg(), there.storage_offset())
    assert layout != (True, False, 0)


def _abort(connection: Connection, _scratch: str) -> None:
    connection.recv()
    os.abort()


def _sleep(connection: Connection, _scratch: str) -> None:
    connection.recv()
    time.sleep(1000)


def test_a_crash_is_a_finding(tmp_path: Path) -> None:
    case = Case(PLAIN, (CALL,), TILED)
    with Workers(2, 60.0, tmp_path, serve=_abort) as workers:
        found = [verdict for _, verdict in workers.judge_all([case] * 3, lambda each: each)]
    assert [each.findings[0].kind for each in found] == ["crash"] * 3
    assert "SIGABRT" in found[0].findings[0].detail


def test_what_takes_too_long_is_a_finding(tmp_path: Path) -> None:
    with Workers(1, 3.0, tmp_path, serve=_sleep) as workers:
        verdict = workers.judge(Case(PLAIN, (CALL,), TILED))
    assert verdict.findings[0].kind == "hangs"


def test_the_process_of_a_case_is_fresh(tmp_path: Path) -> None:
    with Workers(1, 100.0, tmp_path) as workers:
        assert workers.judge(Case(PLAIN, (CALL,), TILED)).results == 5


def test_calls_in_parts_of_their_keys(tmp_path: Path) -> None:
    """Merged, with gradients; shrinking leaves a call of one part where that fails, too."""
    text = "attention near { head_dim 16 tensor t: f32[H] grad score s * t[h] mask window(9) dropout 0.2 }"
    call = CallDraw(head_dim=0, dtype="bf16", shape=(1, 2, 1, 30, 41), starts=(0, 0, 5, 0), parts=3, dropout_seed=4)
    verdict = judge(Case(text, (call,), Machine("tiled")), tmp_path)
    assert not verdict.findings, verdict
    assert verdict.results == 6


def test_parts_in_float32_have_kernels_of_their_own(tmp_path: Path) -> None:
    """Also of a spec that is not built for float32."""
    text = "attention near { head_dim 16 dtype bf16 tensor t: f32[H] grad score s * t[h] mask window(9) }"
    call = CallDraw(head_dim=0, dtype="bf16", shape=(1, 2, 1, 30, 41), starts=(0, 0, 5, 0), parts=3, wide=True)
    verdict = judge(Case(text, (call,), Machine("cpu")), tmp_path)
    assert not verdict.findings, verdict
    assert verdict.results == 6
    assert verdict.kinds == ("bf16, parts in float32",)
    assert len(list(tmp_path.rglob("*.so"))) == 2


def test_tiles_that_lengths_choose(tmp_path: Path) -> None:
    """The emulator's calls are short: they take the tiles of a shape, as a GPU's calls of that shape do."""
    machine, call = Machine("emulator", "sm_80"), CallDraw(0, "bf16", (1, 2, 2, 70, 131), seed=3)
    text = "attention drawn { head_dim 16  mask causal  dtype bf16 }"
    cases = [Case(text, (call,), machine, Build(sized=sized)) for sized in ((), (1, 8, 8, 1024, 1024))]
    plans: list[Any] = [compiled(case, tmp_path).plan[HeadDim(16, 16)] for case in cases]
    tiles = [plan.by_element[ElementType.BF16].forward for plan in plans]
    assert [(tile.Br, tile.Bc) for tile in tiles] == [(128, 128), (64, 128)]
    verdict = judge(cases[1], tmp_path)
    assert (verdict.findings, verdict.results) == ((), 5)
    drawn = [draw(seed, machine).build.sized for seed in range(20)]
    assert any(drawn)
    assert not all(drawn)


@pytest.mark.parametrize(
    ("drawn", "shape", "wants"),
    [
        ("head_dim 1  dropout 0.9", (2, 6, 3, 16, 64), "all"),
        ("head_dim 64  dropout 0.3", (2, 3, 3, 7, 1), "qkv"),  # tangents of gradients cancel, too
    ],
)
def test_what_stored_tangents_of_o_leave_is_borderline(
    drawn: str, shape: tuple[int, int, int, int, int], wants: str, tmp_path: Path
) -> None:
    """Rows that see one key alone: gradients through tangents cancel but for what rounding o, and t_o, leaves."""
    call = CallDraw(0, "bf16", shape, seed=6, spread=30.0, dropout_seed=1, order=2, still=("q", "k"), mixed=True)
    call = dataclasses.replace(call, wants=wants)
    verdict = judge(Case(f"attention drawn {{ {drawn} }}", (call,), Machine("cpu")), tmp_path)
    assert verdict.results == 12
    assert not verdict.findings
