"""Differentiates expressions symbolically.

Stage: analyse. In: a float expression, and the symbol or load to differentiate by, or all of them. Out: the derivative,
simplified. The rules are the rows of the operator table. Derivatives share subexpressions with the expression and
among themselves, so that all of them together have a number of distinct nodes proportional to that of the expression.
Ints, bools, comparisons and indices carry no derivative. Does NOT differentiate twice in mind: nothing forbids it,
nothing needs it.

By one variable the chain rule goes up, from the leaves. By many, what lies above several of them would be written
anew for each: there it goes down, from the root, and meets what came up.
"""

from __future__ import annotations

import math
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from functools import reduce

from flashgen.analysis.simplify import simplify
from flashgen.ir.expr import Apply, Expr, Literal, walk
from flashgen.ir.operators import OPERATORS
from flashgen.ir.operators_base import FLOAT, ONE, ZERO, bool_node, real_node


def derivative(expr: Expr, wrt: Expr) -> Expr:
    """∂expr/∂wrt; the symbol or load ``wrt`` is compared by structure. Literal 0.0 where expr does not depend on it."""
    return derivatives(expr, (wrt,))[wrt]


def derivatives(expr: Expr, wrt: Sequence[Expr]) -> dict[Expr, Expr]:
    """``derivative`` by each of ``wrt``."""
    found: dict[Expr, Expr] = dict.fromkeys(wrt, ZERO)
    below = _below(expr, found)
    alone = below.variable.get(expr)
    if alone is not None:
        found[alone] = below.derivative[expr].value
    elif expr in below.variable:
        for variable, term in _from_above(expr, below):
            found[variable] = _sum(found[variable], term)
    done: dict[Expr, Expr] = {}
    return {variable: simplify(each, done=done) for variable, each in found.items()}


class _Chosen(IntEnum):
    """Whether a factor is 0 because another branch was taken."""

    NEVER = 0
    ON_TOP = 1  # where(c, x, 0) or where(c, 0, x), and x is no such factor
    DEEPER = 2


@dataclass(frozen=True)
class _Factor:
    """The factor of a product that stands for everything below a node, or for everything above it."""

    value: Expr
    chosen: _Chosen = _Chosen.NEVER
    infinite: bool = False  # it has an infinity of the text, beside which a saturated derivative is 0

    def plus(self, other: _Factor) -> _Factor:
        chosen = self.chosen is not _Chosen.NEVER or other.chosen is not _Chosen.NEVER
        infinite = self.infinite or other.infinite
        return _Factor(_sum(self.value, other.value), _Chosen.DEEPER if chosen else _Chosen.NEVER, infinite)


@dataclass(frozen=True)
class _Below:
    """Tables of the nodes that depend on variables, children first.

    ``variable``: the variable below a node, None where there are several. ``derivative``: by that variable.
    ``partials``: (place, ∂node/∂argument) of the arguments that depend on variables. ``infinite``: the nodes over an
    infinity of the text.
    """

    variable: Mapping[Expr, Expr | None]
    derivative: Mapping[Expr, _Factor]
    partials: Mapping[Expr, Sequence[tuple[int, Expr]]]
    infinite: Container[Expr]


def _below(expr: Expr, variables: Mapping[Expr, object]) -> _Below:
    """The chain rule from the leaves: ∂f(a₀, a₁, …) = Σ ∂f/∂aₖ · ∂aₖ, over the arguments that depend on a variable."""
    found, derivative_of = dict[Expr, Expr | None](), dict[Expr, _Factor]()
    partials: dict[Expr, list[tuple[int, Expr]]] = {}
    infinite = set[Expr]()
    for node in walk(expr):
        if (isinstance(node, Literal) and math.isinf(node.value)) or any(each in infinite for each in node.children):
            infinite.add(node)
        if node in variables:
            found[node], derivative_of[node] = node, _Factor(ONE)
            continue
        own = [(k, each) for k, each in _partials(node) if node.children[k] in found]
        if not own:
            continue
        partials[node] = own
        under = {found[node.children[k]] for k, _ in own}
        found[node] = under.pop() if len(under) == 1 else None
        if found[node] is not None:
            terms = [_times(partial, derivative_of[node.children[k]], node in infinite) for k, partial in own]
            derivative_of[node] = reduce(_Factor.plus, terms)
    return _Below(found, derivative_of, partials, infinite)


def _partials(node: Expr) -> Iterator[tuple[int, Expr]]:
    """∂node/∂argument, where it is not 0."""
    if isinstance(node, Apply) and node.type is FLOAT and (rule := OPERATORS[node.op].derivative) is not None:
        for k, arg in enumerate(node.args):
            if arg.type is FLOAT and (partial := rule(node.args, k)) != ZERO:
                yield k, partial


