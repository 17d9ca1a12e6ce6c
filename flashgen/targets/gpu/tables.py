"""Tiles that are worth considering on GPUs, best first: data, read by ``recipes.py``.

A row holds for head dimensions up to its first number. 16-bit types go through m16n8k16; float32 takes twice the
shared memory and three products. Warps of the forward and the query pass have 16 or 32 rows each, those of the key pass
16 keys by a whole head dimension up to 128, or by half of a larger one (``split`` 2). Above 256 a thread's registers
hold 16 rows of half of O or dQ, and 16 keys by a quarter of the head dimension, whoever has them: warps share rows
everywhere.
"""

from __future__ import annotations

from dataclasses import dataclass


class RowsOfBlock:
    """Who has which rows, of forward tiles that are considered or chosen."""

    Br: int
    warpgroups: bool
    producers: int
    begins_next: bool
    split: int
    cluster: int

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
class ForwardChoice(RowsOfBlock):
    """B_r, B_c, warps, stages, whether Q stays in registers, whether warpgroups multiply, warps that copy for them.

    ``split`` warps share rows, each with its part of O's columns and scores of ``weighed`` keys at a time.
    ``blocks``: how many a multiprocessor has registers for, where warpgroups multiply. The rest a family decides for a
    variant: ``tensor_copies`` bring K and V, and blocks take one query tile after another; ``begins_next``: what the
    next one begins with comes while this one is worked on, its Q to one of ``q_places``. ``pairs_staged``: what pairs
    read comes by way of shared memory. Two warpgroups that share rows, and for which others copy, weigh key tiles in
    turns. ``cluster`` blocks have a part of the B_r rows each, of so many warps, and share their copies of K and V.
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


class KeysOfBlock:
    """Who has which keys and columns, of tiles of the key pass that are considered or chosen."""

    Bc: int
    warpgroups: bool
    split: int
    weighed: int
    dq_sent: int | None
    cluster: int
    divides_keys: bool

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
class BackwardChoice(KeysOfBlock):
    """B_r, B_c, warps, stages of Q, warps that share 16 keys, whether warpgroups multiply, warps that copy for them.

    ``blocks``: how many a multiprocessor has registers for, where warpgroups multiply. The rest a family decides for a
    variant: ``tensor_copies`` bring Q and dO; a block that adds up dK, dV and dQ may be ``persistent``: it takes one
    key tile after another; ``begins_next``: the list of the next one comes while this one is worked on; ``weighed``:
    queries whose scores a warp has in registers at a time. ``dq_sent``: of two warpgroups that have half of dQ's
    columns each, as many leave by way of shared memory, at most; None where all do. ``cluster`` blocks have a part of
    the columns each, and exchange what they sum up of S and dP; where a cluster ``divides_keys`` they have a part of a
    tile's keys each, and exchange dS. ``pairs_staged``: what pairs read comes by way of shared memory.
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


@dataclass(frozen=True)
class QueryChoice:
    """B_r, B_c, warps, stages, whether warpgroups multiply, and, as forward, warps that share rows."""

    Br: int
    Bc: int
    warps: int
    stages: int = 1
    warpgroups: bool = False
    split: int = 1
    weighed: int = 0


F, B, Q = ForwardChoice, BackwardChoice, QueryChoice
WIDEST = 576  # head dimension that the tables reach


def _shared_rows(Br: int, Bc: int, warps: int, split: int = 2) -> ForwardChoice:
    return ForwardChoice(Br, Bc, warps, split=split)


def _four_share(Br: int, Bc: int, stages: int = 1) -> ForwardChoice:
    return ForwardChoice(Br, Bc, Br // 4, stages, split=4)


def _shared_queries(Br: int, Bc: int, warps: int, split: int = 2) -> QueryChoice:
    return QueryChoice(Br, Bc, warps, split=split)


HALF_FORWARD: tuple[tuple[int, tuple[ForwardChoice, ...]], ...] = (
    (32, (F(128, 128, 4, 1, True), F(128, 64, 4, 2, True), F(64, 64, 4), F(32, 32, 2))),
    (64, (F(128, 128, 4), F(128, 64, 4, 2, True), F(128, 64, 4), F(64, 64, 4), F(32, 32, 2))),
    (128, (F(128, 64, 4), F(128, 32, 4, 2), F(128, 32, 4), F(64, 64, 4), F(32, 32, 2))),
    (192, (F(128, 64, 8), F(64, 64, 4), F(64, 32, 4), F(32, 32, 2))),
    (256, (F(128, 64, 8), F(64, 64, 4), F(64, 32, 4), F(32, 32, 2))),
    (
        WIDEST,
        (
            _shared_rows(64, 64, 8, split=4),
            _shared_rows(64, 32, 8),
            _shared_rows(48, 16, 6),
            _shared_rows(32, 16, 4),
            _shared_rows(16, 16, 2),
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
    (96, (B(64, 128, 8), B(64, 64, 8, 1, 2), B(32, 64, 4), B(32, 32, 2))),
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
            _shared_queries(64, 32, 8),
            _shared_queries(32, 32, 4),
            _shared_queries(32, 16, 4),
            _shared_queries(16, 16, 2),
        ),
    ),
)
SINGLE_FORWARD: tuple[tuple[int, tuple[ForwardChoice, ...]], ...] = (
    (64, (F(64, 64, 4), F(64, 32, 4), F(32, 32, 2))),
    (128, (F(64, 32, 4), F(32, 32, 2), F(16, 16, 1))),
    (256, (F(64, 32, 4), F(64, 16, 4), F(32, 16, 2), F(16, 16, 1))),
    (WIDEST, (_shared_rows(32, 32, 4), _shared_rows(32, 16, 4), _shared_rows(16, 16, 2))),
)
SINGLE_BACKWARD: tuple[tuple[int, tuple[BackwardChoice, ...]], ...] = (
    (64, (B(32, 64, 4), B(32, 32, 2), B(16, 16, 1))),
    (128, (B(32, 64, 8, 1, 2), B(32, 32, 4, 1, 2), B(32, 64, 4), B(32, 32, 2), B(16, 16, 1))),
    (256, (B(32, 32, 4, 1, 2), B(32, 16, 2, 1, 2), B(16, 16, 2, 1, 2))),
    (WIDEST, (B(32, 16, 4, 1, 4), B(16, 16, 4, 1, 4))),
)
SINGLE_QUERIES: tuple[tuple[int, tuple[QueryChoice, ...]], ...] = (
    (64, (Q(64, 32, 4), Q(32, 32, 2), Q(16, 16, 1))),
    (128, (Q(64, 32, 4), Q(32, 32, 2), Q(16, 16, 1))),
    (256, (Q(64, 32, 4), Q(32, 32, 2), Q(32, 16, 2), Q(16, 16, 1))),
    (WIDEST, (_shared_queries(32, 16, 8, split=4), _shared_queries(16, 16, 4, split=4))),
)
