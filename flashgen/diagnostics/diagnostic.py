"""``Diagnostic``: one thing that is wrong in a user's text, and where: places are kept by every syntax and IR node.

``CODES`` is the catalogue of codes. A code is stable: scripts and editors match on it, so a code is never given another
meaning and never reused. The first digit says the kind (0 text and syntax, 1 names, 2 types and shapes, 3 meaning,
4 schedule and target, 5 warnings, 6 mods of FlexAttention); the sentence says what all diagnostics under that code have
in common.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
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


CODES: Mapping[str, str] = MappingProxyType(
    {
        # Text and syntax
        "E001": "the file cannot be read",
        "E002": "the text is too large",
        "E003": "the file is not UTF-8 text",
        "E004": "a character has no meaning here",
        "E005": "a number is malformed",
        "E006": "the text does not follow the grammar",
        "E007": "something that was opened is not closed",
        "E008": "an expression is nested too deeply or is too long",
        "E009": "the file holds no attention block",
        "E010": "there are too many errors to go on",
        "E011": "an import cannot be followed",
        "E012": "files import each other in a circle",
        "E013": "a statement stands outside an attention block",
        # Names
        "E101": "a name is unknown",
        "E102": "a function is unknown",
        "E103": "a statement is unknown",
        "E104": "a name is defined twice",
        "E105": "a name of the language or the prelude is redefined",
        "E106": "a word of the language is used as a name",
        "E107": "a name is used before its definition",
        "E108": "a name cannot be used in this place",
        "E109": "a constant that is to be overridden does not exist",
        "E110": "an element type is unknown or does not fit",
        "E111": "a name collides with an argument of the generated op",
        # Types and shapes
        "E201": "the types of an operation do not fit",
        "E202": "a call has the wrong arguments",
        "E203": "a tensor has the wrong number of indices",
        "E204": "a tensor, a function or a value is used as something else",
        "E205": "a constant does not fit in 32 bits",
        "E206": "a constant is divided by zero",
        "E207": "a constant expression has no value",
        "E208": "a statement has an expression of the wrong type",
        "E209": "a value must be known at compile time",
        "E210": "the shape of a tensor is not legal",
        "E211": "an index is outside its dimension",
        "E212": "the value given for a constant has the wrong type",
        # Meaning
        "E301": "a required statement is missing",
        "E302": "a statement occurs twice",
        "E303": "a head dimension is not legal",
        "E304": "a list names the same thing twice",
        "E305": "the dropout probability is not legal",
        "E306": "a gradient is asked for where there is none",
        "E307": "a definition uses itself",
        "E308": "an expression is too large once 'let' and 'def' are expanded",
        "E309": "a block size is not legal",
        "E310": "the form of the weights is not legal",
        "E311": "the result does not exist for this spec",
        "E312": "the list of a selection is not legal",
        "E313": "a spec has more tensors and params than an op can take",
        "E314": "a file states more head dimensions than one may",
        # Schedule and target
        "E401": "a schedule entry is unknown",
        "E402": "a schedule entry has a value that is not legal",
        "E403": "a schedule entry cannot work",
        "E404": "the target does not support what the spec asks for",
        "E405": "the target or the device is unknown",
        "E406": "no plan fits the device",
        # Mods of FlexAttention
        "E601": "a mod decides by a value that only a kernel knows",
        "E602": "a function cannot be used in a mod",
        "E603": "a value of a mod has the wrong type or shape",
        "E604": "an int of a mod does not fit in 32 bits",
        "E605": "a mod captures what a kernel cannot read",
        "E606": "a mod cannot be traced",
        # Warnings
        "W501": "an index may fall outside its dimension",
        "W502": "a name is never used",
        "W503": "a statement has no effect",
        "W504": "the mask keeps no pair",
        "W505": "a target refuses what another takes",
        "W506": "a target has no use for a part of the spec",
    }
)
