"""Syntax errors in words: what was found, what could stand there, and what the writer probably meant.

In: the token or the character, and what the parser knows of its surroundings. Out: a diagnostic, and how to go on.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Sequence, Set
from dataclasses import dataclass, replace

from flashgen.diagnostics import Diagnostic, Span, nearest, spoken_list
from flashgen.language import foreign, words
from flashgen.language.tree import Word

_MALFORMED_NUMBER = re.compile(r"\.?[0-9][\w.]*")
_UNREADABLE = re.compile(r"[^\x00-\x7f]+|.", re.DOTALL)

_CHARACTER_HINTS = {
    "!": "write 'not'",
    "~": "write 'not'",
    "?": "write 'a if condition else b'",
    "@": "products of matrices are not written out; 's' is τ · (q_i · k_j)",
    ".": "write names alone: tanh(s), where(c, x, y), inf; there are no modules and no methods",
    "'": "only imports have text in quotes, and those are double",
    "`": "names stand without quotes",
    ";": "statements need no separator",
    "\\": "a line needs no continuation sign",
    "$": "names stand without a sign",
    "≤": "write '<='",
    "≥": "write '>='",
    "≠": "write '!='",
    "−": "write '-'",
    "–": "write '-'",
    "×": "write '*'",
    "·": "write '*'",
    "÷": "write '/'",
    "∞": "write 'inf'",
    "π": "write 'pi'",
    "∧": "write 'and'",
    "∨": "write 'or'",
    "¬": "write 'not'",
    "“": "write '\"'",
    "”": "write '\"'",
    "√": "write 'sqrt(…)'",
    "²": "write '** 2'",
    "τ": "the scale is stated by 'scale'; 's' has it already",
}

_ASCII = "names are made of the letters a to z and A to Z, digits 0 to 9 and '_', numbers of these digits"
_STATEMENTS = f"the statements are {', '.join(words.STATEMENTS)}; 'const' and 'let' define names"
_NO_SLICES = "one element is read at a time, with every index; there are no slices"
_QUOTES = "only imports have text in quotes"
_NAMED = ("NAME", "NUMBER")
_VALUES = (*_NAMED, "RPAR", "RSQB")


@dataclass(frozen=True)
class CharacterComplaint:
    """``length`` characters are to be passed over; where ``harmless``, the statement can be read on."""

    diagnostic: Diagnostic
    length: int
    harmless: bool


@dataclass(frozen=True)
class TokenComplaint:
    """``read_as``: the name to read in place of the word. ``new_statement``: the token was to start a statement."""

    diagnostic: Diagnostic
    read_as: str = ""
    new_statement: bool = False


def complain_about_character(text: str, position: int, here: Span) -> CharacterComplaint:
    """For text that forms no token."""
    number = _MALFORMED_NUMBER.match(text, position)
    if number:
        found = number.group()
        return CharacterComplaint(_malformed_number(found, _across(here, len(found))), len(found), harmless=False)
    character = text[position]
    if character == '"':
        line = text[position:].split("\n", 1)[0]
        message = "text in quotes does not end on its line"
        diagnostic = Diagnostic("E004", message, _across(here, len(line)), hints=("close it with '\"'",))
        return CharacterComplaint(diagnostic, len(line), harmless=False)
    found_run = _UNREADABLE.match(text, position)
    run = found_run.group() if found_run else character
    if run.isspace() or unicodedata.category(character) == "Cf":
        length = len(run) if run.isspace() else 1
        name = unicodedata.name(character, f"U+{ord(character):04X}").lower()
        message = f"the character '{name}' cannot stand here"
        diagnostic = Diagnostic("E004", message, _across(here, length), hints=("write a plain space",))
        return CharacterComplaint(diagnostic, length, harmless=True)
    shown = run if len(run) <= 20 else run[:19] + "…"
    hint = _CHARACTER_HINTS.get(character)
    if hint is None and character.isalnum():
        hint = _ASCII
    message = f"unexpected character{'s' if len(run) > 1 else ''} '{shown}'"
    diagnostic = Diagnostic("E004", message, _across(here, len(run)), hints=(hint,) if hint else ())
    return CharacterComplaint(diagnostic, len(run), harmless=character == ";")


def _malformed_number(found: str, span: Span) -> Diagnostic:
    shown = found if len(found) <= 40 else found[:39] + "…"
    letter = re.match(r"[0-9][0-9_]*([A-Za-z]\w*)$", found)
    hints: tuple[str, ...] = ()
    if letter and not found.startswith(("0x", "0X", "0b", "0B", "0o", "0O")) and letter[1] not in ("e", "E"):
        hints = (f"write '{found[: letter.start(1)]} * {letter[1]}' for a product",)
    elif re.fullmatch(r"[0-9]*\.[0-9]*[fFlL]", found):
        hints = (f"write '{found[:-1]}': numbers have no suffix",)
    elif not found.isascii():
        hints = (_ASCII,)
    return Diagnostic("E005", f"'{shown}' is not a number", span, hints=hints)


def _across(start: Span, length: int) -> Span:
    return replace(start, end_column=start.column + length)


def complain_about_token(
    token: Word,
    accepted: Set[str],
    last: Word | None,
    statement: Sequence[Word],
    opened: Sequence[Word],
    block: Word | None,
) -> TokenComplaint:
    """For a token that the grammar does not admit."""
    text = str(token)
    declares = last is not None and last.type in words.DECLARING_TERMINALS
    if declares and "NAME" in accepted and token.type in words.RESERVED_TERMINALS:
        message = f"'{text}' is a word of the language and cannot be used as a name"
        hints = (f"choose another name, for example '{text}_'",)
        return TokenComplaint(Diagnostic("E106", message, token.span, hints=hints), read_as=text)
    if block is None and token.type in words.STATEMENT_TERMINALS and accepted >= words.TOP_LEVEL_TERMINALS:
        message = f"the statement '{text}' stands outside an 'attention' block"
        hints = ("write 'attention NAME { … }' around it",)
        return TokenComplaint(Diagnostic("E013", message, token.span, hints=hints))
    if token.type == "NAME" and statement_ended(accepted):
        unknown = _no_statement(token, last, statement, block)
        if unknown is not None:
            return TokenComplaint(unknown, new_statement=True)
    expected = expectation(accepted, statement[0] if statement else None, last)
    after = f" after '{last}'" if last is not None and "NUMBER" in accepted else ""
    message = f"expected {expected}{after}, found {description(token)}"
    brackets = opened[1:] if block is not None else opened
    notes = tuple(f"'{bracket}' is opened at {_place(bracket, token)}" for bracket in brackets[-1:])
    ends = words.STATEMENT_TERMINALS | words.TOP_LEVEL_TERMINALS | {"RBRACE", "$END"}
    left_open = bool(brackets) and "NUMBER" not in accepted and token.type in ends
    code = "E007" if left_open else "E006"
    meant = _hints(token, accepted, last, statement) or _form(accepted, last, statement)
    read_as = foreign.READ_AS.get(text, "") if foreign.WORDS.get(text, "") in meant else ""
    return TokenComplaint(Diagnostic(code, message, token.span, notes=notes, hints=meant), read_as)


def not_closed(block: Word, token: Word) -> Diagnostic:
    """For an attention block without its closing brace."""
    notes = (f"attention '{block}' is opened at {_place(block, token)}",)
    message = f"expected '}}' to close attention '{block}', found {description(token)}"
    inside = token.type in ("DEF", "IMPORT")
    hints = (f"'{token}' stands outside of attention blocks; inside one 'let' names an expression",) if inside else ()
    return Diagnostic("E007", message, token.span, notes=notes, hints=hints)


def _place(word: Word, seen_from: Word) -> str:
    if word.span.line == seen_from.span.line:
        return f"column {word.span.column} of this line"
    return f"line {word.span.line}, column {word.span.column}"


def _no_statement(token: Word, last: Word | None, statement: Sequence[Word], block: Word | None) -> Diagnostic | None:
    """A name where a statement could start: a misspelt word, or an operator left out?"""
    text = str(token)
    new_line = last is None or last.span.end_line < token.span.line or last.type in ("LBRACE", "RBRACE")
    is_mask = text in foreign.MASKS and _word(statement) != "MASK"
    close = nearest(text, words.TOP_LEVEL) if block is None else (text,) if is_mask else meant_statements(text)
    if not new_line and not close:
        return None
    if block is None:
        message = f"expected 'attention', 'def' or 'import', found '{text}'"
        return Diagnostic("E006", message, token.span, hints=tuple(f"did you mean '{word}'?" for word in close))
    return unknown_statement(text, token.span, close)


def meant_statements(text: str) -> tuple[str, ...]:
    """The statements that a word may stand for, or the word itself where another language has it."""
    return (text,) if text in foreign.STATEMENTS else nearest(text, words.STATEMENTS)


def unknown_statement(text: str, span: Span, close: Sequence[str]) -> Diagnostic:
    """For a word that starts no statement; ``close`` are the words that it may stand for."""
    instead = foreign.STATEMENTS.get(text) or foreign.MASKS.get(text, "").format(text)
    if instead:
        return Diagnostic("E103", f"unknown statement '{text}'", span, hints=(instead,))
    hints = tuple(f"did you mean '{word}'?" for word in close) or (_STATEMENTS,)
    return Diagnostic("E103", f"unknown statement '{text}'", span, hints=hints)


def _word(statement: Sequence[Word]) -> str:
    """The terminal of the word that a statement starts with."""
    return statement[0].type if statement else ""


def _form(accepted: Set[str], last: Word | None, statement: Sequence[Word]) -> tuple[str, ...]:
    """How the statement is written, where a sign, a name or the first operand of its own is missing."""
    is_inside = accepted & {"PLUS", "NUMBER"}
    own = {"COLON"} if is_inside else {"COLON", "LBRACE", "BLOCK", "STRING", "ASSIGN", "NAME", "LSQB"}
    form = words.WRITTEN.get(_word(statement))
    if form is None or not (accepted & own or any(last is each for each in statement)):
        return ()
    named = len(statement) > 1 and statement[1].type == "NAME"
    return (f"write {form.replace('{}', str(statement[1]) if named else 'NAME')}",)


def _hints(token: Word, accepted: Set[str], last: Word | None, statement: Sequence[Word]) -> tuple[str, ...]:
    """What the writer may have meant, judged by two neighbouring tokens and the statement's first."""
    if "GRAD" in accepted and ("grad" in str(token) or nearest(str(token), ("grad",))):
        return ("did you mean 'grad'?",)
    if found := _of_another_language(token, accepted, last, statement):
        return (found,)
    pair = (last.type if last is not None else "", token.type)
    adjacent = last is not None and last.span.end_line == token.span.line and last.span.end_column == token.span.column
    if adjacent and f"{last}{token}" in foreign.SIGNS:
        return (foreign.SIGNS[f"{last}{token}"],)
    if token.type == "PLUS":
        return ("there is no unary '+'",)
    if token.type == "PIPE" and "NUMBER" in accepted:
        return ("write abs(x) for |x|",)
    if token.type == "ASSIGN" and "PLUS" in accepted:
        return ("write '==', '<=' or '>=' to compare",)
    is_inside = accepted & {"PLUS", "NUMBER"} and pair[0] not in ("NAME", "BLOCK")
    is_choice = pair[1] == "IF" or (pair[1] == "COLON" and is_inside)
    if is_choice or "ELSE" in accepted:
        return ("a condition is written 'a if condition else b'",)
    if pair[1] == "LBRACE" and pair[0] == "ATTENTION":
        return ("give the attention a name: 'attention NAME { … }'",)
    if pair[1] == "COMMA" and _word(statement) in words.LISTING:
        return (words.LISTING[_word(statement)],)
    if pair[1] == "COMMA" and (statement_ended(accepted) or {"RBRACE", "NAME"} <= accepted):
        return ("statements and schedule entries need no separator",)
    return ()


