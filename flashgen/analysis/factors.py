"""Factors of scores: those that are one number for a launch, and log2(e), by which exponents are in base 2.

Stage: analyse. In: a score, or a derivative of it. Out: an equal one, in which factors of a launch (params, sizes, and
what is computed of these) stand together, so that a kernel multiplies them once; the factor of a score that is a
product with ``dot``. Does NOT move factors of heads, rows or columns. Or log2(e) times the score, and how large that
may become: kernels compute exponents in base 2, as exp2 is an instruction where exp is none.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping

from flashgen.analysis.levels import Level, level_of
from flashgen.analysis.ranging import bounds
from flashgen.analysis.simplify import make, simplify
from flashgen.ir.build import apply, conjunction
from flashgen.ir.expr import Apply, Expr, Literal, Symbol, SymbolKind, literal, rewrite, score_input, walk
from flashgen.ir.interval import FloatRange, Range
from flashgen.ir.types import ScalarType

_DOT = score_input("dot")
_LEAST = 2.0**-126  # the smallest normal float: a masked product, -inf, stays infinite by it


def is_of_launch(expr: Expr) -> bool:
    """Whether a value is one number for a whole launch."""
    return level_of(expr) is Level.LAUNCH


def gathered(expr: Expr) -> Expr:
    """The expression, with factors of a launch multiplied by one another first; x · (1 / x) is 1."""
    return rewrite(expr, _gathered)


def factor_of_dot(score: Expr) -> Expr | None:
    """c where a score is c · dot, with a positive constant or a number of the launch; None elsewhere."""
    factors = list(_factors(score))
    others = [each for each in factors if each != (_DOT, False)]
    if len(others) != len(factors) - 1 or not all(is_of_launch(each) for each, _ in others):
        return None
    factor = _product(others)
    return None if isinstance(factor, Literal) and factor.value <= 0 else factor


def never_zero(factor: Expr) -> Expr:
    """The factor, or the least normal number if its magnitude is less. NaN stays."""
    is_small = make("lt", make("abs", factor), literal(_LEAST))
    return make("where", is_small, literal(_LEAST), factor)


def _gathered(node: Expr) -> Expr:
    if not isinstance(node, Apply) or node.op not in ("mul", "div") or node.type is not ScalarType.FLOAT:
        return node
    all_of_them = list(_factors(node))
    factors = _cancelled(all_of_them)
    of_launch = [each for each in factors if is_of_launch(each[0])]
    others = [each for each in factors if not is_of_launch(each[0])]
    if not others or (len(factors) == len(all_of_them) and all(isinstance(each, Literal) for each, _ in of_launch)):
        return node
    return apply("mul", _product(of_launch), _product(others))  # as it is: constants would come out of it again


def _factors(expr: Expr, *, below: bool = False) -> Iterable[tuple[Expr, bool]]:
    """The factors of a product, and whether each is in the denominator."""
    match expr:
        case Apply(op="mul", args=(x, y)) if expr.type is ScalarType.FLOAT:
            yield from _factors(x, below=below)
            yield from _factors(y, below=below)
        case Apply(op="neg", args=(x,)) if expr.type is ScalarType.FLOAT:
            yield literal(-1.0), False
            yield from _factors(x, below=below)
        case Apply(op="div", args=(x, y)) if expr.type is ScalarType.FLOAT:
            yield from _factors(x, below=below)
            yield from _factors(y, below=not below)
        case _:
            yield expr, below


def _cancelled(factors: Iterable[tuple[Expr, bool]]) -> list[tuple[Expr, bool]]:
    left: list[tuple[Expr, bool]] = []
    for each, below in factors:
        if (each, not below) in left and is_of_launch(each) and not isinstance(each, Literal):
            left.remove((each, not below))
        elif each != literal(1.0):
            left.append((each, below))
    return left


def _product(factors: Iterable[tuple[Expr, bool]]) -> Expr:
    above: Expr = literal(1.0)
    under: Expr = literal(1.0)
    for each, below in factors:
        if below:
            under = make("mul", under, each)
        else:
            above = make("mul", above, each)
    return above if under == literal(1.0) else make("div", above, under)


# Exponents in base 2 -------------------------------------------------------------------------------------------------


LOG2_E = math.log2(math.e)
# Scores in base 2 that stay below this need no maximum: a sum of 2^20 weights is at most 2^100, and the products of the
# least weight, 2^-80, and of its parts are normal numbers for values from 2^-30 on. Caps of up to 55 are below.
MOST_EXPONENT = 80.0
_MINUS_INFINITY = literal(-math.inf)


def in_base_2(expr: Expr) -> Expr:
    """The exponent for which exp2 gives exp of ``expr``.

    The factor log2(e) is multiplied into the terms of a sum, where it meets constants and values of a row or a head.
    """
    return _by_term(simplify(_by_term(expr, lambda term: apply("mul", literal(LOG2_E), term))), _before_the_pair)


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


def _before_the_pair(term: Expr) -> Expr:
    """The product, with its constant and the values that are known before the pair as one factor."""
    match term:
        case Apply(op="mul", args=(Literal() as factor, Apply(op="mul", args=(first, second)))) if (
            level_of(first) is not Level.PAIR
        ):
            return apply("mul", apply("mul", factor, first), second)
    return term
