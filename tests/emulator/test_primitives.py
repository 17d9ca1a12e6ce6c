"""Each primitive under the emulator does what its instruction does: by NumPy, PyTorch and the PTX ISA's layouts."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.emulator.helpers import Array, kernel, launch

SOURCE = kernel("primitives")


@pytest.fixture
def random() -> np.random.Generator:
    return np.random.default_rng(7)


@pytest.mark.parametrize("size", [2, 4, 8, 16])
def test_copies_of_every_size(size: int, random: np.random.Generator) -> None:
    x = random.integers(0, 256, (1000, size), dtype=np.uint8)
    y = call(f"copy_{size}", x, np.zeros_like(x), 1000, blocks=3, threads=96, shared_bytes=96 * size)
    assert np.array_equal(x, y)


def test_copies_of_bytes() -> None:
    x = np.arange(77, dtype=np.uint8)
    assert np.array_equal(call("copy_1", x, np.zeros(77, np.float32), 77, blocks=3), x)


def test_asynchronous_copies_and_zeros_where_nothing_is_valid(random: np.random.Generator) -> None:
    x = random.standard_normal((100, 4)).astype(np.float32)
    y = call("copy_async", x, np.ones((128, 4), np.float32), 100, blocks=2, threads=64, shared_bytes=1024)
    padded = np.concatenate([x, np.zeros((28, 4), np.float32)])
    assert np.array_equal(y, padded.reshape(2, 64, 4)[:, ::-1].reshape(128, 4))


def test_atomic_additions(random: np.random.Generator) -> None:
    x = random.integers(0, 8, 300, dtype=np.int32)
    y = call("histogram", x, np.full(8, 2, np.float32), 300, blocks=3, threads=128, shared_bytes=32)
    assert np.array_equal(y, 2 + np.bincount(x, minlength=8))


def test_asynchronous_additions(random: np.random.Generator) -> None:
    x = random.integers(-8, 8, (6 * 3, 128)).astype(np.float32)
    y = call("bulk_add", x, np.full((3, 128), 2, np.float32), 3, threads=128, shared_bytes=4 * 512)
    assert np.array_equal(y, 2 + x.reshape(6, 3, 128).sum(0))


def test_every_thread_knows_its_place() -> None:
    threads, grid = (4, 8, 2), (3, 2, 2)
    shape = (*grid[::-1], *threads[::-1], 6)
    outcome = launch(
        SOURCE, {"x": np.zeros(1), "y": np.zeros(shape, np.int32), "n": 0}, name="indices", grid=grid, block=threads
    )
    places = np.stack(np.meshgrid(*(np.arange(n) for n in shape[:-1]), indexing="ij"), -1)
    assert np.array_equal(outcome.arrays["y"], places[..., [2, 1, 0, 5, 4, 3]])


def test_sums_over_a_block() -> None:
    x = np.arange(512, dtype=np.float32)
    y = call("block_sum", x, np.zeros(2, np.float32), 0, blocks=2, threads=256, shared_bytes=32)
    assert np.array_equal(y, x.reshape(2, 256).sum(1))


def test_shuffles_and_votes(random: np.random.Generator) -> None:
    x = random.integers(0, 2**32, 32, dtype=np.uint32)
    y = call("shuffles", x, np.zeros((32, 8), np.uint32), 0)
    lane = np.arange(32)
    votes = sum(int(bit) << int(at) for at, bit in zip(lane, x % 3 == 0, strict=True))
    expected = [x, x[lane ^ 5], x[[3] * 32], x[(lane + 1) % 32], x[lane - 1], lane[lane - 1], [votes] * 32, lane]
    assert np.array_equal(y, np.stack([np.asarray(each, np.uint32) for each in expected], 1))


def test_the_fragments_of_ldmatrix() -> None:
    x = np.arange(256, dtype=np.uint16).reshape(4, 8, 8)
    y = call("load_matrices", x, np.zeros((32, 8, 2), np.uint16), 0, shared_bytes=512)
    for lane in range(32):
        group, pair = lane // 4, 2 * (lane % 4)
        assert np.array_equal(y[lane, :4], x[:, group, pair : pair + 2])
        assert np.array_equal(y[lane, 4:], x[:, pair : pair + 2, group])


def test_the_fragments_of_stmatrix() -> None:
    x = np.arange(256, dtype=np.uint16).reshape(4, 32, 2)
    y = call("store_matrices", x, np.zeros((4, 8, 8), np.uint16), 0, shared_bytes=512)
    assert np.array_equal(y, x.reshape(4, 8, 8))  # lane 4 g + t has columns 2 t and 2 t + 1 of row g


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_pipelined_product_of_16_bit_matrices(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(3)
    a = torch.randn(128, 96, generator=generator).to(dtype)
    b = torch.randn(96, 64, generator=generator).to(dtype)
    outcome = launch(
        kernel("matmul"),
        {
            "a": a.view(torch.uint16).numpy(),
            "b": b.view(torch.uint16).numpy(),
            "c": np.zeros((128, 64), np.float32),
            "M": 128,
            "N": 64,
            "K": 96,
        },
        name="matmul_f16" if dtype is torch.float16 else "matmul_bf16",
        grid=(1, 2, 1),
        threads=128,
        shared_bytes=16384,
    )
    expected = a.double() @ b.double()
    assert torch.allclose(torch.from_numpy(outcome.arrays["c"].copy()).double(), expected, rtol=1e-5, atol=1e-5)


def test_a_product_of_tf32_matrices_ignores_the_low_bits(random: np.random.Generator) -> None:
    a, b, d = (random.standard_normal((n, 8)).astype(np.float32) for n in (16, 8, 16))
    y = call("mma_tf32", np.concatenate([a, b, d]), np.zeros((16, 8), np.float32), 0)
    exact = d + cut(a).astype(np.float64) @ cut(b).astype(np.float64)
    assert np.allclose(y, exact, rtol=1e-5, atol=1e-6)
    assert not np.allclose(y, d + a.astype(np.float64) @ b, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("sign", [1, -1])
def test_matrix_units_cut_sums_off(sign: int) -> None:
    """Of what is added to 1, one bit below float32's last place is kept; of each sum of four, none."""
    last = 2.0**-23
    for each, terms, left in (
        ([0.75 * last], 1, 0.0),  # to nearest it would be 1 + last
        ([0.5 * last], 4, 2 * last),
        ([0.25 * last], 4, 0.0),  # exactly it would be 1 + last
        ([0.5 * last], 8, 4 * last),
        ([0.5 * last, 0.0, 0.0, 0.0], 8, 0.0),  # two sums, each of which is cut off
    ):
        a, b = np.zeros((16, 8), np.float32), np.zeros((8, 8), np.float32)
        a[:, :terms], b[:terms] = sign, np.resize(np.array(each, np.float32), terms)[:, None]
        d = np.full((16, 8), sign, np.float32)
        y = call("mma_tf32", np.concatenate([a, b, d]), np.zeros((16, 8), np.float32), 0)
        assert np.all(y == np.float32(sign * (1 + left))), (each, terms)


