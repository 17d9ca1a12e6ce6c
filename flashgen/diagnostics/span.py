"""Places in source text, kept by every syntax and IR node."""

from dataclasses import dataclass


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

    def to(self, other: "Span") -> "Span":
        """The stretch from the start of this span to the end of ``other``."""
        return Span(self.file, self.line, self.column, other.end_line, other.end_column)

    def __str__(self) -> str:
        return f"{self.file}:{self.line}:{self.column}"


@dataclass(frozen=True)
class Source:
    """One file of source text under the name that spans and diagnostics use for it."""

    name: str
    text: str
