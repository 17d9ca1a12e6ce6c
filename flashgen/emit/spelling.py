"""How names, literals and operators are spelled in C++."""

import math
import re

from flashgen.ir.operators import OPERATORS

# A name with members, perhaps a call whose arguments hold no further parentheses.
_ATOM = re.compile(r"[\w.:]+(\([^()]*\))?|\([^()]*\)")

# Products of such names bind closer than + and -.
_PRODUCT = re.compile(rf"({_ATOM.pattern})( \* ({_ATOM.pattern}))+")

_RESERVED_WORDS = """
    alignas alignof and and_eq asm auto bitand bitor bool break case catch char class compl const constexpr
    const_cast continue decltype default delete do double dynamic_cast else enum explicit export extern false
    float for friend goto if inline int long mutable namespace new noexcept not not_eq nullptr operator or or_eq
    private protected public register reinterpret_cast return short signed sizeof static static_assert static_cast
    struct switch template this thread_local throw true try typedef typeid typename union unsigned using virtual
    void volatile wchar_t while xor xor_eq b h hkv i j qq kk B H Hkv Nq Nk fg
    distance diagonals begin offset origin near step ahead
"""
_RESERVED = frozenset(_RESERVED_WORDS.split())


def c_identifier(name: str) -> str:
    """The name, or the name with an underscore where C++ or a template already uses it."""
    return f"{name}_" if name in _RESERVED else name


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
    """Parentheses around anything that is not one token, one call or one element."""
    return code if _ATOM.fullmatch(code) else f"({code})"


def c_range(name: str, args: tuple[str, ...]) -> str:
    """The range of an operator over the ranges of its operands."""
    return f"fg::ranges::{OPERATORS[name].interval_c}({', '.join(args)})"
