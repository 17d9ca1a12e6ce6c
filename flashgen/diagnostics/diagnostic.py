"""``Diagnostic``: one thing that is wrong in a user's text, and where: places are kept by every syntax and IR node."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Span:
    """A half-open stretch of one source file; lines and columns count from 1.

    ``end_column`` is the column just past the last character.
    """

    file: str
    line: int
    column: int
    end_line: int
    end_column: int

    def to(self, other: Span) -> Span:
        """The stretch from the start of this span to the end of ``other``."""
        return Span(self.file, self.line, self.column, other.end_line, other.end_column)

    def __str__(self) -> str:
        return f"{self.file}:{self.line}:{self.column}"


@dataclass(frozen=True)
class Source:
    """One file of source text under the name that spans and diagnostics use for it."""

    name: str
    text: str


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
