"""``flashgen check``: diagnostics only."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import click

from flashgen.cli.console import diagnostic_as_dict, exit_code, note, print_json, show_diagnostics
from flashgen.cli.options import TARGETS, Constant, checked_arguments, json_option, near_files, set_option
from flashgen.diagnostics import Diagnostic, Source, SpecError

if TYPE_CHECKING:
    from flashgen.compiler.reading import Verdict


@click.command(short_help="Check specs and print diagnostics.")
@checked_arguments
@set_option
@click.option(
    "--target",
    "targets",
    type=TARGETS,
    show_default="all are asked, and one has to take it",
    metavar="NAME,...",
    help="Ask these alone whether they take a spec; all of them have to.",
)
@json_option
def check(
    files: tuple[Path, ...],
    constants: tuple[tuple[str, Constant], ...],
    targets: tuple[str, ...] | None,
    as_json: bool,
) -> None:
    """Check specs and print every diagnostic.

    Every target is asked what it refuses: that is a warning where another takes the spec. Exits with 1 if there is an
    error; warnings alone exit with 0.
    """
    from flashgen.compiler.pipeline import check_file

    everything: list[dict[str, object]] = []
    errors = warnings = 0
    codes = set[int]()
    for file in files:
        names: tuple[str, ...] = ()
        verdicts: list[Verdict] = []
        diagnostics: Sequence[Diagnostic]
        sources: Sequence[Source]
        try:
            checked = check_file(file, dict(constants), targets, verdicts.append)
        except SpecError as error:
            hint = near_files(file).strip()
            diagnostics, sources = error.diagnostics, error.sources
            if hint:
                diagnostics = [replace(each, hints=(*each.hints, hint)) for each in diagnostics]
        else:
            names = tuple(spec.name for spec in checked.specs)
            diagnostics, sources = checked.warnings, checked.sources
        codes.add(exit_code(diagnostics))
        found = sum(diagnostic.severity == "error" for diagnostic in diagnostics)
        errors += found
        warnings += len(diagnostics) - found
        everything.append(
            {
                "file": str(file),
                "attentions": names,
                "diagnostics": [diagnostic_as_dict(entry) for entry in diagnostics],
                "targets": [
                    {
                        "target": each.target,
                        "attention": each.attention,
                        "takes": each.takes,
                        "refused": [diagnostic_as_dict(entry) for entry in each.refused],
                        "left_out": [diagnostic_as_dict(entry) for entry in each.left_out],
                    }
                    for each in verdicts
                ],
            }
        )
        if not as_json:
            # Where there is no spec to say anything about, a file that cannot be read, it is wrong usage.
            is_unread = any(each.code == "E001" for each in diagnostics)
            show_diagnostics(diagnostics, sources, err=is_unread)
    if as_json:
        print_json({"files": everything, "errors": errors, "warnings": warnings})
    note(f"{_count(len(files), 'file')} checked: {_count(errors, 'error')}, {_count(warnings, 'warning')}")
    sys.exit(min(codes - {0}, default=0))  # a wrong spec (1) weighs more than wrong usage (2)


def _count(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"
