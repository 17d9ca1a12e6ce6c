"""Rows of the operator table: comparisons, logic, bits, selection, conversions, hash.

Stage: IR. In: nothing. Out: ``ROWS``. Comparisons with NaN are false, ``ne`` is true.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

from flashgen.ir import interval, interval_float
from flashgen.ir.expr import Expr
from flashgen.ir.operators_base import (
    FLOAT,
    INT,
    INT_MAX,
    MASK32,
    ONE,
    ZERO,
    ArrayNamespace,
    Operator,
    Samples,
    Signature,
    TypingRule,
    bitwise,
    comparison,
    conversion,
    equality,
    integer,
    logical,
    real_node,
    selection,
    wrap,
)

_PAIR = Samples(floats=((-4.0, 4.0), (-4.0, 4.0)), ints=((-9, 9), (-9, 9)))
_BITS = Samples(ints=((-70, 70), (-70, 70)))


def _plain(function: Callable[..., Any]) -> Callable[..., Any]:
    """A meaning that Python's own operator states for every namespace."""

    def meaning(xp: ArrayNamespace, *args: Any) -> Any:
        return function(*args)

    return meaning


def _not(xp: ArrayNamespace, x: Any) -> Any:
    return xp.logical_not(x)


# x << n is 0, x >> n the sign, where n < 0 or n ≥ 32
def _shl(xp: ArrayNamespace, x: Any, n: Any) -> Any:
    inside = (n >= 0) & (n < 32)
    return xp.where(inside, wrap(x << xp.where(inside, n, 0)), 0)


def _shr(xp: ArrayNamespace, x: Any, n: Any) -> Any:
    inside = (n >= 0) & (n < 32)
    return x >> xp.where(inside, n, 31)


# where(c, x, y): the chosen branch passes the gradient
def _where(xp: ArrayNamespace, c: Any, x: Any, y: Any) -> Any:
    return xp.where(c, x, y)


def _d_where(args: tuple[Expr, ...], k: int) -> Expr:
    passes, stops = ((ONE, ZERO), (ZERO, ONE))[k - 1]
    return real_node("where", args[0], passes, stops)


def _to_float(xp: ArrayNamespace, x: Any) -> Any:
    return xp.to_float(x)


def _d_to_float(args: tuple[Expr, ...], k: int) -> Expr:
    return ONE


# Truncates toward zero, saturates; NaN → 0. ±2**31 are floats in every precision, 2**31 - 1 is not.
def _to_int(xp: ArrayNamespace, x: Any) -> Any:
    if not xp.is_float(x):
        return xp.to_int(x)
    finite = xp.where(xp.isnan(x), xp.to_float(xp.to_int(x > 0)), x)
    inside = xp.where(finite < -(2.0**31), -(2.0**31), xp.where(finite > 2.0**31, 2.0**31, finite))
    whole = xp.to_int(inside)
    return xp.where(whole > INT_MAX, INT_MAX, whole)


# The number of ones in the 32-bit two's complement
def _popcount(xp: ArrayNamespace, x: Any) -> Any:
    v = x & MASK32
    v = v - ((v >> 1) & 0x55555555)
    v = (v & 0x33333333) + ((v >> 2) & 0x33333333)
    v = (v + (v >> 4)) & 0x0F0F0F0F
    return ((v * 0x01010101) & MASK32) >> 24


def _mul32(h: Any, c: int) -> Any:
    """The unsigned product modulo 2**32, without leaving 64 signed bits."""
    return (h * (c & 0xFFFF) + (((h * (c >> 16)) & 0xFFFF) << 16)) & MASK32


# uint32 h = 0x9E3779B9; for x: h ^= x, h *= 0x85EBCA6B, h ^= h >> 13, h *= 0xC2B2AE35, h ^= h >> 16; h & 0x7FFFFFFF
def _hash(xp: ArrayNamespace, *args: Any) -> Any:
    h: Any = 0x9E3779B9
    for x in args:
        h = _mul32(h ^ (x & MASK32), 0x85EBCA6B)
        h = _mul32(h ^ (h >> 13), 0xC2B2AE35)
        h = h ^ (h >> 16)
    return h & INT_MAX


def _compare(name: str, sign: str, rule: TypingRule, function: Callable[..., Any]) -> Operator:
    ranges = {
        "lt": interval.lt, "le": interval.le, "gt": interval.gt,
        "ge": interval.ge, "eq": interval.eq, "ne": interval.ne,
    }  # fmt: skip
    return Operator(name, 2, sign, rule, _plain(function), None, ranges[name], name, name, _PAIR)


_LOGIC = Samples(ints=((0, 1), (0, 1)))

ROWS = (
    _compare("lt", "<", comparison, operator.lt),
    _compare("le", "<=", comparison, operator.le),
    _compare("gt", ">", comparison, operator.gt),
    _compare("ge", ">=", comparison, operator.ge),
    _compare("eq", "==", equality, operator.eq),
    _compare("ne", "!=", equality, operator.ne),
    Operator("and", 2, "and", logical, _plain(operator.and_), None, interval.and_, "&&", "and_", _LOGIC),
    Operator("or", 2, "or", logical, _plain(operator.or_), None, interval.or_, "||", "or_", _LOGIC),
    Operator("not", 1, "not", logical, _not, None, interval.not_, "!", "not_", _LOGIC),
    Operator("bitand", 2, "&", bitwise, _plain(operator.and_), None, interval.bitand, "&", "bitand_", _BITS),
    Operator("bitor", 2, "|", bitwise, _plain(operator.or_), None, interval.bitor, "|", "bitor_", _BITS),
    Operator("bitxor", 2, "^", bitwise, _plain(operator.xor), None, interval.bitxor, "^", "bitxor_", _BITS),
    Operator(
        "shl", 2, "<<", integer, _shl, None, interval.shl, "shift_left", "shl", Samples(ints=((-70, 70), (-3, 35)))
    ),
    Operator(
        "shr", 2, ">>", integer, _shr, None, interval.shr, "shift_right", "shr", Samples(ints=((-7000, 7000), (-3, 35)))
    ),
    Operator(
        "where", 3, "where", selection, _where, _d_where, interval.where, "select", "where",
        Samples(floats=((0.0, 1.0), (-4.0, 4.0), (-4.0, 4.0)), ints=((0, 1), (-9, 9), (-9, 9))),
    ),
    Operator("to_float", 1, "float", conversion(FLOAT), _to_float, _d_to_float, interval_float.to_float, "to_float",
             "to_float", Samples(floats=((-9.0, 9.0),), ints=((-(2**31), 2**31 - 1),))),
    Operator("to_int", 1, "int", conversion(INT), _to_int, None, interval_float.to_int, "to_int", "to_int",
             Samples(floats=((-5e9, 5e9),), ints=((-(2**31), 2**31 - 1),))),
    Operator("popcount", 1, "popcount", integer, _popcount, None, interval.popcount, "popcount", "popcount",
             Samples(ints=((-300, 300),))),
    Operator("hash", -1, "hash", integer, _hash, None, interval.hash_, "hash", "hash",
             Samples(ints=((-(2**31), 2**31 - 1),) * 3)),
)  # fmt: skip
