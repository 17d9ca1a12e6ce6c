"""``Diagnostic``: one thing that is wrong in a user's text."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from flashgen.diagnostics.span import Source, Span

Severity = Literal["error", "warning"]


@dataclass(frozen=True)
class Diagnostic:
    """One mistake or warning.

    ``message`` is a sentence without its full stop, with names in single quotes. ``span`` is the smallest stretch
    that is wrong. ``label`` stands beside the carets. A note states a fact; a hint says what to do.
    """

    code: str
    message: str
    span: Span | None
    label: str = ""
    notes: tuple[str, ...] = ()
    hints: tuple[str, ...] = ()

    @property
    def severity(self) -> Severity:
        """From the code: W… is a warning, E… an error."""
        return "warning" if self.code.startswith("W") else "error"


def in_reading_order(diagnostics: Iterable[Diagnostic], sources: Sequence[Source]) -> tuple[Diagnostic, ...]:
    """The diagnostics file by file in the order of ``sources``, each from top to bottom, without repetitions."""
    order = {source.name: number for number, source in enumerate(sources)}

    def place(diagnostic: Diagnostic) -> tuple[int, int, int]:
        span = diagnostic.span
        if span is None:
            return (-1, 0, 0)
        return (order.get(span.file, len(order)), span.line, span.column)

    return tuple(sorted(dict.fromkeys(diagnostics), key=place))
