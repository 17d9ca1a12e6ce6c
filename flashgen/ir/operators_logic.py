"""Rows of the operator table: comparisons, logic, bits, selection, conversions, hash.

Stage: IR. In: nothing. Out: ``ROWS``. Comparisons with NaN are false, ``ne`` is true.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from typing import Any

from flashgen.ir import interval, interval_float
from flashgen.ir.interval import INT_MAX, INT_MIN, MASK32, IntRange, Range
from flashgen.ir.operators_base import (
    FLOAT,
    INT,
    MOST_BITS,
    ONE,
    ZERO,
    ArrayNamespace,
    Cost,
    Folding,
    NoValueError,
    Operator,
    Samples,
    Strength,
    TypingRule,
    asked,
    bitwise,
    comparison,
    conversion,
    either,
    equality,
    far_too_large,
    folding,
    integer,
    logical,
    partials,
    plain,
    real_node,
    row,
    selection,
    wrap,
)

_PAIR = Samples(floats=((-4.0, 4.0), (-4.0, 4.0)), ints=((-9, 9), (-9, 9)))
_BITS = Samples(ints=((-70, 70), (-70, 70)))


# x << n is 0, x >> n the sign, where n < 0 or n ≥ 32
def _shl(xp: ArrayNamespace, x: Any, n: Any) -> Any:
    inside = (n >= 0) & (n < 32)
    return xp.where(inside, wrap(x << xp.where(inside, n, 0)), 0)


def _shr(xp: ArrayNamespace, x: Any, n: Any) -> Any:
    inside = (n >= 0) & (n < 32)
    return x >> xp.where(inside, n, 31)


# where(c, x, y): the chosen branch passes the gradient
_D_WHERE = partials(
    ZERO,  # conditions carry no derivative
    lambda c, _x, _y: real_node("where", c, ONE, ZERO),
    lambda c, _x, _y: real_node("where", c, ZERO, ONE),
)


# Truncates toward zero, saturates; NaN → 0. ±2**31 are floats in every precision, 2**31 - 1 is not.
def _to_int(xp: ArrayNamespace, x: Any) -> Any:
    if not xp.is_float(x):
        return xp.to_int(x)
    finite = xp.where(xp.isnan(x), xp.to_float(xp.to_int(x > 0)), x)
    inside = xp.where(finite < -(2.0**31), -(2.0**31), xp.where(finite > 2.0**31, 2.0**31, finite))
    whole = xp.to_int(inside)
    return xp.where(whole > INT_MAX, INT_MAX, whole)


# The number of ones in the 32-bit two's complement
def _popcount(_xp: ArrayNamespace, x: Any) -> Any:
    v = x & MASK32
    v = v - ((v >> 1) & 0x55555555)
    v = (v & 0x33333333) + ((v >> 2) & 0x33333333)
    v = (v + (v >> 4)) & 0x0F0F0F0F
    return ((v * 0x01010101) & MASK32) >> 24


def _mul32(h: Any, c: int) -> Any:
    """The unsigned product modulo 2**32, without leaving 64 signed bits."""
    return (h * (c & 0xFFFF) + (((h * (c >> 16)) & 0xFFFF) << 16)) & MASK32


# uint32 h = 0x9E3779B9; for x: h ^= x, h *= 0x85EBCA6B, h ^= h >> 13, h *= 0xC2B2AE35, h ^= h >> 16; h & 0x7FFFFFFF
def _hash(_xp: Any, *args: Any) -> Any:
    h: Any = 0x9E3779B9
    for x in args:
        h = _mul32(h ^ (x & MASK32), 0x85EBCA6B)
        h = _mul32(h ^ (h >> 13), 0xC2B2AE35)
        h = h ^ (h >> 16)
    return h & INT_MAX


def _hash_range(*args: IntRange) -> IntRange:
    """Known where every argument is."""
    if not all(x.is_point for x in args):
        return IntRange(0, INT_MAX)
    value = _hash(None, *(x.lo for x in args))
    return IntRange(value, value)


# On constants --------------------------------------------------------------------------------------------------------


def _left(x: int, n: int) -> int:
    if _shift(n) > MOST_BITS and x != 0:
        raise far_too_large()
    return x << n


def _shift(n: int) -> int:
    if n < 0:
        raise NoValueError("a shift by a negative number has no value")
    return n


def _saturated(x: float) -> int:
    if math.isinf(x) or abs(x) > 2.0**31:
        return INT_MAX if x > 0 else INT_MIN
    return max(INT_MIN, min(INT_MAX, int(x)))


# Ranges: one rule for ints, one for bools.
_BITAND = either(interval.bitand, interval.and_)
_BITOR = either(interval.bitor, interval.or_)
_BITXOR = either(interval.bitxor, interval.ne)

_CHOSEN = folding(lambda c, x, y: x if c else y)

_ONE_BIT, _LOGIC = Samples(ints=((0, 1),)), Samples(ints=((0, 1), (0, 1)))
_ANY_INT = (-(2**31), 2**31 - 1)
_CHOICE = Samples(floats=((0.0, 1.0), (-4.0, 4.0), (-4.0, 4.0)), ints=((0, 1), (-9, 9), (-9, 9)))


def _compared(
    name: str,
    spelling: str,
    typing: TypingRule,
    compare: Callable[[Any, Any], Any],
    interval_rule: Callable[..., Range],
    *,
    opposite: str,
    flipped: str,
) -> Operator:
    """The row of a comparison."""
    return row(
        *(name, spelling, typing, plain(compare), interval_rule, _PAIR, folding(compare)),
        strength=Strength.COMPARISON,
        opposite=opposite,
        flipped=flipped,
    )


def _of_bits(
    name: str,
    spelling: str,
    typing: TypingRule,
    function: Callable[[Any, Any], Any],
    interval_rule: Callable[..., Range],
    samples: Samples,
    c: str,
    strength: Strength,
) -> Operator:
    """The row of an operator that is Python's own, of bools or bit by bit."""
    return row(
        *(name, spelling, typing, plain(function), interval_rule, samples, Folding(ints=function)),
        c=c,
        strength=strength,
        interval_c=f"{name}_",
    )


