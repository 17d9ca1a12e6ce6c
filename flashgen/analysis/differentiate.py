"""Differentiates expressions symbolically.

Stage: analyse. In: a float expression, and the symbol or load to differentiate by. Out: the derivative, simplified.
The rules are the rows of the operator table. Derivatives share subexpressions with the expression and among
themselves, so a derivative has a number of distinct nodes proportional to that of its expression. Ints, bools,
comparisons and indices carry no derivative. Does NOT differentiate twice in mind: nothing forbids it, nothing needs it.
"""

from __future__ import annotations

from flashgen.analysis.simplify import simplify
from flashgen.ir.expr import Apply, Expr, Literal, literal
from flashgen.ir.operators import OPERATORS
from flashgen.ir.types import ScalarType

_ZERO, _ONE = literal(0.0), literal(1.0)


def derivative(expr: Expr, wrt: Expr) -> Expr:
    """∂expr/∂wrt; ``wrt`` is a symbol or a load, compared by structure. Literal 0.0 where expr does not depend on it.

    The chain rule: ∂f(a₀, a₁, …) = Σ ∂f/∂aₖ · ∂aₖ, over the arguments that depend on ``wrt``.
    """
    done: dict[Expr, Expr] = {}

    def visit(node: Expr) -> Expr:
        if node not in done:
            done[node] = _ONE if node == wrt else of_apply(node)
        return done[node]

    def of_apply(node: Expr) -> Expr:
        if not isinstance(node, Apply) or node.type is not ScalarType.FLOAT:
            return _ZERO
        rule = OPERATORS[node.op].derivative
        total: Expr = _ZERO
        for k, arg in enumerate(node.args):
            inner = visit(arg) if arg.type is ScalarType.FLOAT else _ZERO
            if rule is not None and inner != _ZERO:
                total = _sum(total, _product(rule(node.args, k), inner))
        return total

    return simplify(visit(expr))


def _product(partial: Expr, inner: Expr) -> Expr:
    """partial · inner; what selects does so after the product, so that 0 · inf of a branch not taken is 0."""
    if partial == _ONE:
        return inner
    if inner == _ONE or partial == _ZERO:
        return partial
    if inner == _ZERO:
        return inner
    if isinstance(partial, Apply) and partial.op == "where":
        c, x, y = partial.args
        if isinstance(x, Literal) or isinstance(y, Literal):
            return Apply(ScalarType.FLOAT, op="where", args=(c, _product(x, inner), _product(y, inner)))
    if isinstance(inner, Apply) and inner.op == "where" and _ZERO in inner.args:
        c, x, y = inner.args
        return Apply(ScalarType.FLOAT, op="where", args=(c, _product(partial, x), _product(partial, y)))
    return Apply(ScalarType.FLOAT, op="mul", args=(partial, inner))


def _sum(x: Expr, y: Expr) -> Expr:
    if x == _ZERO:
        return y
    return x if y == _ZERO else Apply(ScalarType.FLOAT, op="add", args=(x, y))
