"""HBM bytes of the kernels for GPUs: of a shape, of a call, of sequences, by blocks of keys, over caches.

In: a ``Recipe``, the tiles of an element type, a shape, or the launches and values of one call and what captured
tensors hold. Out: bytes of q, k, v, o, the log-sum-exps, their gradients, delta and the sums of dQ, by the names of the
fields and of the parts of the workspace. Of a shape alone every gradient is summed by atomic additions, none is asked
of the log-sum-exp, and blocks find what they visit. Captured tensors are read element by element where the formula
needs them, mostly from caches, and are left out.
"""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flashgen.analysis.by_blocks import UNIT
from flashgen.analysis.levels import mask_axes
from flashgen.analysis.selection import block_of, selected
from flashgen.analysis.tiles import Boxes, TileClass, by_position, classify_tiles, loads_of_kernels
from flashgen.analysis.variant import Variant
from flashgen.ir.expr import Expr
from flashgen.ir.shape import Shape
from flashgen.kinds.cached import ARRIVALS
from flashgen.kinds.dense import DENSE, OPERANDS
from flashgen.kinds.operand import ELEMENT_BYTES
from flashgen.plan.arguments import params_of_values, sizes_of_values, starts_of_values
from flashgen.plan.by_blocks import BROUGHT, ITEM, QUERIES, STATE_BYTES, part_bytes
from flashgen.plan.launches import PassLaunches
from flashgen.plan.tile_counts import MaskedCall, counts_of_call, tile_counts
from flashgen.targets.gpu.kernel_bytes import DELTA, KERNELS, LSE_PARTS, TURNED, KernelBytes
from flashgen.targets.gpu.launches import (
    CLEARS,
    COUNTS,
    ITEM_COUNTS,
    ITEMS,
    LISTED,
    PART_O,
    PART_ROWS,
    RANKS,
    dq_sums,
    shares_last,
    work_tiles,
)
from flashgen.targets.gpu.lists import OF_KEYS, OF_QUERIES
from flashgen.targets.gpu.model import FEW_QUERIES, FLOAT, MERGED_WEIGHTS, MERGING_THREADS, MERGING_WARPS, WORD, padded
from flashgen.targets.gpu.recipe import Recipe
from flashgen.targets.gpu.schedules import Forward
from flashgen.targets.gpu.tiles import ElementPlan, finds_selected, merging_shares

COUNTED = (
    *(name for name in OPERANDS if name != "lse_parts"),  # of extreme rows, whose number nobody knows
    *(DELTA.name, "workspace.dq", TURNED),
    *(OF_QUERIES, OF_KEYS, f"workspace.{OF_QUERIES}", f"workspace.{OF_KEYS}"),
    *(f"workspace.{PART_O}", f"workspace.{PART_ROWS}", *ARRIVALS),
)


def counted(variant: Variant) -> tuple[str, ...]:
    """The buffers whose bytes are known."""
    of_blocks = BLOCK_BUFFERS if variant.listed is not None else ()
    return (*COUNTED, *of_blocks, *((LSE_PARTS.name,) if variant.weights.form.divided else ()))


def kernels_of(recipe: Recipe, name: str) -> tuple[str, ...]:
    """The kernels of a pass that touch operands, where gradients are summed by atomic additions."""
    if name == "forward":
        return ("turn", "forward") if recipe.variant.kind.f8 else ("forward",)
    rows = ("rows",) if recipe.row_state else ()
    return (*rows, *(("backward", "convert") if recipe.one_pass else ("keys", "queries")))


def bytes_of_shape(recipe: Recipe, tiles: ElementPlan, shape: Shape, name: str) -> Mapping[str, Mapping[str, int]]:
    """Of a pass at a shape, by kernel and buffer; the most that a call moves where its mask reads what it brings."""
    account = KernelBytes(recipe, tiles, asdict(shape), functools.partial(tile_counts, recipe.variant, shape))
    return {each: account.of(each, clears_dq=recipe.one_pass) for each in kernels_of(recipe, name)}


