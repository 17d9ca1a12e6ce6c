"""What the commands print with: tables and JSON on stdout, messages and diagnostics on stderr."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import os
import sys
from collections.abc import Collection, Iterable, Iterator, Sequence
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import Any, NoReturn, TextIO, TypeVar

import click

from flashgen.diagnostics import Diagnostic, Source, nearest, quoted_list, render

Item = TypeVar("Item")

INTERRUPTED = 130  # what shells say of a program that SIGINT ended
JSON_WANTED = "flashgen.json_wanted"  # in a context's meta
_JSON_PRINTED = "flashgen.json_printed"
_WIDEST = 1000  # columns of a table

# Diagnostics that speak of the command line and not of the spec: a file that cannot be read, an unknown or unfit --set,
# --target or --device.
ABOUT_THE_COMMAND = frozenset({"E001", "E109", "E212", "E405"})


def exit_code(diagnostics: Iterable[Diagnostic]) -> int:
    """0 without an error, 2 if every error is about the command line, else 1."""
    codes = {diagnostic.code for diagnostic in diagnostics if diagnostic.severity == "error"}
    if not codes:
        return 0
    return 2 if codes <= ABOUT_THE_COMMAND else 1


def fail(message: str, code: int) -> NoReturn:
    """Say what went wrong on stderr, and as JSON where that was asked for, and leave with this exit code."""
    click.echo(f"error: {message}", err=True)
    print_json_error(message, code)
    # Results that cannot be written are let go of: the interpreter would try again as it ends, and exit by 120.
    try:
        sys.stdout.flush()
    except (OSError, ValueError):
        with contextlib.suppress(OSError, ValueError), Path(os.devnull).open("wb") as nowhere:
            os.dup2(nowhere.fileno(), sys.stdout.fileno())
    sys.exit(code)


def print_json_error(message: str, code: int, diagnostics: Sequence[Diagnostic] = ()) -> None:
    """What went wrong as the one JSON document, where ``--json`` was given and none is printed yet."""
    context = click.get_current_context(silent=True)
    if context is None or not context.meta.get(JSON_WANTED) or context.meta.get(_JSON_PRINTED):
        return
    told = [diagnostic_as_dict(each) for each in diagnostics]
    print_json({"error": {"message": message, "exit_code": code, "diagnostics": told}})


def diagnostic_as_dict(diagnostic: Diagnostic) -> dict[str, object]:
    """A diagnostic as plain data."""
    known = dataclasses.asdict(diagnostic)
    names = ("message", "label", "notes", "hints", "span")
    return {"code": diagnostic.code, "severity": diagnostic.severity, **{name: known[name] for name in names}}


def is_plain() -> bool:
    """Whether a terminal is to be spared colours and other escapes: ``NO_COLOR``, or one that has none."""
    return bool(os.environ.get("NO_COLOR")) or os.environ.get("TERM") == "dumb"


def is_terminal(stream: TextIO | None) -> bool:
    """Whether a terminal reads a stream, which may have been closed."""
    return stream is not None and stream.isatty()


def note(message: str) -> None:
    """Tell a person something that is not a result."""
    click.echo(message, err=True)


def near_matches(word: str, known: Iterable[str]) -> str:
    """`` Did you mean 'x'?``, or nothing."""
    close = nearest(word, known, limit=3)
    return f" Did you mean {quoted_list(close)}?" if close else ""


def show_diagnostics(diagnostics: Sequence[Diagnostic], sources: Sequence[Source], *, err: bool = True) -> None:
    """Print diagnostics with carets, in colour where a terminal reads."""
    if diagnostics:
        stream = sys.stderr if err else sys.stdout
        color = is_terminal(stream) and not is_plain()
        click.echo(render(diagnostics, sources, color=color).rstrip("\n"), err=err)


def print_json(value: object) -> None:
    """One JSON document on stdout. Infinite and undefined numbers become null."""
    context = click.get_current_context(silent=True)
    if context is not None:
        context.meta[_JSON_PRINTED] = True
    click.echo(json.dumps(_finite(value), indent=2, allow_nan=False))


def print_table(
    title: str, columns: Sequence[str], rows: Iterable[Sequence[str]], *, left: Collection[str] = ()
) -> None:
    """A table on stdout, as wide as it needs to be: a terminal that is narrower wraps lines, and loses nothing.

    Numbers stand right, the columns in ``left`` stand left; a row of nothing ends a section.
    """
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(title=Text(title), title_justify="left", title_style="bold", box=SIMPLE_HEAD, pad_edge=False)
    for column in columns:
        table.add_column(column, justify="left" if column in left else "right", no_wrap=True)
    for row in rows:
        if row:
            table.add_row(*row)
        else:
            table.add_section()
    console = Console(highlight=False)
    needed = max(table.__rich_measure__(console, console.options.update(width=_WIDEST)).maximum, 40)
    console = Console(highlight=False, width=min(needed, _WIDEST))
    with console.capture() as capture:
        console.print(table)
    click.echo("\n".join(line.rstrip() for line in capture.get().splitlines()))


def progress(steps: Iterable[Item], what: str, total: int | None = None) -> Iterator[Item]:
    """The steps, counted on stderr while they are taken; silent where no terminal reads.

    Of a ``total`` there is a bar, with the time that the rest will take.
    """
    if not is_terminal(sys.stderr) or is_plain():
        yield from steps
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeRemainingColumn

    counted = (SpinnerColumn(), TextColumn("{task.description}: {task.completed} done"))
    of_total = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*(of_total if total else counted), console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(what, total=total)
        for step in steps:
            bar.advance(task)
            yield step


def _finite(value: object) -> object:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {str(key): _finite(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(entry) for entry in value]
    return value


_GROUP = "flashgen.tools"


def tools() -> Iterator[tuple[str, Any]]:
    """Each command that is there, by its name."""
    for each in entry_points(group=_GROUP):
        found = _loaded(each)
        if isinstance(found, click.Command):
            yield each.name, found


def tool(name: str) -> Any:
    """What an entry point names; None for a name that no tool has. ``UsageError`` where only a checkout has it."""
    there = tuple(entry_points(group=_GROUP, name=name))
    if not there:
        return None
    found = _loaded(there[0])
    if found is None:
        raise click.UsageError(
            f"'flashgen {name}' is a tool for developers, which only a checkout of flashgen has: "
            "run 'pip install -e .' in one, and the command there"
        )
    return found


def _loaded(entry: EntryPoint) -> Any:
    """None where the tool is not installed."""
    try:
        return entry.load()
    except ImportError as error:
        if (error.name or "").split(".")[0] != "tools":
            raise
        return None
