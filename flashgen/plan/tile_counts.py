"""How many tiles of each class a pass visits, without looking at pairs, and seldom at tiles one by one.

In: a ``Variant``, a shape, B_r and B_c. Out: ``TileCounts``. Boxes of tiles are classified by intervals and halved only
where that does not settle them, as kernels do it, so that the work follows the border of the mask. Beyond
``MOST_CLASSIFIED`` boxes some rows of tiles stand for all. What a mask reads of captured tensors is not known before a
call: tiles that depend on it count as PARTIAL.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from flashgen.analysis.tiles import Tile, TileClass, classify
from flashgen.analysis.variant import Variant
from flashgen.ir.build import constant_value
from flashgen.ir.expr import Expr, Load, Symbol, SymbolKind, index_set, literal, size, substitute, walk
from flashgen.ir.interval import IntRange
from flashgen.ir.shape import Shape
from flashgen.ir.spec import Param
from flashgen.ir.types import ScalarType

GROUP = 16  # rows whose sums of dQ lie together
MOST_CLASSIFIED = 1500  # boxes, of all heads that are looked at; some 0.1 to 0.6 ms each
_MOST_HEADS = 8  # that are looked at where heads have masks of their own
_Counts = NDArray[np.int64]


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
    return _counted(variant.keep, variant.spec.params, shape, Br, Bc)


@functools.lru_cache(maxsize=256)
def _counted(keep: Expr, params: tuple[Param, ...], shape: Shape, Br: int, Bc: int) -> TileCounts:
    grid = _Grid(keep, params, shape, Br, Bc)
    heads, distinct = _heads(keep, shape)
    rows, columns = grid.rows, grid.columns
    sampled = np.arange(rows)
    found = grid.count(heads, [(0, rows)], MOST_CLASSIFIED)
    if found is None:  # one row says how many rows can be afforded
        grid.asked = 0
        grid.count(heads[:1], [(rows // 2, rows // 2 + 1)], None)
        affordable = max(3, MOST_CLASSIFIED // max(grid.asked * len(heads), 1))
        sampled = np.unique((np.arange(affordable) + 0.5) * rows // affordable).astype(np.int64)
        found = grid.count(heads, [(int(row), int(row) + 1) for row in sampled], None)
        assert found is not None
    # A sampled row of tiles stands for those around it, a head for those that were not looked at.
    share = shape.batch * shape.heads / max(len(heads), 1)
    nearest = np.abs(np.arange(rows)[:, None] - sampled[None, :]).argmin(1) if rows else np.zeros(0, dtype=np.int64)
    stands_for = sampled[nearest] if rows else sampled
    weights = np.bincount(stands_for, minlength=rows) if rows else np.zeros(0, dtype=np.int64)
    by_rows = rows / max(len(sampled), 1)

    def total(counts: _Counts) -> int:
        return round(share * float((weights * counts).sum()))

    return TileCounts(
        full=total(found.full),
        partial=total(found.partial),
        total=shape.batch * shape.heads * rows * columns,
        row_tiles=(found.full + found.partial)[stands_for] / max(len(heads), 1),
        column_tiles=by_rows * found.by_column / max(len(heads), 1),
        keys=total(found.keys),
        rows=round(share * by_rows * float(found.rows_by_column.sum())),
        groups=round(share * by_rows * float(found.groups_by_column.sum())),
        is_exact=len(sampled) == rows and len(heads) == distinct,
        unknown=_unknown(keep, params),
    )


class _Found:
    """Counts by row of tiles, and by column of tiles."""

    def __init__(self, rows: int, columns: int) -> None:
        self.full, self.partial, self.keys = (np.zeros(rows, dtype=np.int64) for _ in range(3))
        self.by_column, self.rows_by_column, self.groups_by_column = (
            np.zeros(columns, dtype=np.int64) for _ in range(3)
        )


class _Grid:
    """The tiles of one head; ``asked`` counts the boxes that were classified."""

    def __init__(self, keep: Expr, params: tuple[Param, ...], shape: Shape, Br: int, Bc: int) -> None:
        self.keep, self.shape, self.Br, self.Bc = keep, shape, Br, Bc
        self.rows, self.columns = -(-shape.q_len // Br), -(-shape.kv_len // Bc)
        self.row_lengths, self.column_lengths = _lengths(shape.q_len, Br), _lengths(shape.kv_len, Bc)
        self.params = _known_params(params, shape)
        self.sizes = {"B": shape.batch, "H": shape.heads, "Hkv": shape.kv_heads, "Nq": shape.q_len, "Nk": shape.kv_len}
        self.asked = 0

    def count(self, heads: list[tuple[int, int]], spans: list[tuple[int, int]], most: int | None) -> _Found | None:
        """The rows of tiles in these spans; None where it takes more than ``most`` boxes."""
        found = _Found(self.rows, self.columns)
        for b, h in heads:
            boxes = [(first, last, 0, self.columns) for first, last in spans]
            while boxes:
                r0, r1, c0, c1 = boxes.pop()
                if r0 == r1 or c0 == c1:
                    continue
                self.asked += 1
                if most is not None and self.asked > most:
                    return None
                kind = self._classify(b, h, r0, r1, c0, c1)
                if kind is TileClass.PARTIAL and (r1 - r0 > 1 or c1 - c0 > 1):
                    boxes += _halves(r0, r1, c0, c1, self.Br, self.Bc)
                elif kind is not TileClass.EMPTY:
                    self._add(found, kind, r0, r1, c0, c1)
        return found

    def _classify(self, b: int, h: int, r0: int, r1: int, c0: int, c1: int) -> TileClass:
        if self.keep == literal(True):
            return TileClass.FULL
        tile = Tile(
            b=IntRange(b, b),
            h=IntRange(h, h),
            i=IntRange(r0 * self.Br, min(r1 * self.Br, self.shape.q_len) - 1),
            j=IntRange(c0 * self.Bc, min(c1 * self.Bc, self.shape.kv_len) - 1),
            sizes=self.sizes,
            params=self.params,
        )
        return classify(self.keep, tile)

    def _add(self, found: _Found, kind: TileClass, r0: int, r1: int, c0: int, c1: int) -> None:
        rows, lengths = slice(r0, r1), self.row_lengths[r0:r1]
        columns = slice(c0, c1)
        (found.full if kind is TileClass.FULL else found.partial)[rows] += c1 - c0
        found.keys[rows] += self.column_lengths[columns].sum()
        found.by_column[columns] += r1 - r0
        found.rows_by_column[columns] += lengths.sum()
        found.groups_by_column[columns] += (-(-lengths // GROUP)).sum()


def _halves(r0: int, r1: int, c0: int, c1: int, Br: int, Bc: int) -> list[tuple[int, int, int, int]]:
    """A box cut across its longer side."""
    if c1 - c0 == 1 or (r1 - r0 > 1 and (r1 - r0) * Br >= (c1 - c0) * Bc):
        middle = (r0 + r1) // 2
        return [(r0, middle, c0, c1), (middle, r1, c0, c1)]
    middle = (c0 + c1) // 2
    return [(r0, r1, c0, middle), (r0, r1, middle, c1)]


def _lengths(length: int, tile: int) -> _Counts:
    return np.array([min(tile, length - first) for first in range(0, length, tile)], dtype=np.int64)


def _heads(keep: Expr, shape: Shape) -> tuple[list[tuple[int, int]], int]:
    """Batch elements and heads to look at, and how many there are whose masks differ as far as positions go.

    One for all where the mask does not tell them apart; what it reads of captured tensors is not known anyway.
    """
    if 0 in (shape.batch, shape.heads):
        return [], 0
    axes = _axes_outside_loads(keep)
    batches = range(shape.batch) if "b" in axes else range(1)
    heads = range(shape.heads) if {"h", "hkv"} & axes else range(1)
    every = [(b, h) for b in batches for h in heads]
    return (every if len(every) <= _MOST_HEADS else every[:: -(-len(every) // _MOST_HEADS)]), len(every)


def _axes_outside_loads(expr: Expr) -> frozenset[str]:
    if isinstance(expr, Load):
        return frozenset()
    if isinstance(expr, Symbol):
        return index_set(expr)
    return frozenset[str]().union(*(_axes_outside_loads(child) for child in expr.children))


def _known_params(params: tuple[Param, ...], shape: Shape) -> dict[str, bool | int | float]:
    """The params whose defaults follow from the sizes."""
    sizes = {"B": shape.batch, "H": shape.heads, "Hkv": shape.kv_heads, "Nq": shape.q_len, "Nk": shape.kv_len}
    values: dict[Expr, Expr] = {size(name): literal(value) for name, value in sizes.items()}
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