def bytes_of_call(
    recipe: Recipe,
    tiles: ElementPlan,
    symbol: str,
    launches: PassLaunches,
    values: Mapping[str, Any],
    captured: Mapping[str, Any],
    multiprocessors: int | None = None,
) -> Mapping[str, int]:
    """Of the launches of a pass in one call, by buffer.

    ``values`` are those of ``struct Arguments``, ``captured`` the tensors that masks read, as NumPy arrays. Of how many
    ``multiprocessors`` depends what blocks share; without them nothing.
    """
    variant = recipe.variant
    shape = Shape(*(int(values[each]) for each in ("batch", "heads", "kv_heads", "q_len", "kv_len")))
    sizes, params = sizes_of_values(values), params_of_values(variant.spec, values)
    keep, seen = by_position(variant.keep, captured, sizes, params)
    call = MaskedCall(
        shape=shape,
        starts=starts_of_values(values),
        sizes=sizes,
        params=params,
        loads=loads_of_kernels(seen),
    )
    account = KernelBytes(
        recipe,
        tiles,
        {**values, **asdict(shape)},
        functools.cache(functools.partial(counts_of_call, keep, call)),
        {each.field: each for each in launches.lists if values.get(each.field)},
        asks_lse=bool(values.get("d_lse")),
    )
    found = Counter(account.making())
    for launch in launches.launches:
        kernel = launch.kernel.removeprefix(f"{symbol}_").partition("_")[0]
        if kernel in KERNELS:
            found.update(account.of(kernel, clears_dq=launch.kernel.endswith(CLEARS)))
        if kernel == "backward" and multiprocessors and shares_last(variant, tiles.backward):
            found.update(account.read_again(tiles.backward.blocks * multiprocessors))
    if variant.kind.f8 and not values["lse"]:  # which no backward pass will want
        del found["lse"]
    if not values["lse_parts"]:
        found.pop(LSE_PARTS.name, None)
    return found


def bytes_of_sequences(
    sequences: Sequence[Mapping[str, Any]],
    recipe: Recipe,
    tiles: ElementPlan,
    symbol: str,
    launches: PassLaunches,
    values: Mapping[str, Any],
    captured: Mapping[str, Any],
) -> Mapping[str, int]:
    """Of the launches of a ragged batch, by buffer; its ``sequences`` are dense calls with values of their own.

    The kernel of delta goes over the rows of all. What says where sequences begin comes from caches, and is left out.
    """
    dense, found = replace(recipe, variant=replace(recipe.variant, kind=DENSE)), Counter[str]()
    of_all = [each for each in launches.launches if each.kernel.startswith(f"{symbol}_rows_")]
    of_each = replace(launches, launches=tuple(each for each in launches.launches if each not in of_all))
    for own in sequences:
        found.update(bytes_of_call(dense, tiles, symbol, of_each, {**values, **own}, captured))
    for launch in of_all:
        alone = replace(launches, launches=(replace(launch, kernel=launch.kernel.removesuffix(CLEARS)),))
        found.update(bytes_of_call(dense, tiles, symbol, alone, {**values, "batch": 1}, captured))
        if launch.kernel.endswith(CLEARS):
            found["workspace.dq"] += dq_sums(recipe.variant).value(values)
    return found


BLOCK_BUFFERS = tuple(f"workspace.{name}" for name in (LISTED, ITEMS, ITEM_COUNTS, COUNTS, RANKS))
_OF_ITEM = 16  # bytes
_UNITS_OF_TILE = 8
_LANES = 32


