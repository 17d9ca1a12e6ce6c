"""Tiles that are worth considering on GPUs, best first: data, read by ``recipes.py``.

A row holds for head dimensions up to its first number. 16-bit types go through m16n8k16; float32 takes twice the
shared memory and three products. Warps of the forward and the query pass have 16 or 32 rows each, those of the key pass
16 keys by a whole head dimension up to 128, or by half of a larger one (``split`` 2). Above 256 a thread's registers
hold 16 rows of half of O or dQ, and 16 keys by a quarter of the head dimension, whoever has them: warps share rows
everywhere.
"""

from __future__ import annotations

from typing import TypeAlias, TypeVar

from flashgen.targets.gpu.schedules import Backward, Forward, KeyWarps, Queries, QueryWarps, Schedule, Warps

S = TypeVar("S", bound=Schedule)
# Rows hold for head dimensions up to a number.
Table: TypeAlias = tuple[tuple[int, tuple[S, ...]], ...]
W, K, Q = Warps, KeyWarps, QueryWarps
WIDEST = 576  # head dimension that the tables reach


def _four_share(Br: int, Bc: int, stages: int = 1) -> Warps:
    return W(Br, Bc, Br // 4, stages, split=4)


HALF_FORWARD: Table[Forward] = (
    (32, (W(128, 128, 4, 1, True), W(128, 64, 4, 2, True), W(64, 64, 4), W(32, 32, 2))),
    (64, (W(128, 128, 4), W(128, 64, 4, 2, True), W(128, 64, 4), W(64, 64, 4), W(32, 32, 2))),
    (128, (W(128, 64, 4), W(128, 32, 4, 2), W(128, 32, 4), W(64, 64, 4), W(32, 32, 2))),
    (256, (W(128, 64, 8), W(64, 64, 4), W(64, 32, 4), W(32, 32, 2))),
    (
        WIDEST,
        (
            W(64, 64, 8, split=4),
            W(64, 32, 8, split=2),
            W(48, 16, 6, split=2),
            W(32, 16, 4, split=2),
            W(16, 16, 2, split=2),
        ),
    ),
)
# Over caches a block has few rows, 16 a warp, and waits for memory: of rows as many as are there (``pins_of_rows``), of
# keys two stages, so that one is under way.
HALF_CACHED: Table[Forward] = (
    (
        128,
        (W(64, 64, 4, 2, True), W(64, 32, 4, 2, True), W(64, 32, 4), W(32, 64, 4, 2, split=2), _four_share(16, 64, 2)),
    ),
    (256, (W(64, 64, 4, 2), W(64, 32, 4, 2), W(64, 32, 4), W(32, 32, 2), W(16, 16, 1))),
    (WIDEST, (_four_share(64, 32, 2), _four_share(64, 32), _four_share(32, 32), _four_share(16, 16))),
)
SINGLE_CACHED: Table[Forward] = (
    (64, (W(64, 32, 4, 2), W(64, 32, 4), W(32, 32, 2), W(16, 16, 1))),
    (256, (W(64, 32, 4, 2), W(64, 16, 4, 2), W(64, 16, 4), W(32, 16, 2), W(16, 16, 1))),
    (WIDEST, (_four_share(64, 16, 2), _four_share(32, 16, 2), _four_share(32, 16), _four_share(16, 16))),
)
# Forward mode has the sums of O twice, and of scores, too: 16 rows a warp, of few keys.
WIDEST_JVP = 128
HALF_JVP: Table[Forward] = (
    (64, (W(128, 64, 8, 2), W(128, 32, 8, 2), W(64, 32, 4), W(32, 32, 2), W(16, 16, 1))),
    (WIDEST_JVP, (W(128, 32, 8, 2), W(128, 32, 8), W(64, 32, 4), W(32, 32, 2), W(16, 16, 1))),
)
SINGLE_JVP: Table[Forward] = (
    (64, (W(64, 32, 4), W(32, 32, 2), W(16, 16, 1))),
    (WIDEST_JVP, (W(64, 32, 4), W(32, 16, 2), W(16, 16, 1))),
)
# Its backward pass has the scores four times, and keeps K, V and their tangents: few query rows at a time.
HALF_JVP_BACKWARD: Table[Backward] = (
    (64, (K(32, 128, 8, 2), K(32, 128, 8), K(32, 64, 4), K(16, 64, 4), K(32, 32, 2), K(16, 16, 1))),
    (
        WIDEST_JVP,
        (K(32, 128, 8, 2), K(32, 128, 8), K(16, 128, 8), K(32, 64, 4), K(16, 64, 4), K(16, 32, 2), K(16, 16, 1)),
    ),
)
SINGLE_JVP_BACKWARD: Table[Backward] = (
    (64, (K(16, 64, 4), K(16, 32, 2), K(16, 16, 1))),
    (WIDEST_JVP, (K(16, 32, 2), K(16, 16, 1))),
)
HALF_JVP_QUERIES: Table[Queries] = (
    (64, (Q(128, 32, 8), Q(64, 32, 4), Q(32, 32, 2), Q(16, 16, 1))),
    (WIDEST_JVP, (Q(128, 32, 8), Q(64, 32, 4), Q(64, 16, 4), Q(32, 16, 2), Q(16, 16, 1))),
)
SINGLE_JVP_QUERIES: Table[Queries] = (
    (64, (Q(64, 16, 4), Q(32, 16, 2), Q(16, 16, 1))),
    (WIDEST_JVP, (Q(32, 16, 2), Q(16, 16, 1))),
)
HALF_BACKWARD: Table[Backward] = (
    (64, (K(64, 128, 8, 2), K(64, 128, 8), K(64, 64, 4), K(32, 32, 2))),
    (128, (K(64, 128, 8), K(64, 64, 8, 1, 2), K(32, 64, 4), K(32, 32, 2))),
    (192, (K(64, 64, 8, 1, 2), K(32, 64, 8, 1, 2), K(32, 32, 4, 1, 2), K(32, 16, 2, 1, 2))),
    (256, (K(64, 64, 8, 1, 2), K(32, 48, 6, 1, 2), K(32, 32, 4, 1, 2), K(32, 16, 2, 1, 2))),
    (WIDEST, (K(64, 32, 8, 1, 4), K(32, 32, 8, 1, 4), K(32, 16, 4, 1, 4), K(16, 16, 4, 1, 4))),
)
HALF_QUERIES: Table[Queries] = (
    (64, (Q(128, 64, 8, 2), Q(128, 64, 8), Q(64, 64, 4), Q(32, 32, 2))),
    (128, (Q(128, 64, 8), Q(128, 32, 8), Q(64, 32, 4), Q(32, 32, 2))),
    (192, (Q(128, 32, 8), Q(64, 32, 4), Q(32, 32, 2), Q(32, 16, 2))),
    (256, (Q(64, 32, 4), Q(32, 32, 2), Q(32, 16, 2))),
    (WIDEST, (Q(64, 32, 8, split=2), Q(32, 32, 4, split=2), Q(32, 16, 4, split=2), Q(16, 16, 2, split=2))),
)
SINGLE_FORWARD: Table[Forward] = (
    (64, (W(64, 64, 4), W(64, 32, 4), W(32, 32, 2))),
    (128, (W(64, 32, 4), W(32, 32, 2), W(16, 16, 1))),
    (256, (W(64, 32, 4), W(64, 16, 4), W(32, 16, 2), W(16, 16, 1))),
    (WIDEST, (W(32, 32, 4, split=2), W(32, 16, 4, split=2), W(16, 16, 2, split=2))),
)
SINGLE_BACKWARD: Table[Backward] = (
    (64, (K(32, 64, 4), K(32, 32, 2), K(16, 16, 1))),
    (128, (K(32, 64, 8, 1, 2), K(32, 32, 4, 1, 2), K(32, 64, 4), K(32, 32, 2), K(16, 16, 1))),
    (256, (K(32, 32, 4, 1, 2), K(32, 16, 2, 1, 2), K(16, 16, 2, 1, 2))),
    (WIDEST, (K(32, 16, 4, 1, 4), K(16, 16, 4, 1, 4))),
)
SINGLE_QUERIES: Table[Queries] = (
    (128, (Q(64, 32, 4), Q(32, 32, 2), Q(16, 16, 1))),
    (256, (Q(64, 32, 4), Q(32, 32, 2), Q(32, 16, 2), Q(16, 16, 1))),
    (WIDEST, (Q(32, 16, 8, split=4), Q(16, 16, 4, split=4))),
)
