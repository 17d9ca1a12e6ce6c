"""The one renderer of diagnostics: data in, text with source lines and carets out.

    specs/t5.attn:9:21: warning[W501]: index may fall outside 'table'; the load is clamped
       9 |     score s + table[bucket, h]
         |                     ^^^^^^ is in [0, 33], the dimension has 32 entries
         = note: 'bucket' is defined at line 8
         = help: if no pair that the mask keeps can reach it, write min(bucket, 31) and the warning goes

A span over several lines is shown by its first line, a long line by the part around the carets. Columns in the
first line count characters of the text; carets are placed by the width that characters take on a terminal.
``SpecError`` raises every diagnostic of one run once.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher

from flashgen.diagnostics.diagnostic import Diagnostic, Source, Span

_TAB = 4
_WIDEST_LINE = 110
_GUTTER = 4
_ELLIPSIS = "…"

_RESET, _BOLD, _RED, _YELLOW, _BLUE = "\x1b[0m", "\x1b[1m", "\x1b[1;31m", "\x1b[1;33m", "\x1b[1;34m"


def render(diagnostics: Sequence[Diagnostic], sources: Sequence[Source], *, color: bool = False) -> str:
    """All diagnostics as text, one blank line between two, no newline at the end."""
    lines = {source.name: source.text.split("\n") for source in sources}
    return "\n\n".join(_render_one(diagnostic, lines, _Paint(color)) for diagnostic in diagnostics)


@dataclass(frozen=True)
class _Paint:
    """Colours, or none."""

    on: bool

    def __call__(self, text: str, style: str) -> str:
        return f"{style}{text}{_RESET}" if self.on and text else text


def _render_one(diagnostic: Diagnostic, lines: dict[str, list[str]], paint: _Paint) -> str:
    tint = _RED if diagnostic.severity == "error" else _YELLOW
    place = f"{_printable(str(diagnostic.span))}: " if diagnostic.span else ""
    head = paint(f"{diagnostic.severity}[{diagnostic.code}]", tint)
    shown = [f"{paint(place, _BOLD)}{head}: {paint(_printable(diagnostic.message), _BOLD)}"]
    width = _GUTTER
    source_line = _source_line(diagnostic.span, lines)
    if diagnostic.span and source_line is not None:
        width = max(_GUTTER, len(str(diagnostic.span.line)))
        text, start, length = _excerpt(source_line, diagnostic.span)
        number = paint(f"{diagnostic.span.line:>{width}} |", _BLUE)
        shown.append(f"{number} {text}".rstrip())
        carets = paint(f"{'^' * length} {_printable(diagnostic.label)}".rstrip(), tint)
        shown.append(f"{paint(' ' * width + ' |', _BLUE)} {' ' * start}{carets}")
    elif diagnostic.label:
        shown.append(f"{' ' * width} = {_printable(diagnostic.label)}")
    edge = paint(f"{' ' * width} =", _BLUE)
    shown += [f"{edge} note: {_printable(note)}" for note in diagnostic.notes]
    shown += [f"{edge} help: {_printable(hint)}" for hint in diagnostic.hints]
    return "\n".join(shown)


def _source_line(span: Span | None, lines: dict[str, list[str]]) -> str | None:
    if span is None or span.file not in lines or not 1 <= span.line <= len(lines[span.file]):
        return None
    return lines[span.file][span.line - 1]


def _excerpt(line: str, span: Span) -> tuple[str, int, int]:
    """The part of the line to show, the terminal column where the carets start, and how many there are."""
    first = min(span.column - 1, len(line))
    last = min(span.end_column - 1, len(line)) if span.end_line == span.line else len(line)
    last = max(last, first)
    left, right = _window(len(line), first, last)
    before = _display(line[left:first])
    marked = _display(line[first : min(last, right)], _display_width(before))
    after = _display(line[min(last, right) : right], _display_width(before + marked))
    prefix, suffix = (_ELLIPSIS if left > 0 else ""), (_ELLIPSIS if right < len(line) else "")
    start = len(prefix) + _display_width(before)
    return f"{prefix}{before}{marked}{after}{suffix}", start, max(1, _display_width(marked))


def _window(length: int, first: int, last: int) -> tuple[int, int]:
    """The stretch of a long line that is shown: the carets with their surroundings."""
    if length <= _WIDEST_LINE:
        return 0, length
    marked = min(last - first, _WIDEST_LINE * 2 // 3)
    left = max(0, first - (_WIDEST_LINE - marked) // 2)
    right = min(length, left + _WIDEST_LINE)
    return max(0, min(left, right - _WIDEST_LINE)), right


def _display(text: str, column: int = 0) -> str:
    """Tabs to spaces up to the next stop, characters that cannot be shown to a replacement."""
    shown = []
    for character in text:
        piece = " " * (_TAB - column % _TAB) if character == "\t" else _printable(character)
        shown.append(piece)
        column += _display_width(piece)
    return "".join(shown)


def _printable(text: str) -> str:
    """Text that cannot move the cursor or break a line of the report."""
    return "".join(
        "�" if unicodedata.category(character) in ("Cc", "Cs", "Cf", "Zl", "Zp") else character for character in text
    )


def _display_width(text: str) -> int:
    return sum(_character_width(character) for character in text)


def _character_width(character: str) -> int:
    if unicodedata.combining(character):
        return 0
    return 2 if unicodedata.east_asian_width(character) in ("W", "F") else 1


class SpecError(Exception):
    """A user's mistake, as data: every diagnostic of one run and the texts that they point into."""

    def __init__(self, diagnostics: Sequence[Diagnostic], sources: Sequence[Source] = ()) -> None:
        self.diagnostics = tuple(diagnostics)
        self.sources = tuple(sources)
        super().__init__(self.diagnostics, self.sources)

    def __str__(self) -> str:
        return render(self.diagnostics, self.sources)


_LONGEST_COMPARED = 60


def nearest(name: str, known: Iterable[str], *, limit: int = 1) -> tuple[str, ...]:
    """The known names that a misspelt one probably stands for, best first; empty where none is close."""
    if len(name) > _LONGEST_COMPARED:
        return ()
    scored = []
    for candidate in sorted(set(known)):
        score = _likeness(name, candidate)
        if score >= 0.7:
            scored.append((-score, candidate))
    return tuple(candidate for _, candidate in sorted(scored)[:limit])


def _likeness(name: str, candidate: str) -> float:
    """1 for equal names; where only case and underscores differ just below; else the share of common text."""
    if name == candidate:
        return 1.0
    if name.replace("_", "").lower() == candidate.replace("_", "").lower():
        return 0.99
    if min(len(name), len(candidate)) < 2:
        return 0.0
    if len(name) >= 3 and sorted(name) == sorted(candidate):
        return 0.95
    if len(name) >= 4 and candidate.startswith(name):
        return 0.9
    return SequenceMatcher(None, name.lower(), candidate.lower()).ratio()


def quoted_list(names: Iterable[str], conjunction: str = "or") -> str:
    """``'a'``, ``'a' or 'b'``, ``'a', 'b' or 'c'``."""
    return spoken_list([f"'{name}'" for name in names], conjunction)


def spoken_list(words: Sequence[str], conjunction: str = "or") -> str:
    """``a``, ``a or b``, ``a, b or c``."""
    return f" {conjunction} ".join(filter(None, (", ".join(words[:-1]), *words[-1:])))
