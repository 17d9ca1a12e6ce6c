"""Philox4x32-10 against the known answers of Random123, and the contract of dropout."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest

from tests.cpu_primitives.calls import pointer

KNOWN_ANSWERS = [
    ([0] * 4, [0] * 2, [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
    ([0xFFFFFFFF] * 4, [0xFFFFFFFF] * 2, [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]),
    (
        [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
        [0xA4093822, 0x299F31D0],
        [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1],
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
    for _ in range(10):
        a, b = 0xD2511F53 * counter[0], 0xCD9E8D57 * counter[2]
        counter = [(b >> 32) ^ counter[1] ^ key[0], b & word, (a >> 32) ^ counter[3] ^ key[1], a & word]
        key = [key[0] + 0x9E3779B9 & word, key[1] + 0xBB67AE85 & word]
    return counter


@pytest.mark.parametrize(
    ("seed", "b", "h", "first_i", "j_quad"),
    [(0, 0, 0, 0, 0), (2**63 + 12345678901, 3, 17, 4093, 100), (7, 1, 2, 2**31 - 8, 9)],
)
def test_dropout_words(primitives: ctypes.CDLL, seed: int, b: int, h: int, first_i: int, j_quad: int) -> None:
    width = primitives.width()
    out = np.empty((4, width), np.uint32)
    different = primitives.dropout_lanes(pointer(out), ctypes.c_uint64(seed), b, h, first_i, j_quad)
    assert different == 0, "the scalar words differ"
    key = [seed & 0xFFFFFFFF, seed >> 32]
    for lane in range(width):
        i = (first_i + lane) & 0xFFFFFFFF
        assert out[:, lane].tolist() == philox([j_quad, i, h, b], key)


@pytest.mark.parametrize(
    ("p", "want"), [(0.0, 0), (0.5, 2**31), (0.1, 429496730), (1.0, 2**32 - 1), (1 - 2**-40, 2**32 - 1)]
)
def test_threshold(primitives: ctypes.CDLL, p: float, want: int) -> None:
    primitives.threshold.restype = ctypes.c_uint32
    primitives.threshold.argtypes = [ctypes.c_double]
    assert primitives.threshold(p) == want
