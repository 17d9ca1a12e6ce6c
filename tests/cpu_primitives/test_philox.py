"""Philox4x32-7 against the known answers of Random123, and the contract of dropout."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest

from tests.cpu_primitives.calls import pointer

KNOWN_ANSWERS = [
    ([0] * 4, [0] * 2, [0x5F6FB709, 0x0D893F64, 0x4F121F81, 0x4F730A48]),
    ([0xFFFFFFFF] * 4, [0xFFFFFFFF] * 2, [0x5207DDC2, 0x45165E59, 0x4D8EE751, 0x8C52F662]),
    (
        [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
        [0xA4093822, 0x299F31D0],
        [0x4DFCCABA, 0x190A87F0, 0xC47362BA, 0xB6B5242A],
    ),
]


@pytest.mark.parametrize(("counter", "key", "answer"), KNOWN_ANSWERS)
def test_known_answers(primitives: ctypes.CDLL, counter: list[int], key: list[int], answer: list[int]) -> None:
    out = np.empty(4, np.uint32)
    seed = ctypes.c_uint64(key[0] | key[1] << 32)
    primitives.philox_block(pointer(out), pointer(np.array(counter, np.uint32)), seed)
    assert out.tolist() == answer


def philox(counter: list[int], key: list[int]) -> list[int]:
    word = 0xFFFFFFFF
    for _ in range(7):
        a, b = 0xD2511F53 * counter[0], 0xCD9E8D57 * counter[2]
        counter = [(b >> 32) ^ counter[1] ^ key[0], b & word, (a >> 32) ^ counter[3] ^ key[1], a & word]
        key = [key[0] + 0x9E3779B9 & word, key[1] + 0xBB67AE85 & word]
    return counter


def number(seed: int, b: int, h: int, i: int, j: int) -> int:
    """What the pair draws."""
    counter = [h, 8 * (i // 16) + i % 8, b, 4 * (j // 32) + j % 8 // 2]
    word = philox(counter, [seed & 0xFFFFFFFF, seed >> 32])[2 * (j % 16 // 8) + i % 16 // 8]
    if j // 16 % 2:
        word = word << 8 & 0xFFFFFFFF | word >> 24
    return word >> 16 * (j % 2) & 0x7FFF


@pytest.mark.parametrize(
    ("seed", "b", "h", "first_i", "block"),
    [
        (0, 0, 0, 0, 0),
        (2**63 + 12345678901, 3, 17, 4093, 100),
        (7, 1, 2, 4096, 9),
        (7, 1, 2, 4104, 9),
        (11, 0, 5, 2**31 - 32, 2**26 - 1),
    ],
)
@pytest.mark.parametrize("threshold", [1, 3277, 16384, 32767])
def test_kept_pairs(
    primitives: ctypes.CDLL, seed: int, b: int, h: int, first_i: int, block: int, threshold: int
) -> None:
    width = primitives.width()
    out = np.empty((32, width), np.uint8)
    primitives.dropout_lanes(pointer(out), ctypes.c_uint64(seed), b, h, first_i, block, threshold)
    for lane in range(width):
        drawn = [number(seed, b, h, first_i + lane, 32 * block + n) for n in range(32)]
        assert out[:, lane].tolist() == [each >= threshold for each in drawn]
