"""Tiles that ranges leave open are cut into pieces until ranges settle each piece.

Stage: analyse and after. In: a mask over positions alone, and the ranges of a tile. Out: whether ranges decide such a
mask exactly (``is_decided``), and where the tile is cut: at the blocks of the mask, then at multiples of powers of two.
A tile that holds parts of several blocks, or several rows of an image, has the class that its parts have. ``tiles.py``
follows the cuts; so do GPU kernels (``templates/include/flashgen/pieces.cuh``), which otherwise had to load the tile to
check its pairs. The number of cuts is limited; a tile that is still open counts as PARTIAL. Masks that read captured
tensors are not cut, as their values are known for sixteen rows or columns at a time.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

from flashgen.analysis.constraints import (
    COLUMN,
    COLUMN_LESS_ROW,
    MOST_COEFFICIENT,
    ROW,
    ROW_LESS_COLUMN,
    Bound,
    Form,
    Limit,
    Term,
    Truth,
    Unequal,
    block_of,
    is_point,
)
from flashgen.analysis.kept import kept_terms
from flashgen.analysis.levels import Level, level_of
from flashgen.ir.expr import Apply, Expr, Literal, Load, Symbol, index_set, walk
from flashgen.ir.interval import IntRange

MOST_PIECES = 64  # of a tile, with those that were cut
MOST_POSITIONS = 256  # of a tile, each way: what is larger are many tiles at once, which nobody has to settle
MOST_BLOCK_SIZES = 3  # by which rows, or columns, are cut
MOST_DEPTH = 31


@functools.lru_cache(maxsize=256)
def stays_open(keep: Expr) -> bool:
    """Whether a mask over positions alone may leave tiles open that hold no pair, or only kept ones."""
    if _reads_tensors(keep):
        return False
    return not all(is_decided(term) for value in (True, False) for term in kept_terms(keep, value))


@functools.lru_cache(maxsize=256)
def is_cut(keep: Expr) -> bool:
    """Whether open tiles are cut: for masks with drawn blocks (by a hash, by bits), whose ranges leave many tiles open.

    Comparisons of positions leave few open. On an H200, cutting these took as long as half a forward pass.
    """
    return stays_open(keep) and any(term.truths for term in kept_terms(keep))


def is_irregular(keep: Expr) -> bool:
    """Whether a mask over positions alone may keep many runs of keys a row, as no bound on a monotone function does."""
    if _reads_tensors(keep):
        return False
    return any(
        term.truths
        or term.unequal
        or not all(_has_no_gaps(atom) for bound in term.bounds for atom, _ in bound.form.terms)
        for term in kept_terms(keep)
    )


def _reads_tensors(keep: Expr) -> bool:
    return any(isinstance(node, Load) for node in walk(keep))


@functools.lru_cache(maxsize=256)
def block_sizes(keep: Expr, axis: Symbol) -> tuple[int, ...]:
    """The sizes of the blocks that the mask makes of an axis, the largest first: c of i // c and of (i + 1) % c."""
    found = {
        int(c.value)
        for node in walk(keep)
        if isinstance(node, Apply) and node.op in ("floordiv", "mod")
        for x, c in [node.args]
        if isinstance(c, Literal) and 1 < c.value < MOST_COEFFICIENT and _is_moved(x, axis)
    }
    return tuple(sorted(found, reverse=True)[:MOST_BLOCK_SIZES])


def _is_moved(expr: Expr, axis: Symbol) -> bool:
    """Whether an expression is the position plus or minus a constant."""
    match expr:
        case Apply(op="add" | "sub", args=(x, Literal())):
            return x == axis
    return expr == axis


# Cuts -----------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Cut:
    """``at``: the first position of the second part; ``block``: the blocks' size, 1 without blocks, 0 without a cut."""

    at: int
    block: int


def halves(
    i: IntRange, j: IntRange, row_sizes: tuple[int, ...], column_sizes: tuple[int, ...]
) -> tuple[tuple[IntRange, IntRange], tuple[IntRange, IntRange]] | None:
    """Rows and columns cut in two, first between larger blocks, then across the longer side; None for a single pair."""
    rows, columns = cut(i, row_sizes), cut(j, column_sizes)
    if max(rows.block, columns.block) == 0:
        return None
    if (rows.block, i.hi - i.lo) >= (columns.block, j.hi - j.lo):
        return (IntRange(i.lo, rows.at - 1), j), (IntRange(rows.at, i.hi), j)
    return (i, IntRange(j.lo, columns.at - 1)), (i, IntRange(columns.at, j.hi))


