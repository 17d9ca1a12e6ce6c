"""Classifies tiles of query-key pairs: all kept, none kept, or some.

Stage: analyse and after (planner, ``flashgen show``). In: the condition under which a pair is kept, and the ranges of a
tile's coordinates. Out: a ``TileClass``; not known is PARTIAL. Generated kernels take the same steps, which
``emit/ranges.py`` prints over ``templates/cpu/primitives/ranges.h``, and come to the same classes: a test compares.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import numpy as np

from flashgen.analysis.constraints import COLUMN_LESS_ROW, ROW_LESS_COLUMN, Form, Limit, Term, block_of
from flashgen.analysis.kept import kept_pairs
from flashgen.analysis.levels import Level, level_of
from flashgen.analysis.ranging import LoadRange, plain_range
from flashgen.analysis.variant import over_positions
from flashgen.ir.build import apply
from flashgen.ir.expr import Expr, Load, Symbol, SymbolKind, index, size
from flashgen.ir.interval import FULL_FLOAT, INT_MAX, INT_MIN, BoolRange, FloatRange, IntRange, Range, full, truth
from flashgen.ir.interval_float import outward, point
from flashgen.ir.spec import Layout
from flashgen.ir.types import ScalarType

MOST_ELEMENTS = 4  # of a dimension, of elements that a pair reads; ranges.h says the same


class TileClass(Enum):
    """FULL: every pair is kept. EMPTY: none is. PARTIAL: some are, or it is not known."""

    FULL = "full"
    EMPTY = "empty"
    PARTIAL = "partial"


@dataclass(frozen=True)
class Tile:
    """Closed ranges of global coordinates, the sizes (B H Hkv Nq Nk), and the params that are known."""

    b: IntRange
    h: IntRange
    i: IntRange
    j: IntRange
    sizes: Mapping[str, int]
    params: Mapping[str, bool | int | float] = field(default_factory=dict)


def classify(keep: Expr, tile: Tile, layout: Layout | None = None, loads: LoadRange | None = None) -> TileClass:
    """The class of a tile under ``keep`` and, where one is given, a layout that ``keep`` does not contain yet."""
    kept = kept_of(keep if layout is None else apply("and", keep, over_positions(layout)))
    ranges = tile_ranges(tile)
    if not any(_is_possible(term, ranges, loads) for term in kept.kept):
        return TileClass.EMPTY
    dropped = any(_is_possible(term, ranges, loads) for term in kept.dropped)
    return TileClass.PARTIAL if dropped else TileClass.FULL


# A tile takes less time than its mask takes to be read; callers classify many tiles of a few masks.
kept_of = functools.lru_cache(maxsize=16)(kept_pairs)


_SIZES = {name: size(name) for name in ("B", "H", "Hkv", "Nq", "Nk", "D", "Dv")}
_INDICES = {name: index(name) for name in ("b", "h", "i", "j", "hkv")}


def tile_ranges(tile: Tile) -> dict[Expr, Range]:
    """What is known of every symbol on a tile."""
    ranges: dict[Expr, Range] = {_SIZES[name]: IntRange(value, value) for name, value in tile.sizes.items()}
    for name, r in (("b", tile.b), ("h", tile.h), ("i", tile.i), ("j", tile.j)):
        ranges[_INDICES[name]] = r
    group = max(tile.sizes.get("H", 1) // max(tile.sizes.get("Hkv", 1), 1), 1)
    ranges[_INDICES["hkv"]] = IntRange(tile.h.lo // group, tile.h.hi // group)
    for name, value in tile.params.items():
        # Symbols are equal by name and kind; the type is the value's.
        ranges[Symbol(ScalarType.FLOAT, name=name, kind=SymbolKind.PARAM)] = _constant(value)
    return ranges


def _constant(value: bool | int | float) -> Range:
    if isinstance(value, bool):
        return truth(value)
    return IntRange(value, value) if isinstance(value, int) else point(value)


# The steps of a term, as emit/ranges.py prints them ------------------------------------------------------------------


class _Box:
    """What a term leaves of a tile so far. ``loads`` are over the whole tile, as kernels observe them."""

    def __init__(self, whole: Mapping[Expr, Range], loads: LoadRange | None) -> None:
        self._whole, self._loads = whole, loads
        self._known: dict[Expr, Range] = dict(whole)  # of i and j what is left

    def range(self, expr: Expr) -> Range:
        """The range of an expression over what is left."""
        found = self._known.get(expr)
        if found is None:
            if isinstance(expr, Load):
                whole = _Box(self._whole, self._loads)
                found = plain_range(expr, self._whole, self._loads, tuple(whole.range(each) for each in expr.indices))
            else:
                found = plain_range(expr, self._known, None, tuple(self.range(each) for each in expr.children))
        return found

    def ints(self, expr: Expr) -> tuple[int, int]:
        """The ends of an int."""
        found = self.range(expr)
        assert isinstance(found, IntRange)
        return found.lo, found.hi

    def set(self, expr: Expr, lo: int, hi: int) -> None:
        """Makes a range known."""
        self._known[expr] = IntRange(lo, hi)

    def measure(self, form: Form) -> tuple[int, int]:
        """The ends of a form."""
        return _total([_scaled(self.ints(atom), c) for atom, c in form.terms])

    def limit(self, limit: Limit) -> tuple[int, int] | None:
        """The ends of a limit; None where a side of its comparison may wrap."""
        for side in limit.sides:
            lo, hi = _total([_Box(self._whole, self._loads).measure(side.form), self.offset(side.offset)])
            if lo < INT_MIN or hi > INT_MAX:
                return None
        return self.offset(limit)

    def offset(self, limit: Limit) -> tuple[int, int]:
        """The ends of its value."""
        if not limit.points:
            return limit.constant, limit.constant
        points = [_scaled(self.ints(point), c) for point, c in limit.points]
        return _total([(limit.constant, limit.constant), *points])

    def restrict(self, form: Form, lo: int, hi: int) -> bool:
        """Leaves of i and j what the form's range lets, each atom what the others leave to it; whether any is left."""
        for number, (atom, c) in enumerate(form.terms):
            inner = block_of(atom)
            if inner is None or abs(c) != 1:
                continue
            others = [_scaled(self.ints(other), k) for n, (other, k) in enumerate(form.terms) if n != number]
            low, high = _scaled(_total([(lo, hi), _scaled(_total(others), -1)]), c)
            position, block = inner
            first, last = self.ints(position)
            first, last = max(first, low * block), min(last, high * block + block - 1)
            if first > last:
                return False
            self.set(position, first, last)
        return True


