"""HBM bytes of the kernels for GPUs: what each does with its operands, and what lists of visits add.

In: a ``Variant``, the tiles of an element type, a shape, or the launches and values of one call and what captured
tensors hold. Out: bytes of q, k, v, o, the log-sum-exps, their gradients, delta and the sums of dQ, by the names of the
fields and of the parts of the workspace. Of a shape alone every gradient is summed by atomic additions, none is asked
of the log-sum-exp, and blocks find what they visit. Captured tensors are read element by element where the formula
needs them, mostly from caches, and are left out.
"""

from __future__ import annotations

import ctypes
import functools
import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flashgen.analysis.boxes import EMPTY, Boxes, classify_tiles
from flashgen.analysis.levels import mask_axes
from flashgen.analysis.observed import by_position
from flashgen.analysis.selection import block_of, selected
from flashgen.analysis.tiles import loads_of_kernels
from flashgen.analysis.variant import Variant
from flashgen.ir.expr import Expr
from flashgen.ir.shape import Shape
from flashgen.plan.arguments import ARRIVALS, param_field
from flashgen.plan.launches import TURNED_KEYS, PassLaunches, VisitLists
from flashgen.plan.moved import Access, by_tile, moved, once, sizes_of
from flashgen.plan.operands import ELEMENT_BYTES, OPERANDS, QUERIES, Elements, Operand, Width
from flashgen.plan.tile_counts import GROUP, Call, TileCounts, counts_of_call, tile_counts
from flashgen.targets.gpu.block_bytes import BLOCK_BUFFERS
from flashgen.targets.gpu.launches import (
    CLEARS,
    PART_O,
    PART_ROWS,
    TURNED_V,
    dq_sums,
    operands_of,
    rows_of_a_block,
    turned_v,
    work_tiles,
)
from flashgen.targets.gpu.lists import CHUNK, COUNTS, LENGTH, NUMBER, OF_KEYS, OF_QUERIES, TILES_OF_CHUNK
from flashgen.targets.gpu.model import (
    FEW_QUERIES,
    FLOAT,
    MERGED_WEIGHTS,
    MERGING_THREADS,
    WINDOW,
    finders,
    finds_selected,
    merging_shares,
    padded,
    panel_width,
)
from flashgen.targets.gpu.recipe import Recipe, recipe_of
from flashgen.targets.gpu.tiles import ElementPlan, ForwardTiles

DELTA = Operand("workspace.delta", QUERIES, Width.ONE, elements=Elements.FLOAT32)
_TURNED = f"workspace.{TURNED_V}"
COUNTED = (
    *(name for name in OPERANDS if name != "lse_parts"),  # of extreme rows, whose number nobody knows
    *(DELTA.name, "workspace.dq", _TURNED),
    *(OF_QUERIES, OF_KEYS, f"workspace.{OF_QUERIES}", f"workspace.{OF_KEYS}"),
    *(f"workspace.{PART_O}", f"workspace.{PART_ROWS}", *ARRIVALS),
)
# Of divided weights: 1 / Z of each row, which is all that backward passes read of it.
_PARTS = OPERANDS["lse_parts"]
_INVERSE = replace(_PARTS, width=Width.ONE)
_Columns = tuple[NDArray[np.int64], NDArray[np.int64]]
_THREADS = 128  # of the kernel of delta
_WARP = 32
_LANES = 4  # that share a row, and read what it carries one by one


def counted(variant: Variant) -> tuple[str, ...]:
    """The buffers whose bytes are known."""
    of_blocks = BLOCK_BUFFERS if variant.listed is not None else ()
    return (*COUNTED, *of_blocks, *((_PARTS.name,) if variant.weights.form.divided else ()))


def kernels_of(recipe: Recipe, name: str) -> tuple[str, ...]:
    """The kernels of a pass that touch operands, where gradients are summed by atomic additions."""
    if name == "forward":
        return ("turn", "forward") if recipe.computed.f8 else ("forward",)
    rows = ("rows",) if recipe.row_state else ()
    return (*rows, *(("backward", "convert") if recipe.one_pass else ("keys", "queries")))


