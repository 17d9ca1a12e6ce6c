"""By which order a call computes what lists of keys name: of queries, each with its keys, or of blocks of keys.

Stage 3, plan. In: the sizes of a call. Out: a ``BlockOrder``; None where the order of queries is kept. By blocks each
row leaves a part for every number of its list, in the workspace, which is bounded: some of the queries at a time. Which
specs have such kernels says ``analysis/by_blocks.py``; their lists: ``templates/include/flashgen/by_blocks``.
"""

from __future__ import annotations

from dataclasses import dataclass

from flashgen.analysis.by_blocks import UNIT
from flashgen.ir.shape import Shape
from flashgen.ir.spec import HeadDim

QUERIES = 2048  # whose lists are turned together
ITEM = 256  # units of rows that a block of threads takes for one block of keys
MOST_BLOCKS = 8192  # of keys; where the queries of each begin stands in shared memory
MOST_NUMBERS = 32  # of a list, a lane each, which compares it with those before
COUNTED = 32  # queries whose lists a block of threads reads
BROUGHT = 128  # that one brings to the blocks of keys that they list
MOST_PART_BYTES = 2 << 30  # parts of O in the workspace, of all queries at a time; of each row and part 8 bytes more
KEPT = 8  # a query reads at most one key of so many: else tiles of queries read what all of theirs list
LEAST_QUERIES = 4  # that list a block of keys, on average: fewer were not measured
STATE_BYTES = 8  # of a row and part: a maximum and a sum


@dataclass(frozen=True)
class BlockOrder:
    """By blocks of keys, ``queries`` at a time."""

    queries: int


def part_bytes(head_dim: HeadDim, element_bytes: int) -> int:
    """Of a part of ``UNIT`` rows of O, as the lanes of a warp hold them: of each lane whole 16 bytes."""
    columns = -(-head_dim.v // 16) * 16
    return 512 * -(-columns * element_bytes // 64)


def block_order(shape: Shape, numbers: int, block: int, head_dim: HeadDim, element_bytes: int) -> BlockOrder | None:
    """The order of a call whose lists have so many ``numbers`` of blocks."""
    group = shape.heads // max(shape.kv_heads, 1)
    blocks = -(-shape.kv_len // block)
    if group == 0 or group % UNIT or blocks > MOST_BLOCKS or not 0 < numbers <= MOST_NUMBERS:
        return None
    if KEPT * numbers * block > shape.kv_len or shape.q_len * numbers < LEAST_QUERIES * blocks:
        return None
    of_a_query = shape.batch * shape.heads // UNIT * numbers * part_bytes(head_dim, element_bytes)
    most = MOST_PART_BYTES // of_a_query
    queries = most // QUERIES * QUERIES if most > QUERIES else most
    return BlockOrder(min(queries, shape.q_len)) if queries else None
