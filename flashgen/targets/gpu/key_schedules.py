"""The schedules of dK and dV; those of the other passes are in ``schedules.py``."""

from __future__ import annotations

from dataclasses import dataclass, field

from flashgen.analysis.variant import Variant
from flashgen.ir.types import ElementType
from flashgen.targets.gpu.model import TURN, padded
from flashgen.targets.gpu.recipe import Recipe
from flashgen.targets.gpu.schedules import Schedule


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
        return 0 if self.warpgroups else 3 + (self.stages == 1) + (self.split > 1)

    def accumulators(self, variant: Variant, element: ElementType) -> int:
        D, Dv = padded(variant.head_dim.qk), padded(variant.head_dim.v)
        at_a_time, pairs = self.s_columns * self.split * self.rows, self.Br * self.rows
        pairs = at_a_time if self.halves_dq else max(pairs, at_a_time)  # warps that weigh none have room, too
        # dK, dV, S and dP.
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
        return recipe.in_turn is not None and self.spares_warps and TURN % self.Br == TURN % self.Bc == 0

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

    warpgroups = True
    producers = 4
    stages: int = 2
    s_columns: int = 0
    tensor_copies: bool = False
    persistent: bool = False
    pairs_staged: bool = False

    def alone(self) -> Schedule:
        if self.warps > self.producers:
            return self
        return SelfLoadingKeys(self.Br, self.Bc, self.warps, self.stages, blocks=2)


@dataclass(frozen=True)
class OwnKeys(Backward):
    """Two warpgroups with 64 keys each and half of the columns of dQ; other warps copy. dO and dS have one stage."""

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
    """The same by each of two blocks, which have 64 keys and half of the columns of dQ each, and exchange dS."""

    split = cluster = 2
    divides_keys = True