def bytes_of_blocks(
    variant: Variant, tiles: ElementPlan, values: Mapping[str, Any], numbers: NDArray[np.int64]
) -> Mapping[str, int]:
    """Of one call; ``numbers`` are the lists of its queries, [batch, kv_heads, q_len, numbers of a list]."""
    listed, element, head_dim = variant.listed, tiles.element.bytes, variant.head_dim
    assert listed is not None, "kernels go through blocks of keys"
    batch, heads, kv_heads, q_len, kv_len = (
        int(values[each]) for each in ("batch", "heads", "kv_heads", "q_len", "kv_len")
    )
    group, blocks, of_list = heads // kv_heads, -(-kv_len // listed.block), numbers.shape[-1]
    per_query, threads = group // UNIT, 32 * tiles.forward.warps
    there = (numbers >= 0) & (numbers < blocks)
    for place in range(1, of_list):
        there[..., place] &= (numbers[..., :place] != numbers[..., place : place + 1]).all(-1)

    found: Counter[str] = Counter()
    own, state = part_bytes(head_dim, element), UNIT * STATE_BYTES
    spans = range(0, q_len, QUERIES)
    for head in range(batch * kv_heads):
        b, kv_head = divmod(head, kv_heads)
        for first in spans:
            span = (b, kv_head, slice(first, first + QUERIES))
            counts = np.bincount(numbers[span][there[span]], minlength=blocks)
            for block in np.flatnonzero(counts):
                units = int(counts[block]) * per_query
                keys = min(listed.block, kv_len - int(block) * listed.block)
                found[f"workspace.{LISTED}"] += WORD * int(counts[block])
                found[f"workspace.{PART_O}"] += units * own
                found[f"workspace.{PART_ROWS}"] += units * state
                for begin in range(0, units, ITEM):
                    rounded = -(-min(ITEM, units - begin) // _UNITS_OF_TILE) * _UNITS_OF_TILE
                    found["q"] += rounded * UNIT * head_dim.qk * element
                    found["k"] += keys * head_dim.qk * element
                    found["v"] += keys * head_dim.v * element
                    found[f"workspace.{LISTED}"] += WORD * rounded
                    found[f"workspace.{ITEMS}"] += _OF_ITEM * (1 + threads)
    turned = batch * kv_heads * len(spans)
    items = turned * (QUERIES // ITEM * per_query * of_list + blocks)
    found[f"workspace.{ITEM_COUNTS}"] += WORD * (turned + items * threads)
    found[f"workspace.{COUNTS}"] += WORD * (int(there.sum()) + turned * (QUERIES // BROUGHT) * blocks)
    found[f"workspace.{RANKS}"] += 2 * WORD * there.size
    found[f"workspace.{PART_ROWS}"] += int((~there).sum()) * per_query * state
    # Those who merge read the last unit again in the place of those that a block has more room for.
    parts = np.repeat(there.sum(-1).reshape(-1), per_query)
    of_block = 2 * MERGING_WARPS
    rest = -len(parts) % of_block
    found[f"workspace.{PART_O}"] += int(parts.sum() + rest * parts[-1]) * own
    found[f"workspace.{PART_ROWS}"] += 2 * (len(parts) + rest) * of_list * _LANES * STATE_BYTES
    rows = batch * heads * q_len
    found["o"] += rows * head_dim.v * element
    if values["lse"]:
        found["lse"] += rows * FLOAT
    return found


_Columns = tuple[NDArray[np.int64], NDArray[np.int64]]


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
        found[LSE_PARTS.name] = 2 * rows * FLOAT
    for own in sequences if values["merges"] else ():
        for name, count in _left_and_merged(variant, tiles.forward, {**values, **own}).items():
            found[name] += count
    if values["merges"] and not values["merges_apart"]:
        found["arrivals"] = 4 * int(values["splits"]) * work_tiles(tiles.forward).value(values)
    return found


def _parts_with_tiles(tiles: Forward, values: Mapping[str, Any]) -> int:
    """Of a sequence: its tiles are dealt out evenly, to the first parts."""
    visited = -(-int(values["kv_len"]) // tiles.Bc)
    return -(-visited // max(-(-visited // int(values["splits"])), 1))


def _left_and_merged(variant: Variant, tiles: Forward, values: Mapping[str, Any]) -> Mapping[str, int]:
    """What the parts of one sequence leave, and those who merge them read."""
    parts, width, apart = _parts_with_tiles(tiles, values), padded(variant.head_dim.v), bool(values["merges_apart"])
    shares, threads = (merging_shares(tiles, variant), MERGING_THREADS) if apart else (1, tiles.threads)
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
    finds = finds_selected(tiles.forward, variant, tiles.element)
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
    (b_start, h_start, q_start, kv_start), ones = starts_of_values(values), np.ones_like(starts)
    boxes = Boxes(
        b=b_start * ones,
        h=(h_start + head) * ones,
        first_i=(q_start + queries[0]) * ones,
        last_i=(q_start + queries[1]) * ones,
        first_j=kv_start + starts,
        last_j=kv_start + starts + lengths - 1,
        sizes=sizes_of_values(values),
        params=params_of_values(variant.spec, values),
        computed=True,
    )
    loads = loads_of_kernels(captured, observed=False)
    found: NDArray[np.bool_] = classify_tiles(keep, boxes, loads=loads) != TileClass.EMPTY
    return found
