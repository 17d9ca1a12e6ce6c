"""Tiles of query-key pairs, their classes, and what is known of everything that a mask reads over one.

Stage: analyse and after. In: the ranges of a tile's coordinates, captured tensors. Out: ranges of symbols and of loads.
``boxes.py`` classifies tiles; not known is PARTIAL.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any

import numpy as np

from flashgen.analysis.levels import Level, level_of
from flashgen.analysis.ranging import LoadRange, range_of_number
from flashgen.ir.expr import Expr, Load, Symbol, SymbolKind, index, size
from flashgen.ir.interval import FULL_FLOAT, BoolRange, FloatRange, IntRange, Range, full
from flashgen.ir.interval_float import outward
from flashgen.ir.types import ScalarType

MOST_ELEMENTS = 4  # of a dimension, of elements that a pair reads; ranges.h says the same


class TileClass(IntEnum):
    """EMPTY: no pair is kept. FULL: every one is. PARTIAL: some are, or it is not known. Arrays hold the numbers."""

    EMPTY = 0
    PARTIAL = 1
    FULL = 2


@dataclass(frozen=True)
class Tile:
    """Closed ranges of global coordinates, the sizes (B H Hkv Nq Nk), and the params that are known."""

    b: IntRange
    h: IntRange
    i: IntRange
    j: IntRange
    sizes: Mapping[str, int]
    params: Mapping[str, bool | int | float] = field(default_factory=dict)


_SIZES = {name: size(name) for name in ("B", "H", "Hkv", "Nq", "Nk", "D", "Dv")}
INDICES = {name: index(name) for name in ("b", "h", "i", "j", "hkv")}


def heads_of_key_head(sizes: Mapping[str, int]) -> int:
    """The number of query heads for each key/value head."""
    return max(sizes.get("H", 1) // max(sizes.get("Hkv", 1), 1), 1)


def tile_ranges(tile: Tile) -> dict[Expr, Range]:
    """The range of every symbol on a tile."""
    ranges: dict[Expr, Range] = {_SIZES[name]: IntRange(value, value) for name, value in tile.sizes.items()}
    for name, r in (("b", tile.b), ("h", tile.h), ("i", tile.i), ("j", tile.j)):
        ranges[INDICES[name]] = r
    group = heads_of_key_head(tile.sizes)
    ranges[INDICES["hkv"]] = IntRange(tile.h.lo // group, tile.h.hi // group)
    for name, value in tile.params.items():
        # Symbols are equal by name and kind; the type is the value's.
        ranges[Symbol(ScalarType.FLOAT, name=name, kind=SymbolKind.PARAM)] = range_of_number(value)
    return ranges


def loads_of(tensors: Mapping[str, Any]) -> LoadRange:
    """Ranges of loads from NumPy arrays in memory: the extremes of the box that the indices span, clamped.

    An empty tensor reads as zero, an int as its lower 32 bits.
    """

    def rule(load: Load, indices: tuple[Range, ...]) -> Range:
        array = tensors.get(load.tensor)
        if array is None:
            return full(load.type)
        box = array[tuple(_slice(r, extent) for r, extent in zip(indices, array.shape, strict=True))]
        if array.size == 0:
            box = np.zeros(1, array.dtype)
        if load.type is ScalarType.BOOL:
            return BoolRange(not bool(box.all()), bool(box.any()))
        if load.type is ScalarType.INT:
            box = box.astype(np.int32)
            return IntRange(int(box.min()), int(box.max()))
        numbers = box[~np.isnan(box)]
        if numbers.size == 0:
            return FULL_FLOAT
        found: FloatRange = outward(float(numbers.min()), float(numbers.max()), numbers.size < box.size)
        return found

    return rule


def loads_of_kernels(tensors: Mapping[str, Any], *, observed: bool = True) -> LoadRange:
    """The ranges of loads as kernels know them: any elements of a row or column, few of a pair, unknown beside a NaN.

    Where rows and columns are not ``observed``, also few of these.
    """
    loads = loads_of(tensors)

    def rule(load: Load, indices: tuple[Range, ...]) -> Range:
        array = tensors.get(load.tensor)
        if array is None:
            return full(load.type)
        spans = [_slice(r, extent) for r, extent in zip(indices, array.shape, strict=True)]
        is_looked_up = level_of(load) is Level.PAIR or not observed
        if is_looked_up and any(span.stop - span.start > MOST_ELEMENTS for span in spans):
            return full(load.type)
        found = loads(load, indices)
        return FULL_FLOAT if isinstance(found, FloatRange) and found.may_be_nan else found

    return rule


def _slice(found: Range, extent: int) -> slice:
    """The elements that indices of this range read, which kernels clamp."""
    assert isinstance(found, IntRange)
    lo, hi = (max(min(end, extent - 1), 0) for end in (found.lo, found.hi))
    return slice(lo, hi + 1)
