"""Registers of a thread, before anything is compiled.

In: a variant, an element type, the tiles of a kernel. Out: an estimate: what the accumulators and fragments of a tile
take, which is exact, and a constant for addresses, statistics and hooks. The compiler's own report decides in the end;
a test holds the two against each other.
"""

from __future__ import annotations

from flashgen.analysis.variant import Variant
from flashgen.ir.types import ElementType
from flashgen.plan.cuda_model import padded
from flashgen.plan.cuda_plan import BackwardTiles, ForwardTiles, QueryTiles

MOST = 255  # of a thread, on every architecture
# Beside the accumulators. Compiled kernels for causal attention take 40 to 85 more in 16 bits, 42 to 103 in float32,
# whose operands are split in two.
_BESIDE, _SPLITTING = 64, 24


def accumulators(variant: Variant, element: ElementType, tiles: ForwardTiles | BackwardTiles | QueryTiles) -> int:
    """Registers that hold what a kernel sums up, the scores of its tile, and query rows that stay."""
    D, Dv, pairs = padded(variant.head_dim.qk), padded(variant.head_dim.v), tiles.Br * tiles.Bc
    match tiles:
        case ForwardTiles():  # O, S
            numbers = tiles.Br * Dv + pairs
            numbers += tiles.Br * D * element.bytes // 4 if tiles.q_in_registers else 0
        case BackwardTiles():  # dK, dV, S, dP
            numbers = tiles.Bc * (D + Dv) + 2 * pairs
            numbers += 2 * pairs if element is ElementType.F32 else 0  # what is lost of P and dS in TF32
        case QueryTiles():  # dQ, S, dP
            numbers = tiles.Br * D + 2 * pairs
    return -(-numbers // (32 * tiles.warps))


def registers(variant: Variant, element: ElementType, tiles: ForwardTiles | BackwardTiles | QueryTiles) -> int:
    """The estimate; more than ``MOST`` where a kernel will spill."""
    splitting = _SPLITTING if element is ElementType.F32 else 0
    return accumulators(variant, element, tiles) + _BESIDE + splitting
