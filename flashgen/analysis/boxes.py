"""Classifies many boxes of one mask at a time, as arrays: the steps of ``tiles.py``, taken for all of them at once.

Stage: analyse and after (planner). In: the condition under which a pair is kept, and ``Boxes``. Out: a code for each
box. Sums of forms are arithmetic on arrays; what any other operator makes of ranges is asked of the operator table,
once for each combination of ranges that occurs. Tiles that ranges leave open are cut as ``pieces.py`` cuts one. A box
is of the class that ``classify`` finds for its tile, or ``classify_in_pieces``: tests compare.
"""

from __future__ import annotations

import functools
import struct
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import count

import numpy as np
from numpy.typing import NDArray

from flashgen.analysis.constraints import (
    COLUMN,
    COLUMN_LESS_ROW,
    ROW,
    ROW_LESS_COLUMN,
    Form,
    Limit,
    Term,
    block_of,
)
from flashgen.analysis.pieces import MOST_DEPTH, MOST_PIECES, MOST_POSITIONS, Cut, block_sizes, cut, is_cut
from flashgen.analysis.ranging import LoadRange, plain_range
from flashgen.analysis.tiles import Tile, TileClass, kept_of, tile_ranges
from flashgen.ir.expr import Apply, Expr, Load, index, walk
from flashgen.ir.interval import INT_MAX, INT_MIN, BoolRange, FloatRange, IntRange, Range, full
from flashgen.ir.operators import OPERATORS
from flashgen.ir.types import ScalarType

Ints = NDArray[np.int64]
Flags = NDArray[np.bool_]
_Row = tuple[float, ...]
_Piece = tuple[int, int, int, int, int]  # the ends of i and of j, and how often it was cut

EMPTY, PARTIAL, FULL = range(3)
CODES: Mapping[int, TileClass] = {EMPTY: TileClass.EMPTY, PARTIAL: TileClass.PARTIAL, FULL: TileClass.FULL}
_MOST_REMEMBERED = 1 << 16  # combinations of ranges, of one operator
_VARYING = {name: index(name) for name in ("b", "h", "hkv", "i", "j")}


@dataclass(frozen=True, eq=False)
class Boxes:
    """Boxes of pairs, one batch element and head each; all arrays have one length, ends belong to the box.

    ``sizes`` and ``params`` are those of ``Tile``, and the same for all.
    """

    b: Ints
    h: Ints
    first_i: Ints
    last_i: Ints
    first_j: Ints
    last_j: Ints
    sizes: Mapping[str, int]
    params: Mapping[str, bool | int | float]

    def take(self, chosen: Flags) -> Boxes:
        """Some of them."""
        return Boxes(
            b=self.b[chosen],
            h=self.h[chosen],
            first_i=self.first_i[chosen],
            last_i=self.last_i[chosen],
            first_j=self.first_j[chosen],
            last_j=self.last_j[chosen],
            sizes=self.sizes,
            params=self.params,
        )


@dataclass(frozen=True, eq=False)
class _Ranges:
    """A range for each box: ends of ints; whether false and true may be, of bools; ends and NaN, of floats."""

    type: ScalarType
    columns: tuple[NDArray[np.generic], ...]

    @property
    def keys(self) -> tuple[NDArray[np.generic], ...]:
        """The columns, floats as their bits: 0.0 and -0.0 are two keys."""
        return tuple(each.view(np.int64) if each.dtype == np.float64 else each for each in self.columns)

    def take(self, chosen: Flags) -> _Ranges:
        return _Ranges(self.type, tuple(column[chosen] for column in self.columns))


_Known = dict[Expr, "Range | _Ranges"]


