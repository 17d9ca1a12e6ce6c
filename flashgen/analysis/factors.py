"""Factors that are one number for a launch: params, sizes, and what is computed of these.

Stage: analyse. In: a score, or a derivative of it. Out: an equal one, in which such factors of a product stand
together, so that a kernel multiplies them once a launch; the factor of a score that is a product with ``dot``. Does NOT
move factors of heads, rows or columns.
"""

from __future__ import annotations

from collections.abc import Iterable

from flashgen.analysis.levels import Level, level_of
from flashgen.analysis.simplify import make
from flashgen.ir.build import apply
from flashgen.ir.expr import Apply, Expr, Literal, literal, rewrite, score_input
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
