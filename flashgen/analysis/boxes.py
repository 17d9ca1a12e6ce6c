"""Classifies boxes of one mask, many at a time: the steps of its ``RangeProgram`` over arrays.

Stage: analyse and after (planner, ``flashgen show``). In: the condition under which a pair is kept, and ``Boxes``, or a
tile. Out: a code for each box, or a class. Tiles that ranges leave open are cut where ``pieces.py`` says. Generated
kernels take the same steps, printed over ``templates/include/flashgen/ranges.h``, and come to the same classes: tests
compare.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from itertools import count

import numpy as np
from numpy.typing import NDArray

from flashgen.analysis.constraints import COLUMN, ROW
from flashgen.analysis.pieces import MOST_DEPTH, MOST_PIECES, MOST_POSITIONS, block_sizes, halves, is_cut
from flashgen.analysis.range_program import Alternative, RangeProgram, range_program
from flashgen.analysis.range_values import Flags, Ints, Known, Ranges, RangeValues
from flashgen.analysis.ranging import LoadRange
from flashgen.analysis.tiles import INDICES, Tile, TileClass, heads_of_key_head, tile_ranges
from flashgen.ir.expr import Expr
from flashgen.ir.interval import IntRange
from flashgen.ir.types import ScalarType

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
        return replace(
            self,
            b=self.b[chosen],
            h=self.h[chosen],
            first_i=self.first_i[chosen],
            last_i=self.last_i[chosen],
            first_j=self.first_j[chosen],
            last_j=self.last_j[chosen],
        )


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