def bytes_of_shape(variant: Variant, tiles: ElementPlan, shape: Shape, name: str) -> Mapping[str, Mapping[str, int]]:
    """Of a pass at a shape, by kernel and buffer; the most that a call moves where its mask reads what it brings."""
    account = _Account(variant, tiles, sizes_of(shape), functools.partial(tile_counts, variant, shape))
    recipe = recipe_of(variant)
    return {each: account.of(each, clears_dq=recipe.one_pass) for each in kernels_of(recipe, name)}


def bytes_of_call(
    variant: Variant,
    tiles: ElementPlan,
    symbol: str,
    launches: PassLaunches,
    values: Mapping[str, Any],
    captured: Mapping[str, Any],
) -> Mapping[str, int]:
    """Of the launches of a pass in one call, by buffer.

    ``values`` are those of ``struct Arguments``, ``captured`` the tensors that masks read, as NumPy arrays.
    """
    batch, heads, kv_heads, q_len, kv_len = (
        int(values[each]) for each in ("batch", "heads", "kv_heads", "q_len", "kv_len")
    )
    totals = {"B": "b_total", "H": "h_total", "Nq": "q_total", "Nk": "kv_total"}
    sizes = {each: int(values[field]) for each, field in totals.items()}
    starts = [int(values[f"{each}_start"]) for each in ("b", "h", "q", "kv")]
    sizes["Hkv"] = sizes["H"] // (heads // kv_heads)
    params = {param.name: _as_passed(values[param_field(param.name)]) for param in variant.spec.params}
    keep, seen = by_position(variant.keep, captured, sizes, params)
    call = Call(
        shape=Shape(batch, heads, kv_heads, q_len, kv_len),
        starts=(starts[0], starts[1], starts[2], starts[3]),
        sizes=sizes,
        params=params,
        loads=loads_of_kernels(seen),
    )
    account = _Account(
        variant,
        tiles,
        {**values, **sizes_of(call.shape)},
        functools.cache(functools.partial(counts_of_call, keep, call)),
        {each.field: each for each in launches.lists if values.get(each.field)},
        asks_lse=bool(values.get("d_lse")),
    )
    found = Counter(account.making())
    for launch in launches.launches:
        kernel = launch.kernel.removeprefix(f"{symbol}_").partition("_")[0]
        if kernel in _KERNELS:
            found.update(account.of(kernel, clears_dq=launch.kernel.endswith(CLEARS)))
    if variant.f8 and not values["lse"]:  # which no backward pass will want
        del found["lse"]
    if not values["lse_parts"]:
        found.pop(_PARTS.name, None)
    return found


def bytes_of_sequences(
    sequences: Sequence[Mapping[str, Any]],
    variant: Variant,
    tiles: ElementPlan,
    symbol: str,
    launches: PassLaunches,
    values: Mapping[str, Any],
    captured: Mapping[str, Any],
) -> Mapping[str, int]:
    """The same of a ragged batch, whose ``sequences`` are dense calls with values of their own.

    The kernel of delta goes over the rows of all. What says where sequences begin comes from caches, and is left out.
    """
    dense, found = replace(variant, ragged=False), Counter[str]()
    of_all = [each for each in launches.launches if each.kernel.startswith(f"{symbol}_rows_")]
    of_each = replace(launches, launches=tuple(each for each in launches.launches if each not in of_all))
    for own in sequences:
        found.update(bytes_of_call(dense, tiles, symbol, of_each, {**values, **own}, captured))
    for launch in of_all:
        alone = replace(launches, launches=(replace(launch, kernel=launch.kernel.removesuffix(CLEARS)),))
        found.update(bytes_of_call(dense, tiles, symbol, alone, {**values, "batch": 1}, captured))
        if launch.kernel.endswith(CLEARS):
            found["workspace.dq"] += dq_sums(variant).value(values)
    return found


