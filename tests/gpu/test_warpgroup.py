"""Products of warpgroups on a GPU: the kernels of the emulator's tests, so that both read shared memory alike."""

from __future__ import annotations

import ctypes
import struct

import pytest
import torch

from flashgen.hosts.cuda import CupyDriver, current_device, describe_device
from flashgen.store.headers import Text, headers_of
from flashgen.toolchains.nvrtc import compile_cuda
from tests.emulator.test_warpgroup import PRODUCTS, SHARED_BYTES, SOURCES, Product


@pytest.mark.parametrize("product", PRODUCTS, ids=[product.name for product in PRODUCTS])
def test_products(product: Product) -> None:
    name, capability, _ = describe_device(current_device())
    if capability != 90:
        pytest.skip(f"{name} has no products of warpgroups")
    a, b, c = product.operands()
    d = torch.zeros(64, product.n)
    on_gpu = [each.cuda() for each in (a, b, c, d)]
    driver = CupyDriver(current_device())
    text = SOURCES[product.dtype]
    binary = compile_cuda(Text("warpgroup", text, headers_of(text)), "sm_90a")
    function = driver.function(binary.path, product.name, SHARED_BYTES)
    packed = ctypes.c_char_p(struct.pack("4Q", *(each.data_ptr() for each in on_gpu)))
    driver.launch(function, 1, 128, SHARED_BYTES, driver.stream(), ctypes.addressof(packed))
    product.check(on_gpu[3].cpu(), a, b, c)
