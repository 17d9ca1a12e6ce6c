"""Completion as shells do it: bash is really asked; zsh and fish where they are installed."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.helpers import flashgen

NO_SHELL = "there is no {}"


@pytest.fixture(scope="module")
def programs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the command, whatever is installed."""
    folder = tmp_path_factory.mktemp("bin")
    command = folder / "flashgen"
    command.write_text(f'#!/bin/sh\nexec {sys.executable} -m flashgen "$@"\n')
    command.chmod(0o755)
    return folder


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A folder with a spec and a folder of which the gallery has names like theirs."""
    (tmp_path / "alibi_mine.attn").write_text("")
    (tmp_path / "alibi_notes.txt").write_text("")
    (tmp_path / "alibis").mkdir()
    return tmp_path


def shell(name: str, code: str, programs: Path, folder: Path) -> list[str]:
    found = shutil.which(name)
    if found is None:
        pytest.skip(NO_SHELL.format(name))
    path = f"{programs}{os.pathsep}{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path, "PYTHONPATH": str(Path(__file__).parents[2]), "HOME": str(folder)}
    quiet = {"bash": ["--norc", "--noprofile"], "zsh": ["-f"], "fish": ["--no-config"]}[name]
    done = subprocess.run(
        [found, *quiet, "-c", code], cwd=folder, env=environment, capture_output=True, text=True, timeout=60, check=True
    )
    assert not done.stderr
    return done.stdout.splitlines()


def test_bash(programs: Path, place: Path) -> None:
    """Several lines in one shell: a command, an option, a name, a list of names, a file, and what nobody knows."""
    lines = [
        "flashgen pl",
        "flashgen bench --de",
        "flashgen plan --device gen",
        "flashgen build --target cpu,sm_9",
        "flashgen show alibi",
        "flashgen plan nowhere/",
    ]
    code = 'eval "$(flashgen completion bash)"\ncomplete -p flashgen\n'
    code += 'compopt() { echo compopt "$@"; }\n'
    for line in lines:
        words = line.split()
        code += f"COMP_WORDS=({' '.join(words)}); COMP_CWORD={len(words) - 1}; COMPREPLY=()\n"
        code += f'_flashgen flashgen {words[-1]} {words[-2]}; echo "{line}: ${{COMPREPLY[*]}}"\n'
    assert shell("bash", code, programs, place) == [
        "complete -o nosort -F _flashgen flashgen",
        "flashgen pl: plan",
        "flashgen bench --de: --device",
        "flashgen plan --device gen: generic",
        "flashgen build --target cpu,sm_9: cpu,sm_90 cpu,sm_90a",
        "flashgen show alibi: alibi alibi_fixed alibi_mine.attn alibis/",
        "compopt -o default",
        "flashgen plan nowhere/: ",
    ]


def test_zsh(programs: Path, place: Path) -> None:
    code = """
autoload -U compinit && compinit -u -D
eval "$(flashgen completion zsh)"
print $_comps[flashgen]
_path_files() { print files $* }
_describe() { print described $completions_with_descriptions }
compadd() { print plain $completions }
words=(flashgen show alibi_); CURRENT=3; _flashgen_completion
"""
    first, *answers = shell("zsh", code, programs, place)
    assert first == "_flashgen_completion"
    described = "described alibi_fixed:a spec that comes with flashgen"
    assert answers == ["files -f", described]


def test_fish(programs: Path, place: Path) -> None:
    code = "flashgen completion fish | source; complete -C 'flashgen show alibi_'"
    found = {line.partition("\t")[0] for line in shell("fish", code, programs, place)}
    assert {"alibi_fixed", "alibi_mine.attn"} <= found


def test_an_unknown_shell() -> None:
    outcome = flashgen("completion", "tcsh")
    assert outcome.code == 2
    assert "bash" in outcome.stderr
