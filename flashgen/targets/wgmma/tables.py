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

from dataclasses import replace

from flashgen.targets.gpu.tables import WIDEST, WIDEST_JVP, BackwardChoice, ForwardChoice, QueryChoice

Q = QueryChoice


def _hopper(Br: int, Bc: int, warps: int) -> ForwardChoice:
    return ForwardChoice(Br, Bc, warps, stages=2, warpgroups=True, producers=4)


def _hopper_shared(Bc: int, blocks: int) -> ForwardChoice:
    """One warpgroup without producer warps; several such blocks share a multiprocessor."""
    return ForwardChoice(64, Bc, 4, stages=2, warpgroups=True, blocks=blocks)


def _hopper_backward(Br: int, Bc: int, warps: int) -> BackwardChoice:
    return BackwardChoice(Br, Bc, warps, stages=2, warpgroups=True, producers=4)


def _hopper_shared_backward(Br: int, blocks: int) -> BackwardChoice:
    """The same for 64 keys."""
    return BackwardChoice(Br, 64, 4, stages=2, warpgroups=True, blocks=blocks)


def _hopper_shared_keys(sent: int, cluster: int = 1) -> BackwardChoice:
    """Two warpgroups share 64 keys: each has half of the columns of dK, dV and dQ, and scores of half a tile's queries.

    As many columns of dQ as shared memory has room for leave by way of it.
    """
    return BackwardChoice(64, 64, 8, stages=2, split=2, warpgroups=True, producers=4, dq_sent=sent, cluster=cluster)


def _hopper_shared_dq() -> BackwardChoice:
    """The same by each of two blocks, which exchange dS and have half of the columns of dQ each."""
    return replace(_hopper_shared_keys(0, cluster=2), Bc=128, divides_keys=True)


def _hopper_halves_of_dq(sent: int) -> BackwardChoice:
    """Two warpgroups with 64 keys each, by whole rows, where registers hold them; dQ in halves as above."""
    return BackwardChoice(64, 128, 8, stages=2, warpgroups=True, producers=4, dq_sent=sent)


# Two warpgroups share 64 rows: each has half of O's columns, and scores of half a tile's keys, or of whole tiles in
# turns. An H200 at 512, causal and nothing masked: 332 and 326 TFLOP/s, in turns 508 and 513.
_HOPPER_DIVIDED = ForwardChoice(64, 64, 8, warpgroups=True, split=2)
_HOPPER_TURNS = ForwardChoice(64, 64, 8, warpgroups=True, producers=4, split=2)
_HOPPER_CLUSTER = ForwardChoice(128, 64, 8, warpgroups=True, producers=4, split=2, cluster=2)

