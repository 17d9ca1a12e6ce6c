"""Tiles of query-key pairs, what is known of everything that a mask reads over one, and the classes of boxes of them.

Stage: analyse and after. In: the ranges of a tile's coordinates, captured tensors. Out: ranges of symbols and of loads.
For a call, the mask and tensors in which an element that a row (a column) reads by several indices, ``t[i, Nq - 1 -
i]``, is an element of [B, H, N], as kernels see it. Boxes of one mask are classified many at a time, by the steps of
its ``RangeProgram`` over arrays; not known is PARTIAL. Tiles that ranges leave open are cut where ``pieces.py`` says.
Generated kernels take the same steps, printed over ``templates/include/flashgen/ranges.h``, and come to the same
classes: tests compare.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from enum import IntEnum
from itertools import count
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flashgen.analysis.constraints import COLUMN, ROW
from flashgen.analysis.levels import Level, level_of, observed_loads
from flashgen.analysis.pieces import MOST_DEPTH, MOST_PIECES, MOST_POSITIONS, block_sizes, halves, is_cut
from flashgen.analysis.range_program import Alternative, RangeProgram, range_program
from flashgen.analysis.range_values import Flags, Ints, Known, Ranges, RangeValues
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
        wanted = next((each for loads in observed_loads(keep) for each in loads if _is_scattered(each, found)), None)
        if wanted is None:
            return keep, found
        (position,) = index_set(wanted) & set(_POSITION)
        name = f"{wanted.tensor} by {position}, {len(found)}"
        extents = (sizes["B"], sizes["H"], sizes[_POSITION[position]])
        found[name] = np.ascontiguousarray(np.broadcast_to(_values(wanted, position, found, sizes, params), extents))
        places = (index("b"), index("h"), index(position))
        keep = substitute(keep, {wanted: Load(wanted.type, tensor=name, indices=places)})


def _is_scattered(load: Load, tensors: Mapping[str, Any]) -> bool:
    """Whether neighbouring positions read no neighbouring elements, and no load inside of an index is such a one."""
    inside = [each for each in walk(*load.indices) if isinstance(each, Load)]
    is_known = all(each.tensor in tensors for each in (load, *inside))
    if not is_known or any(_is_scattered(each, tensors) for each in inside):
        return False
    varying = [each for each in load.indices if index_set(each) & set(_POSITION)]
    return len(varying) > 1 or not all(map(_is_run, varying))


def _is_run(place: Expr) -> bool:
    """Whether an index is a position, moved or divided by a constant: then it has every value of its range."""
    while isinstance(place, Apply) and place.op in ("add", "sub", "floordiv") and isinstance(place.args[1], Literal):
        place = place.args[0]
    return isinstance(place, Symbol)


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


# Classes of boxes -----------------------------------------------------------------------------------------------------


_Piece = tuple[int, int, int, int, int]  # the ends of i and of j, and how often it was cut


@dataclass(frozen=True, eq=False)
class Boxes:
    """Boxes of pairs, one batch element and head each; all arrays have one length, ends belong to the box.

    ``sizes`` and ``params`` are those of ``Tile``, and the same for all. ``computed``: what depends on no row and no
    column is the number that a kernel computes.
    """

    b: Ints
    h: Ints
    first_i: Ints
    last_i: Ints
    first_j: Ints
    last_j: Ints
    sizes: Mapping[str, int]
    params: Mapping[str, bool | int | float]
    computed: bool = False

    def take(self, chosen: Flags) -> Boxes:
        own = ("b", "h", "first_i", "last_i", "first_j", "last_j")
        return replace(self, **{name: getattr(self, name)[chosen] for name in own})


def classify(keep: Expr, tile: Tile, loads: LoadRange | None = None) -> TileClass:
    """The class of a tile."""
    program = range_program(keep)
    return TileClass(_classes(program, RangeValues(program, dict(tile_ranges(tile)), loads), 1)[0])


def classify_boxes(keep: Expr, boxes: Boxes, loads: LoadRange | None = None) -> NDArray[np.int8]:
    """EMPTY, PARTIAL or FULL for each box; without ``loads`` nothing is known of captured tensors."""
    program = range_program(keep)
    values = RangeValues(program, _whole(boxes), loads, computed=boxes.computed)
    return _classes(program, values, len(boxes.b))


def _classes(program: RangeProgram, values: RangeValues, boxes_count: int) -> NDArray[np.int8]:
    found = np.full(boxes_count, TileClass.EMPTY, np.int8)
    holds = _any_passes(program.kept, values, boxes_count)
    found[holds] = TileClass.FULL
    drops = _any_passes(program.dropped, values.of(holds), int(holds.sum()))
    found[np.flatnonzero(holds)[drops]] = TileClass.PARTIAL
    return found


def classify_tiles(
    keep: Expr,
    boxes: Boxes,
    are_tiles: Flags | None = None,
    most: int | None = None,
    loads: LoadRange | None = None,
) -> NDArray[np.int8]:
    """EMPTY, PARTIAL or FULL for each tile: tiles that ranges leave open are cut into pieces (``pieces.py``).

    ``are_tiles`` says which boxes are single tiles; None: all. With ``most`` the classes are an estimate: only so many
    tiles, evenly spread, are cut, and each stands for those after it.
    """
    found = classify_boxes(keep, boxes, loads)
    extents = (boxes.last_i - boxes.first_i, boxes.last_j - boxes.first_j)
    left_open = (found == TileClass.PARTIAL) & (extents[0] < MOST_POSITIONS) & (extents[1] < MOST_POSITIONS)
    left_open &= True if are_tiles is None else are_tiles
    if is_cut(keep) and left_open.any():
        places = np.flatnonzero(left_open)
        step = 1 if most is None else -(-len(places) // most)
        cut_ones = np.zeros(len(found), np.bool_)
        cut_ones[places[::step]] = True
        found[places] = np.repeat(_in_pieces(keep, boxes.take(cut_ones)), step)[: len(places)]
    return found


def _in_pieces(keep: Expr, boxes: Boxes) -> NDArray[np.int8]:
    """The class of every box from its pieces; the next pieces of all open boxes are classified together.

    Few pieces at first, as most boxes soon show that they are mixed. The order of pieces does not matter: a box has a
    class where all settled pieces agree, none stays open, and no more than ``MOST_PIECES`` were classified.
    """
    found = np.full(len(boxes.b), TileClass.PARTIAL, np.int8)
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
        asked_for = Boxes(boxes.b[at], boxes.h[at], i0, i1, j0, j1, boxes.sizes, boxes.params, boxes.computed)
        for number, piece, code in zip(at, pieces, classify_boxes(keep, asked_for).tolist(), strict=True):
            if number not in open_:
                continue
            parts = _parts(piece, row_sizes, column_sizes) if code == TileClass.PARTIAL else None
            if parts is not None:
                open_[number] += reversed(parts)
            elif code == TileClass.PARTIAL or seen[number] not in (-1, code):
                del open_[number]
            else:
                seen[number] = code
        for number in [number for number, stack in open_.items() if not stack or asked[number] >= MOST_PIECES]:
            if not open_.pop(number) and asked[number] <= MOST_PIECES:
                found[number] = seen[number]
    return found


def _parts(piece: _Piece, row_sizes: tuple[int, ...], column_sizes: tuple[int, ...]) -> list[_Piece] | None:
    i0, i1, j0, j1, depth = piece
    found = halves(IntRange(i0, i1), IntRange(j0, j1), row_sizes, column_sizes) if depth < MOST_DEPTH else None
    return None if found is None else [(i.lo, i.hi, j.lo, j.hi, depth + 1) for i, j in found]


def _whole(boxes: Boxes) -> Known:
    nowhere = IntRange(0, 0)
    known: Known = dict(tile_ranges(Tile(nowhere, nowhere, nowhere, nowhere, boxes.sizes, boxes.params)))
    group = heads_of_key_head(boxes.sizes)
    ends = {
        "b": (boxes.b, boxes.b),
        "h": (boxes.h, boxes.h),
        "hkv": (boxes.h // group, boxes.h // group),
        "i": (boxes.first_i, boxes.last_i),
        "j": (boxes.first_j, boxes.last_j),
    }
    return known | {INDICES[name]: Ranges(ScalarType.INT, columns) for name, columns in ends.items()}


def _any_passes(alternatives: Iterable[Alternative], values: RangeValues, count: int) -> Flags:
    """Which boxes pass all checks of some alternative."""
    found = np.zeros(count, np.bool_)
    for checks in alternatives:
        left = np.flatnonzero(~found)
        if not len(left):
            break
        found[left[_passing(checks, values if len(left) == count else values.of(~found), len(left))]] = True
    return found


def _passing(checks: Alternative, values: RangeValues, count: int) -> Ints:
    """The numbers of the boxes that pass all checks; a box that one check excludes is left out of the next."""
    alive = np.arange(count)
    for check in checks:
        passing = np.broadcast_to(values.passes(check), alive.shape)
        if not passing.all():
            alive = alive[passing]
            if not len(alive):  # steps behind a check mean nothing where it failed
                break
            values = values.of(passing)
    return alive