def _is_possible(term: Term, ranges: Mapping[Expr, Range], loads: LoadRange | None) -> bool:
    """Whether a pair of the tile may satisfy the term."""
    box = _Box(ranges, loads)
    for number, bound in enumerate(term.bounds):
        lo, hi = box.measure(bound.form)
        for each in bound.least:
            if (limit := box.limit(each)) is not None:
                lo = max(lo, limit[0])
        for each in bound.most:
            if (limit := box.limit(each)) is not None:
                hi = min(hi, limit[1])
        if lo > hi:
            return False
        if bound.form.is_distance:
            box.set(ROW_LESS_COLUMN, lo, hi)
            box.set(COLUMN_LESS_ROW, -hi, -lo)
        if term.tightens(number) and not box.restrict(bound.form, lo, hi):
            return False
    for unequal in term.unequal:
        limit = box.limit(unequal.limit)
        if limit is not None and limit[0] == limit[1] and box.measure(unequal.form) == limit:
            return False
    return all(_may_be(box.range(each.condition), each.value) for each in term.truths)


def _may_be(found: Range, value: bool) -> bool:
    assert isinstance(found, BoolRange)
    return found.may_be_true if value else found.may_be_false


def _scaled(ends: tuple[int, int], factor: int) -> tuple[int, int]:
    return min(factor * ends[0], factor * ends[1]), max(factor * ends[0], factor * ends[1])


def _total(parts: Sequence[tuple[int, int]]) -> tuple[int, int]:
    return sum([lo for lo, _ in parts]), sum([hi for _, hi in parts])


def loads_of(tensors: Mapping[str, Any]) -> LoadRange:
    """Ranges of loads from NumPy arrays in memory: the extremes of the box that the indices span, clamped."""

    def rule(load: Load, indices: tuple[Range, ...]) -> Range:
        array = tensors.get(load.tensor)
        if array is None or array.size == 0:
            return full(load.type)
        box = array[tuple(_slice(r, extent) for r, extent in zip(indices, array.shape, strict=True))]
        if load.type is ScalarType.BOOL:
            return BoolRange(not bool(box.all()), bool(box.any()))
        if load.type is ScalarType.INT:
            return IntRange(int(box.min()), int(box.max()))
        numbers = box[~np.isnan(box)]
        if numbers.size == 0:
            return FULL_FLOAT
        found: FloatRange = outward(float(numbers.min()), float(numbers.max()), numbers.size < box.size)
        return found

    return rule


def as_kernels_know(loads: LoadRange) -> LoadRange:
    """What kernels know of the elements of a tile: all of a row or a column, few of a pair."""

    def rule(load: Load, indices: tuple[Range, ...]) -> Range:
        extents = [each.hi - each.lo for each in indices if isinstance(each, IntRange)]
        known = level_of(load) is not Level.PAIR or all(extent < MOST_ELEMENTS for extent in extents)
        return loads(load, indices) if known else full(load.type)

    return rule


def _slice(found: Range, extent: int) -> slice:
    assert isinstance(found, IntRange)
    lo, hi = (min(max(end, 0), extent - 1) for end in (found.lo, found.hi))
    return slice(lo, hi + 1)