def _of_another_language(token: Word, accepted: Set[str], last: Word | None, statement: Sequence[Word]) -> str:
    """What stands here for something that Python, C or FlexAttention has; nothing where it is none of it."""
    before, text, word = last.type if last is not None else "", str(token), _word(statement)
    if token.type in ("ASSIGN", "COLON") and _is_spare(token, last, statement):
        return f"a statement has no '{token}': write '{statement[0]} …'"
    clause = next((each for each in (text, str(last)) if each in foreign.CLAUSES), "")
    if clause and accepted & {"PLUS", "NUMBER"}:
        return foreign.CLAUSES[clause]
    if token.type == "STRING":
        return "write 'inf', without quotes and without a function" if text.strip('"-') == "inf" else _QUOTES
    if before in _VALUES and token.type in _NAMED:
        return _left_out(token, accepted, last, word)
    if "NUMBER" not in accepted:
        return ""
    if token.type in words.STATEMENT_TERMINALS:
        is_value = last is not None and last.span.end_line == token.span.line
        return foreign.WORDS.get(text, "") if is_value else ""
    if token.type == "COLON" and before in ("LSQB", "COMMA"):
        is_list = word == "SELECT"
        return f"write {words.WRITTEN[word]}" if is_list else _NO_SLICES
    return ""


