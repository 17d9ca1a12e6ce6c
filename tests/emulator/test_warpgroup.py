"""Products of warpgroups under the emulator: matrices in shared memory lie as a SharedTile lays them, in every way."""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np
import pytest
import torch

from flashgen.ir.types import ElementType
from flashgen.targets.gpu.primitives import WarpgroupProducts, primitives
from tests.emulator.helpers import Outcome, kernel, launch

WIDTHS = (16, 64, 80, 128, 256)  # n


@dataclass(frozen=True)
class Product:
    """One instance of a template of kernels/warpgroup.cu. Widths are those of the panels, in elements."""

    dtype: torch.dtype
    a_width: int  # 0: A is in registers
    b_width: int
    a_across: bool
    b_across: bool
    n: int
    k: int
    add: bool

    @property
    def name(self) -> str:
        a = f"a{2 * self.a_width}{'across' if self.a_across else ''}" if self.a_width else "registers"
        b = f"b{2 * self.b_width}{'across' if self.b_across else ''}"
        return f"{a}_{b}_{self.n}_{self.k}_{str(self.dtype).removeprefix('torch.')}{'_add' if self.add else ''}"

    @property
    def text(self) -> str:
        c_type = "fg::bfloat_t" if self.dtype is torch.bfloat16 else "fg::half_t"
        flags = [str(flag).lower() for flag in (self.a_across, self.b_across, self.add)]
        if self.a_width:
            values = f"{c_type}, {self.a_width}, {self.b_width}, {flags[0]}, {flags[1]}, {self.n}, {self.k}, {flags[2]}"
            body = f"multiply<{values}>(p);"
        else:
            body = f"multiply_registers<{c_type}, {self.b_width}, {flags[1]}, {self.n}, {self.k}>(p);"
        return f'extern "C" __global__ void __launch_bounds__(128) {self.name}(const Arguments p) {{ {body} }}\n'

    def operands(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Random A, B, C."""
        a, b = torch.randn(64, self.k).to(self.dtype), torch.randn(self.k, self.n).to(self.dtype)
        return a, b, torch.randn(64, self.n)

    def check(self, d: torch.Tensor, a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> None:
        expected = a.double() @ b.double() + (c.double() if self.add else 0)
        assert torch.allclose(d.double(), expected, rtol=1e-5, atol=2e-5)


def _products() -> tuple[Product, ...]:
    """Every panel width with every direction of either operand, and every n; types and depths take turns."""
    found = []
    panels = (16, 32, 64)
    for turn, n in enumerate(WIDTHS):
        for direction in range(4):
            a_across, b_across = bool(direction & 1), bool(direction & 2)
            a_width, b_width = panels[(turn + direction) % 3], panels[(2 * turn + direction // 2) % 3]
            dtype = (torch.float16, torch.bfloat16)[(turn + direction) % 2]
            k = (16, 64, 144, 192)[(turn + 2 * direction) % 4]
            found.append(Product(dtype, a_width, b_width, a_across, b_across, n, k, add=direction % 3 == 0))
        found.append(Product(dtype, 0, panels[turn % 3], False, turn % 2 == 0, n, 16 + 48 * (-turn % 5), add=True))
    return tuple(found)


PRODUCTS = _products()
SHARED_BYTES = 192 * 1024


def source_of(dtype: torch.dtype) -> str:
    """The products of one type, as sources have them."""
    element = ElementType.BF16 if dtype is torch.bfloat16 else ElementType.F16
    products = WarpgroupProducts(tuple(n // 8 for n in WIDTHS), element)
    own = (product.text for product in PRODUCTS if product.dtype is dtype)
    return primitives(warpgroups=products) + kernel("warpgroup") + "".join(own)


SOURCES = {dtype: source_of(dtype) for dtype in (torch.float16, torch.bfloat16)}


@pytest.mark.parametrize("product", PRODUCTS, ids=[product.name for product in PRODUCTS])
def test_products(product: Product) -> None:
    a, b, c = product.operands()
    outcome = launch(
        SOURCES[product.dtype],
        {
            "a": a.view(torch.uint16).numpy(),
            "b": b.view(torch.uint16).numpy(),
            "c": c.numpy(),
            "d": np.zeros((64, product.n), np.float32),
        },
        name=product.name,
        threads=128,
        shared_bytes=SHARED_BYTES,
    )
    product.check(torch.from_numpy(outcome.arrays["d"].copy()), a, b, c)


@pytest.mark.parametrize(("bits", "left"), [(25, 16), (26, 0)])
def test_sums_are_cut_off(bits: int, left: int) -> None:
    """Two bits below float32's last place are kept of what is added to 1, for all sixteen terms at once."""
    product = next(each for each in PRODUCTS if each.add and each.dtype is torch.float16 and each.k == 16)
    a, b = torch.full((64, 16), 2.0 ** (12 - bits)).half(), torch.full((16, product.n), 2.0**-12).half()
    outcome = launch(
        SOURCES[product.dtype],
        {
            "a": a.view(torch.uint16).numpy(),
            "b": b.view(torch.uint16).numpy(),
            "c": np.ones((64, product.n), np.float32),
            "d": np.zeros((64, product.n), np.float32),
        },
        name=product.name,
        threads=128,
        shared_bytes=SHARED_BYTES,
    )
    assert np.all(outcome.arrays["d"] == np.float32(1 + left * 2.0**-bits))


def test_every_width_of_a_panel_is_read_in_both_directions() -> None:
    every = {(width, across) for width in (16, 32, 64) for across in (False, True)}
    assert {(product.a_width, product.a_across) for product in PRODUCTS if product.a_width} == every
    assert {(product.b_width, product.b_across) for product in PRODUCTS} == every
    assert {product.n for product in PRODUCTS} == set(WIDTHS)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_pipelined_product(dtype: torch.dtype) -> None:
    a, b = torch.randn(256, 320).to(dtype), torch.randn(320, 128).to(dtype)
    for seed in range(3):
        c = matmul(a, b, seed=seed).arrays["c"]
        assert torch.allclose(torch.from_numpy(c.copy()).double(), a.double() @ b.double(), rtol=1e-5, atol=1e-4)


def test_fast_enough_for_attention() -> None:
    # 256 products of 64 x 64 x 64: the matrix work of 1 x 2 x 512 x 64 forward.
    a, b = torch.zeros(512, 256, dtype=torch.float16), torch.zeros(256, 512, dtype=torch.float16)
    matmul(a, b)
    start = time.process_time()
    matmul(a, b)
    assert time.process_time() - start < 2.0


def matmul(a: torch.Tensor, b: torch.Tensor, *, seed: int = 0) -> Outcome:
    (M, K), N = a.shape, b.shape[1]
    return launch(
        kernel("warpgroup_matmul"),
        {
            "a": a.view(torch.uint16).numpy(),
            "b": b.view(torch.uint16).numpy(),
            "c": np.zeros((M, N), np.float32),
            "M": M,
            "N": N,
            "K": K,
        },
        name="matmul_f16" if a.dtype is torch.float16 else "matmul_bf16",
        grid=(N // 64, M // 128, 1),
        threads=256,
        shared_bytes=3 * 24576,
        seed=seed,
    )
