"""What was once wrong, judged again on every backend that it was wrong on."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools.fuzz.corpus import Kept, keep, read, read_entry
from tools.fuzz.draws import Build, CallDraw, Case, Machine
from tools.fuzz.workers import Workers

CORPUS = Path(__file__).resolve().parent.parent / "corpus"
ENTRIES = tuple(read(CORPUS))


@pytest.mark.parametrize("kept", ENTRIES, ids=[each.name for each in ENTRIES])
def test_kept_cases(kept: Kept, tmp_path: Path) -> None:
    with Workers(1, 250.0, tmp_path) as workers:
        for case in kept.cases:
            verdict = workers.judge(case)
            assert not verdict.findings, f"{case.machine}\n{case.text}\n{verdict.findings}"


def test_an_entry_says_all_that_it_was_made_of(tmp_path: Path) -> None:
    call = CallDraw(
        1, "bf16", (1, 2, 1, 3, 4), starts=(0, 2, 0, 5), views=(("q", "negated"),), extremes=(("t", "-inf"),)
    )
    case = Case("attention drawn { head_dim 1 }\n", (call,), Machine("emulator", "sm_75"), Build(("-mno-avx",)))
    machines = (Machine("cpu"), case.machine)
    found = read_entry(keep(tmp_path, case, machines, "wrong dq"))
    assert (found.text, found.calls, found.machines, found.build) == (case.text, case.calls, machines, case.build)
    assert found.cases[1] == case


def test_a_file_that_is_no_entry(tmp_path: Path) -> None:
    (tmp_path / "x.attn").write_text("attention drawn { head_dim 1 }")
    (tmp_path / "x.json").write_text('{"calls": 3}')
    with pytest.raises(ValueError, match=r"x\.json' does not hold the inputs of a case"):
        read_entry(tmp_path / "x.attn")
