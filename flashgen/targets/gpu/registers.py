"""Registers of a thread, before anything is compiled.

In: a variant, an element type, the tiles of a kernel. Out: an estimate: what the accumulators and fragments of a tile
take, which is exact, and a constant for addresses, statistics and hooks. The compiler's own report decides in the end;
a test holds the two against each other.
"""

from __future__ import annotations

from typing import Any

from flashgen.analysis.variant import Variant
from flashgen.ir.types import ElementType
from flashgen.plan.plan import Spill
from flashgen.targets.gpu.schedules import Schedule

MOST = 255  # of a thread, on every architecture
# Beside the accumulators. Compiled kernels for causal attention take 40 to 85 more in 16 bits, 42 to 103 in float32,
# whose operands are split in two.
_BESIDE, _SPLITTING = 64, 24
# Bytes of registers that a kernel may store and load again and still be taken: numbers that live across the loops, and
# are read once a tile at most.
HARMLESS_SPILL = 160
# The same where warpgroups multiply: what comes next has no warpgroups, and was measured to take 1.6 times as long.
HARMLESS_WARPGROUP_SPILL = 320
# A register too many is stored once and loaded once. Measured: 128 × 128 spills 1,276 bytes and 64 × 128, whose warps
# keep 64 numbers less, 636.
_SPILLED_BYTES = 8
# Tiles that agree in these have as many registers a thread.
_LIMITS = ("warpgroups", "warps", "producers", "blocks", "cluster", "divides_keys", "s_columns")
_MORE = ("tensor_copies", "persistent", "prefetches_next", "overlaps_next", "q_places", "pairs_staged")


def harmless_spill(tiles: Schedule) -> int:
    """Bytes that a kernel may spill and still be taken."""
    return HARMLESS_WARPGROUP_SPILL if tiles.warpgroups else HARMLESS_SPILL


def still_spilled(variant: Variant, spill: Spill, tiles: Schedule) -> int:
    """Bytes that a tile will spill, from what another of the pass did with as many registers a thread; 0 of others."""
    other: Any = spill.tile
    if any(getattr(other, name, None) != getattr(tiles, name, None) for name in (*_LIMITS, *_MORE)):
        return 0
    saved: int = other.accumulators(variant, spill.element) - tiles.accumulators(variant, spill.element)
    return max(0, spill.bytes - _SPILLED_BYTES * saved)


def registers(variant: Variant, element: ElementType, tiles: Schedule) -> int:
    """The estimate; more than ``MOST`` where a kernel will spill."""
    splitting = _SPLITTING if element is ElementType.F32 else 0
    return tiles.accumulators(variant, element) + _BESIDE + splitting
