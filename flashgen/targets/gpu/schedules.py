"""The schedules of GPU kernels: which warps multiply and which copy, what they share, and which tile comes next.

A class is a schedule; a value of it is a tile for that schedule, with fields of its own. What readers ask of every
schedule has its usual answer in ``Schedule`` or in the class of a pass; a schedule that answers otherwise has a field,
a constant or a property of that name. Families have values in ``tables.py``; ``complete`` of their recipes decides the
fields that follow from a variant.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from flashgen.analysis.selection import selected
from flashgen.analysis.variant import Variant
from flashgen.ir.types import ElementType
from flashgen.plan.plan import Tiles
from flashgen.targets.gpu.model import (
    COPYING_REGISTERS,
    FINDING_REGISTERS,
    MEASURERS,
    WINDOW,
    element_of_keys,
    padded,
    registers,
    tile_bytes,
)

MOST_WARPS = 16  # that multiply, of a block or of the blocks of a multiprocessor
_MOST_STREAMED = 256  # rows of a tile that warpgroups stream


@dataclass(frozen=True)
class Schedule(Tiles):
    """B_r queries by B_c keys for ``warps`` that multiply; what streams has ``stages`` tiles of shared memory.

    ``sram_bytes``: shared memory of a block, once it is planned; ``schedule``: the name of the class, for manifests.
    """

    warps: int
    stages: int = 1
    sram_bytes: int = field(default=0, kw_only=True, compare=False)
    schedule: str = field(default="", kw_only=True, compare=False)

    # Products are Hopper's, of four warps at a time, with operands in shared memory.
    warpgroups = False
    # More warps, which copy, and the registers that a thread of these needs.
    producers = 0
    least_registers = COPYING_REGISTERS
    # Blocks of a multiprocessor that the compiler leaves registers for.
    blocks = 1
    # Blocks that share a tile.
    cluster = 1
    # Warps, or warpgroups, that share rows of O or dQ, or keys of dK and dV, and have a part of the columns each.
    split = 1
    # One thread starts tensor copies.
    tensor_copies = False
    # A block that copies for itself asks for its next tile while it works on one.
    prefetches_next = False
    # What pairs read of a captured tensor comes by way of shared memory.
    pairs_staged = False
    # Two warpgroups weigh key tiles in turns.
    ping_pong = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "schedule", type(self).__name__)

    @property
    def s_columns(self) -> int:
        """Columns of S that a warp has in registers at a time: keys, or queries for dK and dV. 0: those of the tile."""
        return 0

    @property
    def column_parts(self) -> int:
        """Blocks of a cluster that have a part of the columns each; others have a part of a tile's rows or keys."""
        return 1

    @property
    def threads(self) -> int:
        """Of a block."""
        return 32 * (self.warps + self.producers)

    @property
    def registers(self) -> tuple[int, int]:
        """Of a thread that multiplies, and of one that copies; 0 where all are alike."""
        return registers(self.warps, self.producers, self.least_registers) if self.producers else (0, 0)

    @property
    def multipliers(self) -> str:
        """``3 warpgroups``, ``4 warps``."""
        count, what = (self.warps // 4, "warpgroup") if self.warpgroups else (self.warps, "warp")
        return f"{count} {what}{'s' * (count > 1)}"

    @property
    def staged(self) -> str:
        """``2 stages``."""
        return f"{self.stages} stage{'s' * (self.stages > 1)}"

    @property
    def rows(self) -> int:
        """Of a block: those of what it adds up."""
        return self.Br // self.cluster

    @property
    def streamed(self) -> int:
        """Rows of a tile that streams."""
        return self.Bc

    def alone(self) -> Schedule:
        """Where a warpgroup is alone it copies for itself: warps that copy for it would be left too many registers."""
        return self

    @property
    def barriers(self) -> int:
        """Of a step; waits of warpgroups hide."""
        raise NotImplementedError

    def accumulators(self, variant: Variant, element: ElementType) -> int:
        """Registers of a thread for what a kernel adds up, S of its tile, and query rows that stay."""
        raise NotImplementedError

    @property
    def works(self) -> bool:
        """Whether the templates can work with this tile: each warp has whole sixteens of rows, and of its part of S.

        Warpgroups have 64 rows each and two stages, and leave each thread of a multiprocessor 128 registers.
        """
        sixteens, parts = 16 * (self.warps // self.split), 16 * self.split
        whole = self.Br % 16 == self.Bc % 16 == self.warps % self.split == 0 and self.rows % sixteens == 0
        divides = whole and (self.streamed % parts == 0 or self.streamed < parts)
        if not self.warpgroups:
            return divides
        streams = (self.stages == 2 or self.split > 1) and self.streamed <= _MOST_STREAMED
        groups = self.rows == sixteens and self.warps % (4 * self.split) == 0
        return divides and streams and groups and (self.blocks == 1 or self.blocks * self.warps <= MOST_WARPS)


# -- forward -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Forward(Schedule):
    """Of the forward pass: a block has queries, and K and V stream."""

    q_in_registers = False
    divided = False  # warps that share rows have scores of a part of a tile's keys each
    overlaps_next = False  # warpgroups begin a query tile beside the last product of the one before

    @property
    def q_places(self) -> int:
        """Tiles of Q in shared memory."""
        return 1 + self.prefetches_next

    @property
    def self_loading(self) -> bool:
        """Whether blocks are persistent, and a thread that multiplies starts the copies."""
        return self.tensor_copies and not self.producers

    @property
    def barriers(self) -> int:
        return 0 if self.warpgroups else 2 + (self.split > 1)

    def accumulators(self, variant: Variant, element: ElementType) -> int:
        rows, pairs = self.rows, self.rows * self.Bc
        # O, S, and their tangents.
        numbers = rows * padded(variant.head_dim.v) + max(pairs, rows * self.s_columns * self.split)
        numbers *= 1 if variant.tangent is None else 2
        numbers += self.q_in_registers * rows * padded(variant.head_dim.qk) * element.bytes // 4
        numbers += variant.kind.f8 * pairs // 4  # P
        return -(-numbers // (32 * self.warps))

    def finders(self, variant: Variant) -> int:
        """Warps that find visits: all, or those of the producers that neither copy nor take norms of keys."""
        if not self.producers:
            return self.warps
        return self.producers - 1 - self.ping_pong - (MEASURERS if variant.uses_sqdist else 0)

    def finds_selected(self, variant: Variant, element: ElementType) -> bool:
        """Over caches: whether tiles with a selected key are found first. Their numbers take the place of K and V."""
        if selected(variant.keep, variant.spec.tensors) is None:
            return False
        widths, of_keys = (padded(variant.head_dim.qk), padded(variant.head_dim.v)), element_of_keys(variant, element)
        return self.stages * sum(tile_bytes(self.Bc, width, of_keys) for width in widths) >= 2 * WINDOW

    def merging_shares(self, variant: Variant) -> int:
        """Over caches: blocks that merge a tile's parts, each with so much of the columns: 32 or more, or a warp's."""
        width = variant.head_dim.v
        if self.split > 1:
            if width != padded(width):
                return 1
            counts = range(width // 32 // self.split * self.split, self.split, -self.split)
            return next((count for count in counts if width % (16 * count) == 0), self.split)
        return next(count for count in (4, 2, 1) if count == 1 or width % (32 * count) == 0)

    def merging_warps(self, variant: Variant) -> int:
        """Over caches: warps of a team that has all rows of a tile, and a block's columns."""
        return self.warps // (self.split if self.merging_shares(variant) > 1 else 1)


@dataclass(frozen=True)
class Warps(Forward):
    """Each warp multiplies rows of its own (mma.sync)."""

    q_in_registers: bool = False


@dataclass(frozen=True)
class DividedWarps(Forward):
    """``split`` warps share rows, each with its part of O's columns and of a tile's scores; P goes through memory."""

    divided = True
    split: int = 2
    s_columns: int = 0


@dataclass(frozen=True)
class ByBlocks(Forward):
    """A block has a block of keys, and takes the queries that list it."""

    warpgroups: bool = False
    blocks: int = 1


@dataclass(frozen=True)
class SelfLoading(Forward):
    """Warpgroups that copy for themselves; the blocks of a multiprocessor hide each other's copies.

    With tensor copies blocks are persistent, and may ask for the next query tile while they work on one.
    """

    warpgroups = True
    stages: int = 2
    blocks: int = 1
    tensor_copies: bool = False
    prefetches_next: bool = False
    pairs_staged: bool = False


@dataclass(frozen=True)
class Producers(Forward):
    """Warpgroups of a persistent block, for which other warps copy, by tensor copies, and find what is visited.

    ``overlaps_next``: warpgroups begin a query tile beside the last product of the one before; ``q_places`` of Q.
    """

    warpgroups = tensor_copies = True
    producers = 4
    stages: int = 2
    least_registers: int = FINDING_REGISTERS
    overlaps_next: bool = False
    q_places: int = 1
    pairs_staged: bool = False

    def alone(self) -> Schedule:
        if self.warps > self.producers:
            return self
        return SelfLoading(self.Br, self.Bc, self.warps, self.stages, blocks=2, pairs_staged=self.pairs_staged)


@dataclass(frozen=True)
class PingPong(Forward):
    """Two warpgroups share 64 rows, each with half of O's columns, and weigh key tiles in turns; other warps copy.

    The blocks of a cluster have 64 of the rows each, and share their copies of K and V.
    """

    warpgroups = tensor_copies = ping_pong = True
    producers = 4
    split = 2
    least_registers: int = FINDING_REGISTERS
    cluster: int = 1

    @property
    def s_columns(self) -> int:
        return self.Bc

    @property
    def works(self) -> bool:
        return super().works and self.stages == 1


@dataclass(frozen=True)
class DividedWarpgroups(Forward):
    """The same without turns: each has scores of half a tile's keys, all copy, and a block has one query tile."""

    warpgroups = divided = True
    split = 2

    @property
    def s_columns(self) -> int:
        return max(self.Bc // 2, 16)


# -- dQ ----------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Queries(Schedule):
    """Of dQ, where it has a kernel of its own: a block has queries, and K and V stream."""

    @property
    def barriers(self) -> int:
        return 2 if self.warpgroups else 3 + (self.split > 1)

    def accumulators(self, variant: Variant, element: ElementType) -> int:  # noqa: ARG002 - as of the others
        at_a_time = max(self.Br * self.Bc, self.Br * self.s_columns * self.split)
        # dQ, S and dP.
        return -(-(self.Br * padded(variant.head_dim.qk) + 2 * at_a_time) // (32 * self.warps))


@dataclass(frozen=True)
class QueryWarps(Queries):
    """Products of one warp (mma.sync); ``split`` warps share rows as in the forward pass; dS goes through memory."""

    split: int = 1
    s_columns: int = 0


@dataclass(frozen=True)
class QueryWarpgroups(Queries):
    """Warpgroups that copy for themselves."""

    warpgroups = True
    stages: int = 2
