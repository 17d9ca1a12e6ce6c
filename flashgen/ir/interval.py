"""Closed ranges of bools, ints and floats, and the range rule of every operator on bools and ints.

Stage: IR. In: ranges of arguments. Out: a range that holds every value that any backend can compute.
Never wrong; where nothing is known the range is wide. The rules on floats are in ``interval_float.py``; comparisons,
``min``, ``max``, ``where`` and ``hull`` here take every type. ``templates/include/flashgen/ranges.h`` is the same in
C++. Does NOT know expressions (``analysis/bounds.py``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from flashgen.ir.types import ScalarType

INT_MIN, INT_MAX = -(2**31), 2**31 - 1
MASK32 = 0xFFFFFFFF
_SIGN = 0x80000000
INF = float("inf")


@dataclass(frozen=True)
class BoolRange:
    """Which truth values may occur."""

    may_be_false: bool
    may_be_true: bool

    @property
    def is_true(self) -> bool:
        """Surely true."""
        return not self.may_be_false

    @property
    def is_false(self) -> bool:
        """Surely false."""
        return not self.may_be_true


@dataclass(frozen=True)
class IntRange:
    """lo … hi, both inside 32 bits."""

    lo: int
    hi: int

    @property
    def is_point(self) -> bool:
        """One value only."""
        return self.lo == self.hi


@dataclass(frozen=True)
class FloatRange:
    """lo … hi, and NaN besides. The ends are float32 numbers or infinite."""

    lo: float
    hi: float
    may_be_nan: bool = False

    @property
    def is_point(self) -> bool:
        """One value only."""
        return self.lo == self.hi and not self.may_be_nan


Range = BoolRange | IntRange | FloatRange

TRUE, FALSE, FULL_BOOL = BoolRange(False, True), BoolRange(True, False), BoolRange(True, True)
FULL_INT = IntRange(INT_MIN, INT_MAX)
FULL_FLOAT = FloatRange(-INF, INF, may_be_nan=True)


def full(scalar: ScalarType) -> Range:
    """Every value of a type."""
    if scalar is ScalarType.FLOAT:
        return FULL_FLOAT
    return FULL_BOOL if scalar is ScalarType.BOOL else FULL_INT


def truth(value: bool) -> BoolRange:
    """The range of one truth value."""
    return TRUE if value else FALSE


def hull(x: Range, y: Range) -> Range:
    """The smallest range that holds both."""
    if isinstance(x, BoolRange) and isinstance(y, BoolRange):
        return BoolRange(x.may_be_false or y.may_be_false, x.may_be_true or y.may_be_true)
    if isinstance(x, IntRange) and isinstance(y, IntRange):
        return IntRange(min(x.lo, y.lo), max(x.hi, y.hi))
    if isinstance(x, FloatRange) and isinstance(y, FloatRange):
        return FloatRange(min(x.lo, y.lo), max(x.hi, y.hi), x.may_be_nan or y.may_be_nan)
    raise TypeError(f"ranges of different types: {x}, {y}")


def meet(x: Range, y: Range) -> Range | None:
    """The values that both hold; None where there is none."""
    if isinstance(x, BoolRange) and isinstance(y, BoolRange):
        both = BoolRange(x.may_be_false and y.may_be_false, x.may_be_true and y.may_be_true)
        return both if both.may_be_false or both.may_be_true else None
    if isinstance(x, IntRange) and isinstance(y, IntRange):
        lo, hi = max(x.lo, y.lo), min(x.hi, y.hi)
        return IntRange(lo, hi) if lo <= hi else None
    if isinstance(x, FloatRange) and isinstance(y, FloatRange):
        low, high, nan = max(x.lo, y.lo), min(x.hi, y.hi), x.may_be_nan and y.may_be_nan
        if low <= high:
            return FloatRange(low, high, nan)
        return FULL_FLOAT if nan else None
    raise TypeError(f"ranges of different types: {x}, {y}")


def around(values: Iterable[int]) -> IntRange:
    """From the least to the greatest; everything, where one of them wraps."""
    known = tuple(values)
    lo, hi = min(known), max(known)
    return IntRange(lo, hi) if lo >= INT_MIN and hi <= INT_MAX else FULL_INT


# Arithmetic on ints ---------------------------------------------------------------------------------------------------


def add(x: IntRange, y: IntRange) -> IntRange:
    """[x.lo + y.lo, x.hi + y.hi]."""
    return around((x.lo + y.lo, x.hi + y.hi))


def sub(x: IntRange, y: IntRange) -> IntRange:
    """[x.lo - y.hi, x.hi - y.lo]."""
    return around((x.lo - y.hi, x.hi - y.lo))


def mul(x: IntRange, y: IntRange) -> IntRange:
    """The extremes are at corners."""
    return around(a * b for a in (x.lo, x.hi) for b in (y.lo, y.hi))


def neg(x: IntRange) -> IntRange:
    """[-x.hi, -x.lo]."""
    return around((-x.hi, -x.lo))


def _divisors(y: IntRange) -> tuple[int, ...]:
    """The ends of the negative and of the positive part of ``y``."""
    ends: tuple[int, ...] = ()
    if y.lo < 0:
        ends += (y.lo, min(y.hi, -1))
    if y.hi > 0:
        ends += (max(y.lo, 1), y.hi)
    return ends


def floordiv(x: IntRange, y: IntRange) -> IntRange:
    """Monotone in x, and in y of one sign: corners; 0 where y may be 0."""
    values = [a // b for a in (x.lo, x.hi) for b in _divisors(y)]
    if y.lo <= 0 <= y.hi:
        values.append(0)
    return around(values)


def mod(x: IntRange, y: IntRange) -> IntRange:
    """Exact within one period of a fixed divisor; otherwise between 0 and the divisor."""
    if y.is_point and y.lo != 0 and x.lo // y.lo == x.hi // y.lo:
        return IntRange(x.lo % y.lo, x.hi % y.lo)
    if y.lo > x.hi and x.lo >= 0:
        return x
    lo, hi = min(y.lo + 1, 0), max(y.hi - 1, 0)
    # |x % y| ≤ |x| where both have the sign of y; a result never leaves x's own side then.
    if x.lo >= 0 and y.lo >= 0:
        hi = min(hi, x.hi)
    return IntRange(lo, hi)


def ceildiv(x: IntRange, y: IntRange) -> IntRange:
    """-(-x // y)."""
    return neg(floordiv(neg(x), y))


def ipow(x: IntRange, y: IntRange) -> IntRange:
    """One number of one base and one exponent. Of more: monotone pieces for exponents in 0 … 31; otherwise unknown,
    unless every value is 0, 1 or -1.
    """
    if x.lo == x.hi and y.lo == y.hi:
        base, exponent = x.lo, y.lo
        if exponent < 0:
            power = base ** (exponent & 1) if abs(base) == 1 else 0
        else:
            power = (pow(base, exponent, 2**32) + 2**31) % 2**32 - 2**31
        return IntRange(power, power)
    if x.lo >= -1 and x.hi <= 1:
        return IntRange(min(x.lo, 0), 1)
    if y.lo < 0 or y.hi > 31:
        return FULL_INT
    bases = {x.lo, x.hi} | ({0} if x.lo <= 0 <= x.hi else set()) | ({-1} if x.lo <= -1 <= x.hi else set())
    exponents = {n for n in (y.lo, y.lo + 1, y.hi - 1, y.hi) if y.lo <= n <= y.hi}
    return around(base**n for base in bases for n in exponents)


def abs_(x: IntRange) -> IntRange:
    """|x|; -2**31 wraps."""
    smallest = 0 if x.lo <= 0 <= x.hi else min(abs(x.lo), abs(x.hi))
    return around((smallest, abs(x.lo), abs(x.hi)))


def sign(x: IntRange) -> IntRange:
    """-1, 0, 1."""
    return IntRange((x.lo > 0) - (x.lo < 0), (x.hi > 0) - (x.hi < 0))


# Bits -----------------------------------------------------------------------------------------------------------------


def _bits(x: IntRange) -> tuple[int, int]:
    """(bits surely set, bits that may be set): those above the highest bit in which the ends differ are known."""
    unknown = (1 << ((x.lo ^ x.hi) & MASK32).bit_length()) - 1
    known = x.lo & MASK32 & ~unknown
    return known, known | unknown


def _from_bits(certain: int, possible: int) -> IntRange:
    lo, hi = certain, possible
    if (certain ^ possible) & _SIGN:
        lo, hi = certain | _SIGN, possible & ~_SIGN
    return IntRange(lo - 2**32 if lo & _SIGN else lo, hi - 2**32 if hi & _SIGN else hi)


def bitand(x: IntRange, y: IntRange) -> IntRange:
    """By known bits; never above a non-negative operand."""
    a, b = _bits(x), _bits(y)
    found = _from_bits(a[0] & b[0], a[1] & b[1])
    for operand in (x, y):
        if operand.lo >= 0:
            found = IntRange(max(found.lo, 0), min(found.hi, operand.hi))
    return found


def bitor(x: IntRange, y: IntRange) -> IntRange:
    """By known bits."""
    a, b = _bits(x), _bits(y)
    return _from_bits(a[0] | b[0], a[1] | b[1])


def bitxor(x: IntRange, y: IntRange) -> IntRange:
    """By known bits."""
    a, b = _bits(x), _bits(y)
    unknown = (a[0] ^ a[1]) | (b[0] ^ b[1])
    known = (a[0] ^ b[0]) & ~unknown
    return _from_bits(known, known | unknown)


def shl(x: IntRange, n: IntRange) -> IntRange:
    """Corners for counts in 0 … 31; 0 where others may occur."""
    lo, hi = max(n.lo, 0), min(n.hi, 31)
    values = [a << c for a in (x.lo, x.hi) for c in (lo, hi)] if lo <= hi else []
    return around(values if n.lo >= 0 and n.hi <= 31 else (*values, 0))


def shr(x: IntRange, n: IntRange) -> IntRange:
    """Corners for counts in 0 … 31; others count as 31."""
    outside = n.lo < 0 or n.hi > 31
    lo, hi = (max(n.lo, 0), 31) if outside else (n.lo, n.hi)
    if n.hi < 0 or n.lo > 31:
        lo = 31
    return around(a >> c for a in (x.lo, x.hi) for c in (lo, hi))


def popcount(x: IntRange) -> IntRange:
    """The known ones, and as many more as there are unknown bits."""
    certain, possible = _bits(x)
    return IntRange(certain.bit_count(), possible.bit_count())


# Comparisons and logic ------------------------------------------------------------------------------------------------


def _nan(x: Range, y: Range) -> bool:
    return (isinstance(x, FloatRange) and x.may_be_nan) or (isinstance(y, FloatRange) and y.may_be_nan)


def _ends(x: Range) -> tuple[float, float]:
    """(lo, hi); false and true count as 0 and 1."""
    if isinstance(x, BoolRange):
        return (0 if x.may_be_false else 1), (1 if x.may_be_true else 0)
    return x.lo, x.hi


def lt(x: Range, y: Range) -> BoolRange:
    """x < y; with NaN false."""
    return BoolRange(_ends(x)[1] >= _ends(y)[0] or _nan(x, y), _ends(x)[0] < _ends(y)[1])


def le(x: Range, y: Range) -> BoolRange:
    """x ≤ y; with NaN false."""
    return BoolRange(_ends(x)[1] > _ends(y)[0] or _nan(x, y), _ends(x)[0] <= _ends(y)[1])


def gt(x: Range, y: Range) -> BoolRange:
    """y < x."""
    return lt(y, x)


def ge(x: Range, y: Range) -> BoolRange:
    """y ≤ x."""
    return le(y, x)


def eq(x: Range, y: Range) -> BoolRange:
    """True where they may meet, false unless both are the same point."""
    (a, b), (c, d) = _ends(x), _ends(y)
    return BoolRange(not a == b == c == d or _nan(x, y), a <= d and c <= b)


def ne(x: Range, y: Range) -> BoolRange:
    """not x == y."""
    return not_(eq(x, y))


def and_(x: BoolRange, y: BoolRange) -> BoolRange:
    """Both."""
    return BoolRange(x.may_be_false or y.may_be_false, x.may_be_true and y.may_be_true)


def or_(x: BoolRange, y: BoolRange) -> BoolRange:
    """Either."""
    return BoolRange(x.may_be_false and y.may_be_false, x.may_be_true or y.may_be_true)


def not_(x: BoolRange) -> BoolRange:
    """The other."""
    return BoolRange(x.may_be_true, x.may_be_false)


def _extreme(choose: Callable[[float, float], Any]) -> Callable[[Any, Any], Any]:
    """The rule of min or max, on ints or floats: monotone; NaN wins."""

    def rule(x: IntRange | FloatRange, y: IntRange | FloatRange) -> Range:
        lo, hi = choose(x.lo, y.lo), choose(x.hi, y.hi)
        return FloatRange(lo, hi, _nan(x, y)) if isinstance(x, FloatRange) else IntRange(lo, hi)

    return rule


min_, max_ = _extreme(min), _extreme(max)


def where(c: BoolRange, x: Range, y: Range) -> Range:
    """The chosen branch, both where the condition is open."""
    if c.is_true:
        return x
    return y if c.is_false else hull(x, y)
