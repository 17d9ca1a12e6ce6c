"""The range rule of every operator on floats.

Stage: IR. In: ranges of arguments, whose ends are float32 numbers. Out: a range that holds the exact value and what any
kernel computes in float32. ``+ - * /`` and square roots are correctly rounded, so their ends are rounded outward once
(fused multiply-add and flushing of subnormals to zero stay inside). Other functions are off by a few units in the last
place: ``_approximate`` widens by ``RELATIVE`` and ``ABSOLUTE``, far more than the worst of them. Does NOT know ints.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

from flashgen.ir.interval import FULL_FLOAT, INF, INT_MAX, INT_MIN, BoolRange, FloatRange, IntRange, Range, max_

FLOAT_MAX = (2.0 - 2.0**-23) * 2.0**127
FLOAT_TINY = 2.0**-126  # the smallest normal number; smaller ones may be flushed to zero
RELATIVE, ABSOLUTE = 2.0**-18, 2.0**-20
_POW_RELATIVE = 2.0**-13  # the error of the logarithm grows with the exponent


def down(x: float) -> float:
    """The greatest float32 that is no more than ``x``, counting subnormals as zero."""
    if -FLOAT_TINY < x < FLOAT_TINY:
        return 0.0 if x >= 0 else -FLOAT_TINY
    if math.isinf(x):
        return x
    if abs(x) > FLOAT_MAX:
        return FLOAT_MAX if x > 0 else -INF
    mantissa, exponent = math.frexp(x)
    return math.ldexp(math.floor(mantissa * 2.0**24), exponent - 24)


def up(x: float) -> float:
    """The smallest float32 that is no less than ``x``, counting subnormals as zero."""
    return -down(-x)


def outward(lo: float, hi: float, nan: bool) -> FloatRange:
    """From exact ends to float32 ends; an end that is NaN says nothing."""
    if math.isnan(lo) or math.isnan(hi):
        return FULL_FLOAT
    return FloatRange(down(lo), up(hi), nan)


def point(value: float) -> FloatRange:
    """A constant, which kernels round to float32."""
    return outward(value, value, nan=False)


def _approximate(lo: float, hi: float, nan: bool, least: float = -INF, relative: float = RELATIVE) -> FloatRange:
    """Ends of a function that is computed to a few units in the last place and never falls below ``least``."""
    return outward(max(-_above(-lo, relative), least), _above(hi, relative), nan)


def _above(x: float, relative: float) -> float:
    return x if math.isinf(x) else x + abs(x) * relative + ABSOLUTE


# Arithmetic -----------------------------------------------------------------------------------------------------------


def add(x: FloatRange, y: FloatRange) -> FloatRange:
    """[x.lo + y.lo, x.hi + y.hi]; inf - inf is NaN."""
    nan = x.may_be_nan or y.may_be_nan or (x.hi == INF and y.lo == -INF) or (x.lo == -INF and y.hi == INF)
    return outward(x.lo + y.lo, x.hi + y.hi, nan)


def neg(x: FloatRange) -> FloatRange:
    """[-x.hi, -x.lo]."""
    return FloatRange(-x.hi, -x.lo, x.may_be_nan)


def sub(x: FloatRange, y: FloatRange) -> FloatRange:
    """x + -y."""
    return add(x, neg(y))


def _product(a: float, b: float) -> float:
    return 0.0 if a == 0 or b == 0 else a * b


def _has_zero(x: FloatRange) -> bool:
    return x.lo <= 0 <= x.hi


def _has_inf(x: FloatRange) -> bool:
    return x.lo == -INF or x.hi == INF


def mul(x: FloatRange, y: FloatRange) -> FloatRange:
    """The extremes are at corners; 0 · inf is NaN."""
    corners = [_product(a, b) for a in (x.lo, x.hi) for b in (y.lo, y.hi)]
    nan = (_has_zero(x) and _has_inf(y)) or (_has_zero(y) and _has_inf(x))
    return outward(min(corners), max(corners), nan or x.may_be_nan or y.may_be_nan)


def div(x: FloatRange, y: FloatRange) -> FloatRange:
    """The extremes are at corners; unknown where the divisor may be 0 (or -0)."""
    if _has_zero(y):
        return FULL_FLOAT
    if _has_inf(x) and _has_inf(y):
        return FULL_FLOAT
    corners = [a / b for a in (x.lo, x.hi) for b in (y.lo, y.hi)]
    return outward(min(corners), max(corners), x.may_be_nan or y.may_be_nan)


def floordiv(x: FloatRange, y: FloatRange) -> FloatRange:
    """⌊x / y⌋; of an infinite x NaN, by an infinite y of the other sign -1."""
    found = floor(div(x, y))
    lo = min(found.lo, -1.0) if _has_inf(y) else found.lo
    return FloatRange(lo, found.hi, found.may_be_nan or _has_inf(x))


def mod(x: FloatRange, y: FloatRange) -> FloatRange:
    """Between 0 and the divisor, which rounding may reach."""
    if x.lo >= 0 and y.lo > x.hi:
        return FloatRange(x.lo, x.hi, x.may_be_nan or y.may_be_nan)
    nan = x.may_be_nan or y.may_be_nan or _has_zero(y) or _has_inf(x)
    return FloatRange(min(y.lo, 0.0), max(y.hi, 0.0), nan)


def pow_(x: FloatRange, y: FloatRange) -> FloatRange:
    """For x > 0 the extremes are at corners; a base that may be negative is unknown."""
    if x.lo <= 0:
        return FULL_FLOAT
    corners = [_safe(math.pow, a, b) for a in (x.lo, x.hi) for b in (y.lo, y.hi)]
    nan = x.may_be_nan or y.may_be_nan
    if nan or _has_inf(x) or _has_inf(y):  # NaN ** 0 and 1 ** NaN are 1; inf ** 0 is 1
        corners.append(1.0)
    lo, hi = min(corners), max(corners)
    return _approximate(lo, hi, nan, least=0.0, relative=_POW_RELATIVE)


def abs_(x: FloatRange) -> FloatRange:
    """|x|."""
    smallest = 0.0 if _has_zero(x) else min(abs(x.lo), abs(x.hi))
    return FloatRange(smallest, max(abs(x.lo), abs(x.hi)), x.may_be_nan)


def sign(x: FloatRange) -> FloatRange:
    """-1, 0, 1; NaN gives 0."""
    lo, hi = float((x.lo > 0) - (x.lo < 0)), float((x.hi > 0) - (x.hi < 0))
    return FloatRange(min(lo, 0.0), max(hi, 0.0)) if x.may_be_nan else FloatRange(lo, hi)


# Functions ------------------------------------------------------------------------------------------------------------


def _safe(function: Callable[..., float], *args: float) -> float:
    try:
        return function(*args)
    except OverflowError:
        return INF


def increasing(function: Callable[[float], float], least: float = -INF) -> Callable[[FloatRange], FloatRange]:
    """The rule of a function that never falls, nor is below ``least``; infinite where Python's overflows."""

    def rule(x: FloatRange) -> FloatRange:
        return _approximate(_safe(function, x.lo), _safe(function, x.hi), x.may_be_nan, least)

    return rule


