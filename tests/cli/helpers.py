"""Runs the command as users do, in a process of its own, or in this one where speed matters more."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from click.testing import CliRunner

from flashgen.cli import main


@dataclass(frozen=True)
class Outcome:
    """How a command ended and what it printed."""

    code: int
    stdout: str
    stderr: str


def flashgen(*arguments: str | int | Path) -> Outcome:
    """Run a command in this process; an exception that reaches the top fails the test."""
    result = CliRunner().invoke(main, [str(argument) for argument in arguments], prog_name="flashgen")
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return Outcome(result.exit_code, result.stdout, result.stderr)


def flashgen_process(
    *arguments: str | int | Path,
    folder: Path | None = None,
    environment: dict[str, str] | None = None,
    seconds: float = 120,
) -> Outcome:
    """Run a command in a process of its own."""
    done = subprocess.run(
        [sys.executable, "-m", "flashgen", *map(str, arguments)],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=seconds,
        check=False,
    )
    return Outcome(done.returncode, done.stdout, done.stderr)