def bytes_of_caches(
    sequences: Sequence[Mapping[str, Any]],
    variant: Variant,
    tiles: ElementPlan,
    values: Mapping[str, Any],
    captured: Mapping[str, Any],
) -> Mapping[str, int]:
    """Of a call over a cache: K and V once for a tile of the rows of all heads that share them, Q once for each part.

    Parts without keys ask for it, too: they do not know yet.
    What says where rows lie comes from caches, and is left out.
    """
    head_dim, element = variant.head_dim, tiles.element.bytes
    keys = sum(_keys_of_group(variant, tiles, {**values, **own}, captured) for own in sequences)
    rows = math.prod(int(values[each]) for each in ("batch", "heads", "q_len"))
    found = Counter({"q": int(values["splits"]) * rows * head_dim.qk * element, "o": rows * head_dim.v * element})
    of_keys = keys * ELEMENT_BYTES[int(values["key_element"])]
    found.update({"k": of_keys * head_dim.qk, "v": of_keys * head_dim.v})
    if values["lse"]:
        found["lse"] = rows * FLOAT
    if variant.weights.form.divided and values["lse_parts"]:
        found[_PARTS.name] = 2 * rows * FLOAT
    for own in sequences if values["merges"] else ():
        for name, count in _left_and_merged(variant, tiles.forward, {**values, **own}).items():
            found[name] += count
    if values["merges"] and not values["merges_apart"]:
        found["arrivals"] = 4 * int(values["splits"]) * work_tiles(tiles.forward).value(values)
    return found


