"""Numbers that positions decide by their distance alone: tables of relative positions, functions of i - j.

Stage: analyse. In: a ``Variant``. Out: the same, with ``distance`` in the place of i - j in such numbers. A tile of
B_r × B_c pairs has B_r + B_c - 1 diagonals, and a kernel computes them once for each. They are floats: an int or a bool
of such floats is computed for each pair. The mask stays as it is.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import replace

from flashgen.analysis.levels import Level, kept_level, level_of
from flashgen.analysis.variant import CapturedGradient, Variant, map_weights, maybe
from flashgen.ir.build import apply
from flashgen.ir.expr import Apply, Expr, Load, index, literal, rewrite
from flashgen.ir.operators import OPERATORS
from flashgen.ir.types import ScalarType

DISTANCE = index("distance")
_I, _J = index("i"), index("j")


def over_diagonals(variant: Variant, is_kept: Callable[[Expr], bool] = lambda _: True, *, sums: bool = True) -> Variant:
    """The variant with ``distance`` for i - j in every such number that ``is_kept``.

    ``sums``: also in every read by distance that receives a gradient, which is then summed along diagonals.
    """
    # Equal specs may differ in their text, which sources quote: the cached variant has the text of the first one.
    return replace(_over_diagonals(variant, is_kept, sums), spec=variant.spec)


@functools.lru_cache(maxsize=64)
def _over_diagonals(variant: Variant, is_kept: Callable[[Expr], bool], sums: bool) -> Variant:
    proofs = [(proof, by_distance(proof.load)) for proof in variant.proofs]
    rewritten = _Rewriter(is_kept)
    return replace(
        variant,
        score=rewritten(variant.score),
        weights=map_weights(variant.weights, rewritten),
        score_by_dot=rewritten(variant.score_by_dot),
        score_by_sqdist=maybe(rewritten, variant.score_by_sqdist),
        weight_by_score=maybe(rewritten, variant.weight_by_score),
        gradients=tuple(_gradient(each, rewritten, sums=sums) for each in variant.gradients),
        tangent=None if variant.tangent is None else variant.tangent.mapped(rewritten),
        proofs=(*variant.proofs, *(replace(proof, load=load) for proof, load in proofs if load is not None)),
    )


@functools.lru_cache(maxsize=64)
def diagonal_values(variant: Variant) -> tuple[Expr, ...]:
    """The values of the score that a kernel keeps for each diagonal, of a variant over diagonals."""
    weights = variant.weights
    functions = [variant.score, *([] if weights.weight is None else [weights.weight])]
    roots = [*functions, variant.score_by_dot, variant.score_by_sqdist, variant.weight_by_score]
    roots += [part for each in variant.gradients for part in each.of_pairs]
    roots += [] if variant.tangent is None else variant.tangent.of_pairs
    found: dict[Expr, None] = {}
    seen: set[Expr] = set()

    def visit(node: Expr) -> None:
        if kept_level(node) is Level.DIAGONAL:
            found[node] = None
        elif node not in seen:
            seen.add(node)
            for child in node.children:
                visit(child)

    for root in roots:
        if root is not None:
            visit(root)
    return tuple(found)


def by_distance(read: Expr) -> Load | None:
    """A load with ``distance`` for i - j, where positions enter its indices only by i - j."""
    found = _over_distance(read)
    return found if isinstance(found, Load) else None


def _gradient(gradient: CapturedGradient, rewritten: Callable[[Expr], Expr], *, sums: bool) -> CapturedGradient:
    read = by_distance(gradient.read) if sums else None
    return replace(gradient.mapped(rewritten), read=read or gradient.read)


class _Rewriter:
    """Writes the largest floats that are functions of a distance, and are kept, as such; the rest stays.

    It remembers: derivatives have most of their nodes in common.
    """

    def __init__(self, is_kept: Callable[[Expr], bool]) -> None:
        self._is_kept = is_kept
        self._done: dict[Expr, Expr] = {}
        self._by_distance: dict[Expr, Expr] = {}

    def __call__(self, node: Expr) -> Expr:
        if node not in self._done:
            found = _over_distance(node, self._by_distance) if node.type is ScalarType.FLOAT else None
            if found is None or not self._is_kept(found):
                children = []
                for child in node.children:  # no comprehension: derivatives are deep, and it would be one more frame
                    children.append(self(child))  # noqa: PERF401
                found = node.with_children(tuple(children))
            self._done[node] = found
        return self._done[node]


def _over_distance(node: Expr, done: dict[Expr, Expr] | None = None) -> Expr | None:
    """The expression as a function of the distance and of values known before the pair; None where it is not one."""
    if level_of(node) is not Level.PAIR:
        return None
    found = rewrite(node, _with_distance, done)
    return found if level_of(found) is Level.DIAGONAL else None


def _with_distance(node: Expr) -> Expr:
    """A sum of ints with i once and j with the other sign, or a comparison of i and j, over ``distance``."""
    match node:
        case Apply(op="add" | "sub", type=ScalarType.INT):
            terms = list(_terms(node, added=True))
            of_i, of_j = ([added for added, term in terms if term == each] for each in (_I, _J))
            if sorted((*of_i, *of_j)) != [False, True] or len(of_i) != 1:
                return node
            total: Expr = DISTANCE if of_i[0] else apply("neg", DISTANCE)
            for added, term in terms:
                if term not in (_I, _J):
                    total = apply("add" if added else "sub", total, term)
            return total
        case Apply(op=op, args=(x, y)) if OPERATORS[op].is_comparison and {x, y} == {_I, _J}:
            return apply(op, DISTANCE, literal(0)) if x == _I else apply(op, literal(0), DISTANCE)
    return node


def _terms(expr: Expr, *, added: bool) -> Iterator[tuple[bool, Expr]]:
    """The terms of an int sum, each added or subtracted: modulo 2**32, as kernels count, in any order."""
    match expr:
        case Apply(op="add" | "sub" as op, args=(first, second), type=ScalarType.INT):
            yield from _terms(first, added=added)
            yield from _terms(second, added=added == (op == "add"))
        case Apply(op="neg", args=(x,), type=ScalarType.INT):
            yield from _terms(x, added=not added)
        case _:
            yield added, expr
