"""Typing rules of the operator table: which operands an operator takes, what they are promoted to, what it gives.

Stage: IR. In: how an operator is spelt, the types of its operands. Out: ``Signature``; ``TypingError`` says what to do.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from flashgen.ir.types import ScalarType

BOOL, INT, FLOAT = ScalarType.BOOL, ScalarType.INT, ScalarType.FLOAT


class TypingError(Exception):
    """A user's expression that has no type. ``argument`` is the operand at fault, where one is."""

    def __init__(self, message: str, *, argument: int | None = None, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.argument = argument
        self.hint = hint


@dataclass(frozen=True)
class Signature:
    """The types that the operands are promoted to, and the type of the result."""

    arguments: tuple[ScalarType, ...]
    result: ScalarType


TypingRule = Callable[[str, tuple[ScalarType, ...]], Signature]


def _refuse(spelling: str, wanted: str, types: tuple[ScalarType, ...], k: int, hint: str) -> TypingError:
    place = "" if len(types) == 1 else f" as operand {k + 1}"
    return TypingError(f"'{spelling}' takes {wanted}, not {_noun(types[k])}{place}", argument=k, hint=hint)


def _noun(scalar: ScalarType) -> str:
    return {BOOL: "a bool", INT: "an int", FLOAT: "a float"}[scalar]


def _numbers(spelling: str, types: tuple[ScalarType, ...]) -> ScalarType:
    """The common type of numbers: float if one of them is."""
    for k, scalar in enumerate(types):
        if scalar is BOOL:
            raise _refuse(spelling, "numbers", types, k, "write int(…) to count a condition as 0 or 1")
    return FLOAT if FLOAT in types else INT


def numeric(spelling: str, types: tuple[ScalarType, ...]) -> Signature:
    """int… → int; with a float among them all promote to float."""
    common = _numbers(spelling, types)
    return Signature((common,) * len(types), common)


def real(spelling: str, types: tuple[ScalarType, ...]) -> Signature:
    """Numbers → float."""
    _numbers(spelling, types)
    return Signature((FLOAT,) * len(types), FLOAT)


def integer(spelling: str, types: tuple[ScalarType, ...]) -> Signature:
    """int… → int."""
    for k, scalar in enumerate(types):
        if scalar is not INT:
            raise _refuse(spelling, "ints", types, k, "write int(…)")
    return Signature(types, INT)


def comparison(spelling: str, types: tuple[ScalarType, ...]) -> Signature:
    """Numbers, promoted → bool."""
    return Signature((_numbers(spelling, types),) * len(types), BOOL)


def equality(spelling: str, types: tuple[ScalarType, ...]) -> Signature:
    """Two bools, or numbers, promoted → bool."""
    if types == (BOOL, BOOL):
        return Signature(types, BOOL)
    if BOOL in types:
        raise TypingError(
            f"'{spelling}' cannot compare {_noun(types[0])} with {_noun(types[1])}",
            argument=types.index(BOOL),
            hint="write int(…) to count a condition as 0 or 1",
        )
    return comparison(spelling, types)


def logical(spelling: str, types: tuple[ScalarType, ...]) -> Signature:
    """bool… → bool."""
    for k, scalar in enumerate(types):
        if scalar is not BOOL:
            raise _refuse(spelling, "conditions", types, k, "compare it: '… != 0'")
    return Signature(types, BOOL)


def bitwise(spelling: str, types: tuple[ScalarType, ...]) -> Signature:
    """Ints → int, bools → bool."""
    if all(scalar is BOOL for scalar in types):
        return Signature(types, BOOL)
    for k, scalar in enumerate(types):
        if scalar is not INT:
            hint = "a power is written 'x ** y'" if spelling == "^" and scalar is FLOAT else ""
            raise _refuse(spelling, "two ints or two bools", types, k, hint)
    return Signature(types, INT)


def selection(spelling: str, types: tuple[ScalarType, ...]) -> Signature:
    """bool, T, T → T, numbers promoted."""
    if types[0] is not BOOL:
        raise TypingError(
            f"the condition of '{spelling}' must be a bool, not {_noun(types[0])}",
            argument=0,
            hint="compare it: '… != 0'",
        )
    if types[1:] == (BOOL, BOOL):
        return Signature(types, BOOL)
    if BOOL in types[1:]:
        raise TypingError(
            f"the branches of '{spelling}' are {_noun(types[1])} and {_noun(types[2])}",
            argument=1 + types[1:].index(BOOL),
            hint="write int(…) to count a condition as 0 or 1",
        )
    common = _numbers(spelling, types[1:])
    return Signature((BOOL, common, common), common)


def conversion(result: ScalarType) -> TypingRule:
    """Any type → ``result``."""

    def rule(_spelling: str, types: tuple[ScalarType, ...]) -> Signature:
        return Signature(types, result)

    return rule