def _left_out(token: Word, accepted: Set[str], last: Word | None, word: str) -> str:
    """What is missing between two values that follow each other."""
    if "COLON" in accepted:  # of a layout or a select
        return ""
    if word in ("HEAD_DIM", "DTYPE") or (word in ("MASK", "LAYOUT") and token.type == "NAME"):
        return words.LISTING[word]
    if last is None or "PLUS" not in accepted:
        return ""
    called = f"'{last}({token})' for a call, " if last.type == "NAME" else ""
    return f"write {called}'{last if last.type in _NAMED else '…'} * {token}' for a product"


def _is_spare(token: Word, last: Word | None, statement: Sequence[Word]) -> bool:
    """Whether a sign stands behind a statement's word, ``mask: …``, or a name of what it states, ``score s = …``."""
    if not statement or statement[0].type not in words.STATEMENT_TERMINALS - words.DECLARING_TERMINALS:
        return False
    if statement[0] is last:
        return True
    return token.type == "ASSIGN" and statement[-1] is last and last.type == "NAME" and statement[0].type != "MASK"


_SIGNS = {
    "ASSIGN": "=",
    "COLON": ":",
    "COMMA": ",",
    "LBRACE": "{",
    "RBRACE": "}",
    "LPAR": "(",
    "RPAR": ")",
    "LSQB": "[",
    "RSQB": "]",
    "BLOCK": "block",
    "ELSE": "else",
    "GRAD": "grad",
}
# The order in which alternatives are named: what would end the construct comes before what would go on.
_NAMED_SIGNS = ("ASSIGN", "COLON", "BLOCK", "LBRACE", "LSQB", "ELSE", "RPAR", "RSQB", "COMMA", "GRAD")


