"""flashgen build: what it writes, --check, targets, and what goes wrong around it."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from flashgen.toolchains import cpp
from tests.cli.helpers import flashgen, flashgen_process

FIRST = "attention first { head_dim 32 mask causal }"
TEXT = f"""
{FIRST}
attention second {{ head_dim 32, 16 const w = 4 mask window(w) }}
"""


@pytest.fixture
def spec(tmp_path: Path) -> Path:
    file = tmp_path / "two.attn"
    file.write_text(TEXT)
    return file


def contents(folder: Path) -> dict[str, bytes]:
    return {str(file.relative_to(folder)): file.read_bytes() for file in sorted(folder.rglob("*")) if file.is_file()}


def test_it_writes_a_package_for_each_attention(spec: Path, tmp_path: Path) -> None:
    outcome = flashgen("build", spec, "-o", tmp_path / "out")
    assert outcome.code == 0, outcome.stderr
    assert {folder.name for folder in (tmp_path / "out").iterdir()} == {"first", "second"}
    assert "first: " in outcome.stdout
    assert "second: " in outcome.stdout
    assert len(list((tmp_path / "out" / "second").glob("*.cpp"))) == 2
    assert (tmp_path / "out" / "first" / "__init__.py").is_file()


def test_the_same_bytes_wherever_and_however_often(spec: Path, tmp_path: Path) -> None:
    for name in ("one", "other/deeper"):
        assert flashgen("build", spec, "-o", tmp_path / name).code == 0
    assert contents(tmp_path / "one") == contents(tmp_path / "other" / "deeper")
    again = flashgen("build", spec, "-o", tmp_path / "one")
    assert again.stdout.count("0 changed") == 2
    for content in contents(tmp_path / "one").values():
        assert str(tmp_path).encode() not in content


def test_check_agrees_after_a_build_and_writes_nothing(spec: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    missing = flashgen("build", spec, "-o", out, "--check")
    assert missing.code == 1
    assert not out.exists()
    assert flashgen("build", spec, "-o", out).code == 0
    fine = flashgen("build", spec, "-o", out, "--check")
    assert fine.code == 0
    assert "up to date" in fine.stdout


def test_check_names_what_differs(spec: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert flashgen("build", spec, "-o", out).code == 0
    touched = out / "first" / "__init__.py"
    touched.write_text("changed by hand\n")
    before = contents(out)
    outcome = flashgen("build", spec, "-o", out, "--check")
    assert outcome.code == 1
    assert str(touched) in outcome.stdout
    assert contents(out) == before
    assert flashgen("build", spec, "-o", out).code == 2, "it was edited"
    assert contents(out) == before
    assert flashgen("build", spec, "-o", out, "--force").code == 0
    assert flashgen("build", spec, "-o", out, "--check").code == 0
    spec.write_text(TEXT.replace("32, 16", "32"))
    outcome = flashgen("build", spec, "-o", out, "--check")
    assert outcome.code == 1
    assert "second_d16_cpu.cpp" in outcome.stdout


def test_json(spec: Path, tmp_path: Path) -> None:
    outcome = flashgen("build", spec, "-o", tmp_path / "out", "--json")
    first, second = json.loads(outcome.stdout)
    assert (first["name"], second["name"]) == ("first", "second")
    assert first["folder"] == str(tmp_path / "out" / "first")
    assert all(Path(file).is_file() for file in first["files"])
    assert first["changed"] == first["files"]
    assert first["seconds"] > 0


def test_a_constant_is_overridden(spec: Path, tmp_path: Path) -> None:
    spec.write_text("attention c { head_dim 16 const w = 4 mask window(w) }")
    flashgen("build", spec, "-o", tmp_path / "four")
    flashgen("build", spec, "-o", tmp_path / "nine", "--set", "w=9")
    assert contents(tmp_path / "four") != contents(tmp_path / "nine")
    code = "from nine.c import c; assert dict(c.spec.constants) == {'w': 9}, c.spec.constants"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=tmp_path, timeout=120)


def test_what_was_built_is_imported_and_runs(spec: Path, tmp_path: Path) -> None:
    assert flashgen("build", spec, "-o", tmp_path / "generated").code == 0
    code = """
import torch
from generated.first import first
q, k, v = (torch.randn(1, 2, 9, 32, requires_grad=True) for _ in range(3))
o = first(q, k, v)
exact = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
torch.testing.assert_close(o, exact)
o.sum().backward()
"""
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    subprocess.run([sys.executable, "-c", code], check=True, cwd=tmp_path, env=environment, timeout=120)


@pytest.mark.parametrize("place", ["two.attn", "two.attn/below", "/proc/flashgen"])
def test_an_output_that_cannot_be_written_is_wrong_usage(spec: Path, tmp_path: Path, place: str) -> None:
    outcome = flashgen("build", spec, "-o", tmp_path / place)
    assert outcome.code == 2
    assert place in outcome.stderr
    assert not outcome.stdout


def test_without_a_compiler_the_package_is_written_all_the_same(spec: Path, tmp_path: Path) -> None:
    environment = {**os.environ, "PATH": str(tmp_path), "FLASHGEN_CACHE_DIR": str(tmp_path / "cache")}
    environment.pop("CXX", None)
    outcome = flashgen_process("build", spec, "-o", tmp_path / "out", environment=environment)
    assert outcome.code == 0, outcome.stderr
    assert (tmp_path / "out" / "first" / "__init__.py").is_file()
    assert "no C++ compiler" in outcome.stderr
    assert "Traceback" not in outcome.stderr


def test_a_compiler_that_fails_is_reported_with_its_log(spec: Path, tmp_path: Path) -> None:
    compiler = tmp_path / "broken-c++"
    compiler.write_text(
        '#!/bin/sh\n[ "$1" = --version ] && echo broken 1.0 && exit 0\necho "error: broken" >&2\nexit 1\n'
    )
    compiler.chmod(0o755)
    environment = {**os.environ, "CXX": str(compiler), "FLASHGEN_CACHE_DIR": str(tmp_path / "cache")}
    outcome = flashgen_process("build", spec, "-o", tmp_path / "out", environment=environment)
    assert outcome.code == 1
    assert "broken" in outcome.stderr
    assert "Traceback" not in outcome.stderr


def test_building_does_not_import_torch(spec: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", shlex.join(cpp.find_compiler().command))  # without products that tests leave out
    spec.write_text(FIRST)  # which another process compiles as well
    code = f"""
import sys
from flashgen.cli import main
try:
    main(["build", {str(spec)!r}, "-o", {str(tmp_path / "out")!r}])
except SystemExit as end:
    assert not end.code, end.code
assert "torch" not in sys.modules, "flashgen build must start fast"
"""
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, timeout=120)