def _parts_with_tiles(tiles: ForwardTiles, values: Mapping[str, Any]) -> int:
    """Of a sequence: its tiles are dealt out evenly, to the first parts."""
    visited = -(-int(values["kv_len"]) // tiles.Bc)
    return -(-visited // max(-(-visited // int(values["splits"])), 1))


def _left_and_merged(variant: Variant, tiles: ForwardTiles, values: Mapping[str, Any]) -> Mapping[str, int]:
    """What the parts of one sequence leave, and those who merge them read."""
    parts, width, apart = _parts_with_tiles(tiles, values), padded(variant.head_dim.v), bool(values["merges_apart"])
    shares, threads = (merging_shares(variant, tiles), MERGING_THREADS) if apart else (1, 32 * tiles.warps)
    at_once = MERGED_WEIGHTS // tiles.Br  # parts of which more are weighed again for each number of a thread's
    found = Counter[str]()
    for first in range(0, int(values["group_rows"]), tiles.Br):
        rows = min(int(values["group_rows"]) - first, tiles.Br)
        times = -(-rows * width // (4 * shares * threads)) if parts > at_once else 1
        left = int(values["kv_heads"]) * rows * parts
        found[f"workspace.{PART_O}"] += 2 * left * width * FLOAT
        found[f"workspace.{PART_ROWS}"] += (1 + shares * times) * left * 2 * FLOAT * variant.has_row_state
    return found


def _keys_of_group(variant: Variant, tiles: ElementPlan, values: Mapping[str, Any], captured: Mapping[str, Any]) -> int:
    """The keys that a sequence's blocks visit: of a tile of rows what one of its heads and queries may keep."""
    Br, Bc, kv_len = tiles.forward.Br, tiles.forward.Bc, int(values["kv_len"])
    heads, kv_heads, rows = (int(values[each]) for each in ("heads", "kv_heads", "group_rows"))
    group, columns = heads // kv_heads, -(-kv_len // Bc)
    starts = np.arange(columns, dtype=np.int64) * Bc
    lengths = np.minimum(Bc, kv_len - starts)
    if variant.keep_everything:
        return kv_heads * -(-rows // Br) * kv_len
    found, place = 0, _Place(variant, values, captured)
    finds = finds_selected(variant, tiles.element, tiles.forward)
    asked = selected(variant.keep, variant.spec.tensors) if finds else None
    block = 0 if asked is None else block_of(variant.spec.tensors)
    for kv_head in range(kv_heads):
        for first in range(0, rows, Br):
            last = min(first + Br, rows) - 1
            own = range(first % group, last % group + 1) if first // group == last // group else range(group)
            own = own if "h" in mask_axes(variant.keep) else range(1)
            visited = np.zeros(columns, dtype=np.bool_)
            queries = (first // group, last // group)
            for head in own:
                visited |= _visited(variant.keep, place, kv_head * group + head, queries, (starts, lengths))
            if asked is not None:
                visited &= _with_selected(
                    asked, block, place, kv_head * group + np.array(own), queries, (starts, lengths)
                )
            found += int(lengths[visited].sum())
    return found


@dataclass(frozen=True)
class _Place:
    """One sequence over a cache."""

    variant: Variant
    values: Mapping[str, Any]
    captured: Mapping[str, Any]


def _with_selected(
    asked: Expr, block: int, place: _Place, heads: Iterable[int], queries: tuple[int, int], columns: _Columns
) -> NDArray[np.bool_]:
    """Which of the tiles have a selected key: few queries are asked one by one, and each block of keys."""
    starts, lengths = columns
    kv_start, ends = int(place.values["kv_start"]), starts + lengths
    is_few = queries[1] - queries[0] < FEW_QUERIES
    each_query = [(n, n) for n in range(queries[0], queries[1] + 1)] if is_few else [queries]
    found = np.zeros(len(starts), dtype=np.bool_)
    at, owner = starts.copy(), np.arange(len(starts))
    while len(at):
        stops = np.minimum(((kv_start + at) // block + 1) * block - kv_start, ends[owner])
        for head in heads:
            for each in each_query:
                found[owner] |= _visited(asked, place, head, each, (at, stops - at))
        left = stops < ends[owner]
        at, owner = stops[left], owner[left]
    return found


def _visited(keep: Expr, place: _Place, head: int, queries: tuple[int, int], columns: _Columns) -> NDArray[np.bool_]:
    """Which tiles of keys, that begin there and are so long, some queries of a head may keep."""
    variant, values, captured = place.variant, place.values, place.captured
    starts, lengths = columns
    totals = {"B": "b_total", "H": "h_total", "Nq": "q_total", "Nk": "kv_total"}
    sizes = {each: int(values[field]) for each, field in totals.items()}
    sizes["Hkv"] = sizes["H"] // (int(values["heads"]) // int(values["kv_heads"]))
    at, ones = {each: int(values[f"{each}_start"]) for each in ("b", "h", "q", "kv")}, np.ones_like(starts)
    boxes = Boxes(
        b=at["b"] * ones,
        h=(at["h"] + head) * ones,
        first_i=(at["q"] + queries[0]) * ones,
        last_i=(at["q"] + queries[1]) * ones,
        first_j=at["kv"] + starts,
        last_j=at["kv"] + starts + lengths - 1,
        sizes=sizes,
        params={param.name: _as_passed(values[param_field(param.name)]) for param in variant.spec.params},
        computed=True,
    )
    loads = loads_of_kernels(captured, observed=False)
    found: NDArray[np.bool_] = classify_tiles(keep, boxes, loads=loads) != EMPTY
    return found


def _as_passed(value: Any) -> float:
    """Floats are float32 in ``struct Arguments``."""
    return ctypes.c_float(value).value if isinstance(value, float) else value


_KERNELS = ("turn", "forward", "rows", "backward", "keys", "queries", "convert")


def _accesses(
    kernel: str, recipe: Recipe, operands: Mapping[str, Operand], tiles: ElementPlan, *, divided: bool, asks_lse: bool
) -> tuple[Access, ...]:
    """What a kernel does with whole rows of operands. Warps that share the rows of dQ all read what these carry, and so
    do the blocks of a cluster.
    """
    state, of_row = recipe.row_state, _INVERSE if divided else OPERANDS["lse"]
    match kernel:
        case "forward":
            written = (*(["lse"] if state else []), *([_PARTS.name] if divided else []))
            read = ("k",) if recipe.computed.f8 else ("k", "v")
            return (*once("q", "o", *written, of=operands), *by_tile(*read))
        case "turn":
            return once("v", of=operands)
        case "rows":
            return (Access(DELTA),)
        case "backward" | "keys":
            blocks = tiles.backward.cluster
            carried = tuple(Access(each, by_tile=True, times=blocks) for each in (of_row, DELTA)) if state else ()
            return (*once("k", "v", "dk", "dv"), *by_tile("q", "d_o"), *carried)
        case "queries":
            rows = (of_row, DELTA, *((OPERANDS["d_lse"],) if asks_lse and recipe.norms_by_lse else ()))
            carried = tuple(Access(each, times=_LANES * tiles.queries.split) for each in rows) if state else ()
            return (*once("q", "d_o", "dq"), *by_tile("k", "v"), *carried)
        case "convert":
            return once("dq")
    raise AssertionError(kernel)


@dataclass(frozen=True)
class _Account:
    """A pass at a shape, or in a call: ``counts`` of its tiles of Br × Bc, ``lists`` of visits that it reads, by field.

    ``sizes`` are fields of ``struct Arguments``; ``asks_lse``: a gradient of the log-sum-exp comes in.
    """

    variant: Variant
    tiles: ElementPlan
    sizes: Mapping[str, int]
    counts: Callable[[int, int], TileCounts]
    lists: Mapping[str, VisitLists] = field(default_factory=dict)
    asks_lse: bool = False

    def of(self, kernel: str, *, clears_dq: bool) -> Mapping[str, int]:
        """Bytes of one kernel by buffer; ``clears_dq``: that of delta clears the sums of dQ as well."""
        tiles = self.tiles.of_kernel(kernel)
        counts = self.counts(tiles.Br, tiles.Bc) if tiles else None
        head_dim, element = self.variant.head_dim, self.tiles.element.bytes
        operands = operands_of(self.variant)
        divided = self.variant.weights.form.divided
        accesses = _accesses(
            kernel, recipe_of(self.variant), operands, self.tiles, divided=divided, asks_lse=self.asks_lse
        )
        own = (
            replace(each, operand=replace(operands.get(each.operand.name, each.operand), width=each.operand.width))
            for each in accesses
        )
        found = moved(own, head_dim, element, self.sizes, counts)
        if kernel == "rows":
            found.update(self._rows())
        if kernel in ("backward", "keys"):
            assert counts is not None
            for name, width in (("q", head_dim.qk), ("d_o", head_dim.v)):
                found[name] += counts.rows * self._beyond(width) * element
        if kernel == "turn":
            found[_TURNED] += turned_v(self.variant).value(self.sizes)
        if kernel == "forward" and self.variant.f8:
            assert counts is not None
            found[_TURNED] += self._turned(counts)
        if kernel == "backward":
            assert counts is not None
            found["workspace.dq"] += counts.groups * GROUP * padded(head_dim.qk) * FLOAT
            if self.tiles.backward.divides_keys:
                found["k"] += found["k"] // 2  # half of the columns for the other block
        if kernel == "convert" or (kernel == "rows" and clears_dq):
            found["workspace.dq"] += dq_sums(self.variant).value(self.sizes)
        found.update(self._reading_lists(kernel))
        return found

    def _beyond(self, width: int) -> int:
        """Columns that blocks of a cluster bring beside their own, as copies are of whole panels."""
        blocks = self.tiles.backward.column_parts
        own = width // blocks
        panel = panel_width(own, self.tiles.element)
        brought = (min(-(-own // panel) * panel, width - number * own) for number in range(blocks))
        return sum(brought) - width if blocks > 1 else 0

    def _turned(self, counts: TileCounts) -> int:
        """V as it is turned: a tile's panels are whole, and end with the last block of keys."""
        Bc, heads = self.tiles.forward.Bc, self.sizes["batch"] * self.sizes["heads"]
        keys = -(-self.sizes["kv_len"] // TURNED_KEYS) * TURNED_KEYS
        panel = panel_width(Bc, self.tiles.element)
        width = -(-Bc // panel) * panel
        read = sum(float(visits) * min(width, keys - n * Bc) for n, visits in enumerate(counts.column_tiles))
        return round(heads * read) * self.variant.head_dim.v

    def _rows(self) -> Mapping[str, int]:
        """O and dO of whole blocks: threads past the last row read the first again, and each reads what rows carry."""
        each, Dv = rows_of_a_block(self.variant, self.tiles.element), self.variant.head_dim.v
        blocks = -(-self.sizes["batch"] * self.sizes["heads"] * self.sizes["q_len"] // each)
        operands, by_thread = operands_of(self.variant), blocks * _THREADS * FLOAT
        element = self.tiles.element.bytes
        found = {name: blocks * each * Dv * operands[name].element_bytes(element) for name in ("o", "d_o")}
        if self.asks_lse:
            found["d_lse"] = by_thread
        if recipe_of(self.variant).sink_gradients:
            found["lse"] = by_thread
        if self.variant.weights.form.divided:
            found[_PARTS.name] = by_thread
        return found

    # -- lists of visits ---------------------------------------------------------------------------------------

    def making(self) -> Mapping[str, int]:
        """The lists of the call: written, and where the longest come first read and written again.

        A warp that orders one looks at the lengths of all of its mask.
        """
        found: Counter[str] = Counter()
        for lists in self.lists.values():
            if lists.kept:
                continue
            count, size = lists.count.value(self.sizes), CHUNK * sum(self._chunks(lists))
            each = size
            if lists.order:
                tiles = -(-self.sizes["kv_len" if lists.field == OF_KEYS else "q_len"] // lists.tiles[0])
                each += LENGTH + LENGTH * (_WARP + tiles) + 2 * size
            found[_allocation(lists)] += count * each
        return found

    def _reading_lists(self, kernel: str) -> Mapping[str, int]:
        """What blocks read of lists: all that one has room for, but of its counts only what they need."""
        match kernel:
            case "forward":
                tiles = self.tiles.forward
                warps = finders(self.variant, tiles) if tiles.producers else tiles.warps
                copies = tiles.tensor_copies and not tiles.producers
                return self._reading(OF_QUERIES, warps, copies=copies)
            case "backward" | "keys":
                copies = kernel == "backward" and self.tiles.backward.persistent
                group = self.sizes["heads"] // self.sizes["kv_heads"]
                return self._reading(OF_KEYS, self.tiles.backward.warps, heads=group, copies=copies)
            case "queries":
                return self._reading(OF_QUERIES, self.tiles.queries.warps)
        return {}

    def _reading(self, pointer: str, warps: int, *, heads: int = 1, copies: bool = False) -> Mapping[str, int]:
        """A block reads a list for so many ``heads``. Which tile it is of every thread of so many ``warps`` reads.

        Where a block ``copies`` the first window as a whole for the first head, that says it.
        """
        lists = self.lists.get(pointer)
        if lists is None:
            return {}
        windows, chunks = self._chunks(lists)
        each = heads * (COUNTS * windows + CHUNK * chunks)
        if lists.order:
            each += CHUNK - COUNTS if copies else NUMBER * _WARP * warps
        return {_allocation(lists): lists.readers.value(self.sizes) * each}

    def _chunks(self, lists: VisitLists) -> tuple[int, int]:
        """Of a list: the first ones of windows, and those of tiles."""
        length = self.sizes["q_len" if lists.field == OF_KEYS else "kv_len"]
        visited = -(-length // lists.tiles[1])
        return -(-visited // WINDOW), -(-visited // TILES_OF_CHUNK)


def _allocation(lists: VisitLists) -> str:
    return lists.field if lists.kept else f"workspace.{lists.field}"