HOPPER_FORWARD: tuple[tuple[int, tuple[ForwardChoice, ...]], ...] = (
    (
        64,
        (
            _hopper_shared(128, 3),
            _hopper_shared(112, 3),
            _hopper(192, 128, 12),
            _hopper(192, 96, 12),
            _hopper(128, 128, 8),
            _hopper(128, 64, 8),
        ),
    ),
    (128, (_hopper(128, 128, 8), _hopper(128, 64, 8), _hopper_shared(64, 2))),
    (192, (_hopper(128, 112, 8), _hopper(128, 80, 8), _hopper(128, 48, 8))),
    (256, (_hopper(128, 64, 8), _hopper(128, 48, 8))),
    (320, (_hopper(128, 48, 8), _HOPPER_DIVIDED)),
    (WIDEST, (_HOPPER_CLUSTER, _HOPPER_TURNS, _HOPPER_DIVIDED)),
)
# Forward mode has the sums of O twice, and of scores, too. Where rows are no whole numbers of 16 bytes all copy.
_HOPPER_JVP_ALONE = (
    ForwardChoice(128, 64, 8, stages=2, warpgroups=True),
    ForwardChoice(128, 32, 8, stages=2, warpgroups=True),
)
HOPPER_JVP: tuple[tuple[int, tuple[ForwardChoice, ...]], ...] = (
    (64, (_hopper(128, 112, 8), _hopper(128, 96, 8), _hopper(128, 64, 8), *_HOPPER_JVP_ALONE)),
    (WIDEST_JVP, (_hopper(128, 64, 8), _hopper(128, 32, 8), *_HOPPER_JVP_ALONE)),
)
# The same where the mask relates no queries to keys, so that every row has all tiles.
HOPPER_WHOLE_FORWARD: tuple[tuple[int, tuple[ForwardChoice, ...]], ...] = (
    (64, (_hopper(192, 128, 12), *HOPPER_FORWARD[0][1])),
    (128, (_hopper(128, 160, 8), *HOPPER_FORWARD[1][1])),
    *HOPPER_FORWARD[2:],
)
# The same where masks leave rows of tiles short.
HOPPER_SHORT_FORWARD: tuple[tuple[int, tuple[ForwardChoice, ...]], ...] = (
    (64, (_hopper_shared(64, 4), _hopper_shared(64, 3), _hopper(128, 128, 8), _hopper(128, 64, 8))),
    *HOPPER_FORWARD[1:],
)
# The same where they are drawn in blocks smaller than a wide tile.
HOPPER_BLOCK_FORWARD: tuple[tuple[int, tuple[ForwardChoice, ...]], ...] = (
    HOPPER_SHORT_FORWARD[0],
    (128, (_hopper_shared(64, 2), _hopper_shared(48, 3), _hopper(128, 64, 8))),
    (192, (_hopper(128, 80, 8), _hopper(128, 48, 8))),
    *HOPPER_SHORT_FORWARD[3:],
)
# Of 8 bits. What a step waits for is a smaller share of a wide one, and products of it read Q less often.
# Sums take 32 KiB of shared memory at D 128, 64 at D 256.
HOPPER_F8_FORWARD: tuple[tuple[int, tuple[ForwardChoice, ...]], ...] = (
    (64, (_hopper(192, 160, 12), _hopper(128, 128, 8), _hopper(128, 64, 8))),
    (128, (_hopper(128, 224, 8), _hopper(128, 128, 8), _hopper(128, 64, 8))),
    (256, (_hopper(128, 96, 8), _hopper(128, 64, 8), _hopper(128, 32, 8))),
    (WIDEST, ()),
)
# dK and dV of a head dimension above 320 leave no registers for S and dP of 64 keys, whoever of a block shares them,
# above 256 few.
HOPPER_BACKWARD: tuple[tuple[int, tuple[BackwardChoice, ...]], ...] = (
    (64, (_hopper_backward(128, 128, 8), _hopper_backward(64, 128, 8))),
    (128, (_hopper_backward(64, 128, 8),)),
    (192, (_hopper_halves_of_dq(64), _hopper_halves_of_dq(40), _hopper_halves_of_dq(0), _hopper_shared_keys(64))),
    (256, (_hopper_shared_dq(), _hopper_shared_keys(0))),
    (320, (_hopper_shared_keys(0, cluster=2), _hopper_shared_keys(0))),
    (WIDEST, (_hopper_shared_keys(0, cluster=2),)),
)
# A tile of the keys of two blocks visits what either keeps: where rows are short each has its own.
HOPPER_SHORT_BACKWARD: tuple[tuple[int, tuple[BackwardChoice, ...]], ...] = (
    (64, (_hopper_shared_backward(64, 3), _hopper_shared_backward(64, 2), _hopper_backward(64, 128, 8))),
    (128, (_hopper_backward(64, 128, 8), _hopper_shared_backward(64, 2))),
    HOPPER_BACKWARD[2],
    (256, (_hopper_shared_keys(0),)),
    *HOPPER_BACKWARD[4:],
)
HOPPER_BLOCK_BACKWARD: tuple[tuple[int, tuple[BackwardChoice, ...]], ...] = (
    HOPPER_SHORT_BACKWARD[0],
    (128, (_hopper_shared_backward(64, 2), _hopper_backward(64, 128, 8))),
    *HOPPER_SHORT_BACKWARD[2:],
)
HOPPER_QUERIES: tuple[tuple[int, tuple[QueryChoice, ...]], ...] = (
    (128, (Q(128, 64, 8, 2, warpgroups=True),)),
    (256, ()),
    (WIDEST, ()),
)
# Where masks are drawn in small blocks: a tile of two of them visits what either keeps. Random blocks of 64 at D 64,
# 8 of 128 kept: 0.57 ms of 3.36 by the tile of 128 rows; all kept: 6.5 of 8.5.
HOPPER_BLOCK_QUERIES: tuple[tuple[int, tuple[QueryChoice, ...]], ...] = (
    (128, (Q(64, 64, 4, 2, warpgroups=True),)),
    (256, ()),
    (WIDEST, ()),
)
