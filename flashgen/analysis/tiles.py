"""Classifies tiles of query-key pairs: all kept, none kept, or some.

Stage: analyse and after (planner, ``flashgen show``). In: the condition under which a pair is kept, and the ranges of a
tile's coordinates. Out: a ``TileClass``. One interval evaluation a tile; not known is PARTIAL. Generated kernels do the
same with ``templates/cpu/primitives/ranges.h`` and come to the same classes, so this module does NOT use what the
conditions of branches say (``ranging.py`` does), because kernels do not.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import numpy as np

from flashgen.analysis.ranging import LoadRange, plain_range
from flashgen.ir.expr import Expr, Load, Symbol, SymbolKind, index, size, walk
from flashgen.ir.interval import FULL_FLOAT, BoolRange, FloatRange, IntRange, Range, full, truth
from flashgen.ir.interval_float import outward, point
from flashgen.ir.spec import Layout
from flashgen.ir.types import ScalarType


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
    ranges = _symbol_ranges(tile)
    kept = _evaluate(keep, ranges, loads)
    if layout is not None:
        for name, r in (("I", tile.i), ("J", tile.j)):
            block = Symbol(ScalarType.INT, name=name, kind=SymbolKind.BLOCK)
            ranges[block] = IntRange(r.lo // layout.block, r.hi // layout.block)
        blocks = _evaluate(layout.keep, ranges, loads)
        kept = BoolRange(kept.may_be_false or blocks.may_be_false, kept.may_be_true and blocks.may_be_true)
    if not kept.may_be_true:
        return TileClass.EMPTY
    return TileClass.PARTIAL if kept.may_be_false else TileClass.FULL


def _symbol_ranges(tile: Tile) -> dict[Expr, Range]:
    ranges: dict[Expr, Range] = {size(name): IntRange(value, value) for name, value in tile.sizes.items()}
    for name, r in (("b", tile.b), ("h", tile.h), ("i", tile.i), ("j", tile.j)):
        ranges[index(name)] = r
    group = max(tile.sizes.get("H", 1) // max(tile.sizes.get("Hkv", 1), 1), 1)
    ranges[index("hkv")] = IntRange(tile.h.lo // group, tile.h.hi // group)
    for name, value in tile.params.items():
        # Symbols are equal by name and kind; the type is the value's.
        ranges[Symbol(ScalarType.FLOAT, name=name, kind=SymbolKind.PARAM)] = _constant(value)
    return ranges


def _constant(value: bool | int | float) -> Range:
    if isinstance(value, bool):
        return truth(value)
    return IntRange(value, value) if isinstance(value, int) else point(value)


def _evaluate(expr: Expr, ranges: Mapping[Expr, Range], loads: LoadRange | None) -> BoolRange:
    found: dict[Expr, Range] = {}
    for node in walk(expr):
        found[node] = plain_range(node, ranges, loads, tuple(found[child] for child in node.children))
    result = found[expr]
    assert isinstance(result, BoolRange)
    return result


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


def _slice(found: Range, extent: int) -> slice:
    assert isinstance(found, IntRange)
    lo, hi = (min(max(end, 0), extent - 1) for end in (found.lo, found.hi))
    return slice(lo, hi + 1)
