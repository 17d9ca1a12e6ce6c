"""Operands of 8 bits under the emulator: how numbers are rounded, V turned, and sums cut off."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from flashgen.ir.types import ElementType
from flashgen.targets.gpu.primitives import WarpgroupProducts, primitives
from tests.emulator.helpers import Array, kernel, launch

PRODUCTS = WarpgroupProducts((8,), ElementType.F8E4M3)
SOURCE = primitives(warpgroups=PRODUCTS) + kernel("eight_bits")
F8 = torch.float8_e4m3fn
# Where O's columns lie among those of the accumulators: of 16 the even ones come first.
PLACES = [16 * (n // 16) + n % 16 // 2 + n % 2 * 8 for n in range(64)]


def weigh(p: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """O in bfloat16, and the sums that it is made of."""
    arrays: dict[str, Array | int] = {
        "p": p.numpy(),
        "v": v.to(F8).view(torch.uint32).numpy(),
        "o": np.zeros((64, 64), np.uint16),
        "sums": np.zeros((64, 64), np.float32),
    }
    found = launch(SOURCE, arrays, name="weigh", threads=128, shared_bytes=4096).arrays
    o = torch.from_numpy(found["o"].copy()).view(torch.bfloat16)
    return o, torch.from_numpy(found["sums"].copy())[:, PLACES]


def test_keys_and_columns_find_each_other() -> None:
    generator = torch.Generator().manual_seed(1)
    p, v = (torch.randint(-2, 3, (64, 64), generator=generator).float() for _ in range(2))
    o, sums = weigh(p, v)
    assert torch.equal(sums, p @ v)
    assert torch.equal(o.float(), p @ v)


@pytest.mark.parametrize(("bits", "left"), [(13, 31), (14, 0)])
def test_sums_are_cut_off(bits: int, left: int) -> None:
    """Of what is added to 1 in one product of 32 terms 13 bits behind the point are kept."""
    p, v = torch.full((64, 64), 2.0 ** (6 - bits)), torch.full((64, 64), 2.0**-6)
    p[:, 32:], p[:, 0], v[0] = 0.0, 1.0, 1.0
    _, sums = weigh(p, v)
    assert torch.equal(sums, torch.full((64, 64), 1 + left * 2.0**-bits))


def test_numbers_are_rounded_as_pytorch_rounds_them() -> None:
    exact = torch.arange(256, dtype=torch.uint8).view(F8).float()
    exact = exact[exact.isfinite()]
    between = (exact.sort().values[1:] + exact.sort().values[:-1]) / 2  # ties go to even
    near = torch.cat([exact, between, between * (1 + 2**-20), between * (1 - 2**-20), torch.tensor([1e-20, -1e-3])])
    x = torch.cat([near, torch.tensor([448.0, 463.0, -463.0])])
    x = torch.cat([x, x.new_zeros(-len(x) % 512)])
    arrays: dict[str, Array | int] = {
        "p": x.numpy(),
        "v": np.zeros(1, np.uint32),
        "o": np.zeros(1, np.uint16),
        "sums": np.zeros(len(x) // 4, np.float32),
    }
    blocks = len(x) // 512
    found = launch(SOURCE, arrays, name="round_all", threads=128, grid=(blocks, 1, 1), shared_bytes=0).arrays["sums"]
    assert torch.equal(torch.from_numpy(found.view(np.uint8).copy()), x.to(F8).view(torch.uint8))


def test_what_is_beyond_the_largest_becomes_it() -> None:
    x = torch.tensor([449.0, 1e30, -torch.inf, torch.nan]).repeat(128)
    arrays: dict[str, Array | int] = {
        "p": x.numpy(),
        "v": np.zeros(1, np.uint32),
        "o": np.zeros(1, np.uint16),
        "sums": np.zeros(128, np.float32),
    }
    found = launch(SOURCE, arrays, name="round_all", threads=128, shared_bytes=0).arrays["sums"]
    assert found.view(np.uint8)[:4].tolist() == [0x7E, 0x7E, 0xFE, 0x7F]
