"""Scores that fall off in proportion to a distance, as ALiBi's, with one operation a pair.

In: the score. Out: the score without its part of each row, and that part. f · (i - j) is f · i, which is the
same for all keys of a query and so drops out of a softmax, less f · j, which is computed once a key. Positions count
from a block's first one, near which they are small.
"""

from __future__ import annotations

from collections.abc import Iterator

from flashgen.analysis.levels import Level, level_of
from flashgen.ir.build import apply
from flashgen.ir.expr import Apply, Expr, index
from flashgen.ir.types import ScalarType

_I, _J = index("i"), index("j")
# Where a pair's row and column lie, from the block's origin on: each a sum of two floats that code has at hand.
AHEAD = {"row_near": "r.near", "row_step": "r.step", "column_near": "c.near", "column_step": "c.step"}
ROW = tuple(Apply(ScalarType.FLOAT, op=op, args=(_I, _J)) for op in ("row_near", "row_step"))
COLUMN = tuple(Apply(ScalarType.FLOAT, op=op, args=(_I, _J)) for op in ("column_near", "column_step"))


def split_score(score: Expr) -> tuple[Expr, Expr | None]:
    """Those terms of a sum that are a head's factor times i - j lose their part of the row, which comes second."""
    pairs: list[tuple[bool, Expr]] = []
    rows: list[tuple[bool, Expr]] = []
    for added, term in _terms(score, added=True):
        factor, distance = _factor_and_distance(term)
        if distance is None:
            pairs.append((added, term))
            continue
        rows_added = added == (distance == _I)
        rows.append((rows_added, _times(factor, ROW)))
        pairs.append((not rows_added, _times(factor, COLUMN)))
    return (_sum(pairs), _sum(rows)) if rows else (score, None)


def _terms(expr: Expr, *, added: bool) -> Iterator[tuple[bool, Expr]]:
    """The terms of a sum, each added or subtracted."""
    match expr:
        case Apply(op="add" | "sub" as op, args=(first, second)) if expr.type is ScalarType.FLOAT:
            yield from _terms(first, added=added)
            yield from _terms(second, added=added == (op == "add"))
        case _:
            yield added, expr


def _factor_and_distance(term: Expr) -> tuple[Expr | None, Expr | None]:
    """What a distance is multiplied by, and where it begins: at i for i - j; None where a term is none."""
    match term:
        case Apply(op="mul", args=(factor, other)) if level_of(factor) in (Level.LAUNCH, Level.HEAD):
            more, start = _factor_and_distance(other)
            return factor if more is None else apply("mul", factor, more), start
        case Apply(op="to_float", args=(Apply(op="sub", args=(first, second)),)) if {first, second} == {_I, _J}:
            return None, first
    return None, None


def _times(factor: Expr | None, position: tuple[Expr, ...]) -> Expr:
    """Each part by itself: what is constant over a tile stays so, and the rest is one fused operation."""
    near, step = position if factor is None else tuple(apply("mul", factor, part) for part in position)
    return apply("add", near, step)


def _sum(terms: list[tuple[bool, Expr]]) -> Expr:
    """One of the added terms comes first, so that nothing is negated without need."""
    terms = sorted(terms, key=lambda each: not each[0])
    added, total = terms[0]
    if not added:
        total = apply("neg", total)
    for added, term in terms[1:]:
        total = apply("add" if added else "sub", total, term)
    return total
