"""The tile product and the transposing copy against NumPy."""

from __future__ import annotations

import ctypes
import itertools

import numpy as np
import pytest

from tests.cpu_primitives.calls import long, pointer

ZERO, ACCUMULATE = range(2)


@pytest.mark.parametrize("begin", [ZERO, ACCUMULATE])
@pytest.mark.parametrize("swapped", [False, True])
def test_product(primitives: ctypes.CDLL, begin: int, swapped: bool) -> None:
    width = primitives.width()
    rng = np.random.default_rng(7)
    rows, vectors, depths = (4, 8, 12, 16, 20, 28, 64, 128), (*range(1, 10), 16), (0, 1, 5, 64)
    for M, count, K in itertools.product(rows, vectors, depths):
        N, extra = count * width, width * (count % 2)
        a = rng.normal(size=(M, K)).astype(np.float32)
        b = rng.normal(size=(K, N + extra)).astype(np.float32)
        c = rng.normal(size=(M, N + 2 * extra)).astype(np.float32)
        before = c.astype(np.float64)
        stored = np.ascontiguousarray(a.T if swapped else a)
        strides = (long(1), long(M)) if swapped else (long(K), long(1))
        primitives.product(
            M,
            count,
            K,
            pointer(stored),
            *strides,
            pointer(b),
            long(N + extra),
            pointer(c),
            long(N + 2 * extra),
            begin,
        )
        want = a.astype(np.float64) @ b[:, :N].astype(np.float64)
        want += 0 if begin == ZERO else before[:, :N]
        assert np.abs(c[:, :N] - want).max() < 2e-5, (M, N, K)
        assert np.array_equal(c[:, N:], before[:, N:]), "columns beyond N were written"


@pytest.mark.parametrize(("rows", "cols"), [(64, 128), (1, 1), (16, 33), (37, 16), (50, 53), (3, 64), (128, 64)])
def test_transpose(primitives: ctypes.CDLL, rows: int, cols: int) -> None:
    source = np.random.default_rng(8).normal(size=(rows, cols + 3)).astype(np.float32)
    out = np.zeros((cols + 1, rows + 5), np.float32)
    primitives.transpose(pointer(out), long(rows + 5), pointer(source), long(cols + 3), rows, cols)
    assert np.array_equal(out[:cols, :rows], source[:, :cols].T)
    assert not out[cols].any()
    assert not out[:, rows:].any()
