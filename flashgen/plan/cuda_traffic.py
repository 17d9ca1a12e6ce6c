"""What the kernels of a pass move to and from a GPU's memory, byte for byte, without running them.

In: a ``Variant``, the tiles, the launches of the pass, the values of ``struct Arguments``, what captured tensors hold.
Out: bytes of q, k, v, o, the log-sum-exps, their gradients, delta and the sums of dQ, by the names of the fields and of
the parts of the workspace. It follows ``templates/cuda``: which tiles are visited, what is loaded for each, what is
stored at the end, and of the lists of visits that the values point to, with what it takes to make them where each call
does. Captured tensors are read element by element where the formula needs them, mostly from caches, and are left out.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from flashgen.analysis.pieces import classify_in_pieces, is_cut
from flashgen.analysis.tiles import Tile, TileClass, as_kernels_know, classify, loads_of
from flashgen.analysis.variant import Variant
from flashgen.ir.interval import IntRange
from flashgen.plan.arguments import param_field
from flashgen.plan.cuda_launches import CLEARS, dq_sums, passes, rows_of_a_block
from flashgen.plan.cuda_lists import CHUNK, COUNTS, LENGTH, NUMBER, OF_KEYS, OF_QUERIES, TILES_OF_CHUNK
from flashgen.plan.cuda_model import WINDOW, padded
from flashgen.plan.cuda_plan import ElementPlan
from flashgen.plan.launches import PassLaunches, VisitLists

FLOAT = 4
GROUP = 16  # rows whose sums of dQ lie together
COUNTED = (
    *("q", "k", "v", "o", "lse", "d_o", "d_lse", "dq", "dk", "dv", "workspace.delta", "workspace.dq"),
    *(OF_QUERIES, OF_KEYS, f"workspace.{OF_QUERIES}", f"workspace.{OF_KEYS}"),
)
_THREADS = 128  # of the kernel of delta
_WARP = 32


@dataclass(frozen=True)
class _Span:
    """Neighbouring rows or keys: the first, counted within the call, and how many."""

    first: int
    count: int


def traffic(
    variant: Variant,
    tiles: ElementPlan,
    symbol: str,
    launches: PassLaunches,
    values: Mapping[str, Any],
    captured: Mapping[str, Any],
) -> Mapping[str, int]:
    """Bytes by buffer. ``captured`` are the tensors that masks read, as NumPy arrays."""
    model = _Model(variant, tiles, launches.lists, values, captured)
    found = Counter(model.making())
    for launch in launches.launches:
        kernel = launch.kernel.removeprefix(f"{symbol}_").partition("_")[0]
        moved: dict[str, Callable[[], Mapping[str, int]]] = {
            "forward": model.forward,
            "rows": functools.partial(model.rows, clears_dq=launch.kernel.endswith(CLEARS)),
            "backward": functools.partial(model.keys, adds_dq=True),
            "keys": functools.partial(model.keys, adds_dq=False),
            "queries": model.queries,
            "convert": model.convert,
        }
        if kernel in moved:
            found.update(moved[kernel]())
    return found


class _Model:
    """One call: sizes in elements, and which tiles hold a pair that may be kept."""

    def __init__(
        self,
        variant: Variant,
        tiles: ElementPlan,
        lists: tuple[VisitLists, ...],
        values: Mapping[str, Any],
        captured: Mapping[str, Any],
    ) -> None:
        self.tiles = tiles
        self.lists = {each.field: each for each in lists if values.get(each.field)}
        self.cut = passes(variant)
        self.element = tiles.element.bytes
        self.D, self.Dv, self.padded = variant.head_dim.qk, variant.head_dim.v, padded(variant.head_dim.qk)
        self.values = values
        self.batch, self.heads, self.kv_heads = (int(values[name]) for name in ("batch", "heads", "kv_heads"))
        self.q_len, self.kv_len = int(values["q_len"]), int(values["kv_len"])
        self.variant = variant
        self.loads = as_kernels_know(loads_of(captured))
        self._holds = functools.cache(self._classify)

    def forward(self) -> Mapping[str, int]:
        """Q and O once, K and V for every tile that is visited."""
        found = self._by_queries(self.tiles.forward.Br, self.tiles.forward.Bc)
        rows = self._rows()
        found.update({"q": rows * self.D * self.element, "o": rows * self.Dv * self.element})
        if self.cut.row_state:
            found["lse"] += rows * FLOAT
        tiles = self.tiles.forward
        if tiles.tensor_copies and not tiles.loaders:
            found.update(self._copying(OF_QUERIES))
        else:
            found.update(self._reading(OF_QUERIES, tiles.loaders - 1 if tiles.loaders else tiles.warps))
        return found

    def rows(self, *, clears_dq: bool) -> Mapping[str, int]:
        """O and dO once; threads past the last row read the first again. The sums of dQ, where it clears them."""
        each = rows_of_a_block(self.Dv, self.tiles.element)
        blocks = -(-self._rows() // each)
        width = blocks * each * self.Dv * self.element
        found = {"o": width, "d_o": width, "workspace.delta": self._rows() * FLOAT}
        every_thread = blocks * _THREADS * FLOAT
        if self.values["d_lse"]:
            found["d_lse"] = every_thread
        if self.cut.sink_gradients:
            found["lse"] = every_thread
        if clears_dq:
            found["workspace.dq"] = dq_sums(self.variant).value(self.values)
        return found

    def keys(self, *, adds_dq: bool) -> Mapping[str, int]:
        """K and V, dK and dV once; Q, dO and what rows carry for every tile that is visited."""
        found: Counter[str] = Counter()
        plan, group = self.tiles.backward, self.heads // self.kv_heads
        rows = groups = 0
        for b in range(self.batch):
            for h in range(self.heads):
                for keys in _spans(self.kv_len, plan.Bc):
                    for queries in _spans(self.q_len, plan.Br):
                        if self._holds(b, h, queries, keys):
                            rows += queries.count
                            groups += -(-queries.count // GROUP)
        size = self.batch * self.kv_heads * self.kv_len * self.element
        assert group * self.kv_heads == self.heads
        found.update({"k": size * self.D, "v": size * self.Dv, "dk": size * self.D, "dv": size * self.Dv})
        found.update({"q": rows * self.D * self.element, "d_o": rows * self.Dv * self.element})
        if self.cut.row_state:
            found.update({"lse": rows * FLOAT, "workspace.delta": rows * FLOAT})
        if adds_dq and plan.stays:
            found.update(self._copying(OF_KEYS, group))
        else:
            found.update(self._reading(OF_KEYS, plan.warps, group))
        if adds_dq:
            found["workspace.dq"] += groups * GROUP * self.padded * FLOAT
        return found

    def queries(self) -> Mapping[str, int]:
        """Q, dO and dQ once, what a row carries once for each of the four lanes that share it; K and V as forward."""
        found = self._by_queries(self.tiles.queries.Br, self.tiles.queries.Bc)
        rows = self._rows()
        found.update({"q": rows * self.D * self.element, "d_o": rows * self.Dv * self.element})
        found["dq"] += rows * self.D * self.element
        if self.cut.row_state:
            found.update({"lse": 4 * rows * FLOAT, "workspace.delta": 4 * rows * FLOAT})
        found.update(self._reading(OF_QUERIES, self.tiles.queries.warps))
        return found

    def convert(self) -> Mapping[str, int]:
        """The sums of dQ, and dQ."""
        return {"workspace.dq": dq_sums(self.variant).value(self.values), "dq": self._rows() * self.D * self.element}

    def making(self) -> Mapping[str, int]:
        """The lists of the call: written, and where the longest come first read and written again.

        A warp that orders one looks at the lengths of all of its mask.
        """
        found: Counter[str] = Counter()
        for lists in self.lists.values():
            if lists.kept:
                continue
            count, size = lists.count.value(self.values), CHUNK * sum(self._chunks(lists))
            each = size
            if lists.order:
                tiles = -(-(self.kv_len if lists.field == OF_KEYS else self.q_len) // lists.tiles[0])
                each += LENGTH + LENGTH * (_WARP + tiles) + 2 * size
            found[_allocation(lists)] += count * each
        return found

    def _reading(self, field: str, warps: int, heads: int = 1) -> Mapping[str, int]:
        """What blocks read of lists: all that one has room for, but of its counts only what they need.

        Every thread of so many ``warps`` reads as much as says which tile it is of; a block reads it for so many
        ``heads``.
        """
        lists = self.lists.get(field)
        if lists is None:
            return {}
        windows, chunks = self._chunks(lists)
        each = heads * (COUNTS * windows + CHUNK * chunks)
        if lists.order:
            each += NUMBER * _WARP * warps
        return {_allocation(lists): lists.readers.value(self.values) * each}

    def _copying(self, field: str, heads: int = 1) -> Mapping[str, int]:
        """The same where the first window is copied as a whole for the first head: it says what tile the list is of."""
        lists = self.lists.get(field)
        if lists is None or not lists.order:
            return self._reading(field, 0, heads)
        windows, chunks = self._chunks(lists)
        each = heads * (COUNTS * windows + CHUNK * chunks) + CHUNK - COUNTS
        return {_allocation(lists): lists.readers.value(self.values) * each}

    def _chunks(self, lists: VisitLists) -> tuple[int, int]:
        """Of a list: the first ones of windows, and those of tiles."""
        length = self.q_len if lists.field == OF_KEYS else self.kv_len
        visited = -(-length // lists.tiles[1])
        return -(-visited // WINDOW), -(-visited // TILES_OF_CHUNK)

    def _rows(self) -> int:
        return self.batch * self.heads * self.q_len

    def _by_queries(self, Br: int, Bc: int) -> Counter[str]:
        """K and V for each tile of queries and each tile of keys that may hold a kept pair."""
        keys = sum(
            each.count
            for b in range(self.batch)
            for h in range(self.heads)
            for queries in _spans(self.q_len, Br)
            for each in _spans(self.kv_len, Bc)
            if self._holds(b, h, queries, each)
        )
        return Counter({"k": keys * self.D * self.element, "v": keys * self.Dv * self.element})

    def _classify(self, b: int, h: int, queries: _Span, keys: _Span) -> bool:
        values = self.values
        if self.variant.keep_everything:
            return True
        totals = {"B": "b_total", "H": "h_total", "Nq": "q_total", "Nk": "kv_total"}
        sizes = {name: int(values[total]) for name, total in totals.items()}
        sizes["Hkv"] = sizes["H"] // (self.heads // self.kv_heads)
        i, j = int(values["q_start"]) + queries.first, int(values["kv_start"]) + keys.first
        b, h = int(values["b_start"]) + b, int(values["h_start"]) + h
        tile = Tile(
            b=IntRange(b, b),
            h=IntRange(h, h),
            i=IntRange(i, i + queries.count - 1),
            j=IntRange(j, j + keys.count - 1),
            sizes=sizes,
            params={param.name: values[param_field(param.name)] for param in self.variant.spec.params},
        )
        keep = self.variant.keep
        found = classify_in_pieces(keep, tile) if is_cut(keep) else classify(keep, tile, loads=self.loads)
        return found is not TileClass.EMPTY


def _allocation(lists: VisitLists) -> str:
    return lists.field if lists.kept else f"workspace.{lists.field}"


def _spans(length: int, tile: int) -> list[_Span]:
    return [_Span(first, min(tile, length - first)) for first in range(0, length, tile)]
