"""Tiles that are worth considering where warpgroups multiply, best first: data, read by ``recipes.py``.

A row holds for head dimensions up to its first number. Rows use products of four warps, which overlap with the rest:
with two stages, 16 rows (or keys) a warp. They stand before those of all GPUs.

What a block costs beside its tiles (finding them, first and last products, storing O) is hidden by other blocks of the
multiprocessor, or not at all. On an H200, bfloat16, TFLOP/s of the forward pass, with warps that copy and one block a
multiprocessor, and without them and several: documents of 900 tokens in 8k at D 64 192 × 96: 144, 64 × 64 by four
blocks: 232; at D 128 128 × 128: 226, 64 × 48 by three: 283. ALiBi, 2k tokens, at D 64: 192 × 96: 263, 64 × 128 by
three: 344; at D 128: 128 × 128: 373, 64 × 48 by three: 380. Rows of several lengths, D 64, times of 192 × 128 over
those of 64 × 128 by three, 8k and 2k tokens: causal 1.02 and 1.12, ALiBi 1.03 and 1.11, a soft-cap 1.04 and 1.14, T5
1.10 and 1.14, a window of 4096 1.04 and 1.15, sigmoid weights 1.04 and 1.14, dropout 1.14 and 1.19. Nothing masked, 16k
tokens: D 64 192 × 128: 513, 64 × 128 by three: 461; D 128 128 × 160: 665, 128 × 128: 605. On an H100, causal and
nothing masked, 8k: D 192/128 128 × 112: 549 and 697, 128 × 80: 538 and 633, 128 × 128: 538 and 660; D 192 128 × 112:
598, 128 × 80: 510; D 256 128 × 64: 605 and 756, 128 × 48: 522 and 692; D 320 128 × 48: 575 and 725, 128 × 32: 495.
"""

from __future__ import annotations

from flashgen.targets.gpu.schedules import (
    Backward,
    DividedWarpgroups,
    Forward,
    OwnKeys,
    PingPong,
    ProducerKeys,
    Producers,
    Queries,
    QueryWarpgroups,
    SelfLoading,
    SelfLoadingKeys,
    SharedDq,
    SharedKeys,
)
from flashgen.targets.gpu.tables import WIDEST, WIDEST_JVP, Table

S, P = SelfLoading, Producers
# Two warpgroups share 64 rows: each has half of O's columns, and scores of half a tile's keys, or of whole tiles in
# turns. An H200 at 512, causal and nothing masked: 332 and 326 TFLOP/s, in turns 508 and 513.
_DIVIDED = DividedWarpgroups(64, 64, 8)
_PING_PONG = PingPong(64, 64, 8)

HOPPER_FORWARD: Table[Forward] = (
    (
        64,
        (
            S(64, 128, 4, blocks=3),
            S(64, 112, 4, blocks=3),
            P(192, 128, 12),
            P(192, 96, 12),
            P(128, 128, 8),
            P(128, 64, 8),
        ),
    ),
    (128, (P(128, 128, 8), P(128, 64, 8), S(64, 64, 4, blocks=2))),
    (192, (P(128, 112, 8), P(128, 80, 8), P(128, 48, 8))),
    (256, (P(128, 64, 8), P(128, 48, 8))),
    (320, (P(128, 48, 8), _DIVIDED)),
    (WIDEST, (PingPong(128, 64, 8, cluster=2), _PING_PONG, _DIVIDED)),
)
# Forward mode has the sums of O twice, and of scores, too. Where rows are no whole numbers of 16 bytes all copy.
_JVP_ALONE = (S(128, 64, 8), S(128, 32, 8))
HOPPER_JVP: Table[Forward] = (
    (64, (P(128, 112, 8), P(128, 96, 8), P(128, 64, 8), *_JVP_ALONE)),
    (WIDEST_JVP, (P(128, 64, 8), P(128, 32, 8), *_JVP_ALONE)),
)
# Where the mask relates no queries to keys, so that every row has all tiles.
HOPPER_WHOLE_FORWARD: Table[Forward] = (
    (64, (P(192, 128, 12), *HOPPER_FORWARD[0][1])),
    (128, (P(128, 160, 8), *HOPPER_FORWARD[1][1])),
    *HOPPER_FORWARD[2:],
)
# Where masks leave rows of tiles short.
HOPPER_SHORT_FORWARD: Table[Forward] = (
    (64, (S(64, 64, 4, blocks=4), S(64, 64, 4, blocks=3), P(128, 128, 8), P(128, 64, 8))),
    *HOPPER_FORWARD[1:],
)
# Where masks are drawn in blocks smaller than a wide tile.
HOPPER_BLOCK_FORWARD: Table[Forward] = (
    HOPPER_SHORT_FORWARD[0],
    (128, (S(64, 64, 4, blocks=2), S(64, 48, 4, blocks=3), P(128, 64, 8))),
    (192, (P(128, 80, 8), P(128, 48, 8))),
    *HOPPER_SHORT_FORWARD[3:],
)
# Of 8 bits. What a step waits for is a smaller share of a wide one, and products of it read Q less often.
# Sums take 32 KiB of shared memory at D 128, 64 at D 256.
HOPPER_F8_FORWARD: Table[Forward] = (
    (64, (P(192, 160, 12), P(128, 128, 8), P(128, 64, 8))),
    (128, (P(128, 224, 8), P(128, 128, 8), P(128, 64, 8))),
    (256, (P(128, 96, 8), P(128, 64, 8), P(128, 32, 8))),
)
# dK and dV of a head dimension above 320 leave no registers for S and dP of 64 keys, whoever of a block shares them,
# above 256 few.
HOPPER_BACKWARD: Table[Backward] = (
    (64, (ProducerKeys(128, 128, 8), ProducerKeys(64, 128, 8))),
    (128, (ProducerKeys(64, 128, 8),)),
    (192, (OwnKeys(dq_sent=64), OwnKeys(dq_sent=40), OwnKeys(dq_sent=0), SharedKeys(dq_sent=64))),
    (256, (SharedDq(), SharedKeys())),
    (320, (SharedKeys(cluster=2), SharedKeys())),
    (WIDEST, (SharedKeys(cluster=2),)),
)
# A tile of the keys of two blocks visits what either keeps: where rows are short each has its own.
HOPPER_SHORT_BACKWARD: Table[Backward] = (
    (64, (SelfLoadingKeys(64, 64, 4, blocks=3), SelfLoadingKeys(64, 64, 4, blocks=2), ProducerKeys(64, 128, 8))),
    (128, (ProducerKeys(64, 128, 8), SelfLoadingKeys(64, 64, 4, blocks=2))),
    HOPPER_BACKWARD[2],
    (256, (SharedKeys(),)),
    *HOPPER_BACKWARD[4:],
)
HOPPER_BLOCK_BACKWARD: Table[Backward] = (
    HOPPER_SHORT_BACKWARD[0],
    (128, (SelfLoadingKeys(64, 64, 4, blocks=2), ProducerKeys(64, 128, 8))),
    *HOPPER_SHORT_BACKWARD[2:],
)
HOPPER_QUERIES: Table[Queries] = ((128, (QueryWarpgroups(128, 64, 8),)), (256, ()), (WIDEST, ()))
# Where masks are drawn in small blocks: a tile of two of them visits what either keeps. Random blocks of 64 at D 64,
# 8 of 128 kept: 0.57 ms of 3.36 by the tile of 128 rows; all kept: 6.5 of 8.5.
HOPPER_BLOCK_QUERIES: Table[Queries] = ((128, (QueryWarpgroups(64, 64, 4),)), (256, ()), (WIDEST, ()))