def classify_boxes(keep: Expr, boxes: Boxes, loads: LoadRange | None = None) -> NDArray[np.int8]:
    """EMPTY, PARTIAL or FULL for each box; without ``loads`` nothing is known of captured tensors."""
    kept = kept_of(keep)
    whole, boxes_count = _whole(boxes), len(boxes.b)
    if loads is not None:
        _observe(keep, whole, loads)
    found = np.full(boxes_count, EMPTY, np.int8)
    holds = _any_possible(kept.kept, whole, boxes_count)
    found[holds] = FULL
    drops = _any_possible(kept.dropped, _taken(whole, holds), int(holds.sum()))
    found[np.flatnonzero(holds)[drops]] = PARTIAL
    return found


def classify_tiles(
    keep: Expr, boxes: Boxes, are_tiles: Flags | None = None, most: int | None = None
) -> NDArray[np.int8]:
    """The same where boxes are single tiles: what ranges leave open is cut into pieces, as ``pieces.py`` has it.

    ``are_tiles`` says which boxes are; None: all. With ``most`` it is an estimate: no more tiles are cut, evenly
    spread, and stand for those after them.
    """
    found = classify_boxes(keep, boxes)
    extents = (boxes.last_i - boxes.first_i, boxes.last_j - boxes.first_j)
    left_open = (found == PARTIAL) & (extents[0] < MOST_POSITIONS) & (extents[1] < MOST_POSITIONS)
    left_open &= True if are_tiles is None else are_tiles
    if is_cut(keep) and left_open.any():
        places = np.flatnonzero(left_open)
        step = 1 if most is None else -(-len(places) // most)
        cut_ones = np.zeros(len(found), np.bool_)
        cut_ones[places[::step]] = True
        found[places] = np.repeat(_in_pieces(keep, boxes.take(cut_ones)), step)[: len(places)]
    return found


def _in_pieces(keep: Expr, boxes: Boxes) -> NDArray[np.int8]:
    """``classify_in_pieces`` of every box; the next pieces of each are classified at once with those of the others.

    Few at first, as most boxes show soon that they are mixed. In whichever order pieces are looked at, a class comes
    out where all that are settled agree, none stays open, and no more than ``MOST_PIECES`` were looked at.
    """
    found = np.full(len(boxes.b), PARTIAL, np.int8)
    row_sizes, column_sizes = block_sizes(keep, ROW), block_sizes(keep, COLUMN)
    ends = zip(*(each.tolist() for each in (boxes.first_i, boxes.last_i, boxes.first_j, boxes.last_j)), strict=True)
    open_ = {number: [(i0, i1, j0, j1, 0)] for number, (i0, i1, j0, j1) in enumerate(ends)}
    asked, seen = [0] * len(found), [-1] * len(found)
    for turn in count():
        if not open_:
            return found
        at, pieces = [], []
        for number, stack in open_.items():
            some = min(len(stack), 1 << turn // 3)
            at += [number] * some
            pieces += stack[-some:]
            del stack[-some:]
            asked[number] += some
        i0, i1, j0, j1, _ = np.array(pieces).T
        asked_for = Boxes(boxes.b[at], boxes.h[at], i0, i1, j0, j1, boxes.sizes, boxes.params)
        for number, piece, code in zip(at, pieces, classify_boxes(keep, asked_for).tolist(), strict=True):
            if number not in open_:
                continue
            parts = _parts(piece, row_sizes, column_sizes) if code == PARTIAL else None
            if parts is not None:
                open_[number] += reversed(parts)
            elif code == PARTIAL or seen[number] not in (-1, code):
                del open_[number]
            else:
                seen[number] = code
        for number in [number for number, stack in open_.items() if not stack or asked[number] >= MOST_PIECES]:
            if not open_.pop(number) and asked[number] <= MOST_PIECES:
                found[number] = seen[number]
    return found


def _parts(piece: _Piece, row_sizes: tuple[int, ...], column_sizes: tuple[int, ...]) -> tuple[_Piece, _Piece] | None:
    i0, i1, j0, j1, depth = piece
    rows, columns = _cut(i0, i1, row_sizes), _cut(j0, j1, column_sizes)
    if depth >= MOST_DEPTH or max(rows.block, columns.block) == 0:
        return None
    if (rows.block, i1 - i0) >= (columns.block, j1 - j0):
        return (i0, rows.at - 1, j0, j1, depth + 1), (rows.at, i1, j0, j1, depth + 1)
    return (i0, i1, j0, columns.at - 1, depth + 1), (i0, i1, columns.at, j1, depth + 1)


@functools.lru_cache(maxsize=1 << 14)
def _cut(first: int, last: int, sizes: tuple[int, ...]) -> Cut:
    return cut(IntRange(first, last), sizes)


def _whole(boxes: Boxes) -> _Known:
    """What is known of every symbol."""
    nowhere = IntRange(0, 0)
    known: _Known = dict(tile_ranges(Tile(nowhere, nowhere, nowhere, nowhere, boxes.sizes, boxes.params)))
    group = max(boxes.sizes.get("H", 1) // max(boxes.sizes.get("Hkv", 1), 1), 1)
    ends = {
        "b": (boxes.b, boxes.b),
        "h": (boxes.h, boxes.h),
        "hkv": (boxes.h // group, boxes.h // group),
        "i": (boxes.first_i, boxes.last_i),
        "j": (boxes.first_j, boxes.last_j),
    }
    return known | {_VARYING[name]: _Ranges(ScalarType.INT, columns) for name, columns in ends.items()}


def _observe(keep: Expr, whole: _Known, loads: LoadRange) -> None:
    """Makes the ranges of what is loaded known, inner loads before those that they index."""
    for node in sorted((each for each in walk(keep) if isinstance(each, Load)), key=lambda load: load.depth):
        indices = [_range(each, whole) for each in node.indices]
        whole[node] = _by_rows(node.type, indices, functools.partial(_loaded, node, loads))


def _loaded(load: Load, loads: LoadRange, *indices: Range) -> Range:
    return loads(load, indices)


def _taken(known: Mapping[Expr, Range | _Ranges], chosen: Flags) -> _Known:
    return {expr: found.take(chosen) if isinstance(found, _Ranges) else found for expr, found in known.items()}


def _any_possible(terms: Iterable[Term], whole: _Known, count: int) -> Flags:
    """Which boxes may hold a pair that satisfies one of the terms."""
    found = np.zeros(count, np.bool_)
    for term in terms:
        open_ = ~found
        if not open_.any():
            break
        left = whole if open_.all() else _taken(whole, open_)
        found[open_] = _possible(term, left, int(open_.sum()))
    return found


def _possible(term: Term, whole: _Known, count: int) -> Flags:
    """``_is_possible`` of ``tiles.py`` for every box; those that a step excludes are left out of the next."""
    box, alive = _Left(whole), np.arange(count)

    def keep_only(chosen: Flags) -> None:
        nonlocal alive
        if not chosen.all():
            alive = alive[chosen]
            box.take(chosen)

    for number, bound in enumerate(term.bounds):
        lo, hi = box.measure(bound.form)
        for each in bound.least:
            limit, holds = box.limit(each)
            lo = np.where(holds, np.maximum(lo, limit[0]), lo)
        for each in bound.most:
            limit, holds = box.limit(each)
            hi = np.where(holds, np.minimum(hi, limit[1]), hi)
        possible = np.broadcast_to(lo <= hi, alive.shape)
        lo, hi = (np.broadcast_to(each, alive.shape)[possible] for each in (lo, hi))
        keep_only(possible)
        if bound.form.is_distance:
            box.set(ROW_LESS_COLUMN, lo, hi)
            box.set(COLUMN_LESS_ROW, -hi, -lo)
        if _tightens(term, number):
            keep_only(box.restrict(bound.form, lo, hi, len(alive)))
    for unequal in term.unequal:
        limit, holds = box.limit(unequal.limit)
        lo, hi = box.measure(unequal.form)
        excluded = holds & (limit[0] == limit[1]) & (lo == limit[0]) & (hi == limit[1])
        keep_only(~np.broadcast_to(excluded, alive.shape))
    for each_truth in term.truths:
        keep_only(np.broadcast_to(_may_be(box.range(each_truth.condition), each_truth.value), alive.shape))
    found = np.zeros(count, np.bool_)
    found[alive] = True
    return found


@functools.lru_cache(maxsize=1024)
def _tightens(term: Term, number: int) -> bool:
    return term.tightens(number)


class _Left:
    """What a term leaves of the boxes so far. Loads are over whole boxes, as kernels observe them."""

    def __init__(self, whole: Mapping[Expr, Range | _Ranges]) -> None:
        self._whole: _Known = dict(whole)
        self._set: _Known = dict(whole)  # of i and j what is left
        self._known: _Known = dict(whole)  # and what follows from it

    def take(self, chosen: Flags) -> None:
        """Leaves out the other boxes."""
        self._whole, self._set, self._known = (_taken(each, chosen) for each in (self._whole, self._set, self._known))

    def range(self, expr: Expr) -> Range | _Ranges:
        """The range of an expression over what is left of each box."""
        return _range(expr, self._known)

    def ints(self, expr: Expr, *, whole: bool = False) -> tuple[Ints, Ints]:
        """The ends of an int, of the whole box where that is asked for."""
        return _ends(_range(expr, self._whole if whole else self._known))

    def set(self, expr: Expr, lo: Ints, hi: Ints) -> None:
        """Makes a range known."""
        self._set[expr] = _Ranges(ScalarType.INT, (lo, hi))
        self._known = dict(self._set)

    def measure(self, form: Form, *, whole: bool = False) -> tuple[Ints, Ints]:
        """The ends of a form."""
        return _total([_scaled(self.ints(atom, whole=whole), c) for atom, c in form.terms])

    def limit(self, limit: Limit) -> tuple[tuple[Ints, Ints], Flags]:
        """The ends of a limit, and whether it holds: not where a side of its comparison may wrap."""
        holds = np.asarray(True)
        for side in limit.sides:
            lo, hi = _total([self.measure(side.form, whole=True), self.offset(side.offset, whole=True)])
            holds = holds & (lo >= INT_MIN) & (hi <= INT_MAX)
        return self.offset(limit), holds

    def offset(self, limit: Limit, *, whole: bool = False) -> tuple[Ints, Ints]:
        """The ends of its value."""
        constant = np.asarray(limit.constant)
        points = [_scaled(self.ints(point, whole=whole), c) for point, c in limit.points]
        return _total([(constant, constant), *points])

    def restrict(self, form: Form, lo: Ints, hi: Ints, count: int) -> Flags:
        """Leaves of i and j what the form's range lets, each atom what the others leave to it; whether any is left."""
        left = np.ones(count, np.bool_)
        for number, (atom, c) in enumerate(form.terms):
            inner = block_of(atom)
            if inner is None or abs(c) != 1:
                continue
            others = [_scaled(self.ints(other), k) for n, (other, k) in enumerate(form.terms) if n != number]
            low, high = _scaled(_total([(lo, hi), _scaled(_total(others), -1)]), c)
            position, block = inner
            first, last = self.ints(position)
            first, last = np.maximum(first, low * block), np.minimum(last, high * block + block - 1)
            left &= first <= last
            # What is not left anywhere is left out after this; until then it has to stay a range.
            self.set(position, np.minimum(first, last), last)
        return left


# Ranges of expressions ------------------------------------------------------------------------------------------------


def _range(expr: Expr, known: _Known) -> Range | _Ranges:
    found = known.get(expr)
    if found is None:
        found = known[expr] = _evaluated(expr, known)
    return found


def _evaluated(expr: Expr, known: _Known) -> Range | _Ranges:
    if isinstance(expr, Load):
        return full(expr.type)
    children = [_range(each, known) for each in expr.children]
    if isinstance(expr, Apply):
        return _by_rows(expr.type, children, expr.op)
    return plain_range(expr, {}, None, ())


def _by_rows(
    scalar: ScalarType, children: Sequence[Range | _Ranges], rule: str | Callable[..., Range]
) -> Range | _Ranges:
    """What an operator of the table, or a function, makes of ranges, box by box where they vary."""
    arguments = tuple(each.type if isinstance(each, _Ranges) else each for each in children)
    rows = _rule(rule, arguments, repr(arguments)) if isinstance(rule, str) else _Rule(rule, arguments)
    varying = [column.tolist() for each in children if isinstance(each, _Ranges) for column in each.keys]
    if not varying:
        return rows.interval(*children)
    results = [rows[row] for row in zip(*varying, strict=True)]
    columns = zip(*results, strict=True) if results else ((),) * _MAKERS[scalar][1]
    dtype = np.float64 if scalar is ScalarType.FLOAT else np.int64
    return _Ranges(scalar, tuple(np.array(column, dtype) for column in columns))


class _Rule(dict[_Row, _Row]):
    """What a rule makes of ranges, remembered; arguments are types where they vary, else ranges."""

    def __init__(self, interval: Callable[..., Range], arguments: Sequence[ScalarType | Range]) -> None:
        super().__init__()
        self.interval, self._arguments = interval, arguments

    def __missing__(self, row: _Row) -> _Row:
        place, ranges = 0, []
        for each in self._arguments:
            if isinstance(each, ScalarType):
                make, width = _MAKERS[each]
                ranges.append(make(*row[place : place + width]))
                place += width
            else:
                ranges.append(each)
        if len(self) >= _MOST_REMEMBERED:
            self.clear()
        self[row] = found = _row(self.interval(*ranges))
        return found


@functools.lru_cache(maxsize=256)
def _rule(op: str, arguments: tuple[ScalarType | Range, ...], spelling: str) -> _Rule:
    """An operator's, with what it was asked before; ``spelling`` of the arguments tells -0.0 from 0.0."""
    assert spelling
    return _Rule(OPERATORS[op].interval, arguments)


def _float_range(lo: int, hi: int, may_be_nan: int) -> FloatRange:
    """From the bits of the ends."""
    first, last = struct.unpack("dd", struct.pack("qq", lo, hi))
    return FloatRange(first, last, bool(may_be_nan))


_MAKERS: Mapping[ScalarType, tuple[Callable[..., Range], int]] = {
    ScalarType.INT: (IntRange, 2),
    ScalarType.BOOL: (BoolRange, 2),
    ScalarType.FLOAT: (_float_range, 3),
}


def _row(found: Range) -> _Row:
    match found:
        case BoolRange():
            return found.may_be_false, found.may_be_true
        case FloatRange():
            return found.lo, found.hi, found.may_be_nan
    return found.lo, found.hi


def _ends(found: Range | _Ranges) -> tuple[Ints, Ints]:
    if isinstance(found, _Ranges):
        lo, hi = found.columns
        return lo.astype(np.int64, copy=False), hi.astype(np.int64, copy=False)
    assert isinstance(found, IntRange)
    return np.asarray(found.lo), np.asarray(found.hi)


def _may_be(found: Range | _Ranges, value: bool) -> Flags:
    if isinstance(found, _Ranges):
        return found.columns[int(value)].astype(np.bool_)
    assert isinstance(found, BoolRange)
    return np.asarray(found.may_be_true if value else found.may_be_false)


def _scaled(ends: tuple[Ints, Ints], factor: int) -> tuple[Ints, Ints]:
    lo, hi = factor * ends[0], factor * ends[1]
    return (lo, hi) if factor >= 0 else (hi, lo)


def _total(parts: Sequence[tuple[Ints, Ints]]) -> tuple[Ints, Ints]:
    zero = np.asarray(0)
    return sum((lo for lo, _ in parts), start=zero), sum((hi for _, hi in parts), start=zero)
