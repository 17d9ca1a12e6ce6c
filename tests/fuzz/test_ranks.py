"""Calls over ranks that are drawn, judged and cut down: planted mistakes of a rank are found, and so is its end."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tools.fuzz import judge as judge_module
from tools.fuzz import ranks as ranks_module
from tools.fuzz.corpus import keep, read_entry
from tools.fuzz.draws import CallDraw, Case, Draw, Machine, Ranks
from tools.fuzz.judge import judge
from tools.fuzz.rank_draws import draw_over_ranks
from tools.fuzz.ranks import Fault, Group
from tools.fuzz.shrink import shrink
from tools.fuzz.spread import Share, joined

TILED = Machine("tiled")
PLAIN = "attention drawn { head_dim 16  tensor t: f32[H] grad  score s * t[h]  mask causal }"
CALL = CallDraw(0, "f32", (1, 2, 1, 13, 13), seed=3, ranks=Ranks(2, "ring", partition="head_tail"))


@pytest.fixture(scope="module", autouse=True)
def _groups() -> Iterator[None]:
    yield
    for group in ranks_module._groups.values():
        group.end()
    ranks_module._groups.clear()


def test_ranks_find_what_one_process_finds(tmp_path: Path) -> None:
    calls = (
        CALL,
        replace(CALL, ranks=Ranks(2, "ring,ulysses", (1, 2), "", checked=True)),
        replace(CALL, ranks=Ranks(2, sharded="heads"), shape=(2, 4, 2, 5, 5)),
        replace(CALL, ranks=Ranks(2, "all_gather", partition="contiguous", checked=False)),
        replace(CALL, ranks=Ranks(2, "ring", partition="balanced")).of_sequences([(5, 5), (0, 0), (13, 13)]),
    )
    verdict = judge(Case(PLAIN, calls, TILED), tmp_path)
    assert (verdict.findings, verdict.refused, verdict.results) == ((), "", 6 * len(calls))
    assert "2 ranks, by ring, ragged" in verdict.kinds


def _shares(**changed: object) -> list[Share]:
    """Two ranks with two rows each."""
    found = [
        Share({"o": torch.full((1, 1, 2, 1), float(rank)), "dt": torch.ones(2)}, torch.tensor([rank, 3 - rank]))
        for rank in range(2)
    ]
    return [found[0], replace(found[1], **changed)]  # type: ignore[arg-type]


def test_rows_of_ranks_are_put_where_they_belong() -> None:
    own, wrong, _ = joined(_shares(), CALL)
    assert own["o"].flatten().tolist() == [0.0, 1.0, 1.0, 0.0]
    assert not wrong


def test_rounded_parts_are_added_by_the_judge() -> None:
    parts = [Share({"dt": torch.tensor([3.0, -4.0], dtype=torch.bfloat16)}, parts=("dt",)) for _ in range(2)]
    own, wrong, moved = joined(parts, CALL)
    assert (own["dt"].tolist(), own["dt"].dtype, wrong) == ([6.0, -8.0], torch.float64, {})
    assert moved == {"dt": 2.0**-8 * 10}


@pytest.mark.parametrize(
    ("changed", "kind"),
    [
        ({"unsteady": ("o",)}, "other bits"),
        ({"sent": (3, 4), "predicted": (3, 5)}, "bytes"),
        ({"results": {"o": torch.zeros(1, 1, 2, 1), "dt": torch.zeros(2)}}, "ranks differ"),
    ],
)
def test_what_ranks_do_not_agree_in(changed: dict[str, object], kind: str) -> None:
    assert list(joined(_shares(**changed), CALL)[1]) == [kind]


def test_a_planted_error_of_one_rank_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def ask(case: Case, number: int, scratch: Path) -> object:
        said = ranks_module.ask(case, number, scratch)
        assert not isinstance(said, Fault), said
        wrong = said[1].results | {"dk": said[1].results["dk"] * 1.01}
        return [said[0], replace(said[1], results=wrong)]

    monkeypatch.setattr(judge_module, "ask", ask)
    verdict = judge(Case(PLAIN, (CALL,), TILED), tmp_path)
    assert [each.kind for each in verdict.findings] == ["wrong dk"]


def test_a_rank_that_ends_is_a_finding(tmp_path: Path) -> None:
    group = Group(2, tmp_path)
    try:
        children = Path(f"/proc/{group._parent.pid}/task/{group._parent.pid}/children").read_text().split()
        os.kill(int(children[0]), signal.SIGKILL)
        said = group.ask(Case(PLAIN, (CALL,), TILED), 0, 60.0)
    finally:
        group.end()
    assert said == Fault("rank ends", "rank 0 ended by SIGKILL")


@pytest.mark.slow
def test_a_rank_that_gives_no_result_is_a_finding(tmp_path: Path) -> None:
    group = Group(2, tmp_path)
    try:
        children = Path(f"/proc/{group._parent.pid}/task/{group._parent.pid}/children").read_text().split()
        os.kill(int(children[1]), signal.SIGSTOP)
        said = group.ask(Case(PLAIN, (CALL,), TILED), 0, 5.0)
        os.kill(int(children[1]), signal.SIGCONT)
    finally:
        group.end()
    assert isinstance(said, Fault)
    assert said.kind == "ranks hang"


def test_draws_are_the_same_for_the_same_seed_and_of_every_kind() -> None:
    drawn = [draw_over_ranks(seed, TILED, 4) for seed in range(120)]
    assert drawn == [draw_over_ranks(seed, TILED, 4) for seed in range(120)]
    ranks = [call.ranks for each in drawn for call in each.calls if call.ranks is not None]
    assert {each.method for each in ranks} >= {"", "ring", "all_gather", "ulysses", "auto", "ring,ulysses"}
    assert {each.partition for each in ranks} == {"", "balanced", "contiguous", "head_tail", "runs", "documents"}
    assert {each.mesh for each in ranks} >= {(), (1, 4), (2, 2), (4, 1)}
    assert {each.sharded for each in ranks} == {"", "batch", "heads", "nothing"}
    assert any(call.lengths for each in drawn for call in each.calls)


def test_a_failure_is_cut_down_to_one_that_ranks_make() -> None:
    drawn = draw_over_ranks(7, TILED, 4)

    def fails(candidate: Draw) -> bool:
        return any(call.ranks is not None and call.shape[3] > 1 for call in candidate.calls)

    found = shrink(drawn, fails, 400)
    (call,) = found.calls
    assert call.ranks is not None
    assert call.ranks.world == 2
    assert call.shape[3] == call.shape[4] == 2
    assert found.spec is not None
    assert not any(each.word == "mask" for each in found.spec.statements)


def test_how_a_call_is_spread_is_written_down(tmp_path: Path) -> None:
    case = Case(PLAIN, (replace(CALL, ranks=Ranks(4, "ulysses,ring", (2, 2), "balanced", False, 1e5)),), TILED)
    assert read_entry(keep(tmp_path, case, (TILED,), "wrong o")).cases == (case,)
