"""Tiles that are worth considering on GPUs, best first: data, read by ``recipes.py``.

A row holds for head dimensions up to its first number. 16-bit types go through m16n8k16; float32 takes twice the
shared memory and three products. Warps of the forward and the query pass have 16 or 32 rows each, those of the key pass
16 keys by a whole head dimension up to 128, or by half of a larger one (``split`` 2). Above 256 a thread's registers
hold 16 rows of half of O or dQ, and 16 keys by a quarter of the head dimension, whoever has them: warps share rows
everywhere.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, TypeAlias


@dataclass(frozen=True)
class ForwardChoice:
    """B_r query rows over ``warps``, tiles of B_c keys; K and V in rings of ``stages`` tiles.

    ``warpgroups``: products are Hopper's, of four warps at a time, with operands in shared memory, which ``producers``
    more warps fill. ``split`` warps share rows, each with its part of O's columns and scores of ``weighed`` keys at a
    time; P then goes through shared memory. ``blocks``: for how many of a multiprocessor the compiler leaves registers,
    where warpgroups multiply. The rest a family decides for a variant: ``tensor_copies`` bring K and V, one thread
    starts them, and blocks take one query tile after another; ``begins_next``: Q, for which there are ``q_places``, the
    list and the first K of the next one come while this one is worked on. ``pairs_staged``: what pairs read of a
    captured tensor comes by way of shared memory, a warp's rows for that warp. Two warpgroups that share rows, and for
    which others copy, weigh key tiles in turns. ``cluster`` blocks have a part of the B_r rows each, of so many warps,
    and share their copies of K and V.
    """

    Br: int
    Bc: int
    warps: int
    stages: int = 1
    q_in_registers: bool = False
    warpgroups: bool = False
    producers: int = 0
    blocks: int = 1
    tensor_copies: bool = False
    begins_next: bool = False
    q_places: int = 1
    pairs_staged: bool = False
    split: int = 1
    weighed: int = 0
    cluster: int = 1

    @property
    def takes_turns(self) -> bool:
        """Whether two warpgroups share rows, and weigh key tiles in turns."""
        return self.warpgroups and self.split > 1 and self.producers > 0

    @property
    def goes_over(self) -> bool:
        """Whether warpgroups for which others copy begin a query tile beside the last product of the one before."""
        return self.producers > 0 and self.begins_next

    @property
    def rows(self) -> int:
        """Of a block."""
        return self.Br // self.cluster


@dataclass(frozen=True)
class BackwardChoice:
    """B_c keys over ``warps`` for dK and dV, B_r queries a step; Q in ``stages``.

    ``split`` warps share 16 keys, each with its part of the head dimension; P and dS then go through shared memory.
    With ``warpgroups`` dO and dS have as many stages as Q, and ``producers`` more warps copy. ``blocks``: for how many
    of a multiprocessor the compiler leaves registers, where warpgroups multiply. The rest a family decides for a
    variant: ``tensor_copies`` bring Q and dO, and one thread starts them; a block that adds up dK, dV and dQ may be
    ``persistent``: it takes one key tile after another; ``begins_next``: the list of the next one comes while this one
    is worked on; ``pairs_staged``: as forward, all by a warp that copies. ``weighed``: queries whose scores a warp has
    in registers at a time. Where two warpgroups have half of dQ's columns each, there is one stage of dO and dS, and
    ``dq_sent`` of these columns leave by way of shared memory, at most; None where all of dQ does. ``cluster`` blocks
    have a part of the columns each, and exchange what they sum up of S and dP; where a cluster ``divides_keys`` they
    have a part of a tile's keys each, and exchange dS.
    """

    Br: int
    Bc: int
    warps: int
    stages: int = 1
    split: int = 1
    warpgroups: bool = False
    producers: int = 0
    blocks: int = 1
    tensor_copies: bool = False
    persistent: bool = False
    begins_next: bool = False
    pairs_staged: bool = False
    weighed: int = 0
    dq_sent: int | None = None
    cluster: int = 1
    divides_keys: bool = False

    @property
    def keys(self) -> int:
        """Of a block."""
        return self.Bc // self.cluster if self.divides_keys else self.Bc

    @property
    def column_parts(self) -> int:
        """Blocks that have a part of the columns each."""
        return 1 if self.divides_keys else self.cluster

    @property
    def dq_in_halves(self) -> bool:
        """Whether two warpgroups have half of the columns of dQ each, wherever panels end."""
        return self.warpgroups and self.dq_sent is not None

    @property
    def shares_keys(self) -> bool:
        """Whether two warpgroups share 64 keys, each with half of the columns of dK, dV and dQ."""
        return self.warpgroups and self.split > 1

    @property
    def weighs_whole(self) -> bool:
        """Whether warpgroups weigh a tile of 128 queries at once."""
        return self.warpgroups and self.weighed == 128


@dataclass(frozen=True)
class QueryChoice:
    """B_r query rows over ``warps`` for dQ, where it has a kernel of its own; B_c keys a step.

    ``split`` warps share rows as in the forward pass; dS then goes through shared memory.
    """

    Br: int
    Bc: int
    warps: int
    stages: int = 1
    warpgroups: bool = False
    split: int = 1
    weighed: int = 0
    # What no kernel of dQ has: warps that copy, blocks that share registers or tiles.
    producers: ClassVar[int] = 0
    blocks: ClassVar[int] = 1
    cluster: ClassVar[int] = 1
    registers: ClassVar[int] = 0


AnyChoice: TypeAlias = ForwardChoice | BackwardChoice | QueryChoice
F, B, Q = ForwardChoice, BackwardChoice, QueryChoice
WIDEST = 576  # head dimension that the tables reach


def _four_share(Br: int, Bc: int, stages: int = 1) -> ForwardChoice:
    return ForwardChoice(Br, Bc, Br // 4, stages, split=4)


HALF_FORWARD: tuple[tuple[int, tuple[ForwardChoice, ...]], ...] = (
    (32, (F(128, 128, 4, 1, True), F(128, 64, 4, 2, True), F(64, 64, 4), F(32, 32, 2))),
    (64, (F(128, 128, 4), F(128, 64, 4, 2, True), F(128, 64, 4), F(64, 64, 4), F(32, 32, 2))),
    (128, (F(128, 64, 4), F(128, 32, 4, 2), F(128, 32, 4), F(64, 64, 4), F(32, 32, 2))),
    (256, (F(128, 64, 8), F(64, 64, 4), F(64, 32, 4), F(32, 32, 2))),
    (
        WIDEST,
        (
            F(64, 64, 8, split=4),
            F(64, 32, 8, split=2),
            F(48, 16, 6, split=2),
            F(32, 16, 4, split=2),
            F(16, 16, 2, split=2),
        ),
    ),
)
# Over caches a block has few rows, 16 a warp, and waits for memory: of rows as many as are there (``pins_of_rows``), of
# keys two stages, so that one is under way.
HALF_CACHED: tuple[tuple[int, tuple[ForwardChoice, ...]], ...] = (
    (
        128,
        (F(64, 64, 4, 2, True), F(64, 32, 4, 2, True), F(64, 32, 4), F(32, 64, 4, 2, split=2), _four_share(16, 64, 2)),
    ),
    (256, (F(64, 64, 4, 2), F(64, 32, 4, 2), F(64, 32, 4), F(32, 32, 2), F(16, 16, 1))),
    (WIDEST, (_four_share(64, 32, 2), _four_share(64, 32), _four_share(32, 32), _four_share(16, 16))),
)
SINGLE_CACHED: tuple[tuple[int, tuple[ForwardChoice, ...]], ...] = (
    (64, (F(64, 32, 4, 2), F(64, 32, 4), F(32, 32, 2), F(16, 16, 1))),
    (256, (F(64, 32, 4, 2), F(64, 16, 4, 2), F(64, 16, 4), F(32, 16, 2), F(16, 16, 1))),
    (WIDEST, (_four_share(64, 16, 2), _four_share(32, 16, 2), _four_share(32, 16), _four_share(16, 16))),
)
# Forward mode has the sums of O twice, and of scores, too: 16 rows a warp, of few keys.
WIDEST_JVP = 128
HALF_JVP: tuple[tuple[int, tuple[ForwardChoice, ...]], ...] = (
    (64, (F(128, 64, 8, 2), F(128, 32, 8, 2), F(64, 32, 4), F(32, 32, 2), F(16, 16, 1))),
    (WIDEST_JVP, (F(128, 32, 8, 2), F(128, 32, 8), F(64, 32, 4), F(32, 32, 2), F(16, 16, 1))),
)
SINGLE_JVP: tuple[tuple[int, tuple[ForwardChoice, ...]], ...] = (
    (64, (F(64, 32, 4), F(32, 32, 2), F(16, 16, 1))),
    (WIDEST_JVP, (F(64, 32, 4), F(32, 16, 2), F(16, 16, 1))),
)
# Its backward pass has the scores four times, and keeps K, V and their tangents: few query rows at a time.
HALF_JVP_BACKWARD: tuple[tuple[int, tuple[BackwardChoice, ...]], ...] = (
    (64, (B(32, 128, 8, 2), B(32, 128, 8), B(32, 64, 4), B(16, 64, 4), B(32, 32, 2), B(16, 16, 1))),
    (
        WIDEST_JVP,
        (B(32, 128, 8, 2), B(32, 128, 8), B(16, 128, 8), B(32, 64, 4), B(16, 64, 4), B(16, 32, 2), B(16, 16, 1)),
    ),
)
SINGLE_JVP_BACKWARD: tuple[tuple[int, tuple[BackwardChoice, ...]], ...] = (
    (64, (B(16, 64, 4), B(16, 32, 2), B(16, 16, 1))),
    (WIDEST_JVP, (B(16, 32, 2), B(16, 16, 1))),
)
HALF_JVP_QUERIES: tuple[tuple[int, tuple[QueryChoice, ...]], ...] = (
    (64, (Q(128, 32, 8), Q(64, 32, 4), Q(32, 32, 2), Q(16, 16, 1))),
    (WIDEST_JVP, (Q(128, 32, 8), Q(64, 32, 4), Q(64, 16, 4), Q(32, 16, 2), Q(16, 16, 1))),
)
SINGLE_JVP_QUERIES: tuple[tuple[int, tuple[QueryChoice, ...]], ...] = (
    (64, (Q(64, 16, 4), Q(32, 16, 2), Q(16, 16, 1))),
    (WIDEST_JVP, (Q(32, 16, 2), Q(16, 16, 1))),
)
HALF_BACKWARD: tuple[tuple[int, tuple[BackwardChoice, ...]], ...] = (
    (64, (B(64, 128, 8, 2), B(64, 128, 8), B(64, 64, 4), B(32, 32, 2))),
    (128, (B(64, 128, 8), B(64, 64, 8, 1, 2), B(32, 64, 4), B(32, 32, 2))),
    (192, (B(64, 64, 8, 1, 2), B(32, 64, 8, 1, 2), B(32, 32, 4, 1, 2), B(32, 16, 2, 1, 2))),
    (256, (B(64, 64, 8, 1, 2), B(32, 48, 6, 1, 2), B(32, 32, 4, 1, 2), B(32, 16, 2, 1, 2))),
    (WIDEST, (B(64, 32, 8, 1, 4), B(32, 32, 8, 1, 4), B(32, 16, 4, 1, 4), B(16, 16, 4, 1, 4))),
)
HALF_QUERIES: tuple[tuple[int, tuple[QueryChoice, ...]], ...] = (
    (64, (Q(128, 64, 8, 2), Q(128, 64, 8), Q(64, 64, 4), Q(32, 32, 2))),
    (128, (Q(128, 64, 8), Q(128, 32, 8), Q(64, 32, 4), Q(32, 32, 2))),
    (192, (Q(128, 32, 8), Q(64, 32, 4), Q(32, 32, 2), Q(32, 16, 2))),
    (256, (Q(64, 32, 4), Q(32, 32, 2), Q(32, 16, 2))),
    (
        WIDEST,
        (
            Q(64, 32, 8, split=2),
            Q(32, 32, 4, split=2),
            Q(32, 16, 4, split=2),
            Q(16, 16, 2, split=2),
        ),
    ),
)
SINGLE_FORWARD: tuple[tuple[int, tuple[ForwardChoice, ...]], ...] = (
    (64, (F(64, 64, 4), F(64, 32, 4), F(32, 32, 2))),
    (128, (F(64, 32, 4), F(32, 32, 2), F(16, 16, 1))),
    (256, (F(64, 32, 4), F(64, 16, 4), F(32, 16, 2), F(16, 16, 1))),
    (WIDEST, (F(32, 32, 4, split=2), F(32, 16, 4, split=2), F(16, 16, 2, split=2))),
)
SINGLE_BACKWARD: tuple[tuple[int, tuple[BackwardChoice, ...]], ...] = (
    (64, (B(32, 64, 4), B(32, 32, 2), B(16, 16, 1))),
    (128, (B(32, 64, 8, 1, 2), B(32, 32, 4, 1, 2), B(32, 64, 4), B(32, 32, 2), B(16, 16, 1))),
    (256, (B(32, 32, 4, 1, 2), B(32, 16, 2, 1, 2), B(16, 16, 2, 1, 2))),
    (WIDEST, (B(32, 16, 4, 1, 4), B(16, 16, 4, 1, 4))),
)
SINGLE_QUERIES: tuple[tuple[int, tuple[QueryChoice, ...]], ...] = (
    (128, (Q(64, 32, 4), Q(32, 32, 2), Q(16, 16, 1))),
    (256, (Q(64, 32, 4), Q(32, 32, 2), Q(32, 16, 2), Q(16, 16, 1))),
    (WIDEST, (Q(32, 16, 8, split=4), Q(16, 16, 4, split=4))),
)
