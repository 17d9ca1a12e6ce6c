"""Matrix registers: products of bfloat16 and of float32 in parts, and how their operands are made, against NumPy."""

from __future__ import annotations

import ctypes
import itertools

import numpy as np
import pytest
import torch

from tests.cpu_primitives.calls import Array, all_floats, long, pointer

ZERO, ACCUMULATE = range(2)


def floats(x: Array) -> Array:
    return (x.astype(np.uint32) << 16).view(np.float32)


def normal(*sizes: int, seed: int, parts: int) -> Array:
    """Random numbers that are sums of so many bfloat16."""
    x = np.random.default_rng(seed).normal(size=sizes).astype(np.float32)
    return x if parts > 1 else floats(x.view(np.uint32) >> 16)


@pytest.mark.parametrize("parts", [1, 3])
@pytest.mark.parametrize("begin", [ZERO, ACCUMULATE])
@pytest.mark.parametrize(("turned", "by_columns"), [(False, False), (True, True)])
def test_product(matrices: ctypes.CDLL, parts: int, begin: int, *, turned: bool, by_columns: bool) -> None:
    width = matrices.width()
    for M, vectors, K in itertools.product((16, 32, 48, 64, 144), (1, 2, 3, 4, 7), (32, 64, 160)):
        N = vectors * width
        a, b = normal(M, K, seed=M, parts=parts), normal(K, N, seed=K, parts=parts)
        c = normal(M, N + 2 * width, seed=vectors, parts=3)
        before = c.astype(np.float64)
        given_a, given_b = (np.ascontiguousarray(x.T if other else x) for x, other in ((a, turned), (b, by_columns)))
        operands = (pointer(given_a), turned, pointer(given_b), by_columns)
        matrices.product_of_matrices(parts, M, vectors, K, *operands, pointer(c), long(N + 2 * width), begin)
        want = a.astype(np.float64) @ b.astype(np.float64) + (0 if begin == ZERO else before[:, :N])
        # As float32 products: units in the last place of the sum of the terms' sizes.
        size = np.abs(a).astype(np.float64) @ np.abs(b) + (0 if begin == ZERO else np.abs(before[:, :N]))
        assert (np.abs(c[:, :N] - want) / size).max() < 2.0**-22, (M, N, K)
        assert np.array_equal(c[:, N:], before[:, N:]), "columns beyond N were written"


@pytest.mark.parametrize("parts", [1, 3])
def test_what_is_not_finite_stays_in_its_row_and_column(matrices: ctypes.CDLL, parts: int) -> None:
    """Of ones, whose second and third parts are zeros: an infinity times these would be NaN."""
    width = matrices.width()
    a, b = np.ones((16, 32), np.float32), np.ones((32, width), np.float32)
    a[3, 5], a[7, 31], a[9, 2] = np.inf, np.nan, -np.inf
    c = np.zeros((16, width), np.float32)
    matrices.product_of_matrices(parts, 16, 1, 32, pointer(a), False, pointer(b), False, pointer(c), long(width), ZERO)
    assert np.isposinf(c[3]).all()
    assert np.isnan(c[7]).all()
    assert np.isneginf(c[9]).all()
    assert (np.delete(c, (3, 7, 9), axis=0) == 32).all()


def test_three_parts_hold_a_float32(matrices: ctypes.CDLL) -> None:
    width = matrices.width()
    x = all_floats(99991)
    x = x[np.abs(x) > 2.0**-110]  # and no NaN
    x = np.append(x, [np.finfo(np.float32).max, np.finfo(np.float32).min]).astype(np.float32)
    for some in x[-(len(x) // width * width) :].reshape(-1, width):
        out = np.empty((3, width), np.float32)
        matrices.parts_of(pointer(out), pointer(np.ascontiguousarray(some)))
        finite = np.isfinite(some)
        assert np.isfinite(out[:, finite]).all()
        assert np.array_equal(out[:, finite].astype(np.float64).sum(0), some[finite].astype(np.float64))
        assert np.array_equal(out[0, ~finite], some[~finite])


def test_pairs_are_rounded_to_nearest(matrices: ctypes.CDLL) -> None:
    width = matrices.width()
    x = all_floats(99991)
    x = x[: len(x) // (2 * width) * 2 * width].reshape(-1, 2, width)
    for low, high in x:
        out = np.empty(width, np.int32)
        matrices.pairs(pointer(out), pointer(np.ascontiguousarray(low)), pointer(np.ascontiguousarray(high)))
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
