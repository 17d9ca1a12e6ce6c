"""Rows of the operator table: arithmetic, division, powers, and the functions that choose (abs, min, max, clamp).

Stage: IR. In: nothing. Out: ``ROWS``. Ints are 32-bit and wrap; ``meaning`` holds them in 64 bits and wraps explicitly.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

from flashgen.ir import interval, interval_float
from flashgen.ir.expr import Expr
from flashgen.ir.operators_base import (
    FLAT,
    HALF,
    MINUS_ONE,
    MOST_BITS,
    ONE,
    ZERO,
    ArrayNamespace,
    Cost,
    Folding,
    NoValueError,
    Samples,
    Strength,
    asked,
    bool_node,
    either,
    far_too_large,
    folding,
    integer,
    nonzero,
    numeric,
    partials,
    plain,
    real,
    real_node,
    row,
    wrap,
)

_UNARY = Samples(floats=((-8.0, 8.0),), ints=((-40, 40),))
_BINARY = Samples(floats=((-8.0, 8.0), (-8.0, 8.0)), ints=((-40, 40), (-12, 12)))


def _wrapped(xp: ArrayNamespace, value: Any) -> Any:
    return value if xp.is_float(value) else wrap(value)


def _wrapping(function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda xp, *args: _wrapped(xp, function(*args))


# ∂(x + y) = 1, 1;  ∂(x - y) = 1, -1;  ∂(x · y) = y, x
_add, _sub = _wrapping(operator.add), _wrapping(operator.sub)
_mul, _neg = _wrapping(operator.mul), _wrapping(operator.neg)
_D_MUL = partials(lambda _x, y: y, lambda x, _y: x)


# ∂(x / y) = 1/y, -(x/y)/y
_D_DIV = partials(
    lambda _x, y: real_node("div", ONE, y),
    lambda x, y: real_node("neg", real_node("div", real_node("div", x, y), y)),
)


def _nonzero(xp: ArrayNamespace, y: Any) -> Any:
    return xp.where(y == 0, 1, y)


# x // y rounds toward -inf; an int by 0 is 0, a float by 0 is x / 0. The int -2**31 // -1 wraps to -2**31.
def _floordiv(xp: ArrayNamespace, x: Any, y: Any) -> Any:
    if xp.is_float(x):
        return xp.floor_divide(x, y)
    return wrap(xp.where(y == 0, 0, xp.floor_divide(x, _nonzero(xp, y))))


# x % y has the sign of y; an int by 0 is 0, a float by 0 is NaN.  ∂(x % y) = 1, -(x // y)
def _mod(xp: ArrayNamespace, x: Any, y: Any) -> Any:
    if xp.is_float(x):
        return xp.remainder(x, y)
    return xp.where(y == 0, 0, xp.remainder(x, _nonzero(xp, y)))


_D_MOD = partials(ONE, lambda x, y: real_node("neg", real_node("floordiv", x, y)))


# ∂(x^y) = y x^(y-1) (0 where y = 0),  x^y log x (0 where x = 0 and y ≥ 0)
def _pow_by_x(x: Expr, y: Expr) -> Expr:
    power = real_node("pow", x, real_node("sub", y, ONE))
    return real_node("where", bool_node("eq", y, ZERO), ZERO, real_node("mul", y, power))


def _pow_by_y(x: Expr, y: Expr) -> Expr:
    flat_here = bool_node("and", bool_node("eq", x, ZERO), bool_node("ge", y, ZERO))
    growth = real_node("mul", real_node("pow", x, y), real_node("log", x))
    return real_node("where", flat_here, ZERO, growth)


# int ** int by squaring, modulo 2**32; a negative exponent gives 0 except for base 1 (1) and -1 (±1)
def _ipow(xp: ArrayNamespace, x: Any, y: Any) -> Any:
    result, base = x * 0 + 1, x
    for bit in range(31):
        result = xp.where((y >> bit) & 1 == 1, wrap(result * base), result)
        base = wrap(base * base)
    unit = xp.where(x == 1, 1, xp.where(x == -1, 1 - 2 * (y & 1), 0))
    return xp.where(y < 0, unit, result)


# sign NaN = 0
def _sign(xp: ArrayNamespace, x: Any) -> Any:
    difference = xp.to_int(x > 0) - xp.to_int(x < 0)
    return xp.to_float(difference) if xp.is_float(x) else difference


# ∂min(x, y): 1 for the smaller, 1/2 each at a tie; likewise max.  NaN wins.
def _choice(loses: str, mine: Expr, other: Expr) -> Expr:
    apart = real_node("where", bool_node(loses, mine, other), ZERO, ONE)
    return real_node("where", bool_node("eq", mine, other), HALF, apart)


_MIN, _MAX = asked("minimum"), asked("maximum")
_D_MIN = partials(lambda x, y: _choice("gt", x, y), lambda x, y: _choice("gt", y, x))
_D_MAX = partials(lambda x, y: _choice("lt", x, y), lambda x, y: _choice("lt", y, x))


# clamp(x, lo, hi) = min(max(x, lo), hi); ∂x = [lo ≤ x ≤ hi], ∂lo = [x < lo < hi], ∂hi = [x > hi or hi < lo]
def _selected(condition: Expr) -> Expr:
    return real_node("where", condition, ONE, ZERO)


_D_CLAMP = partials(
    lambda x, lo, hi: _selected(bool_node("and", bool_node("le", lo, x), bool_node("le", x, hi))),
    lambda x, lo, hi: _selected(bool_node("and", bool_node("lt", x, lo), bool_node("lt", lo, hi))),
    lambda x, lo, hi: _selected(bool_node("or", bool_node("gt", x, hi), bool_node("lt", hi, lo))),
)


# Ranges: one rule for ints, one for floats.
_ADD = either(interval.add, interval_float.add)
_SUB = either(interval.sub, interval_float.sub)
_MUL = either(interval.mul, interval_float.mul)
_NEG = either(interval.neg, interval_float.neg)
_FLOORDIV = either(interval.floordiv, interval_float.floordiv)
_MOD = either(interval.mod, interval_float.mod)
_ABS = either(interval.abs_, interval_float.abs_)
_SIGN = either(interval.sign, interval_float.sign)

_POWER = Samples(floats=((0.1, 4.0), (-3.0, 3.0)))
_INT_POWER = Samples(ints=((-9, 9), (-3, 12)))
_BETWEEN = Samples(floats=((-8.0, 8.0), (-8.0, 2.0), (-2.0, 8.0)), ints=((-40, 40), (-20, 5), (-5, 20)))


# Distances to the nearest kink, for tests.
def _apart(x: float, y: float) -> float:
    return abs(x - y)


def _from_step(x: float, y: float) -> float:
    return abs(x / y - round(x / y)) * min(abs(y), 1.0) if abs(y) > 0.2 else 0.0


# On constants --------------------------------------------------------------------------------------------------------


def _power(x: int, y: int) -> int:
    if y < 0:
        if x == 0:
            raise NoValueError("zero has no negative power", by_zero=True)
        raise AssertionError("negative powers are floats")
    if abs(x) > 1 and (abs(x).bit_length() - 1) * y > MOST_BITS:
        raise far_too_large()
    return int(x**y)


def _float_power(x: float, y: float) -> float:
    if x == 0 and y < 0:
        raise NoValueError("zero has no negative power", by_zero=True)
    value: float | complex = float(x) ** float(y)
    if isinstance(value, complex):
        raise NoValueError("a negative number has no power with a fraction")
    return value


def _sign_of(x: float) -> float:
    return type(x)((x > 0) - (x < 0))


_ADDED = folding(operator.add, overflows=True)
_SUBTRACTED = folding(operator.sub, overflows=True)
_MULTIPLIED = folding(operator.mul, overflows=True)
_DIVIDED = Folding(floats=nonzero(operator.truediv), overflows=True)
_FOLD_POWER = Folding(floats=_float_power, overflows=True)
_FOLD_CEILDIV = Folding(ints=nonzero(lambda x, y: -(-x // y)))
_CEILDIV = Samples(ints=((-40, 40), (-12, 12)))

ROWS = (
    row("add", "+", numeric, _add, _ADD, _BINARY, _ADDED, c="+", strength=Strength.SUM, derivative=partials(ONE, ONE)),
    row(
        *("sub", "-", numeric, _sub, _SUB, _BINARY, _SUBTRACTED),
        c="-",
        strength=Strength.SUM,
        derivative=partials(ONE, MINUS_ONE),
    ),
    row(
        *("mul", "*", numeric, _mul, _MUL, _BINARY, _MULTIPLIED),
        c="*",
        strength=Strength.PRODUCT,
        derivative=_D_MUL,
    ),
    row(
        *("neg", "-", numeric, _neg, _NEG, _UNARY, folding(operator.neg)),
        c="-",
        strength=Strength.UNARY,
        derivative=partials(MINUS_ONE),
    ),
    row(
        *("div", "/", real, plain(operator.truediv), interval_float.div, _BINARY, _DIVIDED),
        c="/",
        strength=Strength.PRODUCT,
        derivative=_D_DIV,
        cost=Cost(1, 2),
        kink=lambda _x, y: abs(y) - 0.1,
    ),
    row(
        *("floordiv", "//", numeric, _floordiv, _FLOORDIV, _BINARY, folding(nonzero(operator.floordiv))),
        c="floor_div",
        strength=Strength.PRODUCT,
        derivative=FLAT,
        cost=Cost(0, 12),
        kink=_from_step,
    ),
    row(
        *("mod", "%", numeric, _mod, _MOD, _BINARY, folding(nonzero(operator.mod))),
        c="floor_mod",
        strength=Strength.PRODUCT,
        derivative=_D_MOD,
        cost=Cost(0, 14),
        kink=_from_step,
    ),
    row(  # -(-x // y), by 0 is 0
        *("ceildiv", "ceildiv", integer, lambda xp, x, y: wrap(-_floordiv(xp, wrap(-x), y))),
        *(interval.ceildiv, _CEILDIV, _FOLD_CEILDIV),
    ),
    row(
        *("pow", "**", real, asked("pow"), interval_float.pow_, _POWER, _FOLD_POWER),
        strength=Strength.POWER,
        derivative=partials(_pow_by_x, _pow_by_y),
        cost=Cost(2, 3),
        function="pow",
    ),
    row(
        *("ipow", "**", integer, _ipow, interval.ipow, _INT_POWER, Folding(ints=_power)),
        strength=Strength.POWER,
        cost=Cost(0, 2),
    ),
    row(
        "abs",
        "abs",
        numeric,
        lambda xp, x: _wrapped(xp, xp.abs(x)),  # the int |-2**31| wraps to -2**31; ∂|x| = sign x
        _ABS,
        _UNARY,
        folding(abs),
        derivative=partials(lambda x: real_node("sign", x)),
        kink=abs,
    ),
    row("sign", "sign", numeric, _sign, _SIGN, _UNARY, folding(_sign_of), derivative=FLAT, kink=abs),
    row("min", "min", numeric, _MIN, interval.min_, _BINARY, folding(min), derivative=_D_MIN, most=None, kink=_apart),
    row("max", "max", numeric, _MAX, interval.max_, _BINARY, folding(max), derivative=_D_MAX, most=None, kink=_apart),
    row(
        *("clamp", "clamp", numeric, asked("clamp"), lambda x, lo, hi: interval.min_(interval.max_(x, lo), hi)),
        *(_BETWEEN, folding(lambda x, low, high: min(max(x, low), high))),
        derivative=_D_CLAMP,
        kink=lambda x, lo, hi: min(abs(x - lo), abs(x - hi), abs(hi - lo)),
    ),
)
