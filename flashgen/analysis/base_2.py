"""Exponents in base 2, as kernels compute them: exp2 is an instruction where exp is none.

Stage: analyse. In: a score. Out: log2(e) times it, and how large that may become.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

from flashgen.analysis.levels import Level, level_of
from flashgen.analysis.ranging import bounds
from flashgen.analysis.simplify import simplify
from flashgen.ir.build import apply, conjunction
from flashgen.ir.expr import Apply, Expr, Literal, Symbol, SymbolKind, literal, walk
from flashgen.ir.interval import FloatRange, Range
from flashgen.ir.types import ScalarType

LOG2_E = math.log2(math.e)
# Scores in base 2 that stay below this need no maximum: a sum of 2^20 weights is at most 2^100, and the products of the
# least weight, 2^-80, and of its parts are normal numbers for values from 2^-30 on. Caps of up to 55 are below.
MOST_EXPONENT = 80.0
_MINUS_INFINITY = literal(-math.inf)


def in_base_2(expr: Expr) -> Expr:
    """The exponent for which exp2 gives exp of ``expr``.

    The factor log2(e) is multiplied into the terms of a sum, where it meets constants and values of a row or a head.
    """
    return _by_term(simplify(_by_term(expr, lambda term: apply("mul", literal(LOG2_E), term))), _gathered)


def largest_exponent(exponent: Expr, ranges: Mapping[Expr, Range] | None = None) -> float:
    """The largest magnitude of an exponent of ``in_base_2``, over all inputs but NaN; infinite if it is not bounded."""
    found = bounds(exponent, ranges or {})
    assert isinstance(found, FloatRange)
    return max(-found.lo, found.hi)


def needs_no_maximum(exponent: Expr) -> bool:
    """Whether weights are finite numbers without a row maximum, for ``exponent``, a score in base 2."""
    return largest_exponent(exponent) <= MOST_EXPONENT


def float_params(expr: Expr) -> list[Symbol]:
    """The float params of an expression."""
    params = [each for each in walk(expr) if isinstance(each, Symbol) and each.kind is SymbolKind.PARAM]
    return [each for each in params if each.type is ScalarType.FLOAT]


def bounding_condition(exponent: Expr) -> Expr | None:
    """A condition on float params under which a score needs no maximum: their magnitudes are at most one number."""
    params = float_params(exponent)

    def largest(most: float) -> float:
        return largest_exponent(exponent, {each: FloatRange(-most, most) for each in params})

    if not params or not 0.0 < (unit := largest(1.0)) < math.inf:
        return None
    most = MOST_EXPONENT / unit
    if largest(most) > MOST_EXPONENT * (1 + 2.0**-20):  # in more than proportion
        return None
    return conjunction(*(apply("le", apply("abs", each), literal(most)) for each in params))


def _by_term(expr: Expr, change: Callable[[Expr], Expr]) -> Expr:
    """The sum with every term changed, also inside a choice of -inf, which prunes pairs by their score."""
    match expr:
        case Apply(op="add" | "sub" as op, args=(first, second)) if expr.type is ScalarType.FLOAT:
            return apply(op, _by_term(first, change), _by_term(second, change))
        case Apply(op="where", args=(c, x, y)) if _MINUS_INFINITY in (x, y):
            return apply("where", c, *(each if each == _MINUS_INFINITY else _by_term(each, change) for each in (x, y)))
    return change(expr)


def _gathered(term: Expr) -> Expr:
    """The product, with its constant and the values that are known before the pair as one factor."""
    match term:
        case Apply(op="mul", args=(Literal() as factor, Apply(op="mul", args=(first, second)))) if (
            level_of(first) is not Level.PAIR
        ):
            return apply("mul", apply("mul", factor, first), second)
    return term
