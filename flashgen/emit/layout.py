"""Stage 4c: lay out what the templates printed, so that no line of a generated source is longer than ``COLUMNS``.

In: C++ or CUDA text whose lines may have any length, as expressions of a spec make them. Out: the same tokens. Lines
that fit stay as they are; a longer one is broken where its brackets are fewest and its operators bind least. Does NOT
know a spec, and does not look at macros: templates keep those short.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

COLUMNS = 120
_STEP = 2  # what a block is indented by
_HANGING = 4  # what the rest of a statement is indented by
_FARTHEST = 72  # the last column at which the rest of a statement stands below an open bracket

_TOKEN = re.compile(
    r"""
      (?P<space>\s+)
    | (?P<string>"(?:\\.|[^"\\])*" | '(?:\\.|[^'\\])*')
    | (?P<number>\d(?:[\w.']|(?<=[eEpP])[+-])*)
    | (?P<word>[^\W\d]\w*)
    | (?P<mark>->|::|<<=|>>=|<=|>=|==|!=|&&|\|\||\+\+|--|[-+*/%&|^]=|<<|.)
    """,
    re.VERBOSE,
)
_OPENING, _CLOSING = {"(": ")", "[": "]", "{": "}", "<": ">"}, {")", "]", "}", ">"}
# How tightly operators bind: a line is broken after the loosest, or before it where it is one of a conditional.
_RANKS = {
    **dict.fromkeys([",", ";"], 0),
    ":": 1,
    "?": 2,
    "||": 3,
    "&&": 4,
    **dict.fromkeys(["|", "^", "&"], 5),
    **dict.fromkeys(["==", "!=", "<", ">", "<=", ">="], 6),
    **dict.fromkeys(["<<", ">>"], 6),
    **dict.fromkeys(["+", "-"], 7),
    **dict.fromkeys(["*", "/", "%"], 8),
}
_ASSIGNED = frozenset({"=", "+=", "-=", "*=", "/=", "|=", "&=", "^="})
_DEEPER = 10  # one more open bracket counts more than any operator
_STRINGS = 1  # the rank of a place between two literals that are one
_OPENED = 4  # of a place behind a bracket
_SHORT_REST, _LONG_REST = 5, 14  # what a place behind = or a bracket costs more, by whether the rest fits one line


def laid_out(source: str) -> str:
    """The source with its long lines broken. A line stays long where one token does not fit."""
    found: list[str] = []
    lines = source.splitlines()
    number = 0
    while number < len(lines):
        line = lines[number]
        number += 1
        is_macro = line.lstrip().startswith("#") or line.endswith("\\") or (bool(found) and found[-1].endswith("\\"))
        if len(line) <= COLUMNS or is_macro:
            found.append(line)
        elif _SECTION.match(line):
            found.append(line[:COLUMNS])
        elif _PROSE.match(line):
            paragraph = [line]  # a long line of a paragraph pushes words into the next one
            while number < len(lines) and _goes_on(line, lines[number]):
                paragraph.append(lines[number])
                number += 1
            found += _paragraph(paragraph)
        else:
            found += _lines(line)
    return "".join(f"{line}\n" for line in found)


def _lines(line: str) -> Iterator[str]:
    """A line of the source as lines that fit."""
    indent = len(line) - len(line.lstrip())
    if line.lstrip().startswith("//"):
        yield from _quoted(line.lstrip(), indent)
        return
    code, comment = _apart(line)
    if comment:  # stands above what it is about
        yield from _paragraph([" " * indent + comment])
    yield from _statements(code, indent)


# -- comments ------------------------------------------------------------------------------------------------------

_SECTION = re.compile(r"// ---- .* -+$")
_PROSE = re.compile(r"\s*// (?=[^\s-])")


def _apart(line: str) -> tuple[str, str]:
    """The code of a line, and the comment behind it."""
    for match in _TOKEN.finditer(line):
        if match["mark"] == "/" and line.startswith("//", match.start()):
            return line[: match.start()].strip(), line[match.start() :]
    return line.strip(), ""


def _goes_on(line: str, following: str) -> bool:
    here, there = _PROSE.match(line), _PROSE.match(following)
    return here is not None and there is not None and here[0] == there[0]


def _paragraph(lines: list[str]) -> Iterator[str]:
    """Lines of prose: what one has too much of goes to the next, up to one that had room."""
    opening = _PROSE.match(lines[0])
    head = lines[0][: lines[0].index("//")] + "// " if opening is None else opening[0]
    rest = ""
    for line in lines:
        words = f"{rest} {line[len(head) :]}" if rest else line[len(head) :]
        rest = ""
        while len(head) + len(words) > COLUMNS and " " in words[: COLUMNS - len(head) + 1]:
            at = words.rindex(" ", 0, COLUMNS - len(head) + 1)
            words, rest = words[:at], f"{words[at + 1 :]} {rest}".strip()
        yield head + words
    while rest:
        at = rest.rfind(" ", 0, COLUMNS - len(head) + 1) if len(head) + len(rest) > COLUMNS else -1
        yield head + (rest if at < 0 else rest[:at])
        rest = "" if at < 0 else rest[at + 1 :]


def _quoted(comment: str, indent: int) -> Iterator[str]:
    """A line of a list, or of the spec: its rest stands further to the right."""
    opening = re.match(r"//\s*", comment)
    assert opening is not None
    head = " " * indent + opening[0]
    line, words = head, comment[len(opening[0]) :].split(" ")
    for number, word in enumerate(words):
        if number and len(line) + 1 + len(word) > COLUMNS:
            yield line.rstrip()
            line = head + " " * _HANGING + word
        else:
            line += f" {word}" if number else word
    yield line


# -- statements ----------------------------------------------------------------------------------------------------


def _statements(code: str, indent: int) -> Iterator[str]:
    """Code that stood on one line: as it is where it fits, else a block's statements on lines of their own."""
    code = code.strip()
    if not code:
        return
    if indent + len(code) <= COLUMNS:
        yield " " * indent + code
        return
    tokens = _tokens(code)
    cut = _head_of_template(tokens)
    if cut is not None:
        yield from _broken(code[:cut], indent)
        yield from _statements(code[cut:], indent)
        return
    block = _first_block(tokens)
    end = _end_of_statement(tokens)
    if block is not None and (end is None or block[0] < end):
        opened, closed = block
        yield from _broken(code[: opened + 1], indent)
        yield from _each(code[opened + 1 : closed], indent + _STEP)
        yield from _statements(code[closed:], indent)
        return
    if end is not None and code[end:].strip():
        yield from _statements(code[:end], indent)
        yield from _statements(code[end:], indent)
        return
    cut = _head_of_control(tokens)
    if cut is not None and code[cut:].strip() not in ("", "{"):
        yield from _broken(code[:cut], indent)
        yield from _statements(code[cut:], indent + _STEP)
        return
    yield from _broken(code, indent)


def _each(code: str, indent: int) -> Iterator[str]:
    """The statements of a block, one a line."""
    code = code.strip()
    while code:
        tokens = _tokens(code)
        end = _end_of_statement(tokens) or len(code)
        yield from _statements(code[:end], indent)
        code = code[end:].strip()


@dataclass(frozen=True)
class _Token:
    """A token, where it begins, whether blanks stand before it, and how many brackets are open there."""

    text: str
    start: int
    spaced: bool
    depth: int
    opens: bool = False  # a bracket, as which < may be no comparison
    closes: bool = False

    @property
    def end(self) -> int:
        return self.start + len(self.text)


def _tokens(code: str) -> list[_Token]:
    """The tokens, with their brackets: < is one where no blank stands before it, or behind `template`."""
    found: list[_Token] = []
    open_ones: list[str] = []
    spaced = False
    for match in _TOKEN.finditer(code):
        text = match[0]
        if match["space"]:
            spaced = True
            continue
        is_angle = text == "<" and (not spaced or (bool(found) and found[-1].text == "template"))
        is_angle = is_angle and not (found and found[-1].text == "operator")
        opens = text in ("(", "[", "{") or is_angle
        closes = text in (")", "]", "}") or (text == ">" and bool(open_ones) and open_ones[-1] == "<")
        if closes:
            while open_ones and _OPENING[open_ones[-1]] != text:
                open_ones.pop()
            if open_ones:
                open_ones.pop()
        found.append(_Token(text, match.start(), spaced, len(open_ones), opens, closes))
        if opens:
            open_ones.append(text)
        spaced = False
    return found


def _closing(tokens: list[_Token], opening: int) -> int | None:
    """The index of the bracket that closes this one."""
    behind, depth = range(opening + 1, len(tokens)), tokens[opening].depth
    return next((index for index in behind if tokens[index].closes and tokens[index].depth == depth), None)


def _head_of_template(tokens: list[_Token]) -> int | None:
    """Where ``template <…>`` ends, if more follows."""
    if len(tokens) < 2 or tokens[0].text != "template" or tokens[1].text != "<":
        return None
    closed = _closing(tokens, 1)
    return None if closed is None or closed + 1 == len(tokens) else tokens[closed].end


def _head_of_control(tokens: list[_Token]) -> int | None:
    """Where ``for (…)`` or ``if (…)`` ends."""
    words = [token.text for token in tokens[:4]]
    if not words or words[0] not in ("for", "if", "while", "else"):
        return None
    if words[0] == "else" and words[1] != "if":
        return tokens[0].end
    opened = words.index("(")
    closed = _closing(tokens, opened)
    return None if closed is None else tokens[closed].end


def _first_block(tokens: list[_Token]) -> tuple[int, int] | None:
    """Where the first braces lie that hold statements; of nested ones the outer ones."""
    for index, token in enumerate(tokens):
        if token.text != "{":
            continue
        closed = _closing(tokens, index)
        if closed is None:
            return None
        inner = tokens[index + 1 : closed]
        if any(each.text == ";" and each.depth == token.depth + 1 for each in inner):
            return token.start, tokens[closed].start
    return None


def _end_of_statement(tokens: list[_Token]) -> int | None:
    """Where the first statement ends: behind its semicolon."""
    return next((token.end for token in tokens if token.text == ";" and token.depth == 0), None)


# -- one statement -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Gap:
    """A place where a line may end: before the token of this number."""

    token: int
    cost: int
    before_value: bool = False  # of an assignment, or behind a bracket: best where the rest fits one line


def _broken(code: str, indent: int) -> Iterator[str]:
    """One statement on as many lines as it takes; what follows stands below the bracket that is open, or hangs."""
    code = code.strip()
    tokens = _tokens(code)
    gaps = _gaps(tokens)
    columns: list[
        tuple[int, int]
    ] = []  # of the brackets that are open: where what they hold begins, their line's indent
    first, at = 0, indent
    while first < len(tokens):
        if at + len(code) - tokens[first].start <= COLUMNS:
            yield " " * at + code[tokens[first].start :]
            return
        cut = _best(tokens, gaps, first, at, len(code))
        if cut is None:
            yield " " * at + code[tokens[first].start :]
            return
        yield " " * at + code[tokens[first].start : tokens[cut - 1].end]
        for token in tokens[first:cut]:
            if token.opens:
                columns.append((at + token.end - tokens[first].start, at))
            elif token.closes and columns:
                columns.pop()
        if columns and (tokens[cut - 1].opens or columns[-1][0] > _FARTHEST):
            columns[-1] = (columns[-1][1] + _HANGING, columns[-1][1])
        at = columns[-1][0] if columns else indent + _HANGING
        first = cut


def _best(tokens: list[_Token], gaps: list[_Gap], first: int, at: int, end: int) -> int | None:
    """The cheapest place that leaves a line that fits, the last one of those; any place where none does."""
    start = tokens[first].start
    later = [gap for gap in gaps if gap.token > first]
    fitting = [gap for gap in later if at + tokens[gap.token - 1].end - start <= COLUMNS]
    if not fitting:
        return later[0].token if later else None

    def cost(gap: _Gap) -> tuple[int, int]:
        fits = at + _HANGING + end - tokens[gap.token].start <= COLUMNS
        value = (_SHORT_REST if fits else _LONG_REST) if gap.before_value else 0
        return gap.cost + value, -gap.token

    return min(fitting, key=cost).token


def _gaps(tokens: list[_Token]) -> list[_Gap]:
    """Where lines may end, with what it costs a reader."""
    found = []
    for number in range(1, len(tokens)):
        before, here = tokens[number - 1], tokens[number]
        depth = _DEEPER * here.depth
        if before.text in _ASSIGNED and here.spaced:
            found.append(_Gap(number, depth, before_value=True))
        elif before.opens and before.text != "<" and not here.closes and _closing(tokens, number - 1) is not None:
            found.append(_Gap(number, depth - _DEEPER + _OPENED, before_value=True))
        elif here.spaced and here.text in ("?", ":"):
            found.append(_Gap(number, depth + _RANKS[here.text]))
        elif here.spaced and before.text in _RANKS and before.text not in ("?", ":") and not _ends_type(before):
            found.append(_Gap(number, depth + _RANKS[before.text]))
        elif here.text[0] == '"' and before.text[-1] == '"':
            found.append(_Gap(number, depth + _STRINGS))
    return found


def _ends_type(token: _Token) -> bool:
    """Whether it is no operator: a * or & that no blank stands before, or the end of a template's arguments."""
    return token.closes or (token.text in ("*", "&") and not token.spaced)
