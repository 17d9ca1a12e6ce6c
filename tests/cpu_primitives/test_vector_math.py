"""Accuracy of the functions of the language against float64, and the exact ones against NumPy."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest
import scipy.special

from tests.cpu_primitives.calls import Array, all_floats, binary, long, padded, pointer, ulps, unary

FLOATS = all_floats(10007)
WIDE = FLOATS.astype(np.float64)
SMALLEST_NORMAL = 2.0**-126


def gelu(x: Array) -> Array:
    return np.where(np.isneginf(x), -0.0, x * scipy.special.ndtr(x))


def silu(x: Array) -> Array:
    y: Array = x * scipy.special.expit(x)
    return y


# name: (float64 reference, bound in units in the last place, results below this may be 0). Without fused multiply-add,
# where every product is rounded, the bounds grow by WITHOUT_FUSED.
WITHOUT_FUSED = 1.4
FUNCTIONS = {
    "exp": (np.exp, 1.3, 0),
    "exp2": (np.exp2, 1.3, 0),
    "log": (np.log, 1.1, 0),
    "log2": (np.log2, 1.8, 0),
    "log1p": (np.log1p, 1.3, 0),
    "sqrt": (np.sqrt, 0.5, 0),
    "rsqrt": (lambda x: 1 / np.sqrt(x), 1.5, 0),
    "tanh": (np.tanh, 2.5, 0),
    "sigmoid": (scipy.special.expit, 2.5, SMALLEST_NORMAL),
    "silu": (silu, 3, 104 * SMALLEST_NORMAL),
    "gelu": (gelu, 5, 0),
    "erf": (scipy.special.erf, 1.6, 0),
    "softplus": (lambda x: np.logaddexp(0, x), 2, 0),
    "floor": (np.floor, 0, 0),
    "ceil": (np.ceil, 0, 0),
    "round": (np.rint, 0, 0),
    "abs": (np.abs, 0, 0),
    "sign": (lambda x: np.nan_to_num(np.sign(x)), 0, 0),
    "relu": (lambda x: np.where(x <= 0, 0, x), 0, 0),
    "sin": (np.sin, 1.7, 0),
    "cos": (np.cos, 1.7, 0),
    "atan": (np.arctan, 1.8, 0),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_accuracy(primitives: ctypes.CDLL, name: str) -> None:
    reference, bound, flushed_below = FUNCTIONS[name]
    with np.errstate(all="ignore"):
        want = reference(WIDE)
    got = unary(primitives, name, FLOATS)
    error = ulps(got, want)
    flushed = (got == 0) & (np.abs(want) < flushed_below)
    if name == "silu":  # as in PyTorch: -inf * 0
        flushed |= np.isneginf(FLOATS) & np.isnan(got)
    error = np.where(flushed, 0, error)
    worst = int(np.argmax(error))
    bound *= 1 if primitives.fused() else WITHOUT_FUSED
    assert error[worst] <= bound, f"{name}({FLOATS[worst]!r}) = {got[worst]!r}, should be {want[worst]!r}"


def test_exp2_bounded(primitives: ctypes.CDLL) -> None:
    x = FLOATS[~(FLOATS >= 127.5)]
    x = x[: len(x) // 16 * 16]
    got, want = unary(primitives, "exp2_bounded", x), np.exp2(x.astype(np.float64))
    low = x < -126
    assert not got[low].any(), "results below the normal range are 0"
    assert ulps(got, want)[~low].max() <= 2.2
    assert (got[x == 0] == 1).all()
    assert np.array_equal(np.isnan(got), np.isnan(x))


def test_signed_zeros(primitives: ctypes.CDLL) -> None:
    zeros = padded(np.array([0.0, -0.0], np.float32))
    for name in ("tanh", "erf", "sin", "atan", "log1p", "sqrt", "floor", "ceil", "round", "gelu", "silu"):
        assert np.array_equal(np.signbit(unary(primitives, name, zeros)), np.signbit(zeros)), name


def test_monotone_and_bounded(primitives: ctypes.CDLL) -> None:
    x = padded(np.linspace(0, 12, 1 << 17).astype(np.float32))
    for name in ("tanh", "sigmoid", "erf"):
        assert unary(primitives, name, x).max() <= 1, name


def test_pow(primitives: ctypes.CDLL) -> None:
    rng = np.random.default_rng(2)
    special = np.array(
        [0, -0.0, 1, -1, 2, -2, 0.5, -0.5, 3, -3, np.inf, -np.inf, np.nan, 1e-40, 16777217, -7, 1e30], np.float32
    )
    grid = [g.ravel() for g in np.meshgrid(special, special)]
    base = np.exp2(rng.uniform(-30, 30, 60000)).astype(np.float32)
    exponent = rng.uniform(-6, 6, 60000).astype(np.float32)
    negative = -rng.uniform(0, 20, 4000).astype(np.float32)
    integral = rng.integers(-20, 20, 4000).astype(np.float32)
    near_one = (1 + rng.uniform(-1e-3, 1e-3, 20000)).astype(np.float32)
    large = rng.uniform(-8e4, 8e4, 20000).astype(np.float32)
    a = padded(np.concatenate([grid[0], base, negative, near_one]))
    b = padded(np.concatenate([grid[1], exponent, integral, large]))
    with np.errstate(all="ignore"):
        want = np.power(a.astype(np.float64), b.astype(np.float64))
    error = ulps(binary(primitives, "pow", a, b, np.float32), want)
    worst = int(np.argmax(error))
    assert error[worst] <= 1.6, (a[worst], b[worst], want[worst])


def test_sine_of_large_numbers(primitives: ctypes.CDLL) -> None:
    near_multiples = (np.arange(1, 60000) * (np.pi / 2)).astype(np.float32)
    x = padded(np.concatenate([near_multiples, -near_multiples, np.array([1e5, 9.9e5, 1.1e6, 3e38], np.float32)]))
    assert ulps(unary(primitives, "sin", x), np.sin(x.astype(np.float64))).max() <= 1.7
    assert ulps(unary(primitives, "cos", x), np.cos(x.astype(np.float64))).max() <= 1.7


def test_order_of_floats(primitives: ctypes.CDLL) -> None:
    values = np.array([0, -0.0, 1, -1, np.inf, -np.inf, np.nan, 2.5], np.float32)
    a, b = (padded(g.ravel().astype(np.float32)) for g in np.meshgrid(values, values))
    assert np.array_equal(binary(primitives, "min", a, b, np.float32), np.minimum(a, b), equal_nan=True)
    assert np.array_equal(binary(primitives, "max", a, b, np.float32), np.maximum(a, b), equal_nan=True)
    for name, function in COMPARISONS.items():
        assert np.array_equal(binary(primitives, name, a, b, np.int32), -function(a, b).astype(np.int32)), name


COMPARISONS = {
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
    "eq": np.equal,
    "ne": np.not_equal,
}


def test_division_of_floats(primitives: ctypes.CDLL) -> None:
    rng = np.random.default_rng(3)
    special = np.array([0, 1, -1, 7, -7, 2, 0.1, np.inf, -np.inf, np.nan, 1e30], np.float32)
    grid = [g.ravel() for g in np.meshgrid(special, special)]
    a = padded(np.concatenate([grid[0], rng.normal(0, 100, 5000).astype(np.float32)]))
    b = padded(np.concatenate([grid[1], rng.normal(0, 3, 5000).astype(np.float32)]))
    with np.errstate(all="ignore"):
        quotient, rest = np.floor_divide(a, b), np.remainder(a, b)
    assert np.array_equal(binary(primitives, "floor_mod", a, b, np.float32), rest, equal_nan=True)
    finite = np.isfinite(a)
    got = binary(primitives, "floor_div", a, b, np.float32)
    assert np.array_equal(got[finite], quotient[finite], equal_nan=True)


def integers() -> tuple[Array, Array]:
    rng = np.random.default_rng(4)
    special = np.array([0, 1, -1, 2, -2, 7, -7, 64, 2**31 - 1, -(2**31), 2**31 - 2, -(2**31) + 1, 31, 32, 33], np.int32)
    grid = [g.ravel() for g in np.meshgrid(special, special)]
    any_a, any_b = rng.integers(-(2**31), 2**31, 4000), rng.integers(-(2**31), 2**31, 4000)
    small_b = rng.integers(-40, 40, 4000)
    a = np.concatenate([grid[0], any_a, any_a]).astype(np.int32)
    b = np.concatenate([grid[1], any_b, small_b]).astype(np.int32)
    return padded(a), padded(b)


def wrap(x: Array) -> Array:
    return x.astype(np.int64).astype(np.uint32).astype(np.int32)


def test_integers(primitives: ctypes.CDLL) -> None:
    a, b = integers()
    wide_a, wide_b = a.astype(np.int64), b.astype(np.int64)
    divisor = np.where(b == 0, 1, wide_b)
    shift = np.clip(wide_b, 0, 31)
    outside = (b < 0) | (b > 31)
    want = {
        "floor_div": np.where(b == 0, 0, wide_a // divisor),
        "floor_mod": np.where(b == 0, 0, wide_a % divisor),
        "ceildiv": np.where(b == 0, 0, -(wrap(-wide_a).astype(np.int64) // divisor)),
        "min": np.minimum(wide_a, wide_b),
        "max": np.maximum(wide_a, wide_b),
        "shift_left": np.where(outside, 0, wide_a << shift),
        "shift_right": np.where(outside, wide_a >> 31, wide_a >> shift),
    }
    for name, values in want.items():
        got = binary(primitives, name, a, b, np.int32)
        wrong = np.flatnonzero(got != wrap(values))
        assert not len(wrong), f"{name}({a[wrong[0]]}, {b[wrong[0]]}) = {got[wrong[0]]}"
    for name, function in COMPARISONS.items():
        assert np.array_equal(binary(primitives, name, a, b, np.int32), -function(a, b).astype(np.int32)), name


def test_integer_division_by_constants(primitives: ctypes.CDLL) -> None:
    a, _ = integers()
    out = np.empty((7, len(a)), np.int32)
    primitives.divide_by_constants(pointer(out), pointer(a), long(len(a)))
    wide = a.astype(np.int64)
    for got, want in zip(
        out, [wide // 64, wide % 64, wide // 7, wide % -7, 0 * wide, -wide, wide // -(2**31)], strict=True
    ):
        assert np.array_equal(got, wrap(want))


def test_ipow(primitives: ctypes.CDLL) -> None:
    pairs = [(x, n) for x in (*range(-9, 10), 2**31 - 1, -(2**31)) for n in (*range(-5, 40), 2**31 - 1, -(2**31))]

    def power(x: int, n: int) -> int:
        if n < 0:
            return x if x in (1, -1) and n % 2 else 1 if x in (1, -1) else 0
        return (pow(x, n, 2**32) + 2**31) % 2**32 - 2**31

    a, b = (padded(np.array(column, np.int32)) for column in zip(*pairs, strict=True))
    want = padded(np.array([power(x, n) for x, n in pairs], np.int32))
    assert np.array_equal(binary(primitives, "ipow", a, b, np.int32), want)


def test_unary_integers(primitives: ctypes.CDLL) -> None:
    a, _ = integers()
    assert np.array_equal(unary(primitives, "abs", a, np.int32), wrap(np.abs(a.astype(np.int64))))
    assert np.array_equal(unary(primitives, "sign", a, np.int32), np.sign(a))
    counts = [bin(int(x) & 0xFFFFFFFF).count("1") for x in a]
    assert unary(primitives, "popcount", a, np.int32).tolist() == counts


def test_conversions_between_kinds(primitives: ctypes.CDLL) -> None:
    a, _ = integers()
    assert np.array_equal(unary(primitives, "to_float", a), a.astype(np.float32))
    assert np.array_equal(unary(primitives, "to_bool", a, np.int32), -(a != 0).astype(np.int32))
    assert np.array_equal(unary(primitives, "to_bool", FLOATS, np.int32), -(FLOATS != 0).astype(np.int32))
    want = np.clip(np.trunc(np.nan_to_num(WIDE, nan=0.0, posinf=1e300, neginf=-1e300)), -(2**31), 2**31 - 1)
    assert np.array_equal(unary(primitives, "to_int", FLOATS, np.int32), want.astype(np.int32))


def python_hash(*arguments: int) -> int:
    h, word = 0x9E3779B9, 0xFFFFFFFF
    for x in arguments:
        h ^= x & word
        h = h * 0x85EBCA6B & word
        h ^= h >> 13
        h = h * 0xC2B2AE35 & word
        h ^= h >> 16
    return h & 0x7FFFFFFF


def test_hash(primitives: ctypes.CDLL) -> None:
    a, b = integers()
    got = binary(primitives, "hash", a, b, np.int32)
    assert got.tolist() == [python_hash(int(x), int(y)) for x, y in zip(a, b, strict=True)]
    out = np.empty_like(b)
    assert primitives.hash_three(pointer(out), -5, pointer(b), 77, long(len(b))) == 0
    assert out.tolist() == [python_hash(-5, int(y), 77) for y in b]
