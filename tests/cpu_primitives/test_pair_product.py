"""Products of pairs of bfloat16 in vectors, and how their operands are made, against NumPy."""

from __future__ import annotations

import ctypes
import itertools

import numpy as np
import pytest
import torch

from tests.cpu_primitives.calls import Array, all_floats, long, pointer

ZERO, ACCUMULATE = range(2)


def normal(*sizes: int, seed: int) -> Array:
    """Random numbers that bfloat16 holds."""
    bits = np.random.default_rng(seed).normal(size=sizes).astype(np.float32).view(np.uint32)
    return (bits & 0xFFFF0000).view(np.float32)


def product(pairs: ctypes.CDLL, a: Array, b: Array, c: Array, begin: int, *, turned: bool, by_columns: bool) -> None:
    """C (+)= A B, of operands that lie in one way or the other."""
    (M, K), N = a.shape, b.shape[1]
    given_a, given_b = (np.ascontiguousarray(x.T if other else x) for x, other in ((a, turned), (b, by_columns)))
    operands = (pointer(given_a), turned, pointer(given_b), by_columns)
    pairs.product_of_pairs(M, N // pairs.width(), K, *operands, pointer(c), long(c.shape[1]), begin)


@pytest.mark.parametrize("begin", [ZERO, ACCUMULATE])
@pytest.mark.parametrize(("turned", "by_columns"), [(False, False), (True, True), (False, True)])
def test_product(pairs: ctypes.CDLL, begin: int, *, turned: bool, by_columns: bool) -> None:
    width = pairs.width()
    rows = (16, 32, 80, 144) if turned else (4, 8, 12, 20, 28, 64)
    for M, vectors, K in itertools.product(rows, (1, 2, 3, 4, 7), (32, 64, 160)):
        N = vectors * width
        a, b, c = normal(M, K, seed=M), normal(K, N, seed=K), normal(M, N + 2 * width, seed=vectors)
        before = c.astype(np.float64)
        product(pairs, a, b, c, begin, turned=turned, by_columns=by_columns)
        want = a.astype(np.float64) @ b.astype(np.float64) + (0 if begin == ZERO else before[:, :N])
        # As float32 products: units in the last place of the sum of the terms' sizes.
        size = np.abs(a).astype(np.float64) @ np.abs(b) + (0 if begin == ZERO else np.abs(before[:, :N]))
        assert (np.abs(c[:, :N] - want) / size).max() < 2.0**-22, (M, N, K)
        assert np.array_equal(c[:, N:], before[:, N:]), "columns beyond N were written"


@pytest.mark.parametrize("turned", [False, True])
def test_what_is_not_finite_stays_in_its_row_and_column(pairs: ctypes.CDLL, *, turned: bool) -> None:
    width = pairs.width()
    a, b = np.ones((16, 32), np.float32), np.ones((32, width), np.float32)
    a[3, 5], a[7, 31], a[9, 2] = np.inf, np.nan, -np.inf
    b[4, 1] = 0.0  # in a pair with what an infinity is multiplied by
    c = np.zeros((16, width), np.float32)
    product(pairs, a, b, c, ZERO, turned=turned, by_columns=False)
    others = np.arange(width) != 1
    assert np.isposinf(c[3]).all()
    assert np.isnan(c[7]).all()
    assert np.isneginf(c[9]).all()
    finite = np.delete(c, (3, 7, 9), axis=0)
    assert (finite[:, others] == 32).all()
    assert (finite[:, 1] == 31).all()


def test_both_terms_of_a_pair_reach_the_least_and_the_largest_numbers(pairs: ctypes.CDLL) -> None:
    """Sums of float32, whose exponents are bfloat16's: normal numbers are not lost, nor do their sums overflow."""
    width = pairs.width()
    for size in (2.0**-126, 2.0**100):
        a, b = np.zeros((4, 32), np.float32), np.ones((32, width), np.float32)
        for row, (first, second) in enumerate(((1, 0), (0, 1), (1, 1), (2, -1))):
            a[row, 6], a[row, 7] = first * size, second * size
        c = np.zeros((4, width), np.float32)
        product(pairs, a, b, c, ZERO, turned=False, by_columns=True)
        assert np.array_equal(c[:, 0] / np.float32(size), [1, 1, 2, 1])
        assert (c == c[:, :1]).all()


def test_pairs_are_rounded_to_nearest_even(pairs: ctypes.CDLL) -> None:
    width = pairs.width()
    x = all_floats(99991)
    x = x[~(np.abs(x) < 2.0**-126)]  # what is smaller may be lost; NaN stays
    for low, high in x[: len(x) // (2 * width) * 2 * width].reshape(-1, 2, width):
        paired, words = np.empty(2 * width, np.uint16), np.empty(2 * width, np.uint16)
        pairs.rounded_pairs(
            pointer(paired), pointer(words), *(pointer(np.ascontiguousarray(each)) for each in (low, high))
        )
        assert np.array_equal(paired.reshape(width, 2).T, words.reshape(2, width))
        got = (words.astype(np.uint32) << 16).view(np.float32).reshape(2, width)
        exact = torch.from_numpy(np.stack([low, high])).to(torch.bfloat16).float().numpy()
        assert np.array_equal(got, exact, equal_nan=True)
