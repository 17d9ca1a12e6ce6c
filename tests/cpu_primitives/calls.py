"""Calling the compiled primitives with NumPy arrays, and measuring errors in units in the last place."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]


class Pointer(ctypes.c_void_p):
    """Where an array lies, and the array: a library of another process needs its numbers."""

    array: Array


def pointer(x: Array) -> Pointer:
    assert x.flags.c_contiguous
    found = Pointer(x.ctypes.data)
    found.array = x
    return found


def long(x: int) -> ctypes.c_int64:
    return ctypes.c_int64(x)


def padded(x: Array) -> Array:
    """x, repeated to a length that every width divides."""
    return np.resize(x, -(-len(x) // 16) * 16)


def unary(library: ctypes.CDLL, name: str, x: Array, out: type = np.float32) -> Array:
    kind = {"float32": "float", "int32": "int32"}[x.dtype.name]
    y: Array = np.empty(len(x), out)
    different = getattr(library, f"unary_{name}_{kind}")(pointer(y), pointer(x), long(len(x)))
    assert different == 0, f"the scalar '{name}' differs from the vector one"
    return y


def binary(library: ctypes.CDLL, name: str, a: Array, b: Array, out: type) -> Array:
    kind = {"float32": "float", "int32": "int32"}[a.dtype.name]
    y: Array = np.empty(len(a), out)
    different = getattr(library, f"binary_{name}_{kind}")(pointer(y), pointer(a), pointer(b), long(len(a)))
    assert different == 0, f"scalar or mixed forms of '{name}' differ from the vector one"
    return y


def all_floats(step: int) -> Array:
    """Every step-th float32 by its bits, with subnormals, infinities and NaNs of all payloads."""
    bits = np.arange(step // 2, 2**32, step, dtype=np.uint64).astype(np.uint32)
    x = np.where((bits & 0x7FFFFFFF) > 0x7F800000, bits | 0x400000, bits).view(np.float32)  # quiet NaNs only
    special = [0.0, -0.0, 1, -1, 0.5, -0.5, 2, np.inf, -np.inf, np.nan, -np.nan, 2.0**-126, -(2.0**-126), 2.0**-149]
    edges = [88.72, 88.73, -87.33, -87.34, -103.9, -104, 127.99999, 128, -126, -149, -150, 2.0**24, 2.0**31, -(2.0**31)]
    dense = np.random.default_rng(1).uniform(-20, 20, 1 << 15)
    return padded(np.concatenate([x, np.array(special + edges + list(dense), np.float32)]))


def ulps(got: Array, want: Array) -> Array:
    """The error of float32 results against float64 ones; what is not finite must agree exactly (0 or infinity)."""
    with np.errstate(all="ignore"):
        rounded = want.astype(np.float32)
        unit = np.maximum(np.spacing(np.abs(rounded)), np.float32(2.0**-149)).astype(np.float64)
        error = np.abs(got.astype(np.float64) - want) / unit
        same = (got == rounded) | (np.isnan(got) & np.isnan(rounded))
        # Overflow half a unit early or late is no error of its own.
        near_overflow = (np.abs(want) > 3.4028e38) & (np.abs(got) > 3.4028e38) & (np.sign(want) == np.sign(got))
        special = np.where(same | near_overflow, 0.0, np.inf)
        return np.where(np.isfinite(rounded) & np.isfinite(got), error, special)
