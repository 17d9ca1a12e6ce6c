"""``flashgen check``: diagnostics only."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import click

from flashgen.cli.console import exit_code, note, print_json, show_diagnostics
from flashgen.cli.options import Constant, json_option, set_option, spec_arguments
from flashgen.diagnostics import Diagnostic, Source, SpecError


@click.command(short_help="Check specs and print diagnostics.")
@spec_arguments
@set_option
@json_option
def check(files: tuple[Path, ...], constants: tuple[tuple[str, Constant], ...], as_json: bool) -> None:
    """Check specs and print every diagnostic.

    Exits with 1 if there is an error; warnings alone exit with 0.
    """
    from flashgen.pipeline import check_file

    everything: list[dict[str, object]] = []
    errors = warnings = worst = 0
    for file in files:
        names: tuple[str, ...] = ()
        diagnostics: Sequence[Diagnostic]
        sources: Sequence[Source]
        try:
            checked = check_file(file, dict(constants))
        except SpecError as error:
            diagnostics, sources = error.diagnostics, error.sources
        else:
            names = tuple(spec.name for spec in checked.specs)
            diagnostics, sources = checked.warnings, checked.sources
        worst = _worse(worst, exit_code(diagnostics))
        found = sum(diagnostic.severity == "error" for diagnostic in diagnostics)
        errors += found
        warnings += len(diagnostics) - found
        everything.append(
            {
                "file": str(file),
                "attentions": names,
                "diagnostics": [_as_dict(entry) for entry in diagnostics],
            }
        )
        if not as_json:
            show_diagnostics(diagnostics, sources, err=False)
    if as_json:
        print_json({"files": everything, "errors": errors, "warnings": warnings})
    note(f"{_count(len(files), 'file')} checked: {_count(errors, 'error')}, {_count(warnings, 'warning')}")
    sys.exit(worst)


def _worse(one: int, other: int) -> int:
    """A wrong spec (1) weighs more than wrong usage (2), and that more than neither."""
    return 1 if 1 in (one, other) else max(one, other)


def _as_dict(diagnostic: Diagnostic) -> dict[str, object]:
    span = diagnostic.span
    place = None
    if span is not None:
        place = {
            "file": span.file,
            "line": span.line,
            "column": span.column,
            "end_line": span.end_line,
            "end_column": span.end_column,
        }
    return {
        "code": diagnostic.code,
        "severity": diagnostic.severity,
        "message": diagnostic.message,
        "label": diagnostic.label,
        "notes": diagnostic.notes,
        "hints": diagnostic.hints,
        "span": place,
    }


def _count(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"
