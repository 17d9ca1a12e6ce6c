"""Rows of the operator table: arithmetic, division, powers, and the functions that choose (abs, min, max, clamp).

Stage: IR. In: nothing. Out: ``ROWS``. Ints are 32-bit and wrap; ``meaning`` holds them in 64 bits and wraps explicitly.
"""

from __future__ import annotations

from typing import Any

from flashgen.ir import interval, interval_float
from flashgen.ir.expr import Expr
from flashgen.ir.interval import Range
from flashgen.ir.operators_base import (
    HALF,
    ONE,
    ZERO,
    ArrayNamespace,
    Operator,
    Samples,
    bool_node,
    either,
    flat,
    integer,
    numeric,
    real,
    real_node,
    wrap,
)

_UNARY = Samples(floats=((-8.0, 8.0),), ints=((-40, 40),))
_BINARY = Samples(floats=((-8.0, 8.0), (-8.0, 8.0)), ints=((-40, 40), (-12, 12)))


def _wrapped(xp: ArrayNamespace, value: Any) -> Any:
    return value if xp.is_float(value) else wrap(value)


# ∂(x + y) = 1, 1;  ∂(x - y) = 1, -1
def _add(xp: ArrayNamespace, x: Any, y: Any) -> Any:
    return _wrapped(xp, x + y)


def _d_add(args: tuple[Expr, ...], k: int) -> Expr:
    return ONE


def _sub(xp: ArrayNamespace, x: Any, y: Any) -> Any:
    return _wrapped(xp, x - y)


def _d_sub(args: tuple[Expr, ...], k: int) -> Expr:
    return (ONE, real_node("neg", ONE))[k]


# ∂(x · y) = y, x
def _mul(xp: ArrayNamespace, x: Any, y: Any) -> Any:
    return _wrapped(xp, x * y)


def _d_mul(args: tuple[Expr, ...], k: int) -> Expr:
    return args[1 - k]


# ∂(x / y) = 1/y, -(x/y)/y
def _div(xp: ArrayNamespace, x: Any, y: Any) -> Any:
    return x / y


def _d_div(args: tuple[Expr, ...], k: int) -> Expr:
    x, y = args
    if k == 0:
        return real_node("div", ONE, y)
    return real_node("neg", real_node("div", real_node("div", x, y), y))


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


def _d_mod(args: tuple[Expr, ...], k: int) -> Expr:
    return ONE if k == 0 else real_node("neg", real_node("floordiv", *args))


def _division_kink(x: float, y: float) -> float:
    return abs(x / y - round(x / y)) * min(abs(y), 1.0) if abs(y) > 0.2 else 0.0


# ceildiv(x, y) = -(-x // y), by 0 is 0
def _ceildiv(xp: ArrayNamespace, x: Any, y: Any) -> Any:
    return wrap(-_floordiv(xp, wrap(-x), y))


def _neg(xp: ArrayNamespace, x: Any) -> Any:
    return _wrapped(xp, -x)


def _d_neg(args: tuple[Expr, ...], k: int) -> Expr:
    return real_node("neg", ONE)


# ∂(x^y) = y x^(y-1) (0 where y = 0),  x^y log x (0 where x = 0 and y ≥ 0)
def _pow(xp: ArrayNamespace, x: Any, y: Any) -> Any:
    return xp.pow(x, y)


def _d_pow(args: tuple[Expr, ...], k: int) -> Expr:
    x, y = args
    if k == 0:
        power = real_node("pow", x, real_node("sub", y, ONE))
        return real_node("where", bool_node("eq", y, ZERO), ZERO, real_node("mul", y, power))
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


# ∂|x| = sign x.  The int |-2**31| wraps to -2**31.
def _abs(xp: ArrayNamespace, x: Any) -> Any:
    return _wrapped(xp, xp.abs(x))


def _d_abs(args: tuple[Expr, ...], k: int) -> Expr:
    return real_node("sign", args[0])


# sign NaN = 0
def _sign(xp: ArrayNamespace, x: Any) -> Any:
    difference = xp.to_int(x > 0) - xp.to_int(x < 0)
    return xp.to_float(difference) if xp.is_float(x) else difference


# ∂min(x, y): 1 for the smaller, 1/2 each at a tie; likewise max.  NaN wins.
def _min(xp: ArrayNamespace, x: Any, y: Any) -> Any:
    return xp.minimum(x, y)


