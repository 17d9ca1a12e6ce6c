"""flashgen check: diagnostics on stdout, exit codes, JSON, and no traceback whatever the input."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import pytest

from tests.cli.helpers import flashgen, flashgen_process

GOOD = "attention good { head_dim 64 mask causal }"
BAD = "attention bad {\n    head_dim 64\n    mask causall\n}\n"


def spec(folder: Path, text: str | bytes, name: str = "spec.attn") -> Path:
    file = folder / name
    file.write_bytes(text.encode() if isinstance(text, str) else text)
    return file


def test_every_spec_of_the_gallery_is_fine(specs: Path) -> None:
    files = sorted(specs.glob("*.attn"))
    assert files
    outcome = flashgen("check", *files)
    assert outcome.code == 0, outcome.stdout
    assert f"{len(files)} files checked: 0 errors" in outcome.stderr


def test_an_error_is_shown_with_its_place_and_a_hint(tmp_path: Path) -> None:
    file = spec(tmp_path, BAD)
    outcome = flashgen("check", file)
    assert outcome.code == 1
    assert f"{file}:3:10: error[E101]" in outcome.stdout
    assert "did you mean 'causal'" in outcome.stdout.lower()
    assert "1 file checked: 1 error" in outcome.stderr


def test_json_says_the_same(tmp_path: Path) -> None:
    good, bad = spec(tmp_path, GOOD, "good.attn"), spec(tmp_path, BAD, "bad.attn")
    outcome = flashgen("check", "--json", good, bad)
    assert outcome.code == 1
    document = json.loads(outcome.stdout)
    assert document["errors"] == 1
    assert document["files"][0] == {"file": str(good), "attentions": ["good"], "diagnostics": []}
    (diagnostic,) = document["files"][1]["diagnostics"]
    assert diagnostic["code"] == "E101"
    assert diagnostic["severity"] == "error"
    assert diagnostic["span"] == {"file": str(bad), "line": 3, "column": 10, "end_line": 3, "end_column": 17}


def test_warnings_alone_exit_with_0(tmp_path: Path) -> None:
    file = spec(tmp_path, "attention w { head_dim 64 let unused = 3 mask causal }")
    outcome = flashgen("check", file)
    assert outcome.code == 0
    assert "warning[W5" in outcome.stdout


def test_a_constant_is_overridden(tmp_path: Path) -> None:
    file = spec(tmp_path, "attention c { head_dim 64 const w = 8 mask window_left(w) }")
    assert flashgen("check", file, "--set", "w=1_000").code == 0


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        ("window", "not NAME=VALUE"),
        ("=3", "not NAME=VALUE"),
        ("w=many", "not a number"),
        ("w=", "not a number"),
        ("ww=3", "ww"),
    ],
)
def test_a_wrong_setting_is_wrong_usage(tmp_path: Path, setting: str, said: str) -> None:
    file = spec(tmp_path, "attention c { head_dim 64 const w = 8 mask window_left(w) }")
    outcome = flashgen("check", file, "--set", setting)
    assert outcome.code == 2
    assert said in outcome.stdout + outcome.stderr


def test_a_missing_file_and_a_folder_are_wrong_usage(tmp_path: Path) -> None:
    for path in (tmp_path / "missing.attn", tmp_path):
        outcome = flashgen("check", path)
        assert outcome.code == 2
        assert str(path) in outcome.stderr
        assert not outcome.stdout


def test_no_file_is_wrong_usage() -> None:
    assert flashgen("check").code == 2


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\x00\xff\xfe binary \x80",
        b"attention",
        b"attention x {",
        b"attention x { head_dim 64 score " + b"(" * 50_000 + b" }",
        b"attention x { head_dim 64 score " + b"-" * 50_000 + b"s }",
        b"attention x { head_dim 64 score s " + b"+ s " * 50_000 + b"}",
        b"# comment only\n" * 10,
        b"attention x { head_dim 64 " + b"x" * 10_000_000 + b"}",
        "attention \N{GREEK SMALL LETTER TAU} { head_dim 64 }".encode(),
        b"\xef\xbb\xbfattention x { head_dim 64 mask causall }",
    ],
    ids=["empty", "binary", "word", "open", "parentheses", "minuses", "sum", "comments", "10MB", "greek", "bom"],
)
def test_broken_text_is_diagnosed_in_time(tmp_path: Path, content: bytes) -> None:
    file = spec(tmp_path, content)
    start = time.perf_counter()
    outcome = flashgen_process("check", file)
    assert time.perf_counter() - start < 10
    assert outcome.code == 1, outcome
    assert "error[E" in outcome.stdout
    assert str(file) in outcome.stdout
    assert "Traceback" not in outcome.stdout + outcome.stderr


def test_checking_imports_neither_torch_nor_the_runtime(tmp_path: Path) -> None:
    file = spec(tmp_path, GOOD)
    code = f"""
import sys
from flashgen.cli import main
try:
    main(["check", {str(file)!r}])
except SystemExit as end:
    assert not end.code, end.code
assert "torch" not in sys.modules, "flashgen check must start fast"
"""
    import subprocess

    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
