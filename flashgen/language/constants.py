"""Constants: the value of a number as written, and operators on constants with Python's own arithmetic.

Ints are exact and floats double while an expression folds; only what reaches the IR has to fit in 32 bits.
"""

from __future__ import annotations

import math
from typing import Any

from flashgen.ir.operators import OPERATORS, NoValueError, Operator
from flashgen.ir.operators_base import MOST_BITS, far_too_large

Value = bool | int | float

INT_MIN, INT_MAX = -(2**31), 2**31 - 1
FLOAT_MAX = float.fromhex("0x1.fffffep127")

MOST_DIGITS = 400


class ConstantError(Exception):
    """A constant expression without a value; ``code`` is the diagnostic's."""

    def __init__(self, code: str, message: str, hint: str = "") -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.hint = hint


def number(text: str) -> int | float:
    """The value of a number as written; the parser has checked its form."""
    digits = text.replace("_", "")
    if len(digits) > MOST_DIGITS:
        raise ConstantError("E205", "the number is too long to fit in 32 bits")
    if digits[:2].lower() in ("0x", "0b", "0o"):
        return int(digits, 0)
    if digits.isdigit():
        return int(digits)
    value = float(digits)
    if math.isinf(value):
        raise _beyond_floats(text)
    return value


def _beyond_floats(written: str) -> ConstantError:
    return ConstantError("E205", f"{written} does not fit in a 32-bit float", "write 'inf' for infinity")


def fits(value: Value) -> ConstantError | None:
    """Why a constant cannot stand in the IR; None where it can."""
    if isinstance(value, bool):
        return None
    if isinstance(value, int):
        if INT_MIN <= value <= INT_MAX:
            return None
        hint = "ints end at 2147483647; where a float will do, add '.0'"
        return ConstantError("E205", f"{_shown(value)} does not fit in a 32-bit int", hint)
    if math.isinf(value) or abs(value) <= FLOAT_MAX:
        return None
    return _beyond_floats(repr(value))


def _shown(value: int) -> str:
    text = str(value)
    return text if len(text) <= 24 else f"{text[:12]}…{text[-4:]} ({len(text)} digits)"


def fold(op: str, arguments: tuple[Value, ...]) -> Value:
    """The value of an operator of the IR on constants; raises ``ConstantError``."""
    row = OPERATORS[op]
    value: Value
    try:
        on_ints = all(isinstance(argument, int) for argument in arguments)
        takes_ints = row.fold.ints is not None or row.fold.floats is None
        value = _on_ints(row, arguments) if on_ints and takes_ints else _on_floats(row, arguments)
        if isinstance(value, int) and value.bit_length() > MOST_BITS:
            raise far_too_large()
    except NoValueError as error:
        code = "E206" if error.by_zero else "E205" if error.too_large else "E207"
        raise ConstantError(code, error.message) from None
    return value


def _on_ints(row: Operator, arguments: tuple[Value, ...]) -> Value:
    if row.fold.ints is not None:
        value: Value = row.fold.ints(*arguments)
        return value
    for argument in arguments:  # an operator on 32-bit patterns means what its row says
        error = fits(argument)
        if error is not None:
            raise error
    nothing: Any = None  # the row needs no array library for plain ints
    return int(row.meaning(nothing, *arguments))


def _on_floats(row: Operator, arguments: tuple[Value, ...]) -> Value:
    assert row.fold.floats is not None, f"{row.name} takes no floats"
    try:
        value: Value = row.fold.floats(*arguments)
    except OverflowError:
        raise ConstantError("E205", "the constant does not fit in a 32-bit float") from None
    except ValueError:
        raise ConstantError("E207", f"'{row.spelling}' has no value here") from None
    if isinstance(value, float):
        if math.isnan(value):
            raise ConstantError("E207", f"'{row.spelling}' gives no number here")
        if math.isinf(value) and all(math.isfinite(argument) for argument in arguments) and row.fold.overflows:
            raise ConstantError("E205", "the constant does not fit in a 32-bit float")
    return value
