"""HBM bytes of kernels that go through blocks of keys: what follows from the lists of a call.

In: a ``Variant`` with ``listed`` blocks, the tiles of an element type, the values of one call and its lists. Out: bytes
by buffer, as in ``bytes.py``. The lists themselves are captured, and left out.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flashgen.analysis.by_blocks import UNIT
from flashgen.analysis.variant import Variant
from flashgen.plan.by_blocks import BROUGHT, ITEM, QUERIES, STATE_BYTES, part_bytes
from flashgen.targets.gpu.launches import COUNTS, ITEM_COUNTS, ITEMS, LISTED, PART_O, PART_ROWS, RANKS
from flashgen.targets.gpu.model import FLOAT, MERGING_WARPS, WORD
from flashgen.targets.gpu.tiles import ElementPlan

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
