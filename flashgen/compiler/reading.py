"""From the text of a spec to its ``AttentionSpec``s, with all that is wrong with them on every target.

In: a file, a text, constants by name. Out: ``Checked``. The front end, and with it lark, is imported when a text is
read that was not read before (``emit/recall.py``).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flashgen.analysis.bounds import prove_indices
from flashgen.analysis.index_checks import index_diagnostics, weight_diagnostics
from flashgen.compiler.verdicts import Verdict
from flashgen.diagnostics import Diagnostic, Source, SpecError, in_reading_order, nearest, quoted_list
from flashgen.ir.spec import AttentionSpec

if TYPE_CHECKING:
    from flashgen.language import SpecFile

Constant = bool | int | float
CONSTANTS = ("constants", "{'window': 128}")


@dataclass(frozen=True)
class Checked:
    """A file without errors: its specs, every warning about them, and the verdicts of the targets that were asked."""

    specs: tuple[AttentionSpec, ...]
    warnings: tuple[Diagnostic, ...]
    sources: tuple[Source, ...]
    verdicts: tuple[Verdict, ...] = ()


def read_file(path: Path | str, constants: Mapping[str, Constant] | None = None) -> Checked:
    """The specs of a file, with what is wrong or deserves a warning whatever they are compiled for.

    Raises ``SpecError`` where there is an error.
    """
    from flashgen.language import parse_file

    return _checked(parse_file(path, by_name(constants, *CONSTANTS)))


def _checked(parsed: SpecFile) -> Checked:
    """The parsed specs with the diagnostics that need the analysis of every head dimension."""
    found: dict[Diagnostic, None] = dict.fromkeys(parsed.warnings)
    for spec in parsed.specs:
        found.update(dict.fromkeys(weight_diagnostics(spec)))
        for head_dim in spec.head_dims:
            found.update(dict.fromkeys(index_diagnostics(spec, prove_indices(spec, head_dim))))
    diagnostics = in_reading_order(found, parsed.sources)
    if any(diagnostic.severity == "error" for diagnostic in diagnostics):
        raise SpecError(diagnostics, parsed.sources)
    return Checked(parsed.specs, diagnostics, parsed.sources)


def read_text(text: str, constants: Mapping[str, Constant]) -> Checked:
    """``read_file`` for a text."""
    from flashgen.language import parse_text

    return _checked(parse_text(text, constants=constants))


def by_name(given: object, what: str, example: str) -> dict[str, Any]:
    """What a caller gives by name, nothing for None. Raises ``TypeError`` for what has no names."""
    found = {} if given is None else given
    if not isinstance(found, Mapping) or not all(isinstance(name, str) for name in found):
        raise TypeError(f"{what} are given by their names, as in {example}, not as {given!r}")
    return dict(found)


def did_you_mean(name: str, known: Iterable[str]) -> tuple[str, ...]:
    """The known names that an unknown one may stand for, in words."""
    close = nearest(name, known, limit=3)
    return (f"did you mean {quoted_list(close)}?",) if close else (f"known: {quoted_list(known, 'and')}",)
