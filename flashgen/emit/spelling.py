"""How names, literals and operators are spelled in C++."""

import math
import re
from collections.abc import Iterable

from flashgen.ir.operators import OPERATORS

# A name with members, perhaps a call whose arguments hold no further parentheses.
_ATOM = re.compile(r"[\w.:]+(\([^()]*\))?|\([^()]*\)")

# What a call or a group in brackets begins with.
_NAME = re.compile(r"[\w.:]*\(")

# Products of such names bind closer than + and -.
_PRODUCT = re.compile(rf"({_ATOM.pattern})( \* ({_ATOM.pattern}))+")


def user_name(name: str) -> str:
    """A value that is named after a tensor or param of the spec: no keyword, macro or name of ours begins like this."""
    return f"of_{name}"


def c_literal(value: bool | int | float) -> str:
    """A constant: ``true``, ``7``, ``0.125f``, ``-INFINITY``."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int):
        return "INT32_MIN" if value == -(2**31) else _signed(str(value))
    if math.isinf(value):
        return "INFINITY" if value > 0 else "(-INFINITY)"
    shown = f"{value:.9g}"
    return _signed(f"{shown if any(mark in shown for mark in '.en') else shown + '.0'}f")


def c_sum(constant: int, terms: Iterable[tuple[str, int]]) -> str:
    """constant + Σ coefficient · term, of terms that are names or calls, the constant last; of no terms a number."""
    code = ""
    for term, c in terms:
        sign = (" - " if c < 0 else " + ") if code else "-" if c < 0 else ""
        code += f"{sign}{'' if abs(c) == 1 else f'{abs(c)} * '}{term}"
    if not code:
        return str(constant)
    return code if constant == 0 else f"{code} {'-' if constant < 0 else '+'} {abs(constant)}"


def _signed(shown: str) -> str:
    return f"({shown})" if shown.startswith("-") else shown


def c_operator(name: str, args: tuple[str, ...]) -> str:
    """An operator of the table over operands that are already spelled."""
    row = OPERATORS[name]
    if not row.is_infix:
        return f"fg::{row.c}({', '.join(args)})"
    keeps_products = row.c in ("+", "-") and len(args) == 2
    operands = tuple(each if keeps_products and _PRODUCT.fullmatch(each) else _operand(each) for each in args)
    return f"{row.c}{operands[0]}" if len(operands) == 1 else f"{operands[0]} {row.c} {operands[1]}"


def _operand(code: str) -> str:
    """Parentheses around anything that is not one token, one call or one element, or has them."""
    return code if _ATOM.fullmatch(code) or _is_one_group(code) else f"({code})"


def _is_one_group(code: str) -> bool:
    """Whether the bracket that closes last is that of the name or bracket that comes first."""
    opening = _NAME.match(code)
    if opening is None or not code.endswith(")"):
        return False
    depth = 0
    for at, mark in enumerate(code[opening.end() - 1 :], opening.end() - 1):
        depth += (mark == "(") - (mark == ")")
        if depth == 0:
            return at == len(code) - 1
    return False


def c_range(name: str, args: tuple[str, ...]) -> str:
    """The range of an operator over the ranges of its operands."""
    return f"fg::ranges::{OPERATORS[name].interval_c}({', '.join(args)})"
