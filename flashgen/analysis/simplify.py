"""Simplifies expressions; recognises softmax that is written as normalised exponentials.

Stage: analyse. In: typed expressions. Out: equal ones with fewer operations; constants fold in double precision (ints
exactly). Loses no NaN or infinity that matters; the rules and their limits are in ``identities.py``. Does NOT use
ranges.
"""

from __future__ import annotations

import math

from flashgen.analysis.identities import improve, make, reciprocal
from flashgen.ir.expr import Apply, Expr, Literal, literal, rewrite, score_input, substitute
from flashgen.ir.operators import OPERATORS
from flashgen.ir.types import ScalarType
from flashgen.ir.weights import Weights

_MINUS_INFINITY = literal(-math.inf)


def simplify(expr: Expr, *, reciprocals: bool = False, done: dict[Expr, Expr] | None = None) -> Expr:
    """An equal expression with fewer operations; ``reciprocals`` turns x / c into (1/c) x where x is of pairs.

    ``done`` as of ``rewrite``: expressions that share are simplified once where they do.
    """

    def rule(node: Expr) -> Expr:
        if not isinstance(node, Apply):
            return node
        if reciprocals and node.op == "div" and (product := reciprocal(*node.args)) is not None:
            return product
        return improve(node)

    return rewrite(expr, rule, done)


def canonical_weights(weights: Weights, score: Expr) -> tuple[Weights, Expr]:
    """``normalize(exp(e))`` as softmax over ``e[s := score]``; other weights and their score as they are.

    A score of -inf is masked in every form. Where e does not take -inf to -inf, the new score says so itself.
    """
    if weights.weight is None or not weights.form.is_sum:
        return weights, score
    exponent = _exponent(simplify(weights.weight))
    if exponent is None:
        return weights, score
    s = score_input("s")
    new_score = substitute(exponent, {s: score})
    if simplify(substitute(exponent, {s: _MINUS_INFINITY})) != _MINUS_INFINITY:
        masked = make("eq", score, _MINUS_INFINITY)
        new_score = make("where", masked, _MINUS_INFINITY, new_score)
    return Weights(), simplify(new_score)


def _exponent(weight: Expr) -> Expr | None:
    """e where the weight is exp(e)."""
    match weight:
        case Apply(op=op, args=(e,)) if rate := OPERATORS[op].rate:
            return e if rate == 1 else make("mul", literal(rate), e)
        case Literal(type=ScalarType.FLOAT, value=value) if 0 < value < math.inf:
            return literal(math.log(value))
        case Apply(op="mul" | "div" as op, args=(x, y)):
            left, right = _exponent(x), _exponent(y)
            if left is not None and right is not None:
                return make("add" if op == "mul" else "sub", left, right)
    return None
