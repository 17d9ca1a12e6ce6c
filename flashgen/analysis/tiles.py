"""Tiles of query-key pairs, their classes, and what is known of everything that a mask reads over one.

Stage: analyse and after. In: the ranges of a tile's coordinates, captured tensors. Out: ranges of symbols and of loads.
For a call, the mask and tensors in which an element that a row (a column) reads by several indices, ``t[i, Nq - 1 -
i]``, is an element of [B, H, N], as kernels see it. ``boxes.py`` classifies tiles; not known is PARTIAL.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any

import numpy as np

from flashgen.analysis.levels import Level, level_of, observed_loads
from flashgen.analysis.ranging import LoadRange, range_of_number
from flashgen.ir.expr import Apply, Expr, Literal, Load, Symbol, SymbolKind, index, index_set, size, substitute, walk
from flashgen.ir.interval import FULL_FLOAT, BoolRange, FloatRange, IntRange, Range, full
from flashgen.ir.interval_float import outward
from flashgen.ir.operators import NUMPY, OPERATORS
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


_POSITION = {"i": "Nq", "j": "Nk"}


def by_position(
    keep: Expr, tensors: Mapping[str, Any], sizes: Mapping[str, int], params: Mapping[str, Any]
) -> tuple[Expr, Mapping[str, Any]]:
    """The mask and its tensors. Loads of tensors that are not given stay as they are."""
    found = dict(tensors)
    while True:
        wanted = next((each for loads in observed_loads(keep) for each in loads if _is_box(each, found)), None)
        if wanted is None:
            return keep, found
        (position,) = index_set(wanted) & set(_POSITION)
        name = f"{wanted.tensor} by {position}, {len(found)}"
        extents = (sizes["B"], sizes["H"], sizes[_POSITION[position]])
        found[name] = np.ascontiguousarray(np.broadcast_to(_values(wanted, position, found, sizes, params), extents))
        places = (index("b"), index("h"), index(position))
        keep = substitute(keep, {wanted: Load(wanted.type, tensor=name, indices=places)})


def _is_box(load: Load, tensors: Mapping[str, Any]) -> bool:
    """Whether several indices vary along the position, and no load inside of an index is such an element."""
    inside = [each for each in walk(*load.indices) if isinstance(each, Load)]
    if any(each.tensor not in tensors for each in (load, *inside)) or any(_is_box(each, tensors) for each in inside):
        return False
    return sum(bool(index_set(each) & set(_POSITION)) for each in load.indices) > 1


def _values(
    load: Load, position: str, tensors: Mapping[str, Any], sizes: Mapping[str, int], params: Mapping[str, Any]
) -> Any:
    """The elements that all positions read, for each b and h; [B or 1, H or 1, N or 1]."""
    heads = np.arange(sizes["H"])[:, None]
    symbols = {"b": np.arange(sizes["B"])[:, None, None], "h": heads, "hkv": heads // heads_of_key_head(sizes)}
    symbols[position] = np.arange(sizes[_POSITION[position]])
    done: dict[Expr, Any] = {}
    with np.errstate(all="ignore"):
        for node in walk(load):
            match node:
                case Literal(value=value):
                    array = np.asarray(value)
                    done[node] = NUMPY.to_float(array) if node.type is ScalarType.FLOAT else array
                case Symbol(kind=SymbolKind.INDEX, name=name):
                    done[node] = symbols[name]
                case Symbol(kind=SymbolKind.PARAM, name=name):
                    done[node] = np.asarray(params[name])
                case Symbol(name=name):
                    done[node] = np.asarray(sizes[name])
                case Load(tensor=name, indices=indices):
                    array = tensors[name] if tensors[name].size else np.zeros([1] * len(indices), tensors[name].dtype)
                    # Of an int the lower 32 bits, held in 64 as all ints are here.
                    array = array.astype(np.int32).astype(np.int64) if array.dtype.kind == "i" else array
                    places = zip(indices, array.shape, strict=True)
                    done[node] = array[tuple(np.clip(done[place], 0, extent - 1) for place, extent in places)]
                case Apply(op=op, args=args):
                    done[node] = OPERATORS[op].meaning(NUMPY, *(done[arg] for arg in args))
                case _:
                    raise AssertionError(f"no value for {node}")
    return done[load]