def expectation(accepted: Set[str], statement: Word | None, last: Word | None) -> str:
    """``"an expression"``, ``"')' or ','"``, …: what could stand where an unexpected token stands."""
    options: list[str] = []
    if "NUMBER" in accepted:
        options.append("an expression")
        options += _signs(accepted & {"RPAR", "RSQB"})
    elif "PLUS" in accepted:
        options.append("an operator")
        unlikely = {"LPAR", "LSQB", "ASSIGN", "BLOCK"}
        if "NAME" in accepted:
            options.append("the next entry")
            unlikely.add("GRAD")
        options += _signs(accepted - unlikely)
    else:
        if "NAME" in accepted:
            options.append(_kind_of_name(statement, last))
            accepted = accepted - {"BLOCK", "GRAD"}
        options += _signs(accepted)
    if "STRING" in accepted:
        options.append("a file name in double quotes")
    if accepted & words.STATEMENT_TERMINALS:
        fresh = last is None or last.type == "LBRACE"
        options.append("a statement" if fresh else "the next statement")
        options.append("'}'")
    elif accepted >= words.TOP_LEVEL_TERMINALS:
        options.append("'attention', 'def' or 'import'")
    elif "RBRACE" in accepted:
        options.append("'}'")
    return spoken_list(list(dict.fromkeys(options))) or "something else"


def statement_ended(accepted: Set[str]) -> bool:
    """Whether the text before the token is complete: the next statement or definition could start here."""
    return bool(accepted & words.STATEMENT_TERMINALS) or accepted >= words.TOP_LEVEL_TERMINALS


def description(token: Word) -> str:
    """The token that was found."""
    if token.type == "$END":
        return "the end of the file"
    text = str(token)
    return f"'{text if len(text) <= 40 else text[:37] + '…'}'"


def _signs(accepted: Set[str]) -> list[str]:
    return [f"'{_SIGNS[sign]}'" for sign in _NAMED_SIGNS if sign in accepted]


def _kind_of_name(statement: Word | None, last: Word | None) -> str:
    kind = statement.type if statement is not None else ""
    if kind == "DTYPE":
        return "an element type such as 'f16'"
    if last is not None and last.type == "COLON":
        return "a type such as 'f32'"
    if kind == "SCHEDULE":
        return "an entry such as 'Br = 64'"
    return "a name"
