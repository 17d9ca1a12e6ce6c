"""Tiles that are worth considering on GPUs, best first: data, read by ``cuda_planner.py``.

A row holds for head dimensions up to its first number. 16-bit types go through m16n8k16; float32 takes twice the
shared memory and three products. Warps of the forward and the query pass have 16 or 32 rows each, those of the key pass
16 keys by a whole head dimension up to 128, or by half of a larger one (``split`` 2). Rows with ``warpgroups`` use
Hopper's products of four warps, which overlap with the rest: with two stages, 16 rows (or keys) a warp.

What a block costs beside its tiles (finding them, first and last products, storing O) is hidden by other blocks of the
multiprocessor, or not at all. On an H200, bfloat16, TFLOP/s of the forward pass, with warps that copy and one block a
multiprocessor, and without them and several: documents of 900 tokens in 8k at D 64 192 × 96: 144, 64 × 64 by four
blocks: 232; at D 128 128 × 128: 226, 64 × 48 by three: 283. ALiBi, 2k tokens, at D 64: 192 × 96: 263, 64 × 128 by
three: 344; at D 128: 128 × 128: 373, 64 × 48 by three: 380. Nothing masked, 16k tokens: D 64 192 × 128: 513,
64 × 128 by three: 461; D 128 128 × 160: 665, 128 × 128: 605.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ForwardChoice:
    """B_r, B_c, warps, stages, whether Q stays in registers, whether warpgroups multiply, warps that copy for them.

    ``blocks``: how many a multiprocessor has registers for, where warpgroups multiply.
    """

    Br: int
    Bc: int
    warps: int
    stages: int = 1
    q_in_registers: bool = False
    warpgroups: bool = False
    loaders: int = 0
    blocks: int = 1


@dataclass(frozen=True)
class BackwardChoice:
    """B_r, B_c, warps, stages of Q, warps that share 16 keys, whether warpgroups multiply, warps that copy for them.

    ``blocks``: how many a multiprocessor has registers for, where warpgroups multiply.
    """

    Br: int
    Bc: int
    warps: int
    stages: int = 1
    split: int = 1
    warpgroups: bool = False
    loaders: int = 0
    blocks: int = 1


@dataclass(frozen=True)
class QueryChoice:
    """B_r, B_c, warps, stages, and whether warpgroups multiply."""

    Br: int
    Bc: int
    warps: int
    stages: int = 1
    warpgroups: bool = False


F, B, Q = ForwardChoice, BackwardChoice, QueryChoice


def _hopper(Br: int, Bc: int, warps: int) -> ForwardChoice:
    return ForwardChoice(Br, Bc, warps, stages=2, warpgroups=True, loaders=4)


def _hopper_shared(Bc: int, blocks: int) -> ForwardChoice:
    """One warpgroup without loaders; several such blocks share a multiprocessor."""
    return ForwardChoice(64, Bc, 4, stages=2, warpgroups=True, blocks=blocks)


def _hopper_backward(Br: int, Bc: int, warps: int) -> BackwardChoice:
    return BackwardChoice(Br, Bc, warps, stages=2, warpgroups=True, loaders=4)


def _hopper_shared_backward(Br: int, blocks: int) -> BackwardChoice:
    """The same for 64 keys."""
    return BackwardChoice(Br, 64, 4, stages=2, warpgroups=True, blocks=blocks)


HALF_FORWARD: tuple[tuple[int, tuple[ForwardChoice, ...]], ...] = (
    (32, (F(128, 128, 4, 1, True), F(128, 64, 4, 2, True), F(64, 64, 4), F(32, 32, 2))),
    (64, (F(128, 128, 4), F(128, 64, 4, 2, True), F(128, 64, 4), F(64, 64, 4), F(32, 32, 2))),
    (128, (F(128, 64, 4), F(128, 32, 4, 2), F(128, 32, 4), F(64, 64, 4), F(32, 32, 2))),
    (192, (F(128, 64, 8), F(64, 64, 4), F(64, 32, 4), F(32, 32, 2))),
    (256, (F(128, 64, 8), F(64, 64, 4), F(64, 32, 4), F(32, 32, 2))),
)
HALF_BACKWARD: tuple[tuple[int, tuple[BackwardChoice, ...]], ...] = (
    (64, (B(64, 128, 8, 2), B(64, 128, 8), B(64, 64, 4), B(32, 32, 2))),
    (96, (B(64, 128, 8), B(64, 64, 8, 1, 2), B(32, 64, 4), B(32, 32, 2))),
    (128, (B(64, 128, 8), B(64, 64, 8, 1, 2), B(32, 64, 4), B(32, 32, 2))),
    (192, (B(64, 64, 8, 1, 2), B(32, 64, 8, 1, 2), B(32, 32, 4, 1, 2), B(32, 16, 2, 1, 2))),
    (256, (B(64, 64, 8, 1, 2), B(32, 48, 6, 1, 2), B(32, 32, 4, 1, 2), B(32, 16, 2, 1, 2))),
)
HALF_QUERIES: tuple[tuple[int, tuple[QueryChoice, ...]], ...] = (
    (64, (Q(128, 64, 8, 2), Q(128, 64, 8), Q(64, 64, 4), Q(32, 32, 2))),
    (128, (Q(128, 64, 8), Q(128, 32, 8), Q(64, 32, 4), Q(32, 32, 2))),
    (192, (Q(128, 32, 8), Q(64, 32, 4), Q(32, 32, 2), Q(32, 16, 2))),
    (256, (Q(64, 32, 4), Q(32, 32, 2), Q(32, 16, 2))),
)
# Before those of HALF_… on sm_90a. dK and dV of a larger head dimension leave no registers for S and dP of 64 keys.
HOPPER_FORWARD: tuple[tuple[int, tuple[ForwardChoice, ...]], ...] = (
    (
        64,
        (
            _hopper(192, 128, 12),
            _hopper_shared(112, 3),
            _hopper(192, 96, 12),
            _hopper(128, 128, 8),
            _hopper(128, 64, 8),
        ),
    ),
    (128, (_hopper(128, 128, 8), _hopper(128, 64, 8), _hopper_shared(64, 2))),
    (256, (_hopper(128, 80, 8), _hopper(128, 48, 8))),
)
# The same where the mask relates no queries to keys, so that every row has all tiles.
HOPPER_WHOLE_FORWARD: tuple[tuple[int, tuple[ForwardChoice, ...]], ...] = (
    (64, (_hopper(192, 128, 12), *HOPPER_FORWARD[0][1])),
    (128, (_hopper(128, 160, 8), *HOPPER_FORWARD[1][1])),
    HOPPER_FORWARD[2],
)
# The same where masks leave rows of tiles short.
HOPPER_SHORT_FORWARD: tuple[tuple[int, tuple[ForwardChoice, ...]], ...] = (
    (64, (_hopper_shared(64, 4), _hopper_shared(64, 3), _hopper(128, 128, 8), _hopper(128, 64, 8))),
    (128, (_hopper(128, 128, 8), _hopper(128, 64, 8), _hopper_shared(64, 2))),
    (256, (_hopper(128, 80, 8), _hopper(128, 48, 8))),
)
# The same where they are drawn in blocks smaller than a wide tile.
HOPPER_BLOCK_FORWARD: tuple[tuple[int, tuple[ForwardChoice, ...]], ...] = (
    HOPPER_SHORT_FORWARD[0],
    (128, (_hopper_shared(64, 2), _hopper_shared(48, 3), _hopper(128, 64, 8))),
    HOPPER_SHORT_FORWARD[2],
)
HOPPER_BACKWARD: tuple[tuple[int, tuple[BackwardChoice, ...]], ...] = (
    (64, (_hopper_backward(128, 128, 8), _hopper_backward(64, 128, 8))),
    (128, (_hopper_backward(64, 128, 8),)),
    (256, ()),
)
HOPPER_SHORT_BACKWARD: tuple[tuple[int, tuple[BackwardChoice, ...]], ...] = (
    (64, (_hopper_shared_backward(64, 3), _hopper_shared_backward(64, 2), _hopper_backward(64, 128, 8))),
    (128, (_hopper_backward(64, 128, 8), _hopper_shared_backward(64, 2))),
    (256, ()),
)
HOPPER_BLOCK_BACKWARD: tuple[tuple[int, tuple[BackwardChoice, ...]], ...] = (
    HOPPER_SHORT_BACKWARD[0],
    (128, (_hopper_shared_backward(64, 2), _hopper_backward(64, 128, 8))),
    (256, ()),
)
HOPPER_QUERIES: tuple[tuple[int, tuple[QueryChoice, ...]], ...] = (
    (128, (Q(128, 64, 8, 2, warpgroups=True),)),
    (256, ()),
)
# Where masks are drawn in small blocks: a tile of two of them visits what either keeps. Random blocks of 64 at D 64,
# 8 of 128 kept: 0.57 ms of 3.36 by the tile of 128 rows; all kept: 6.5 of 8.5.
HOPPER_BLOCK_QUERIES: tuple[tuple[int, tuple[QueryChoice, ...]], ...] = (
    (128, (Q(64, 64, 4, 2, warpgroups=True),)),
    (256, ()),
)

SINGLE_FORWARD: tuple[tuple[int, tuple[ForwardChoice, ...]], ...] = (
    (64, (F(64, 64, 4), F(64, 32, 4), F(32, 32, 2))),
    (128, (F(64, 32, 4), F(32, 32, 2), F(16, 16, 1))),
    (256, (F(64, 32, 4), F(64, 16, 4), F(32, 16, 2), F(16, 16, 1))),
)
SINGLE_BACKWARD: tuple[tuple[int, tuple[BackwardChoice, ...]], ...] = (
    (64, (B(32, 64, 4), B(32, 32, 2), B(16, 16, 1))),
    (128, (B(32, 64, 8, 1, 2), B(32, 32, 4, 1, 2), B(32, 64, 4), B(32, 32, 2), B(16, 16, 1))),
    (256, (B(32, 32, 4, 1, 2), B(32, 16, 2, 1, 2), B(16, 16, 2, 1, 2))),
)
SINGLE_QUERIES: tuple[tuple[int, tuple[QueryChoice, ...]], ...] = (
    (64, (Q(64, 32, 4), Q(32, 32, 2), Q(16, 16, 1))),
    (128, (Q(64, 32, 4), Q(32, 32, 2), Q(16, 16, 1))),
    (256, (Q(64, 32, 4), Q(32, 32, 2), Q(32, 16, 2), Q(16, 16, 1))),
)
