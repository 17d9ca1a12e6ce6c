"""Products of bfloat16 matrices, and the making of their operands, against NumPy."""

from __future__ import annotations

import ctypes
import itertools

import numpy as np
import pytest
import torch

from tests.cpu_primitives.calls import Array, all_floats, long, pointer

ZERO, ACCUMULATE = range(2)


def halves(*sizes: int, seed: int) -> Array:
    """Random bfloat16, as bits."""
    x = torch.randn(sizes, generator=torch.Generator().manual_seed(seed), dtype=torch.bfloat16)
    return x.view(torch.int16).numpy().view(np.uint16)


def floats(x: Array) -> Array:
    return (x.astype(np.uint32) << 16).view(np.float32)


def in_pairs(x: Array) -> Array:
    """Rows 2 n and 2 n + 1 in the halves of row n."""
    return (x[::2].astype(np.uint32) | x[1::2].astype(np.uint32) << 16).view(np.int32)


@pytest.mark.parametrize("begin", [ZERO, ACCUMULATE])
def test_product(primitives: ctypes.CDLL, begin: int) -> None:
    if not primitives.matrices():
        pytest.skip("the system does not grant the registers")
    width = primitives.width()
    for M, vectors, K in itertools.product((16, 32, 48, 64, 144), (1, 2, 3, 4, 7), (32, 64, 160)):
        N = vectors * width
        a, b = halves(M, K + 32, seed=M), halves(K, N + width, seed=K)
        c = np.random.default_rng(vectors).normal(size=(M, N + 2 * width)).astype(np.float32)
        before, pairs = c.astype(np.float64), np.ascontiguousarray(in_pairs(b))
        strides = (long(K + 32), pointer(pairs), long(N + width), pointer(c), long(N + 2 * width))
        primitives.product_of_matrices(M, vectors, K, pointer(a), *strides, begin)
        want = floats(a[:, :K]).astype(np.float64) @ floats(b[:, :N]).astype(np.float64)
        want += 0 if begin == ZERO else before[:, :N]
        assert np.abs(c[:, :N] - want).max() < 5e-5, (M, N, K)
        assert np.array_equal(c[:, N:], before[:, N:]), "columns beyond N were written"


def test_what_is_not_finite_stays_in_its_row_and_column(primitives: ctypes.CDLL) -> None:
    if not primitives.matrices():
        pytest.skip("the system does not grant the registers")
    width = primitives.width()
    a, b = np.full((16, 32), 0x3F80, np.uint16), np.full((32, width), 0x3F80, np.uint16)
    a[3, 5], a[7, 31] = 0x7F80, 0x7FC0  # infinity, NaN
    c = np.zeros((16, width), np.float32)
    pairs = np.ascontiguousarray(in_pairs(b))
    primitives.product_of_matrices(
        16, 1, 32, pointer(a), long(32), pointer(pairs), long(width), pointer(c), long(width), ZERO
    )
    assert np.isposinf(c[3]).all()
    assert np.isnan(c[7]).all()
    assert (np.delete(c, (3, 7), axis=0) == 32).all()


@pytest.mark.parametrize(("rows", "cols"), [(32, 32), (64, 96), (128, 32)])
def test_turn(primitives: ctypes.CDLL, rows: int, cols: int) -> None:
    source = np.random.default_rng(8).integers(0, 2**16, (rows, cols + 5)).astype(np.uint16)
    out = np.zeros((cols + 1, rows + 7), np.uint16)
    primitives.turn(pointer(out), long(rows + 7), pointer(source), long(cols + 5), rows, cols)
    assert np.array_equal(out[:cols, :rows], source[:, :cols].T)
    assert not out[cols].any()
    assert not out[:, rows:].any()


def test_pairs_are_rounded_to_nearest(primitives: ctypes.CDLL) -> None:
    width = primitives.width()
    x = all_floats(99991)
    x = x[: len(x) // (2 * width) * 2 * width].reshape(-1, 2, width)
    for low, high in x:
        out = np.empty(width, np.int32)
        primitives.pairs(pointer(out), pointer(np.ascontiguousarray(low)), pointer(np.ascontiguousarray(high)))
        got = out.view(np.uint16).reshape(width, 2).T
        for bits, value in zip(got, (low, high), strict=True):
            exact = torch.from_numpy(value.copy()).to(torch.bfloat16).float().numpy()
            below = floats(bits)
            number = ~np.isnan(value)
            tie = (value.view(np.uint32) & 0xFFFF) == 0x8000
            assert np.array_equal(below[number & ~tie], exact[number & ~tie])
            # The contract lets go of NaNs whose payload is all ones.
            plain = ~number & ((value.view(np.uint32) & 0x7FFF8000) != 0x7FFF8000)
            assert np.isnan(below[plain]).all()