def test_matrix_units_pass_on_infinities_and_nan() -> None:
    a, b, d = (np.ones((n, 8), np.float32) for n in (16, 8, 16))
    a[0, 0], a[1, 3], b[2, 5], d[4, 4] = np.inf, np.nan, -np.inf, np.inf
    y = call("mma_tf32", np.concatenate([a, b, d]), np.zeros((16, 8), np.float32), 0)
    with np.errstate(invalid="ignore"):
        assert np.array_equal(y, d + a @ b, equal_nan=True)


def test_conversions_round_to_nearest_even(random: np.random.Generator) -> None:
    edges = [0.0, -0.0, 1.0, 65504.0, 65519.9, 65520.0, 1e30, np.inf, -np.inf, 5.96e-8, 2.98e-8, 2.99e-8, 6.1e-5, 1e-45]
    ties = np.array([0x3F801000, 0x3F803000, 0x3F808000, 0x3F818000, 0x3F801001], np.uint32).view(np.float32)
    bits = random.integers(0, 2**32, 4000, dtype=np.uint32).view(np.float32)
    scaled = (random.standard_normal(2000) * np.exp2(random.integers(-26, 18, 2000))).astype(np.float32)
    x = np.concatenate([np.array(edges, np.float32), ties, bits[~np.isnan(bits)], scaled])
    y = call("conversions", x, np.zeros((x.size, 3), np.uint32), x.size, blocks=x.size // 256 + 1, threads=256)
    value = torch.from_numpy(x)
    half, bfloat = value.half(), value.bfloat16()
    for column, rounded in ((0, half), (1, bfloat)):
        assert np.array_equal(y[:, column] & 0xFFFF, rounded.view(torch.int16).numpy().view(np.uint16))
        assert np.array_equal(y[:, column] >> 16, (-rounded).view(torch.int16).numpy().view(np.uint16))
    assert np.array_equal(y[:, 2], half.float().numpy().view(np.uint32))


def test_conversions_of_nan() -> None:
    y = call("conversions", np.array([np.nan], np.float32), np.zeros((1, 3), np.uint32), 1)
    assert y[0, 0] == y[0, 1] == 0x7FFF7FFF
    assert np.isnan(y[0, 2:].copy().view(np.float32)).all()


def test_special_functions_flush_subnormal_numbers() -> None:
    x = np.array([0.5, -3.25, -126, -127, -150, 128, 1e-40, 3e38, -np.inf, np.inf], np.float32)
    y = call("special_functions", x, np.zeros((x.size, 2), np.float32), x.size)
    with np.errstate(over="ignore", divide="ignore"):
        power, inverse = np.exp2(x), 1 / np.where(np.abs(x) < 2.0**-126, 0, x)
    for got, exact in ((y[:, 0], power), (y[:, 1], inverse)):
        flushed = np.where(np.abs(exact) < 2.0**-126, 0, exact)
        assert np.allclose(got, flushed, rtol=3e-7, atol=0)


def cut(x: Array) -> Array:
    return (x.view(np.uint32) & np.uint32(0xFFFFE000)).view(np.float32)


def call(name: str, x: Array, y: Array, n: int, *, blocks: int = 1, threads: int = 32, shared_bytes: int = 0) -> Array:
    """``y`` after the kernel."""
    arguments: dict[str, Array | int] = {"x": x, "y": y, "n": n}
    outcome = launch(SOURCE, arguments, name=name, grid=(blocks, 1, 1), threads=threads, shared_bytes=shared_bytes)
    return outcome.arrays["y"]
