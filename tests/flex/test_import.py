"""``flashgen import`` prints the spec of a mod, and a mistake without a traceback."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from flashgen.cli import main
from tests.cli.helpers import flashgen_process

MODULE = """\
import torch
WINDOW = 128
slopes = torch.rand(8)
def alibi(score, b, h, q_idx, kv_idx):
    return score - slopes[h] * (q_idx - kv_idx)
def local(b, h, q_idx, kv_idx):
    return (q_idx >= kv_idx) & (q_idx - kv_idx < WINDOW)
def wrong(b, h, q_idx, kv_idx):
    return True if q_idx > kv_idx else False
def anything(*given):
    return given[0]
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "mods_of_mine.py").write_text(MODULE)
    return tmp_path


def test_the_spec_is_printed_and_checks(folder: Path) -> None:
    outcome = flashgen_process("import", "mods_of_mine:alibi", "mods_of_mine:local", "--head-dim", "32", folder=folder)
    assert outcome.stdout == (
        "attention alibi_local {\n"
        "    head_dim 32\n"
        "    param WINDOW: i32 = 128\n"
        "    tensor slopes: f32[H]\n"
        "    score s - slopes[h] * (i - j)\n"
        "    mask i >= j and i - j < WINDOW\n"
        "}\n"
    )
    (folder / "a.attn").write_text(outcome.stdout)
    assert flashgen_process("check", "a.attn", folder=folder).code == 0


@pytest.mark.parametrize(
    ("place", "words", "code"),
    [
        ("mods_of_mine:wrong", "mods_of_mine.py:9:", 1),
        ("mods_of_mine:alibbi", "Did you mean 'alibi'", 2),
        ("no_such_module:f", "cannot be imported", 2),
        ("mods_of_mine", "module:function", 2),
        ("mods_of_mine.py:alibi", "name the module: mods_of_mine:alibi", 2),
        ("mods_of_mine:anything", "any number of arguments", 2),
        ("mods_of_mine:WINDOW", "not a function", 2),
        ("torch:relu", "arguments", 2),
        ("math:sin", "takes 1 argument;", 2),
    ],
)
def test_mistakes_are_explained(
    folder: Path, monkeypatch: pytest.MonkeyPatch, place: str, words: str, code: int
) -> None:
    monkeypatch.chdir(folder)
    monkeypatch.delitem(sys.modules, "mods_of_mine", raising=False)
    outcome = CliRunner().invoke(main, ["import", place])
    sys.modules.pop("mods_of_mine", None)
    assert outcome.exit_code == code
    assert words in outcome.output
    assert outcome.exception is None or isinstance(outcome.exception, SystemExit)