def _shifted(
    name: str,
    spelling: str,
    meaning: Callable[..., Any],
    interval_rule: Callable[..., Range],
    most: int,
    fold: Callable[[int, int], int],
    c: str,
) -> Operator:
    """The row of a shift, which tests sample up to ``most``."""
    samples = Samples(ints=((-most, most), (-3, 35)))
    parts = (name, spelling, integer, meaning, interval_rule, samples, Folding(ints=fold))
    return row(*parts, c=c, strength=Strength.SHIFT)


ROWS = (
    _compared("lt", "<", comparison, operator.lt, interval.lt, opposite="ge", flipped="gt"),
    _compared("le", "<=", comparison, operator.le, interval.le, opposite="gt", flipped="ge"),
    _compared("gt", ">", comparison, operator.gt, interval.gt, opposite="le", flipped="lt"),
    _compared("ge", ">=", comparison, operator.ge, interval.ge, opposite="lt", flipped="le"),
    _compared("eq", "==", equality, operator.eq, interval.eq, opposite="ne", flipped="eq"),
    _compared("ne", "!=", equality, operator.ne, interval.ne, opposite="eq", flipped="ne"),
    _of_bits("and", "and", logical, operator.and_, interval.and_, _LOGIC, "&&", Strength.AND),
    _of_bits("or", "or", logical, operator.or_, interval.or_, _LOGIC, "||", Strength.OR),
    row(
        *("not", "not", logical, asked("logical_not"), interval.not_, _ONE_BIT, Folding(ints=operator.not_)),
        c="!",
        strength=Strength.NOT,
        interval_c="not_",
    ),
    _of_bits("bitand", "&", bitwise, operator.and_, _BITAND, _BITS, "&", Strength.BIT_AND),
    _of_bits("bitor", "|", bitwise, operator.or_, _BITOR, _BITS, "|", Strength.BIT_OR),
    _of_bits("bitxor", "^", bitwise, operator.xor, _BITXOR, _BITS, "^", Strength.BIT_XOR),
    _shifted("shl", "<<", _shl, interval.shl, 70, _left, "shift_left"),
    _shifted("shr", ">>", _shr, interval.shr, 7000, lambda x, n: x >> min(_shift(n), 4 * MOST_BITS), "shift_right"),
    row(
        "where",
        "where",
        selection,
        asked("where"),
        interval.where,
        _CHOICE,
        _CHOSEN,
        c="select",
        strength=Strength.CONDITIONAL,
        derivative=_D_WHERE,
    ),
    row(
        "to_float",
        "float",
        conversion(FLOAT),
        asked("to_float"),
        interval_float.to_float,
        Samples(floats=((-9.0, 9.0),), ints=(_ANY_INT,)),
        folding(float),
        derivative=partials(ONE),
    ),
    row(
        "to_int",
        "int",
        conversion(INT),
        _to_int,
        interval_float.to_int,
        Samples(floats=((-5e9, 5e9),), ints=(_ANY_INT,)),
        Folding(ints=int, floats=_saturated),
    ),
    row("popcount", "popcount", integer, _popcount, interval.popcount, Samples(ints=((-300, 300),)), Folding()),
    row(
        *("hash", "hash", integer, _hash, _hash_range, Samples(ints=(_ANY_INT,) * 3), Folding()),
        cost=Cost(0, 20),
        arity=-1,
        most=None,
    ),
)
