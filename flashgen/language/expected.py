"""What the grammar would have accepted, in people's words. Pure text: no parser state is touched here."""

from __future__ import annotations

from collections.abc import Set

from flashgen.language import words
from flashgen.language.tree import Word

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
    return _joined(list(dict.fromkeys(options)))


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


def _joined(options: list[str]) -> str:
    if len(options) < 2:
        return "".join(options) or "something else"
    return f"{', '.join(options[:-1])} or {options[-1]}"