def _logarithm(function: Callable[[float], float], pole: float) -> Callable[[FloatRange], FloatRange]:
    """The rule of one: monotone; -inf at the pole (or just above it, flushed to it), NaN below."""

    def rule(x: FloatRange) -> FloatRange:
        if x.hi < pole:
            return FULL_FLOAT
        lo = function(x.lo) if x.lo > pole else -INF
        hi = function(x.hi) if x.hi > pole else -INF
        return _approximate(lo, hi, x.may_be_nan or x.lo < pole)

    return rule


log, log2, log1p = _logarithm(math.log, 0.0), _logarithm(math.log2, 0.0), _logarithm(math.log1p, -1.0)


def sqrt(x: FloatRange) -> FloatRange:
    """√x; NaN below 0."""
    if x.hi < 0:
        return FULL_FLOAT
    return _approximate(math.sqrt(max(x.lo, 0.0)), math.sqrt(x.hi), x.may_be_nan or x.lo < 0, least=0.0)


def rsqrt(x: FloatRange) -> FloatRange:
    """1/√x; unknown at 0 (1/√-0 = -inf) and below."""
    if x.lo <= 0:
        return FULL_FLOAT
    return _approximate(1 / math.sqrt(x.hi), 1 / math.sqrt(x.lo), x.may_be_nan, least=0.0)


