"""Stage 2, decide for GPUs: the form of a score, and when kernels make weights of it.

In: a ``Variant`` as kernels evaluate it. Out: one of four forms of a ``Score``, each with what its kernels use; when P
is formed (``Weighing``); how rows know that their scores are extreme (``Extremes``).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

from flashgen.analysis.factors import LOG2_E, bounding_condition, float_params, is_of_launch, needs_no_maximum
from flashgen.analysis.levels import Level, kept_level
from flashgen.analysis.norms import SplitNorms, split_norms
from flashgen.analysis.ranging import bounds
from flashgen.analysis.simplify import make
from flashgen.analysis.variant import DOT, CapturedGradient, Variant, linear_factor
from flashgen.ir.build import apply
from flashgen.ir.expr import Apply, Expr, literal, substitute, walk
from flashgen.ir.interval import INT_MAX, FloatRange, Range
from flashgen.targets.gpu import rules
from flashgen.targets.gpu.diagonals import exponent_of
from flashgen.targets.gpu.lengths import has_whole_rows

# tanh x = x + x³ (c1 + c2 x²), right to 3e-7 up to SMALL: to 1.4e-5 in a score whose cap is 50, where a weight is
# rounded to 2^-9 or 2^-12 of itself.
SMALL = 0.3
_C1, _C2 = -0.33312132, 0.12641042
MOST_LSE = 88.0  # beyond, a row's scores are extreme: templates/include/flashgen/math.cuh says the same
_ANY_DOT: Mapping[Expr, Range] = {DOT: FloatRange(-math.inf, math.inf)}  # of finite rows
_MOST_FLOAT = (2 - 2.0**-23) * 2.0**127
_PARAM = FloatRange(2.0**-60, 2.0**60)  # of scores; by others these are no numbers, or none that a float holds


@dataclass(frozen=True)
class SmallTanh:
    """A score whose tanh is a polynomial, right where ``argument`` is at most ``bound``, whatever its sign.

    ``exponent`` is this score in base 2. Of the special function unit, which takes eight clocks for what other units do
    in one, a tanh asks twice. Kernels ask once for all pairs of a warp's tile whether all arguments are small.
    """

    argument: Expr
    bound: Expr
    score: Expr
    exponent: Expr


class Score:
    """The form of a score: one of the four below."""

    small_tanh: SmallTanh | None = None
    maxima_by_sums: bool = False


@dataclass(frozen=True)
class Product(Score):
    """``factor`` times dot, for a softmax: kernels keep products, and exponents take the factor.

    ``maxima_by_sums``: warpgroups look for maxima of rows only where sums of weights tell that one has grown.
    """

    factor: Expr
    maxima_by_sums: bool


@dataclass(frozen=True)
class Bounded(Score):
    """A formula that bounds its value, for a softmax: weights are formed before maxima of rows are looked at.

    ``exponent`` is the score in base 2; ``condition``: in which launches it is bounded, None: in all.
    """

    exponent: Expr
    condition: Expr | None
    small_tanh: SmallTanh | None


@dataclass(frozen=True)
class Distance(Score):
    """A formula that is linear in |q - k|², for a softmax: pairs form it without |q|², which a row's keys share.

    ``by_lse``: what arrives at |q|² is summed up as P times what arrives at lse. As much arrives there as through the
    scores of all keys of a row. A sink takes a part of it; what is dropped is not in P.
    """

    norms: SplitNorms
    by_lse: bool


@dataclass(frozen=True)
class General(Score):
    """Any other formula, or weights other than a softmax."""

    small_tanh: SmallTanh | None


class Weighing(Enum):
    """When the backward pass makes P of S, before or after dP is there; forward mode, the tangents of S."""

    LAST = "S beside dP"  # what follows P needs dot products, or draws dropout
    FIRST = "P, then dP"  # nothing that follows does: P takes the place of S
    WITH_SLOPE = "P and its slope, then dP"  # dS alone does: P times the score's derivative takes the place of S

    @property
    def first(self) -> bool:
        """Whether P takes the place of S."""
        return self is not Weighing.LAST

    @property
    def with_slope(self) -> bool:
        """Whether P times the derivative of the score does."""
        return self is Weighing.WITH_SLOPE


class Extremes(Enum):
    """How a row of the backward pass knows that its scores are extreme: its exponents then count from its maximum."""

    NONE = "no scores are"  # the formula bounds |lse|, or weights are no softmax
    MARKS = "two bytes say so"  # of products
    TOPS = "a word has the maximum, or 0"


def score_of(computed: Variant) -> Score:
    """The form of a score. Over a cache a tile waits for memory, and has few rows: there a formula stays as it is."""
    if not computed.weights.form.exponential:
        return General(None)  # such weights see the score itself
    factor, kind = linear_factor(computed), computed.kind
    if factor is not None:
        return Product(factor, _maxima_by_sums(computed))
    tanh = None
    if not (kind.rows_of_heads or kind.f8 or computed.tangent is not None):
        tanh = _small_tanh(computed)
        if kept_level(computed.score) is Level.PAIR:
            exponent = exponent_of(computed, computed.score)
            always = needs_no_maximum(exponent)
            condition = None if always else bounding_condition(exponent)
            if always or condition is not None:
                return Bounded(exponent, condition, tanh)
    norms = split_norms(computed.score) if computed.uses_sqdist and not kind.cached else None
    if norms is None:
        return General(tanh)
    alone = computed.weights.sink is None and computed.spec.dropout is None and computed.tangent is None
    return Distance(norms, by_lse=alone)


def weighing_of(computed: Variant, keys: Sequence[CapturedGradient]) -> Weighing:
    """When P is formed, where kernels sum up these gradients over ``keys``."""
    if not computed.weights.form.exponential or computed.uses_sqdist or computed.kind.backward_only:
        return Weighing.LAST
    if computed.tangent is not None:
        return Weighing.LAST if DOT in walk(computed.tangent.score) else Weighing.FIRST
    if computed.spec.dropout is not None:
        return Weighing.LAST
    if is_of_launch(computed.score_by_dot):
        parts = (each.from_score for each in keys if each.from_score is not None)
        return Weighing.LAST if any(DOT in walk(part) for part in parts) else Weighing.FIRST
    if keys or computed.kind.forward_only:
        return Weighing.LAST
    ranges: Mapping[Expr, Range] = dict.fromkeys(float_params(computed.score_by_dot), _PARAM)
    ranges = {**ranges, DOT: FloatRange(-_MOST_FLOAT, _MOST_FLOAT)} if ranges else _ANY_DOT
    found = bounds(computed.score_by_dot, ranges)
    assert isinstance(found, FloatRange)
    is_number = math.isfinite(found.lo) and math.isfinite(found.hi) and not found.may_be_nan
    return Weighing.WITH_SLOPE if is_number else Weighing.LAST


def extremes_of(computed: Variant, score: Score) -> Extremes:
    """|lse| is at most the largest score and the logarithm of how many there may be. A sink is bounded by nothing."""
    if isinstance(score, Product):
        return Extremes.MARKS
    if not computed.weights.form.exponential:
        return Extremes.NONE
    if computed.weights.sink is not None or computed.tangent is not None:
        return Extremes.TOPS
    found = bounds(computed.score, _ANY_DOT)
    assert isinstance(found, FloatRange)
    return Extremes.NONE if max(-found.lo, found.hi) + math.log(INT_MAX) < MOST_LSE else Extremes.TOPS


def _maxima_by_sums(computed: Variant) -> bool:
    """Not where weights of 8 bits begin high, nor in forward mode; not where wide K, in a ring, is waited for."""
    width = computed.head_dim.qk
    if computed.kind.f8 or computed.tangent is not None:
        return False
    return width <= rules.SUMS_TELL.limit or (width <= 256 and not has_whole_rows(computed))


def _small_tanh(computed: Variant) -> SmallTanh | None:
    """None where there is none, or several, or where gradients of captured values want the same P of all kernels.

    Nor for squared distances, which no warpgroup multiplies.
    """
    found = {each for each in walk(computed.score) if isinstance(each, Apply) and each.op == "tanh"}
    if computed.gradients or computed.uses_sqdist or len(found) != 1:
        return None
    (tanh,) = found
    if kept_level(tanh) is not Level.PAIR:  # there are few, and those of diagonals are read
        return None
    (argument,) = tanh.args
    match computed.score, argument:
        case (
            Apply(op="mul", args=(cap, inner)),
            Apply(op="mul", args=(factor, value)),
        ) if inner == tanh and value == DOT and is_of_launch(cap) and is_of_launch(factor) and factor != literal(0.0):
            # One multiplication less for either number.
            square = _product(factor, factor)
            cubed = _product(factor, square)
            numbers = (
                _product(cap, factor), _product(cap, literal(_C1), cubed), _product(cap, literal(_C2), cubed, square)
            )  # fmt: skip
            exponent = _odd(DOT, *(_product(literal(LOG2_E), each) for each in numbers))
            return SmallTanh(DOT, make("div", literal(SMALL), make("abs", factor)), _odd(DOT, *numbers), exponent)
    small: dict[Expr, Expr] = {tanh: _odd(argument, literal(1.0), literal(_C1), literal(_C2))}
    score, exponent = substitute(computed.score, small), substitute(exponent_of(computed, computed.score), small)
    return SmallTanh(argument, literal(SMALL), score, exponent)


def _product(*factors: Expr) -> Expr:
    return functools.reduce(lambda x, y: make("mul", x, y), factors)


def _odd(x: Expr, c0: Expr, c1: Expr, c2: Expr) -> Expr:
    square = apply("mul", x, x)
    inner = apply("add", c1, apply("mul", square, c2))
    return apply("mul", x, apply("add", c0, apply("mul", square, inner)))