def _from_above(root: Expr, below: _Below) -> Iterator[tuple[Expr, Expr]]:
    """The derivatives by each variable as terms, from the root down to nodes with one variable left."""
    above = {root: _Factor(ONE)}
    for node in reversed([each for each, variable in below.variable.items() if variable is None]):
        if node not in above:
            continue
        for k, partial in below.partials[node]:
            arg = node.children[k]
            factor = _times(partial, above[node], node in below.infinite, from_above=True)
            variable = below.variable[arg]
            if variable is not None:
                under = below.derivative[arg]
                product = _times(under.value, factor, under.infinite, from_above=True)
                yield variable, _guarded(product.value, factor.value, under)
            else:
                above[arg] = above[arg].plus(factor) if arg in above else factor


def _times(partial: Expr, factor: _Factor, over_infinity: bool, *, from_above: bool = False) -> _Factor:
    """partial · factor, which is 0 where a branch not taken makes the factor 0, even if partial is infinite."""
    product = _product(partial, factor.value, from_above=from_above)
    chosen = factor.chosen
    if isinstance(partial, Apply) and partial.op == "where":
        chosen = max(chosen, _Chosen.ON_TOP) if _has_zero(partial) and _is_flat(partial) else _Chosen.DEEPER
    if factor.infinite:
        product = _where(bool_node("eq", partial, ZERO), ZERO, product)
    infinite = over_infinity and not _has_literals_only(partial)
    return _Factor(_guarded(product, partial, factor, infinite), chosen, factor.infinite or infinite)


def _guarded(product: Expr, partial: Expr, factor: _Factor, infinite: bool = False) -> Expr:
    """The product, evaluated only where the factor is not 0, unless ``_product`` did that already.

    Also where ``partial`` may be ``infinite``, beside which a saturated factor is 0.
    """
    if _has_literals_only(partial) or not (factor.chosen is _Chosen.DEEPER or infinite):
        return product
    return _where(bool_node("eq", factor.value, ZERO), ZERO, product)


def _has_literals_only(partial: Expr) -> bool:
    """Whether an expression is a finite number, or a choice among such."""
    match partial:
        case Literal(value=value):
            return math.isfinite(value)
        case Apply(op="where", args=(_, x, y)):
            return _has_literals_only(x) and _has_literals_only(y)
    return False


def _is_flat(partial: Expr) -> bool:
    """Whether a choice has no other choice in its branches."""
    return isinstance(partial, Apply) and not any(isinstance(x, Apply) and x.op == "where" for x in partial.args[1:])


def _product(partial: Expr, inner: Expr, *, from_above: bool = False) -> Expr:
    """partial · inner; a choice is applied after the product, so that 0 · inf of a branch not taken is 0.

    ``from_above``: the inner factor, which stands above, is written first.
    """
    if partial == ONE:
        return inner
    if inner == ONE or partial == ZERO:
        return partial
    if inner == ZERO:
        return inner
    if isinstance(partial, Apply) and partial.op == "where":
        c, x, y = partial.args
        if isinstance(x, Literal) or isinstance(y, Literal):
            return _where(c, *(_product(each, inner, from_above=from_above) for each in (x, y)))
    if isinstance(inner, Apply) and _has_zero(inner):
        c, x, y = inner.args
        return _where(c, *(_product(partial, each, from_above=from_above) for each in (x, y)))
    return real_node("mul", *((inner, partial) if from_above else (partial, inner)))


def _where(c: Expr, x: Expr, y: Expr) -> Expr:
    """``x if c else y``; a choice against 0 inside another is merged with it, so that products enter both."""
    if y == ZERO and isinstance(x, Apply) and _has_zero(x):
        inner, here, there = x.args
        if here == ZERO:
            inner, here = bool_node("not", inner), there
        return real_node("where", bool_node("and", c, inner), here, ZERO)
    if x == ZERO and isinstance(y, Apply) and _has_zero(y):
        inner, here, there = y.args
        if there == ZERO:
            inner, there = bool_node("not", inner), here
        return real_node("where", bool_node("or", c, inner), ZERO, there)
    return real_node("where", c, x, y)


def _has_zero(expr: Expr) -> bool:
    return isinstance(expr, Apply) and expr.op == "where" and ZERO in expr.args[1:]


def _sum(x: Expr, y: Expr) -> Expr:
    if x == ZERO:
        return y
    return x if y == ZERO else real_node("add", x, y)