def _max(xp: ArrayNamespace, x: Any, y: Any) -> Any:
    return xp.maximum(x, y)


def _d_choice(loses: str, args: tuple[Expr, ...], k: int) -> Expr:
    mine, other = args[k], args[1 - k]
    apart = real_node("where", bool_node(loses, mine, other), ZERO, ONE)
    return real_node("where", bool_node("eq", mine, other), HALF, apart)


def _d_min(args: tuple[Expr, ...], k: int) -> Expr:
    return _d_choice("gt", args, k)


def _d_max(args: tuple[Expr, ...], k: int) -> Expr:
    return _d_choice("lt", args, k)


# clamp(x, lo, hi) = min(max(x, lo), hi); ∂x = [lo ≤ x ≤ hi], ∂lo = [x < lo < hi], ∂hi = [x > hi or hi < lo]
def _clamp(xp: ArrayNamespace, x: Any, lo: Any, hi: Any) -> Any:
    return xp.clamp(x, lo, hi)


def _d_clamp(args: tuple[Expr, ...], k: int) -> Expr:
    x, lo, hi = args
    condition = (
        bool_node("and", bool_node("le", lo, x), bool_node("le", x, hi)),
        bool_node("and", bool_node("lt", x, lo), bool_node("lt", lo, hi)),
        bool_node("or", bool_node("gt", x, hi), bool_node("lt", hi, lo)),
    )[k]
    return real_node("where", condition, ONE, ZERO)


_min_range = either(interval.min_, interval_float.min_)
_max_range = either(interval.max_, interval_float.max_)


def _clamp_range(x: Range, lo: Range, hi: Range) -> Range:
    return _min_range(_max_range(x, lo), hi)


ROWS = (
    Operator("add", 2, "+", numeric, _add, _d_add, either(interval.add, interval_float.add), "+", "add", _BINARY),
    Operator("sub", 2, "-", numeric, _sub, _d_sub, either(interval.sub, interval_float.sub), "-", "sub", _BINARY),
    Operator("mul", 2, "*", numeric, _mul, _d_mul, either(interval.mul, interval_float.mul), "*", "mul", _BINARY),
    Operator(
        "div", 2, "/", real, _div, _d_div, interval_float.div, "/", "div", _BINARY, lambda x, y: abs(y) - 0.1
    ),
    Operator(
        "floordiv", 2, "//", numeric, _floordiv, flat, either(interval.floordiv, interval_float.floordiv), "floor_div", "floordiv", _BINARY,
        _division_kink,
    ),
    Operator("mod", 2, "%", numeric, _mod, _d_mod, either(interval.mod, interval_float.mod), "floor_mod", "mod", _BINARY, _division_kink),
    Operator("ceildiv", 2, "ceildiv", integer, _ceildiv, None, interval.ceildiv, "ceildiv", "ceildiv", _BINARY),
    Operator("neg", 1, "-", numeric, _neg, _d_neg, either(interval.neg, interval_float.neg), "-", "neg", _UNARY),
    Operator(
        "pow", 2, "**", real, _pow, _d_pow, interval_float.pow_, "pow", "pow",
        Samples(floats=((0.1, 4.0), (-3.0, 3.0))),
    ),
    Operator(
        "ipow", 2, "**", integer, _ipow, None, interval.ipow, "ipow", "ipow", Samples(ints=((-9, 9), (-3, 12)))
    ),
    Operator("abs", 1, "abs", numeric, _abs, _d_abs, either(interval.abs_, interval_float.abs_), "abs", "abs", _UNARY, abs),
    Operator("sign", 1, "sign", numeric, _sign, flat, either(interval.sign, interval_float.sign), "sign", "sign", _UNARY, abs),
    Operator("min", 2, "min", numeric, _min, _d_min, _min_range, "min", "min", _BINARY, lambda x, y: abs(x - y)),
    Operator("max", 2, "max", numeric, _max, _d_max, _max_range, "max", "max", _BINARY, lambda x, y: abs(x - y)),
    Operator(
        "clamp", 3, "clamp", numeric, _clamp, _d_clamp, _clamp_range, "clamp", "clamp",
        Samples(floats=((-8.0, 8.0), (-8.0, 2.0), (-2.0, 8.0)), ints=((-40, 40), (-20, 5), (-5, 20))),
        lambda x, lo, hi: min(abs(x - lo), abs(x - hi), abs(hi - lo)),
    ),
)
