"""Constants: the value of a number as written, and operators on constants with Python's own arithmetic.

Ints are exact and floats double while an expression folds; only what reaches the IR has to fit in 32 bits.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from flashgen.ir.operators import OPERATORS

Value = bool | int | float

INT_MIN, INT_MAX = -(2**31), 2**31 - 1
FLOAT_MAX = float.fromhex("0x1.fffffep127")

# Ints beyond this many bits are refused while folding, so that no expression can take long.
_MOST_BITS = 256
_MOST_DIGITS = 400


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
    if len(digits) > _MOST_DIGITS:
        raise ConstantError("E205", "the number is too long to fit in 32 bits")
    if digits[:2].lower() in ("0x", "0b", "0o"):
        return int(digits, 0)
    if digits.isdigit():
        return int(digits)
    return float(digits)


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
    return ConstantError("E205", f"{value!r} does not fit in a 32-bit float", "write 'inf' for infinity")


def _shown(value: int) -> str:
    text = str(value)
    return text if len(text) <= 24 else f"{text[:12]}…{text[-4:]} ({len(text)} digits)"


def fold(op: str, arguments: tuple[Value, ...]) -> Value:
    """The value of an operator of the IR on constants; raises ``ConstantError``."""
    value: Value
    if op in _INTS and all(isinstance(argument, int) for argument in arguments):
        value = _INTS[op](*arguments)
    else:
        value = _on_floats(op, arguments)
    if isinstance(value, int) and value.bit_length() > _MOST_BITS:
        raise ConstantError("E205", "the constant is far too large to fit in 32 bits")
    return value


def _on_floats(op: str, arguments: tuple[Value, ...]) -> Value:
    value: Value
    try:
        value = _FLOATS[op](*arguments)
    except OverflowError:
        raise ConstantError("E205", "the constant does not fit in a 32-bit float") from None
    except ValueError:
        raise ConstantError("E207", f"'{OPERATORS[op].spelling}' has no value here") from None
    if isinstance(value, float):
        if math.isnan(value):
            raise ConstantError("E207", f"'{OPERATORS[op].spelling}' gives no number here")
        if math.isinf(value) and all(math.isfinite(argument) for argument in arguments) and op in _OVERFLOWING:
            raise ConstantError("E205", "the constant does not fit in a 32-bit float")
    return value


_OVERFLOWING = frozenset({"add", "sub", "mul", "div", "pow", "exp", "exp2"})


def _nonzero(divide: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    def checked(x: Any, y: Any) -> Any:
        if y == 0:
            raise ConstantError("E206", "division by zero")
        return divide(x, y)

    return checked


def _power(x: int, y: int) -> int:
    if y < 0:
        if x == 0:
            raise ConstantError("E206", "zero has no negative power")
        raise AssertionError("negative powers are floats")
    if abs(x) > 1 and (abs(x).bit_length() - 1) * y > _MOST_BITS:
        raise ConstantError("E205", "the constant is far too large to fit in 32 bits")
    return int(x**y)


def _float_power(x: float, y: float) -> float:
    if x == 0 and y < 0:
        raise ConstantError("E206", "zero has no negative power")
    value: float | complex = float(x) ** float(y)
    if isinstance(value, complex):
        raise ConstantError("E207", "a negative number has no power with a fraction")
    return value


def _shift(x: int, n: int, sign: int) -> int:
    if n < 0:
        raise ConstantError("E207", "a shift by a negative number has no value")
    if sign > 0 and x != 0 and n > _MOST_BITS:
        raise ConstantError("E205", "the constant is far too large to fit in 32 bits")
    return x << n if sign > 0 else x >> min(n, 4 * _MOST_BITS)


def _bits(op: str) -> Callable[..., Any]:
    """Operators on 32-bit patterns mean what their row in the table says."""

    def checked(*arguments: int) -> int:
        for argument in arguments:
            error = fits(argument)
            if error is not None:
                raise error
        nothing: Any = None  # the row needs no array library for plain ints
        return int(OPERATORS[op].meaning(nothing, *arguments))

    return checked


def _sign(x: float) -> float:
    return type(x)((x > 0) - (x < 0))


def _clamp(x: float, low: float, high: float) -> float:
    return min(max(x, low), high)


def _to_int(x: float) -> int:
    if math.isinf(x) or abs(x) > 2.0**31:
        return INT_MAX if x > 0 else INT_MIN
    return max(INT_MIN, min(INT_MAX, int(x)))


def _step(function: Callable[[float], int]) -> Callable[[float], float]:
    return lambda x: float(x) if math.isinf(x) else float(function(x))


def _log(function: Callable[[float], float], pole: float = 0.0) -> Callable[[float], float]:
    return lambda x: -math.inf if x == pole else function(x)


def _exp(function: Callable[[float], float]) -> Callable[[float], float]:
    def safe(x: float) -> float:
        return math.inf if x == math.inf else function(x)

    return safe


def _sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x)) if x >= 0 else math.exp(x) / (1 + math.exp(x))


def _softplus(x: float) -> float:
    return max(x, 0.0) + math.log1p(math.exp(-abs(x)))


def _gelu(x: float) -> float:
    return 0.0 if x == -math.inf else 0.5 * x * (1 + math.erf(x / math.sqrt(2)))


def _silu(x: float) -> float:
    return 0.0 if x == -math.inf else x * _sigmoid(x)


_BOTH: Mapping[str, Callable[..., Any]] = MappingProxyType(
    {
        "add": operator.add,
        "sub": operator.sub,
        "mul": operator.mul,
        "floordiv": _nonzero(operator.floordiv),
        "mod": _nonzero(operator.mod),
        "neg": operator.neg,
        "abs": abs,
        "sign": _sign,
        "min": min,
        "max": max,
        "clamp": _clamp,
        "lt": operator.lt,
        "le": operator.le,
        "gt": operator.gt,
        "ge": operator.ge,
        "eq": operator.eq,
        "ne": operator.ne,
        "where": lambda c, x, y: x if c else y,
        "to_float": float,
    }
)

_INTS: Mapping[str, Callable[..., Any]] = MappingProxyType(
    {
        **_BOTH,
        "and": operator.and_,
        "or": operator.or_,
        "not": operator.not_,
        "bitand": operator.and_,
        "bitor": operator.or_,
        "bitxor": operator.xor,
        "shl": lambda x, n: _shift(x, n, 1),
        "shr": lambda x, n: _shift(x, n, -1),
        "ipow": _power,
        "ceildiv": _nonzero(lambda x, y: -(-x // y)),
        "to_int": int,
        "popcount": _bits("popcount"),
        "hash": _bits("hash"),
    }
)

_FLOATS: Mapping[str, Callable[..., Any]] = MappingProxyType(
    {
        **_BOTH,
        "div": _nonzero(operator.truediv),
        "pow": _float_power,
        "to_int": _to_int,
        "exp": _exp(math.exp),
        "exp2": _exp(math.exp2),
        "log": _log(math.log),
        "log2": _log(math.log2),
        "log1p": _log(math.log1p, -1.0),
        "sqrt": math.sqrt,
        "rsqrt": lambda x: math.inf if x == 0 else 1 / math.sqrt(x),
        "tanh": math.tanh,
        "sigmoid": _sigmoid,
        "silu": _silu,
        "relu": lambda x: max(float(x), 0.0),
        "gelu": _gelu,
        "erf": math.erf,
        "softplus": _softplus,
        "sin": math.sin,
        "cos": math.cos,
        "floor": _step(math.floor),
        "ceil": _step(math.ceil),
        "round": _step(round),
    }
)
