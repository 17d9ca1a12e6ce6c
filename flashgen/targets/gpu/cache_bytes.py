"""HBM bytes of kernels that attend to a cache: what the keys of each sequence, and the parts of these, add up to.

In: a ``Variant``, the tiles of an element type, the values of one call and of each of its sequences, what captured
tensors hold. Out: bytes by buffer, as in ``bytes.py``.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flashgen.analysis.boxes import Boxes, classify_tiles
from flashgen.analysis.levels import mask_axes
from flashgen.analysis.selection import block_of, selected
from flashgen.analysis.tiles import TileClass, loads_of_kernels
from flashgen.analysis.variant import Variant
from flashgen.ir.expr import Expr
from flashgen.kinds.operand import ELEMENT_BYTES
from flashgen.plan.arguments import params_of_values, sizes_of_values, starts_of_values
from flashgen.targets.gpu.kernel_bytes import LSE_PARTS
from flashgen.targets.gpu.launches import PART_O, PART_ROWS, work_tiles
from flashgen.targets.gpu.model import (
    FEW_QUERIES,
    FLOAT,
    MERGED_WEIGHTS,
    MERGING_THREADS,
    padded,
)
from flashgen.targets.gpu.schedules import Forward
from flashgen.targets.gpu.tiles import ElementPlan

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
    shares, threads = (tiles.merging_shares(variant), MERGING_THREADS) if apart else (1, tiles.threads)
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
    finds = tiles.forward.finds_selected(variant, tiles.element)
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