@functools.lru_cache(maxsize=1 << 14)
def cut(x: IntRange, sizes: tuple[int, ...]) -> Cut:
    """Where a range is cut: between the largest blocks that it has parts of, else at a multiple of a power of two."""
    middle = x.lo + (x.hi - x.lo + 1) // 2
    for size in sizes:
        at = (middle + size // 2) // size * size
        if x.lo < at <= x.hi:
            return Cut(at, size)
    if x.lo == x.hi:
        return Cut(x.lo, 0)
    bit = (x.lo ^ x.hi).bit_length() - 1
    return Cut(x.hi >> bit << bit, 1)


# What ranges decide exactly -------------------------------------------------------------------------------------------


def is_decided(term: Term) -> bool:
    """Whether ranges decide a tile exactly: the mask bounds i, j, one difference, and one expression more.

    Bounds on i, j and i - j (or the difference of blocks of one size) leave each of them every value between its ends.
    The other expression has to depend on one of them alone; without a difference, rows and columns are independent.
    """
    differences = [bound for bound in term.bounds if _is_difference(bound.form)]
    others: list[Bound | Unequal | Truth] = [
        each for each in term.bounds if each.form.axis is None and not _is_difference(each.form)
    ]
    others += [*term.unequal, *term.truths]
    if len(differences) > 1 or len(others) > 1:
        return False
    return all(_is_exact(each) and (not differences or _follows(each, differences[0].form)) for each in others)


def _is_difference(form: Form) -> bool:
    """i - j, or i // c - j // c."""
    if len(form.terms) != 2:
        return False
    (row, one), (column, other) = form.terms
    rows, columns = block_of(row), block_of(column)
    return (one, other) == (1, -1) and rows is not None and columns is not None and rows[1] == columns[1]


def _is_exact(part: Bound | Unequal | Truth) -> bool:
    """Whether the condition holds somewhere in a box whenever its range says so."""
    match part:
        case Unequal(form=form):
            return all(_has_its_ends(atom) for atom, _ in form.terms)
        case Bound(form=form, least=least, most=most) if not least or not most:
            return all(_has_its_ends(atom) for atom, _ in form.terms)
        case Bound(form=form, least=least, most=most):
            steps = max(abs(c) for _, c in form.terms)
            return all(_has_no_gaps(atom) for atom, _ in form.terms) and _width(least, most) >= steps
        case Truth(condition=Apply(op="eq" | "ne", args=(Apply(op="mod", args=(x, Literal())), Literal(value=0)))):
            return _is_sum_without_gaps(x)
    return False


def _follows(part: Bound | Unequal | Truth, difference: Form) -> bool:
    """Whether an expression depends on i alone, on j alone, or on i - j where that is the bounded difference."""
    exprs = [part.condition] if isinstance(part, Truth) else [atom for atom, _ in part.form.terms]
    if len(frozenset[str]().union(*(index_set(each) for each in exprs)) & {"i", "j"}) == 1:
        return True
    return difference.is_distance and isinstance(part, Truth) and _reads_through_distance(part.condition)


def _reads_through_distance(expr: Expr) -> bool:
    if expr in (ROW_LESS_COLUMN, COLUMN_LESS_ROW) or is_point(expr):
        return True
    return isinstance(expr, Apply) and all(_reads_through_distance(each) for each in expr.args)


def _width(least: tuple[Limit, ...], most: tuple[Limit, ...]) -> int:
    """The number of values between the ends; 0 where they are not known now."""
    if not all(limit.is_number for limit in (*least, *most)):
        return 0
    return min(limit.constant for limit in most) - max(limit.constant for limit in least) + 1


def _has_its_ends(atom: Expr) -> bool:
    """Whether an atom takes both ends of its range."""
    match atom:
        case Apply(op="mod", args=(x, Literal())):
            return _is_sum_without_gaps(x)
    return _has_no_gaps(atom)


def _has_no_gaps(atom: Expr) -> bool:
    """Whether an expression takes every value between its ends while i, or j, takes every value of a range."""
    match atom:
        case Symbol():
            return atom in (ROW, COLUMN)
        case Apply(op="floordiv", args=(x, c)) if is_point(c):  # it rises, falls or stays, by 1 at most
            return _has_no_gaps(x)
        case Apply(op="neg", args=(x,)):
            return _has_no_gaps(x)
        case Apply(op="add" | "sub" | "min" | "max", args=(x, y)):
            return (_has_no_gaps(x) and is_point(y)) or (is_point(x) and _has_no_gaps(y))
        case Apply(op="clamp", args=(x, lo, hi)):
            return _has_no_gaps(x) and is_point(lo) and is_point(hi)
    return False


def _is_sum_without_gaps(expr: Expr) -> bool:
    """Whether a sum or difference of a term of the row and one of the column takes every value between its ends."""
    if level_of(expr) is not Level.PAIR:
        return _has_no_gaps(expr)
    match expr:
        case Apply(op="add" | "sub", args=(x, y)):
            if is_point(y) or is_point(x):
                return _is_sum_without_gaps(x if is_point(y) else y)
            return {level_of(x), level_of(y)} == {Level.ROW, Level.COLUMN} and _has_no_gaps(x) and _has_no_gaps(y)
    return False
