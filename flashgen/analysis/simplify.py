"""Simplifies expressions, finds masks written as scores of -inf, and softmax written as normalised exponentials.

Stage: analyse. In: typed expressions. Out: equal ones with fewer operations; constants fold in double precision (ints
exactly). Loses no NaN or infinity that matters; the rules and their limits are in ``identities.py``. Does NOT use
ranges.
"""

from __future__ import annotations

import math

from flashgen.analysis.identities import improve, make, negation, reciprocal
from flashgen.ir.expr import Apply, Expr, Literal, literal, rewrite, score_input, substitute
from flashgen.ir.spec import Normalize, Softmax, Weights
from flashgen.ir.types import ScalarType

_MINUS_INFINITY = literal(-math.inf)
_TRUE, _FALSE = literal(True), literal(False)
_LN2 = math.log(2.0)


def simplify(expr: Expr, *, reciprocals: bool = False) -> Expr:
    """An equal expression with fewer operations; ``reciprocals`` turns x / c into (1/c) x."""

    def rule(node: Expr) -> Expr:
        if not isinstance(node, Apply):
            return node
        better = improve(node)
        if reciprocals and isinstance(better, Apply) and better.op == "div":
            return reciprocal(*better.args) or better
        return better

    return rewrite(expr, rule)


def split_masked_score(score: Expr) -> tuple[Expr, Expr]:
    """The score without its -inf, and the condition under which a pair is kept.

    ``where(c, s, -inf)`` is (s, c), at the top, within branches and within sums: a sum with -inf is -inf, but for
    +inf and NaN, which are no scores. Everything else is (score, true).
    """
    found, keep = _split(simplify(score))
    return found, simplify(keep)


def _split(score: Expr) -> tuple[Expr, Expr]:
    if score == _MINUS_INFINITY:
        return literal(0.0), _FALSE
    match score:
        case Apply(op="where", args=(c, x, y)):
            (x, keep_x), (y, keep_y) = _split(x), _split(y)
            if keep_x == _FALSE:
                return y, make("and", negation(c), keep_y)
            if keep_y == _FALSE:
                return x, make("and", c, keep_x)
            return make("where", c, x, y), make("where", c, keep_x, keep_y)
        case Apply(op="add", args=(x, y)):
            (x, keep_x), (y, keep_y) = _split(x), _split(y)
            return make("add", x, y), make("and", keep_x, keep_y)
        case Apply(op="sub", args=(x, y)):
            x, keep_x = _split(x)
            return make("sub", x, y), keep_x
    return score, _TRUE


def canonical_weights(weights: Weights, score: Expr) -> tuple[Weights, Expr]:
    """``normalize(exp(e))`` as softmax over ``e[s := score]``; other weights and their score as they are.

    A score of -inf is masked in every form. Where e does not take -inf to -inf, the new score says so itself.
    """
    if not isinstance(weights, Normalize):
        return weights, score
    exponent = _exponent(simplify(weights.weight))
    if exponent is None:
        return weights, score
    s = score_input("s")
    new_score = substitute(exponent, {s: score})
    if simplify(substitute(exponent, {s: _MINUS_INFINITY})) != _MINUS_INFINITY:
        masked = make("eq", score, _MINUS_INFINITY)
        new_score = make("where", masked, _MINUS_INFINITY, new_score)
    return Softmax(), simplify(new_score)


def _exponent(weight: Expr) -> Expr | None:
    """e where the weight is exp(e)."""
    match weight:
        case Apply(op="exp", args=(e,)):
            return e
        case Apply(op="exp2", args=(e,)):
            return make("mul", literal(_LN2), e)
        case Literal(type=ScalarType.FLOAT, value=value) if 0 < value < math.inf:
            return literal(math.log(value))
        case Apply(op="mul" | "div" as op, args=(x, y)):
            left, right = _exponent(x), _exponent(y)
            if left is not None and right is not None:
                return make("add" if op == "mul" else "sub", left, right)
    return None
