"""Products with few query rows against NumPy: float32 and bfloat16, whole vectors and others, runs of keys."""

from __future__ import annotations

import ctypes
import itertools

import numpy as np
import pytest

from tests.cpu_primitives.calls import long, pointer

ROWS, KEYS = (1, 2, 3, 5, 8), ((1, 1), (7, 3), (16, 16), (61, 20), (64, 64))  # the latter with where they are cut


@pytest.mark.parametrize("half", [False, True], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("width", [20, 64, 144])
def test_products_of_few_rows(primitives: ctypes.CDLL, width: int, half: bool) -> None:
    lanes = primitives.width()
    padded, rng = -(-width // lanes) * lanes, np.random.default_rng(3)
    for rows, (keys, cut) in itertools.product(ROWS, KEYS):
        ld, lds = width + 3, -(-keys // lanes) * lanes + lanes
        kv = rng.normal(size=(keys, ld)).astype(np.float32)
        kv[:, width:] = np.nan  # what lies between rows is not read
        bits = (kv.view(np.uint32) >> 16).astype(np.uint16)
        stored = np.ascontiguousarray(bits if half else kv).ravel()[: (keys - 1) * ld + width].copy()
        numbers = ((bits.astype(np.uint32) << 16).view(np.float32) if half else kv)[:, :width].astype(np.float64)
        q = np.zeros((rows, padded), np.float32)
        q[:, :width] = rng.normal(size=(rows, width))
        s = np.zeros((rows, lds), np.float32)

        def run(q_or_o: np.ndarray, weights: int, cut: int = cut) -> int:
            given = (width, int(half), rows, keys, cut, pointer(stored), long(ld), pointer(q_or_o), pointer(s))  # noqa: B023
            return int(primitives.few_rows(*given, long(lds), weights))  # noqa: B023

        assert rows <= run(q, 0)
        assert np.abs(s[:, :keys] - q[:, :width].astype(np.float64) @ numbers.T).max() < 2e-5

        p, o = s.copy(), rng.normal(size=(rows, padded)).astype(np.float32)
        want = o[:, :width] + p[:, :keys].astype(np.float64) @ numbers
        run(o, 1)
        assert np.abs(o[:, :width] - want).max() < 1e-5 * max(1.0, np.abs(want).max())
        if cut < keys:  # the same to the bit, however keys are cut
            in_two, in_one = np.zeros((2, rows, padded), np.float32)
            run(in_two, 1)
            run(in_one, 1, keys)
            assert np.array_equal(in_two, in_one)
