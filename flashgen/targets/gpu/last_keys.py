"""The last key tiles of a backward pass, which several persistent blocks share: how many, and what each block leaves.

In: the variant, the tiles of its backward pass, the sizes of a call. Out: what plans, workspaces and predicted bytes
say of them, and the limits by which kernels choose.
"""

from __future__ import annotations

from collections.abc import Mapping

from flashgen.analysis.variant import Variant
from flashgen.targets.gpu.model import FLOAT, padded
from flashgen.targets.gpu.schedules import Backward

# Of the key tiles that several blocks work on: parts of one, of all, and tiles of queries that a part has at least.
MOST_PARTS, MOST_UNITS, LEAST_PART = 8, 512, 8
PART_OVERHEAD = 4  # tiles of queries that take as long as what a part begins and ends with


def shares_last(variant: Variant, tiles: Backward) -> bool:
    """Whether several blocks work on each of the last key tiles, which persistent blocks that have others copy do."""
    return tiles.persistent and tiles.producers > 0 and not variant.kind.ragged


def parts_of_last(tiles: Backward, sizes: Mapping[str, int], blocks: int) -> tuple[int, int]:
    """How many key tiles are left once all ``blocks`` have had as many, and how many of these work on each.

    As ``parts_of`` of ``templates/include/flashgen/backward/warpgroup_visits.cuh`` has it.
    """
    key_tiles = sizes["batch"] * sizes["kv_heads"] * -(-sizes["kv_len"] // tiles.Bc)
    queries, group = -(-sizes["q_len"] // tiles.Br), sizes["heads"] // sizes["kv_heads"]
    rest, most = key_tiles % blocks, min(key_tiles // 2, MOST_UNITS)

    def cost(parts: int) -> int:
        return -(-rest * parts // blocks) * (-(-queries // parts) * group + PART_OVERHEAD)

    counts = (n for n in range(2, MOST_PARTS + 1) if n * LEAST_PART <= queries and rest * n <= most)
    return rest, min((1, *counts), key=cost) if rest else 1


def bytes_of_part(variant: Variant, tiles: Backward) -> int:
    """What one of these blocks leaves of dK and dV."""
    return FLOAT * tiles.Bc * (padded(variant.head_dim.qk) + padded(variant.head_dim.v))
