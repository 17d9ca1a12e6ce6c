"""Registers of a thread, before anything is compiled.

In: a variant, an element type, the tiles of a kernel. Out: an estimate: what the accumulators and fragments of a tile
take, which is exact, and a constant for addresses, statistics and hooks. The compiler's own report decides in the end;
a test holds the two against each other.
"""

from __future__ import annotations

from dataclasses import replace

from flashgen.analysis.variant import Variant
from flashgen.ir.types import ElementType
from flashgen.plan.plan import Spill
from flashgen.targets.gpu.model import padded
from flashgen.targets.gpu.tables import AnyChoice, BackwardChoice, ForwardChoice, QueryChoice

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
# In which tiles differ that have as many registers a thread.
_FREE = ("Br", "Bc", "stages", "q_in_registers", "split", "dq_sent")


def accumulators(variant: Variant, element: ElementType, tiles: AnyChoice) -> int:
    """Registers that hold what a kernel sums up, the scores of its tile, and query rows that stay."""
    D, Dv, pairs = padded(variant.head_dim.qk), padded(variant.head_dim.v), tiles.Br * tiles.Bc
    match tiles:
        case ForwardChoice():  # O, S, and their tangents
            rows, pairs = tiles.rows, pairs // tiles.cluster
            numbers = rows * Dv + max(pairs, rows * tiles.weighed * tiles.split)
            numbers *= 1 if variant.tangent is None else 2
            numbers += rows * D * element.bytes // 4 if tiles.q_in_registers else 0
            numbers += pairs // 4 if variant.kind.f8 else 0  # P
        case BackwardChoice():  # dK, dV, S, dP
            at_a_time, pairs = tiles.weighed * tiles.split * tiles.keys, tiles.Br * tiles.keys
            pairs = at_a_time if tiles.dq_in_halves else max(pairs, at_a_time)  # warps that weigh none have room, too
            numbers = tiles.keys * (D + Dv) // tiles.column_parts + 2 * pairs
            numbers += 2 * pairs if element is ElementType.F32 else 0  # what is lost of P and dS in TF32
            numbers += 0 if variant.tangent is None else 2 * pairs  # what both change by
        case QueryChoice():  # dQ, S, dP
            numbers = tiles.Br * D + 2 * max(pairs, tiles.Br * tiles.weighed * tiles.split)
    return -(-numbers // (32 * tiles.warps))


def harmless_spill(choice: AnyChoice) -> int:
    """Bytes that a kernel may spill and still be taken."""
    return HARMLESS_WARPGROUP_SPILL if choice.warpgroups else HARMLESS_SPILL


def still_spilled(variant: Variant, spill: Spill, choice: AnyChoice) -> int:
    """Bytes that a tile will spill, from what another did whose threads may have as many registers; 0 of others."""
    other = spill.tile
    if not isinstance(other, type(choice)):
        return 0
    if replace(other, **{name: getattr(choice, name) for name in _FREE if hasattr(choice, name)}) != choice:
        return 0
    saved = accumulators(variant, spill.element, other) - accumulators(variant, spill.element, choice)
    return max(0, spill.bytes - _SPILLED_BYTES * saved)


def registers(variant: Variant, element: ElementType, tiles: AnyChoice) -> int:
    """The estimate; more than ``MOST`` where a kernel will spill."""
    splitting = _SPLITTING if element is ElementType.F32 else 0
    return accumulators(variant, element, tiles) + _BESIDE + splitting
