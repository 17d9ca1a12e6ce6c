"""Storage types: every 16-bit float both ways, 8-bit ones, and all ways of reading elements of a captured tensor."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest
import torch

from tests.cpu_primitives.calls import Array, all_floats, long, pointer

EVERY_HALF = np.arange(2**16, dtype=np.uint16)


def torch_bits(x: Array, kind: torch.dtype) -> Array:
    return torch.from_numpy(x).to(kind).view(torch.int16).numpy().view(np.uint16)


def torch_floats(x: Array, kind: torch.dtype) -> Array:
    return torch.from_numpy(x.view(np.int16)).view(kind).float().numpy()


@pytest.mark.parametrize(("name", "kind"), [("f16", torch.float16), ("bf16", torch.bfloat16)])
@pytest.mark.parametrize("length", [2**16, 37, 3])
def test_to_float(primitives: ctypes.CDLL, name: str, kind: torch.dtype, length: int) -> None:
    source = EVERY_HALF[-length:].copy()
    out = np.full(length + 1, -77, np.float32)
    getattr(primitives, f"{name}_to_float")(pointer(out), pointer(source), long(length))
    want = torch_floats(source, kind)
    assert np.array_equal(out[:-1], want, equal_nan=True)
    assert out[-1] == -77
    number = ~np.isnan(want)
    assert np.array_equal(np.signbit(out[:-1][number]), np.signbit(want[number]))


@pytest.mark.parametrize("length", [256, 37, 3])
def test_8_bits_times_a_factor(primitives: ctypes.CDLL, length: int) -> None:
    source = np.arange(256, dtype=np.uint8)[-length:].copy()
    out = np.full(length + 1, -77, np.float32)
    primitives.f8e4m3_to_float_times(pointer(out), pointer(source), long(length), ctypes.c_float(0.3))
    want = torch.from_numpy(source).view(torch.float8_e4m3fn).float() * 0.3
    assert np.array_equal(out[:-1], want.numpy(), equal_nan=True)
    assert out[-1] == -77


@pytest.mark.parametrize(("name", "kind"), [("f16", torch.float16), ("bf16", torch.bfloat16)])
def test_from_float(primitives: ctypes.CDLL, name: str, kind: torch.dtype) -> None:
    halves = torch_floats(EVERY_HALF, kind)
    finite = halves[np.isfinite(halves)]
    between = np.concatenate([np.nextafter(finite, np.float32(s)) for s in (-np.inf, np.inf)])
    next_half = np.sort(finite)
    ties = ((next_half[1:].astype(np.float64) + next_half[:-1]) / 2).astype(np.float32)
    edges = np.array([65504, 65519.996, 65520, 65536, 1e38, 2.0**-25, 2.0**-24 * 1.5, 2.0**-14], np.float32)
    x = np.concatenate([halves, between, ties, edges, -edges, all_floats(10007)]).astype(np.float32)
    out = np.full(len(x) + 1, 7, np.uint16)
    getattr(primitives, f"{name}_from_float")(pointer(out), pointer(x), long(len(x)))
    assert out[-1] == 7
    nan = np.isnan(x)
    assert np.array_equal(out[:-1][~nan], torch_bits(x[~nan], kind))
    assert np.isnan(torch_floats(out[:-1][nan], kind)).all()


def test_elements(primitives: ctypes.CDLL) -> None:
    rng = np.random.default_rng(6)
    n = 512
    index = rng.integers(0, n, n).astype(np.int32)
    floats = rng.normal(size=n).astype(np.float32)
    wide = rng.integers(-(2**62), 2**62, n)
    tensors = {
        "float": (floats, floats),
        "f16": (torch_bits(floats, torch.float16), torch_floats(torch_bits(floats, torch.float16), torch.float16)),
        "bf16": (torch_bits(floats, torch.bfloat16), torch_floats(torch_bits(floats, torch.bfloat16), torch.bfloat16)),
        "int32": (index, index),
        "int64_t": (wide, wide.astype(np.uint32).view(np.int32)),
        "bool": (wide % 2 == 0, -(wide % 2 == 0).astype(np.int32)),
    }
    for name, (tensor, want) in tensors.items():
        out = np.empty(n, want.dtype)
        padded = np.concatenate([tensor, tensor[:16]])
        different = getattr(primitives, f"read_{name}")(pointer(out), pointer(padded), pointer(index), long(n))
        assert different == 0, name
        assert np.array_equal(out, want), name
