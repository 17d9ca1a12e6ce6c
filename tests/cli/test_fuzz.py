"""flashgen fuzz, as users call it."""

from __future__ import annotations

import json
from pathlib import Path

from tests.cli.helpers import flashgen, flashgen_process
from tools.fuzz.corpus import keep
from tools.fuzz.draws import CallDraw, Case, Machine


def test_a_seed_can_be_repeated() -> None:
    runs = [
        flashgen_process("fuzz", "--backend", "tiled", "--seed", "7", "--count", "3", "--jobs", "1", "--json")
        for _ in range(2)
    ]
    first, second = (json.loads(each.stdout) for each in runs)
    assert first["specs"] == 3
    assert {**first, "seconds": 0} == {**second, "seconds": 0}
    assert "seed 7" in runs[0].stderr


def test_calls_of_a_file(tmp_path: Path) -> None:
    file = tmp_path / "two.attn"
    file.write_text("attention a { head_dim 8 mask causal } attention b { head_dim 4/8 dtype bf16 weights sigmoid(s) }")
    done = flashgen_process("fuzz", file, "--backend", "tiled", "--count", "4")
    assert done.code == 0, done.stderr
    assert "4 specs in" in done.stdout
    assert "bf16" in done.stdout


def test_what_was_kept_is_judged_again(tmp_path: Path) -> None:
    case = Case("attention drawn { head_dim 4 }\n", (CallDraw(0, "f32", (1, 1, 1, 3, 3)),), Machine("tiled"))
    done = flashgen_process("fuzz", keep(tmp_path, case, (Machine("tiled"),), "wrong o"))
    assert (done.code, done.stdout) == (0, "tiled: ok\n")


def test_wrong_usage(tmp_path: Path) -> None:
    for arguments, said in (
        (("--backend", "gpu"), "unknown backend 'gpu'"),
        (("--target", "sm_80"), "--target is for --backend emulator; 'cpu' runs on the machine at hand"),
        (("--count", "0"), "--count"),
        ((tmp_path / "none.attn",), "does not exist"),
    ):
        done = flashgen("fuzz", *arguments)
        assert done.code == 2, done.stderr
        assert said in done.stderr


def test_a_spec_with_errors(tmp_path: Path) -> None:
    file = tmp_path / "wrong.attn"
    file.write_text("attention a { head_dim 8 mask caussal }")
    done = flashgen("fuzz", file)
    assert done.code == 1
    assert "E101" in done.stderr
