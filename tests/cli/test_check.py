"""flashgen check: diagnostics on stdout, exit codes, JSON, and no traceback whatever the input."""

from __future__ import annotations

import json
import resource
import sys
from pathlib import Path

import pytest

from flashgen.compiler.pipeline import target_names
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
    targets = document["files"][0].pop("targets")
    assert document["files"][0] == {"file": str(good), "attentions": ["good"], "diagnostics": []}
    assert [each["target"] for each in targets] == list(target_names())
    assert all(each["takes"] for each in targets)
    (diagnostic,) = document["files"][1]["diagnostics"]
    assert diagnostic["code"] == "E101"
    assert diagnostic["severity"] == "error"
    assert diagnostic["span"] == {"file": str(bad), "line": 3, "column": 10, "end_line": 3, "end_column": 17}


def test_warnings_alone_exit_with_0(tmp_path: Path) -> None:
    file = spec(tmp_path, "attention w { head_dim 64 let unused = 3 mask causal }")
    outcome = flashgen("check", file)
    assert outcome.code == 0
    assert "warning[W5" in outcome.stdout


# -- targets -----------------------------------------------------------------------------------------------------------

WIDE = "attention wide {\n    head_dim 512\n    mask causal\n}\n"
WARPS = "attention warps {\n    head_dim 64\n    mask causal\n    schedule { warps = 4 }\n}\n"
FORTY = "attention forty {\n    head_dim 64\n    mask causal\n    schedule { Bc = 40 }\n}\n"
LARGE = "attention large {\n    head_dim 256\n    dtype f32\n}\n"
NEVER = "attention never {\n    head_dim 64\n    schedule { Br = 24 }\n}\n"


@pytest.mark.parametrize(
    ("text", "place", "code", "refusing", "said"),
    [
        (WIDE, "2:5", "W505", "sm_75", "no tile of 'wide' in f16 fits a block's shared memory at head dimension 512"),
        (FORTY, "4:5", "W505", "sm_90a", "the schedule cannot work on a GPU"),
        (LARGE, "2:5", "W505", "sm_75", "no tile of 'large' in f32 fits a block's shared memory at head dimension 256"),
        (WARPS, "4:5", "W506", "cpu", "'warps' of the schedule, which is for GPUs"),
    ],
    ids=["head_dim", "Bc", "memory", "warps"],
)
def test_what_one_target_refuses_is_a_warning_with_its_place(
    tmp_path: Path, text: str, place: str, code: str, refusing: str, said: str
) -> None:
    file = spec(tmp_path, text)
    outcome = flashgen("check", file)
    assert outcome.code == 0, outcome
    (line,) = [each for each in outcome.stdout.splitlines() if f"{file}:{place}: warning[{code}]" in each]
    assert f"'{refusing}'" in line
    assert said in line
    answers = json.loads(flashgen("check", "--json", file).stdout)["files"][0]["targets"]
    (answer,) = [each for each in answers if each["target"] == refusing]
    what = "refused" if code == "W505" else "left_out"
    assert answer["takes"] is (code == "W506")
    assert any(said in each["message"] and each["span"]["line"] == int(place[0]) for each in answer[what])
    assert any(each["takes"] for each in answers)


@pytest.mark.parametrize(("text", "refusing", "taking"), [(WIDE, "sm_75", "cpu"), (LARGE, "sm_75", "sm_80")])
def test_a_target_that_is_named_has_to_take_it(tmp_path: Path, text: str, refusing: str, taking: str) -> None:
    file = spec(tmp_path, text)
    assert flashgen("check", file, "--target", taking).code == 0
    outcome = flashgen("check", file, "--target", f"{taking},{refusing}")
    assert outcome.code == 1
    assert f"error[E406]: refused by '{refusing}': " in outcome.stdout
    answers = json.loads(flashgen("check", "--json", file, "--target", refusing).stdout)["files"][0]["targets"]
    assert [(each["target"], each["takes"]) for each in answers] == [(refusing, False)]


def test_what_all_targets_refuse_is_an_error(tmp_path: Path) -> None:
    file = spec(tmp_path, NEVER)
    outcome = flashgen("check", file)
    assert outcome.code == 1
    assert f"{file}:3:5: error[E403]: refused by 'cpu': the schedule cannot work on a CPU" in outcome.stdout
    assert "'sm_80'" in outcome.stdout


def test_an_unknown_target_is_wrong_usage(tmp_path: Path) -> None:
    outcome = flashgen("check", spec(tmp_path, GOOD), "--target", "sm_81")
    assert outcome.code == 2
    assert "sm_80" in outcome.stderr


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
        ("w=৪", "not NAME=VALUE"),
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


def test_json_of_what_cannot_be_read(tmp_path: Path) -> None:
    """A machine that asked for JSON gets it, and the exit code of wrong usage."""
    for path in (tmp_path / "missing.attn", tmp_path):
        outcome = flashgen("check", "--json", path)
        assert outcome.code == 2
        (entry,) = json.loads(outcome.stdout)["files"]
        assert entry["file"] == str(path)
        assert [each["code"] for each in entry["diagnostics"]] == ["E001"]
    bad = spec(tmp_path, BAD)
    outcome = flashgen("check", "--json", tmp_path / "missing.attn", bad)
    assert outcome.code == 1, "the spec that is wrong weighs more"
    assert json.loads(outcome.stdout)["errors"] == 2


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
    before = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime  # of the processor: other work is no matter
    outcome = flashgen_process("check", file)
    assert resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime - before < 10
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


def test_tiles_that_the_schedule_pins_are_told_where_they_stand(tmp_path: Path) -> None:
    """One message for all that say so, with the notes of the first."""
    file = spec(tmp_path, "attention tall {\n    head_dim 64\n    dtype bf16\n    schedule { Bc = 1024 }\n}\n")
    outcome = flashgen("check", file)
    assert outcome.code == 0, outcome
    (line,) = [each for each in outcome.stdout.splitlines() if f"{file}:4:5: warning[W505]" in each]
    assert "'sm_75'" in line
    assert "'sm_90a'" in line
    assert "× 1024 needs" in outcome.stdout
    assert "backward, bf16: 64" not in outcome.stdout, "what fits is no matter"
