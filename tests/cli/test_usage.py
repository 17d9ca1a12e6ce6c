"""The command group: help, version, unknown commands, and options that are refused with near matches."""

from __future__ import annotations

from pathlib import Path

import pytest

from flashgen.version import __version__
from tests.cli.helpers import flashgen, flashgen_process

COMMANDS = ("check", "build", "verify", "plan", "bench", "devices", "cache")


def test_help_names_every_command() -> None:
    outcome = flashgen("--help")
    assert outcome.code == 0
    for command in COMMANDS:
        assert f"\n  {command} " in outcome.stdout


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help(command: str) -> None:
    outcome = flashgen(command, "--help")
    assert outcome.code == 0
    assert "Usage:" in outcome.stdout


def test_version() -> None:
    assert flashgen("--version").stdout == f"flashgen, version {__version__}\n"


def test_an_unknown_command_is_answered_with_the_nearest() -> None:
    outcome = flashgen("biuld", "x.attn")
    assert outcome.code == 2
    assert "'build'" in outcome.stderr


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("build", "--target", "cup"), "'cpu'"),
        (("plan", "--device", "genric"), "'generic'"),
        (("plan", "--sram", "0"), "0"),
        (("plan", "--sram", "lots"), "lots"),
        (("verify", "--backend", "cup"), "'cpu'"),
        (("verify", "--shape", "1,2,3"), "five"),
        (("verify", "--shape", "1,3,2,4,4"), "multiple"),
        (("verify", "--shape", "1,2,2,-4,4"), "too small"),
        (("verify", "--shape", "1,2,2,4,99999999999"), "too large"),
        (("verify", "--shape", "1,1,1,4,2000000000"), "not enough memory"),
        (("verify", "--shape", "a,b,c,d,e"), "five integers"),
        (("verify", "--shape", "1,1,1,৪,৪"), "five integers"),
        (("verify", "--name", "cuasal"), "'causal'"),
        (("bench", "--vs", "spda"), "'sdpa'"),
        (("bench", "--dtype", "f64"), "f32"),
    ],
)
def test_a_wrong_option_is_wrong_usage(specs: Path, arguments: tuple[str, ...], said: str) -> None:
    command, *options = arguments
    outcome = flashgen(command, specs / "causal.attn", *options)
    assert outcome.code == 2
    assert said in outcome.stderr
    assert not outcome.stdout


def test_module_and_command_are_the_same(tmp_path: Path) -> None:
    outcome = flashgen_process("--version", folder=tmp_path)
    assert outcome.code == 0
    assert __version__ in outcome.stdout


@pytest.mark.parametrize("command", ["check", "build", "verify", "plan", "bench"])
def test_a_wrong_spec_exits_with_1_from_every_command(tmp_path: Path, command: str) -> None:
    file = tmp_path / "bad.attn"
    file.write_text("attention bad { head_dim 64 mask causall }")
    options = ("-o", tmp_path / "out") if command == "build" else ()
    outcome = flashgen(command, file, *options)
    assert outcome.code == 1
    assert "error[E101]" in (outcome.stdout if command == "check" else outcome.stderr)
    assert not (tmp_path / "out").exists()