def logistic(x: float) -> float:
    """σ(x)."""
    return 1 / (1 + math.exp(-x)) if x >= 0 else math.exp(x) / (1 + math.exp(x))


relu = functools.partial(max_, FloatRange(0.0, 0.0))


def _valley(function: Callable[[float], float], bottom: float, least: float) -> Callable[[FloatRange], FloatRange]:
    """The rule of what falls from 0 at -inf to ``least`` at ``bottom``, then rises. At -inf the product of -inf and 0
    is NaN.
    """

    def rule(x: FloatRange) -> FloatRange:
        at_lo, at_hi = (0.0 if end == -INF else function(end) for end in (x.lo, x.hi))
        lo = least if x.lo <= bottom <= x.hi else min(at_lo, at_hi)
        slack = 2.0**-16  # left of the bottom 1 + erf cancels, at |x| < 6
        return _approximate(lo - slack, max(at_lo, at_hi) + slack, x.may_be_nan or x.lo == -INF)

    return rule


silu = _valley(lambda x: x * logistic(x), -1.2784645427610738, -0.27846454276107380)
gelu = _valley(lambda x: 0.5 * x * (1 + math.erf(x * math.sqrt(0.5))), -0.75179152981410563, -0.16997120747990369)


def sin(x: FloatRange) -> FloatRange:
    """Its ends, and ±1 where a crest lies between them."""
    if _has_inf(x):
        return FloatRange(-1.0 - ABSOLUTE, 1.0 + ABSOLUTE, may_be_nan=True)
    if x.hi - x.lo > 6.25 or max(abs(x.lo), abs(x.hi)) > 1e4:
        return FloatRange(-1.0 - ABSOLUTE, 1.0 + ABSOLUTE, x.may_be_nan)
    values = [math.sin(x.lo), math.sin(x.hi)]
    half_turns = math.floor((x.lo - 0.001) / math.pi - 0.5)
    for k in range(half_turns, half_turns + 4):
        crest = (k + 0.5) * math.pi
        if x.lo - 0.001 <= crest <= x.hi + 0.001:
            values.append(math.sin(crest))
    slack = 2.0**-16  # the reduction of the argument
    return _approximate(min(values) - slack, max(values) + slack, x.may_be_nan)


def cos(x: FloatRange) -> FloatRange:
    """sin(x + π/2)."""
    return sin(FloatRange(x.lo + math.pi / 2, x.hi + math.pi / 2, x.may_be_nan))


def _step(function: Callable[[float], float]) -> Callable[[FloatRange], FloatRange]:
    """The rule of a step function: monotone and exact."""

    def rule(x: FloatRange) -> FloatRange:
        lo, hi = (t if math.isinf(t) else float(function(t)) for t in (x.lo, x.hi))
        return FloatRange(lo, hi, x.may_be_nan)

    return rule


floor, ceil, round_ = _step(math.floor), _step(math.ceil), _step(round)


# Conversions ----------------------------------------------------------------------------------------------------------


def to_float(x: Range) -> FloatRange:
    """Correctly rounded; false and true are 0 and 1."""
    match x:
        case BoolRange(may_be_false, may_be_true):
            return FloatRange(0.0 if may_be_false else 1.0, 1.0 if may_be_true else 0.0)
        case IntRange(lo, hi):
            return outward(float(lo), float(hi), nan=False)
        case FloatRange():
            return x


def to_int(x: Range) -> IntRange:
    """Truncates toward zero, saturates; NaN gives 0."""
    match x:
        case BoolRange(may_be_false, may_be_true):
            return IntRange(0 if may_be_false else 1, 1 if may_be_true else 0)
        case IntRange():
            return x
        case FloatRange(low, high, nan):
            lo, hi = (math.trunc(max(float(INT_MIN), min(float(INT_MAX), t))) for t in (low, high))
            return IntRange(min(lo, 0), max(hi, 0)) if nan else IntRange(lo, hi)
