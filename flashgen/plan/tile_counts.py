"""How many tiles of each class a pass visits, without looking at pairs, and seldom at tiles one by one.

In: a ``Variant``, a shape or a ``MaskedCall``, B_r and B_c. Out: ``TileCounts``. Boxes of tiles are classified by
intervals, many at a time (``analysis/tiles.py``). A box of tiles of several classes is halved, so that the work follows
the border of the mask. For a shape with more than ``MOST_CLASSIFIED`` boxes some rows of tiles stand for all. For a
shape captured tensors are not known: tiles that depend on them count as PARTIAL, so that counts of visits are the most
that a call makes. For a call everything is known, and every tile is counted.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from flashgen.analysis.pieces import is_cut
from flashgen.analysis.ranging import LoadRange
from flashgen.analysis.tiles import Boxes, TileClass, classify_tiles
from flashgen.analysis.variant import Variant
from flashgen.ir.build import constant_value
from flashgen.ir.expr import Expr, Load, Symbol, SymbolKind, index_set, literal, size, substitute, walk
from flashgen.ir.shape import Shape
from flashgen.ir.spec import Param
from flashgen.ir.types import ScalarType

GROUP = 16  # rows whose sums of dQ lie together
MOST_CLASSIFIED = 2500  # boxes, of all heads that are looked at; some 2 to 50 µs each
_PIECES = 6  # more of a tile, on average, where a mask may leave it open
_MOST_CUT = 128  # tiles that a mask leaves open, where rows are sampled
_MOST_HEADS = 8  # that are looked at where heads have masks of their own
_Counts = NDArray[np.int64]
_Boxes = NDArray[np.int64]  # [6, boxes] of whole tiles: b, h, rows r0 … r1 - 1 by columns c0 … c1 - 1


@dataclass(frozen=True)
class TileCounts:
    """Tiles by class, over every batch element and head.

    ``row_tiles`` and ``column_tiles``: how many tiles a tile of queries (keys) of a head visits, [⌈Nq / B_r⌉] and
    [⌈Nk / B_c⌉], averaged over the heads that were looked at. ``keys`` are the keys of visited tiles, summed over tiles
    of queries; ``rows`` the queries of visited tiles, ``groups`` the sixteens of them, summed over tiles of keys.
    ``is_exact``: no row of tiles and no head was left out. ``unknown``: captured tensors and params that the mask reads
    and nobody knows yet.
    """

    full: int
    partial: int
    total: int
    row_tiles: NDArray[np.float64]
    column_tiles: NDArray[np.float64]
    keys: int
    rows: int
    groups: int
    is_exact: bool
    unknown: tuple[str, ...]

    @property
    def visited(self) -> int:
        """Tiles that may hold a kept pair."""
        return self.full + self.partial

    @property
    def visited_fraction(self) -> float:
        """Of all tiles: no less than the fraction of the pairs that are kept."""
        return self.visited / self.total if self.total else 0.0

    @property
    def full_fraction(self) -> float:
        """Of all tiles: no more than the fraction of the pairs that are kept, but for ragged edges."""
        return self.full / self.total if self.total else 0.0

    @property
    def kept_fraction(self) -> float:
        """An estimate between the two: a tile on the border of a mask keeps half of its pairs."""
        return (self.full + self.partial / 2) / self.total if self.total else 0.0


def tile_counts(variant: Variant, shape: Shape, Br: int, Bc: int) -> TileCounts:
    """The tiles of one pass over a call of this shape."""
    found = _counted(variant.keep, variant.spec.params, shape, Br, Bc)
    made_of = {each.name: each.made_of for each in variant.spec.tensors if each.made_of is not None}
    return replace(found, unknown=tuple(dict.fromkeys(made_of.get(name, name) for name in found.unknown)))


@dataclass(frozen=True, eq=False)
class MaskedCall:
    """The call whose mask is counted: the lengths of its shard, where b, h, i and j start, the sizes of the whole.

    The mask reads ``params``, and captured tensors through ``loads``.
    """

    shape: Shape
    starts: tuple[int, int, int, int]
    sizes: Mapping[str, int]
    params: Mapping[str, bool | int | float]
    loads: LoadRange | None

    @classmethod
    def of_shape(cls, shape: Shape, params: tuple[Param, ...]) -> MaskedCall:
        """A call that is the whole problem, with the params that follow from its sizes."""
        return cls(shape, (0, 0, 0, 0), _sizes(shape), known_params(params, shape), None)


def counts_of_call(keep: Expr, call: MaskedCall, Br: int, Bc: int) -> TileCounts:
    """The tiles of one pass over a call, each as kernels classify it."""
    looked_at, _ = _heads(index_set(keep), call.shape)
    grid = _Grid(keep, call, Br, Bc)
    found, _ = grid.count(looked_at, [(0, grid.rows)], None, None)
    assert found is not None
    return _scaled(grid, found, np.arange(grid.rows), looked_at, is_exact=True)


@functools.lru_cache(maxsize=256)
def _counted(keep: Expr, params: tuple[Param, ...], shape: Shape, Br: int, Bc: int) -> TileCounts:
    grid = _Grid(keep, MaskedCall.of_shape(shape, params), Br, Bc)
    heads, distinct = _heads(_axes_outside_loads(keep), shape, _MOST_HEADS)  # what loads read is not known anyway
    rows = grid.rows
    sampled = np.arange(rows)
    found, _ = grid.count(heads, [(0, rows)], MOST_CLASSIFIED, None)
    if found is None:  # one row says how many rows can be afforded
        _, asked = grid.count(heads[:1], [(rows // 2, rows // 2 + 1)], None, _MOST_CUT)
        affordable = max(3, MOST_CLASSIFIED // max(asked * len(heads), 1))
        sampled = np.unique((np.arange(affordable) + 0.5) * rows // affordable).astype(np.int64)
        found, _ = grid.count(heads, [(int(row), int(row) + 1) for row in sampled], None, _MOST_CUT)
        assert found is not None
    is_exact = len(sampled) == rows and len(heads) == distinct
    return replace(_scaled(grid, found, sampled, heads, is_exact=is_exact), unknown=_unknown(keep, params))


def _scaled(
    grid: _Grid, found: _Found, sampled: _Counts, heads: Sequence[tuple[int, int]], *, is_exact: bool
) -> TileCounts:
    """What was found in some rows of tiles of some heads, for all."""
    rows, shape = grid.rows, grid.call.shape
    # A sampled row of tiles stands for those around it, a head for those that were not looked at.
    share = shape.batch * shape.heads / max(len(heads), 1)
    stands_for = _nearest(rows, sampled)
    weights = np.bincount(stands_for, minlength=rows) if rows else np.zeros(0, dtype=np.int64)
    by_rows = rows / max(len(sampled), 1)

    def total(counts: _Counts) -> int:
        return round(share * float((weights * counts).sum()))

    return TileCounts(
        full=total(found.full),
        partial=total(found.partial),
        total=shape.batch * shape.heads * rows * grid.columns,
        row_tiles=(found.full + found.partial)[stands_for] / max(len(heads), 1),
        column_tiles=by_rows * found.by_column / max(len(heads), 1),
        keys=total(found.keys),
        rows=round(share * by_rows * float(found.rows_by_column.sum())),
        groups=round(share * by_rows * float(found.groups_by_column.sum())),
        is_exact=is_exact,
        unknown=(),
    )


class _Found:
    """Counts by row of tiles, and by column of tiles, of boxes whose tiles are all FULL, and of PARTIAL tiles."""

    def __init__(self, grid: _Grid, full: _Boxes, partial: _Boxes) -> None:
        ones = np.ones(grid.columns, dtype=np.int64)
        self.full, self.partial = _by_row(grid, full, ones), _by_row(grid, partial, ones)
        visited = np.concatenate([full, partial], axis=1)
        self.keys = _by_row(grid, visited, grid.column_lengths)
        self.by_column = _by_column(grid, visited, np.ones(grid.rows, dtype=np.int64))
        self.rows_by_column = _by_column(grid, visited, grid.row_lengths)
        self.groups_by_column = _by_column(grid, visited, -(-grid.row_lengths // GROUP))


class _Grid:
    """The tiles of one head."""

    def __init__(self, keep: Expr, call: MaskedCall, Br: int, Bc: int) -> None:
        self.keep, self.call, self.Br, self.Bc = keep, call, Br, Bc
        q_len, kv_len = call.shape.q_len, call.shape.kv_len
        self.rows, self.columns = -(-q_len // Br), -(-kv_len // Bc)
        self.row_lengths, self.column_lengths = _lengths(q_len, Br), _lengths(kv_len, Bc)

    def count(
        self, heads: list[tuple[int, int]], spans: list[tuple[int, int]], most: int | None, most_cut: int | None
    ) -> tuple[_Found | None, int]:
        """The rows of tiles in these spans, None where it takes more than ``most`` boxes; how many were classified.

        With ``most_cut`` it is an estimate: no more of the tiles that are left open are cut.
        """
        places = [(b, h, first, last, 0, self.columns) for b, h in heads for first, last in spans if first < last]
        boxes = np.array(places if self.columns else [], dtype=np.int64).reshape(-1, 6).T
        asked, full, partial = 0, [boxes[:, :0]], [boxes[:, :0]]
        while boxes.size:
            r0, r1, c0, c1 = boxes[2:]
            single = (r1 - r0 == 1) & (c1 - c0 == 1)
            asked += len(r0) + (_PIECES * int(single.sum()) if is_cut(self.keep) else 0)
            if most is not None and asked > most:
                return None, asked
            codes = self._classify(boxes, single, most_cut)
            full.append(boxes[:, codes == TileClass.FULL])
            partial.append(boxes[:, (codes == TileClass.PARTIAL) & single])
            boxes = self._halves(boxes[:, (codes == TileClass.PARTIAL) & ~single])
        return _Found(self, np.concatenate(full, axis=1), np.concatenate(partial, axis=1)), asked

    def _classify(self, boxes: _Boxes, single: NDArray[np.bool_], most_cut: int | None) -> NDArray[np.int8]:
        if self.keep == literal(True):
            return np.full(len(single), TileClass.FULL, dtype=np.int8)
        call, (b, h, i, j), (_, _, r0, r1, c0, c1) = self.call, self.call.starts, boxes
        return classify_tiles(
            self.keep,
            Boxes(
                b=b + boxes[0],
                h=h + boxes[1],
                first_i=i + r0 * self.Br,
                last_i=i + np.minimum(r1 * self.Br, call.shape.q_len) - 1,
                first_j=j + c0 * self.Bc,
                last_j=j + np.minimum(c1 * self.Bc, call.shape.kv_len) - 1,
                sizes=call.sizes,
                params=call.params,
                computed=call.loads is not None,
            ),
            single,
            most_cut,
            call.loads,
        )

    def _halves(self, boxes: _Boxes) -> _Boxes:
        """Each box cut across its longer side."""
        b, h, r0, r1, c0, c1 = boxes
        height, width = r1 - r0, c1 - c0
        across = (width == 1) | ((height > 1) & (height * self.Br >= width * self.Bc))
        middle = np.where(across, (r0 + r1) // 2, (c0 + c1) // 2)
        lower = np.stack([b, h, r0, np.where(across, middle, r1), c0, np.where(across, c1, middle)])
        upper = np.stack([b, h, np.where(across, middle, r0), r1, np.where(across, c0, middle), c1])
        return np.concatenate([lower, upper], axis=1)


def _by_row(grid: _Grid, boxes: _Boxes, weights: _Counts) -> _Counts:
    """The weights of the columns that each row of tiles visits, summed."""
    return _spread(grid.rows, weights, boxes[2:])


def _by_column(grid: _Grid, boxes: _Boxes, weights: _Counts) -> _Counts:
    """The weights of the rows that visit each column of tiles, summed."""
    return _spread(grid.columns, weights, boxes[[4, 5, 2, 3]])


def _spread(length: int, weights: _Counts, spans: _Boxes) -> _Counts:
    """Adds to places first … last - 1 the weights begin … end - 1, for every such (first, last, begin, end)."""
    before, steps = np.concatenate([[0], np.cumsum(weights)]), np.zeros(length + 1, dtype=np.int64)
    first, last, begin, end = spans
    total = before[end] - before[begin]
    np.add.at(steps, first, total)
    np.subtract.at(steps, last, total)
    return np.cumsum(steps)[:-1]


def _lengths(length: int, tile: int) -> _Counts:
    lengths: _Counts = np.minimum(tile, length - np.arange(0, length, tile, dtype=np.int64))
    return lengths


def _nearest(rows: int, sampled: _Counts) -> _Counts:
    """For each row the nearest of those that were looked at, the lower one of two."""
    every = np.arange(rows)
    if len(sampled) == rows:
        return every
    above = np.searchsorted(sampled, every).clip(1, len(sampled) - 1)
    below = above - 1
    nearest: _Counts = np.where(every - sampled[below] <= sampled[above] - every, sampled[below], sampled[above])
    return nearest


def _heads(axes: Set[str], shape: Shape, most: int | None = None) -> tuple[list[tuple[int, int]], int]:
    """Batch elements and heads to look at, ``most`` at most, and how many there are whose masks differ along axes."""
    batches = range(shape.batch if "b" in axes else min(shape.batch, 1))
    heads = range(shape.heads if {"h", "hkv"} & axes else min(shape.heads, 1))
    count = len(batches) * len(heads)
    step = 1 if most is None else max(1, -(-count // most))
    return [divmod(number, len(heads)) for number in range(0, count, step)], count


def _axes_outside_loads(expr: Expr) -> frozenset[str]:
    if isinstance(expr, Load):
        return frozenset()
    if isinstance(expr, Symbol):
        return index_set(expr)
    return frozenset[str]().union(*(_axes_outside_loads(child) for child in expr.children))


def _sizes(shape: Shape) -> Mapping[str, int]:
    return {"B": shape.batch, "H": shape.heads, "Hkv": shape.kv_heads, "Nq": shape.q_len, "Nk": shape.kv_len}


def known_params(params: tuple[Param, ...], shape: Shape) -> dict[str, bool | int | float]:
    """The params whose defaults follow from the sizes."""
    values: dict[Expr, Expr] = {size(name): literal(value) for name, value in _sizes(shape).items()}
    known: dict[str, bool | int | float] = {}
    for param in params:
        value = None if param.default is None else constant_value(substitute(param.default, values))
        if value is not None:
            known[param.name] = int(value) if param.type is ScalarType.INT else float(value)
            values[Symbol(param.type, name=param.name, kind=SymbolKind.PARAM)] = literal(known[param.name])
    return known


def _unknown(keep: Expr, params: tuple[Param, ...]) -> tuple[str, ...]:
    given = {param.name for param in params if param.default is not None}
    names = []
    for node in walk(keep):
        if isinstance(node, Load):
            names.append(node.tensor)
        if isinstance(node, Symbol) and node.kind is SymbolKind.PARAM and node.name not in given:
            names.append(node.name)
    return tuple(dict.fromkeys(names))
