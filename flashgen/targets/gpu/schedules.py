"""The schedules of GPU kernels: which warps multiply and which copy, what they share, and which tile comes next.

A class is a schedule; a value of it is a tile for that schedule, with fields of its own. What readers ask of every
schedule has its usual answer in ``Schedule`` or in the class of a pass; a schedule that answers otherwise has a field,
a constant or a property of that name. Families have values in ``tables.py``; ``complete`` of their recipes decides the
fields that follow from a variant. ``header`` is the file of ``include/flashgen/forward`` or ``backward`` that has the
kernel: a new schedule is such a file, its class here, and rows in a table.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TypeAlias

from flashgen.analysis.variant import Variant
from flashgen.ir.types import ElementType
from flashgen.plan.measured import counted
from flashgen.plan.plan import Tiles
from flashgen.targets.gpu import model
from flashgen.targets.gpu.model import padded
from flashgen.targets.gpu.recipe import Recipe

MOST_WARPS = 16  # that multiply, of a block or of the blocks of a multiprocessor


@dataclass(frozen=True)
class Schedule(Tiles):
    """B_r queries by B_c keys for ``warps`` that multiply; what streams has ``stages`` tiles of shared memory.

    ``sram_bytes``: shared memory of a block, once it is planned; ``schedule``: the name of the class, for manifests.
    """

    warps: int
    stages: int = 1
    sram_bytes: int = field(default=0, kw_only=True, compare=False)
    schedule: str = field(default="", kw_only=True, compare=False)

    header = "by_warps"
    warpgroups = False  # products are Hopper's, of four warps at a time, with operands in shared memory
    producers = 0  # more warps, which copy
    least_registers = model.COPYING_REGISTERS  # of a thread of these
    blocks = 1  # of a multiprocessor that the compiler leaves registers for
    cluster = 1  # blocks that share a tile
    split = 1  # warps, or warpgroups, that share rows of O or dQ, or keys, and have a part of the columns each
    tensor_copies = False  # one thread starts tensor copies
    prefetches_next = False  # a block that copies for itself asks for its next tile while it works on one
    pairs_staged = False  # what pairs read of a captured tensor comes by way of shared memory
    ping_pong = False  # two warpgroups weigh key tiles in turns

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
        return model.registers(self.warps, self.producers, self.least_registers) if self.producers else (0, 0)

    @property
    def multipliers(self) -> str:
        """``3 warpgroups``, ``4 warps``."""
        return counted(self.warps // 4, "warpgroup") if self.warpgroups else counted(self.warps, "warp")

    @property
    def rows(self) -> int:
        """Of a block: those of what it adds up."""
        return self.Br // self.cluster

    @property
    def streamed(self) -> int:
        """Rows of a tile that streams."""
        return self.Bc

    @property
    def barriers(self) -> int:
        """Of a step; waits of warpgroups hide."""
        return 0 if self.warpgroups else 2 + (self.split > 1)

    def accumulators(self, variant: Variant, element: ElementType) -> int:
        """Registers of a thread for what a kernel adds up, S of its tile (and dP), their tangents, Q where it stays."""
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
        streams = (self.stages == 2 or self.split > 1) and self.streamed <= 256
        groups = self.rows == sixteens and self.warps % (4 * self.split) == 0
        return divides and streams and groups and (self.blocks == 1 or self.blocks * self.warps <= MOST_WARPS)


# -- forward -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Forward(Schedule):
    """Of the forward pass: a block has queries, and K and V stream."""

    header_of_tangents = "by_warps"  # in forward mode
    q_in_registers = False
    overlaps_next = False  # warpgroups begin a query tile beside the last product of the one before

    @property
    def q_places(self) -> int:
        """Tiles of Q in shared memory."""
        return 1 + self.prefetches_next

    @property
    def divided(self) -> bool:
        """Whether warps that share rows have scores of a part of a tile's keys each."""
        return self.split > 1 and not self.ping_pong

    @property
    def self_loading(self) -> bool:
        """Whether blocks are persistent, and a thread that multiplies starts the copies."""
        return self.tensor_copies and not self.producers

    def accumulators(self, variant: Variant, element: ElementType) -> int:
        rows, pairs = self.rows, self.rows * self.Bc
        numbers = rows * padded(variant.head_dim.v) + max(pairs, rows * self.s_columns * self.split)
        numbers *= 1 if variant.tangent is None else 2
        numbers += self.q_in_registers * rows * padded(variant.head_dim.qk) * element.bytes // 4
        numbers += variant.kind.f8 * pairs // 4  # P
        return -(-numbers // (32 * self.warps))

    def maxima_by_sums(self, recipe: Recipe) -> bool:
        """Whether maxima of rows are looked for only where sums of weights tell that one has grown."""
        # Three blocks of ragged batches of narrow heads have no registers for it: they spilled 344 bytes.
        crowded = self.blocks > 2 and recipe.variant.kind.ragged and recipe.variant.head_dim.qk <= 64
        return recipe.score.maxima_by_sums and not crowded

    def finders(self, variant: Variant) -> int:
        """Warps that find visits: all, or those of the producers that neither copy nor take norms of keys."""
        if not self.producers:
            return self.warps
        return self.producers - 1 - self.ping_pong - (model.MEASURERS if variant.uses_sqdist else 0)


@dataclass(frozen=True)
class Warps(Forward):
    """Products of one warp (mma.sync). ``split`` warps share rows, O's columns and scores; P goes through memory."""

    q_in_registers: bool = False
    split: int = 1
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
    header_of_tangents = "by_warpgroups"
    stages: int = 2
    blocks: int = 1
    tensor_copies: bool = False
    prefetches_next: bool = False
    pairs_staged: bool = False

    @property
    def header(self) -> str:  # type: ignore[override]
        return "self_loading" if self.tensor_copies else "warpgroups_alone"


@dataclass(frozen=True)
class Producers(Forward):
    """Warpgroups of a persistent block, for which other warps copy, by tensor copies, and find what is visited.

    ``overlaps_next``: warpgroups begin a query tile beside the last product of the one before; ``q_places`` of Q.
    """

    header, header_of_tangents = "warpgroups_with_producers", "tangents_with_producers"
    warpgroups = tensor_copies = True
    producers = 4
    stages: int = 2
    least_registers: int = model.FINDING_REGISTERS
    overlaps_next: bool = False
    q_places: int = 1
    pairs_staged: bool = False


@dataclass(frozen=True)
class PingPong(Forward):
    """Two warpgroups share 64 rows, each with half of O's columns, and weigh key tiles in turns; other warps copy.

    The blocks of a cluster have 64 of the rows each, and share their copies of K and V.
    """

    header = header_of_tangents = "ping_pong"
    warpgroups = tensor_copies = ping_pong = True
    producers = 4
    split = 2
    least_registers: int = model.FINDING_REGISTERS
    cluster: int = 1

    @property
    def s_columns(self) -> int:
        return self.Bc

    @property
    def works(self) -> bool:
        return super().works and self.stages == 1


@dataclass(frozen=True)
class DividedWarpgroups(Forward):
    """``PingPong`` without turns: each has scores of half a tile's keys, all copy, and a block has one query tile."""

    header = header_of_tangents = "by_warpgroups"
    warpgroups = True
    split = 2

    @property
    def s_columns(self) -> int:
        return max(self.Bc // 2, 16)


# -- dK and dV ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Backward(Schedule):
    """Of dK and dV, with dQ added up or without: a block has keys, and Q and dO stream.

    ``keys_sram_bytes``: shared memory of a kernel that does not add up dQ, once it is planned.
    """

    keys_sram_bytes: int = field(default=0, kw_only=True, compare=False)

    persistent = False  # a block takes one key tile after another
    halves_dq = False  # two warpgroups have half of the columns of dQ each, wherever panels end
    dq_sent = 0  # of these the columns that leave by way of shared memory, at most
    divides_keys = False  # the blocks of a cluster have a part of a tile's keys each, and exchange dS

    @property
    def rows(self) -> int:
        return self.Bc // self.cluster * self.column_parts

    @property
    def streamed(self) -> int:
        return self.Br

    @property
    def shares_keys(self) -> bool:
        """Whether two warpgroups share 64 keys, each with half of the columns of dK, dV and dQ."""
        return self.warpgroups and self.split > 1

    @property
    def weighs_whole(self) -> bool:
        """Whether warpgroups weigh a tile of 128 queries at once."""
        return self.warpgroups and self.s_columns == 128

    @property
    def works(self) -> bool:
        divides = self.split != 2 or self.Br % 32 == 0
        groups = not self.warpgroups or (self.Br % 64 == 0 and self.Br <= 16 * self.warps)  # of 64 rows of dQ
        threads = self.Br <= 32 * self.warps  # one for each query
        return super().works and divides and groups and threads and self.stages <= 2

    @property
    def barriers(self) -> int:
        return 0 if self.warpgroups else 1 + (self.stages == 1) + super().barriers

    def accumulators(self, variant: Variant, element: ElementType) -> int:
        D, Dv = padded(variant.head_dim.qk), padded(variant.head_dim.v)
        at_a_time, pairs = self.s_columns * self.split * self.rows, self.Br * self.rows
        pairs = at_a_time if self.halves_dq else max(pairs, at_a_time)  # warps that weigh none have room, too
        numbers = self.rows * (D + Dv) // self.column_parts + 2 * pairs
        numbers += 2 * pairs if element is ElementType.F32 else 0  # what is lost of P and dS in TF32
        numbers += 0 if variant.tangent is None else 2 * pairs  # what both change by
        return -(-numbers // (32 * self.warps))

    @property
    def spares_warps(self) -> bool:
        """Whether warps that copy have time for more."""
        return self.producers > 0 and self.tensor_copies and not self.persistent

    def takes_turns(self, recipe: Recipe) -> bool:
        """Whether batch entries add to a gradient in turn: one of the warps that copy waits for a tile's."""
        return recipe.in_turn is not None and self.spares_warps and model.TURN % self.Br == model.TURN % self.Bc == 0

    def stored_whole(self, recipe: Recipe) -> tuple[str, ...]:
        """Captured tensors every element of whose gradients blocks store: warps that copy clear what nobody visits."""
        stored = recipe.stored if self.spares_warps else ()
        in_turn = (recipe.in_turn,) if recipe.in_turn is not None and self.takes_turns(recipe) else ()
        return tuple(each.name for each in (*stored, *in_turn))


@dataclass(frozen=True)
class KeyWarps(Backward):
    """Products of one warp (mma.sync); ``split`` warps share 16 keys, and P and dS go through shared memory."""

    split: int = 1
    s_columns: int = 0


@dataclass(frozen=True)
class SelfLoadingKeys(Backward):
    """Warpgroups that copy for themselves, dO and dS in two stages as Q; see ``SelfLoading``."""

    header = "by_warpgroups"
    warpgroups = True
    stages: int = 2
    blocks: int = 1
    s_columns: int = 0
    tensor_copies: bool = False
    persistent: bool = False
    prefetches_next: bool = False


@dataclass(frozen=True)
class ProducerKeys(Backward):
    """Warpgroups for which other warps copy, by tensor copies or async copies; dO and dS have two stages as Q.

    ``pairs_staged``: by a warp that copies.
    """

    header = "by_warpgroups"
    warpgroups = True
    producers = 4
    stages: int = 2
    s_columns: int = 0
    tensor_copies: bool = False
    persistent: bool = False
    pairs_staged: bool = False


@dataclass(frozen=True)
class OwnKeys(Backward):
    """Two warpgroups with 64 keys each and half of the columns of dQ; other warps copy. dO and dS have one stage."""

    header = "wide"
    warpgroups = tensor_copies = halves_dq = True
    producers = 4
    Br: int = 64
    Bc: int = 128
    warps: int = 8
    stages: int = 2
    dq_sent: int = 0

    @property
    def s_columns(self) -> int:
        return self.Br // 2

    @property
    def works(self) -> bool:
        return super().works and (self.Br, self.warps) == (64, 8)


@dataclass(frozen=True)
class SharedKeys(OwnKeys):
    """Two warpgroups share 64 keys: each has half of the columns of dK, dV and dQ, and scores of half the queries.

    Two blocks of a cluster have half of the columns each, and exchange what they sum up of S and dP.
    """

    split = 2
    Bc: int = 64
    cluster: int = 1

    @property
    def column_parts(self) -> int:
        return self.cluster


@dataclass(frozen=True)
class SharedDq(OwnKeys):
    """``SharedKeys`` by each of two blocks, which have 64 keys and half of dQ's columns each, and exchange dS."""

    split = cluster = 2
    divides_keys = True


# -- dQ ----------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Queries(Schedule):
    """Of dQ, where it has a kernel of its own: a block has queries, and K and V stream."""

    header = "queries"

    @property
    def barriers(self) -> int:
        return 2 if self.warpgroups else 3 + (self.split > 1)

    def accumulators(self, variant: Variant, element: ElementType) -> int:  # noqa: ARG002 - as of the others
        at_a_time = max(self.Br * self.Bc, self.Br * self.s_columns * self.split)
        return -(-(self.Br * padded(variant.head_dim.qk) + 2 * at_a_time) // (32 * self.warps))


@dataclass(frozen=True)
class QueryWarps(Queries):
    """Products of one warp (mma.sync); ``split`` warps share rows as in the forward pass; dS goes through memory."""

    split: int = 1
    s_columns: int = 0


@dataclass(frozen=True)
class QueryWarpgroups(Queries):
    """Warpgroups that copy for themselves."""

    header = "warpgroup_queries"
    warpgroups = True
    stages: int = 2


# What manifests are read as.
AnyForward: TypeAlias = Warps | ByBlocks | SelfLoading | Producers | PingPong | DividedWarpgroups
AnyBackward: TypeAlias = KeyWarps | SelfLoadingKeys | ProducerKeys | OwnKeys | SharedKeys | SharedDq
AnyQueries: TypeAlias = QueryWarps | QueryWarpgroups
