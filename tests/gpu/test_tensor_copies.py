"""Tensor copies on a GPU: the kernels of the emulator's tests, with maps as the driver encodes them."""

from __future__ import annotations

import ctypes
import struct

import numpy as np
import pytest
import torch

from flashgen.hosts.cuda import CupyDriver, current_device, describe_device
from flashgen.hosts.tensor_maps import map_bytes
from flashgen.store.headers import Text, headers_of
from flashgen.toolchains.nvrtc import compile_cuda
from tests.emulator.test_tensor_copies import COPIES, SHARED_BYTES, SOURCE, Copy


@pytest.mark.parametrize("copy", COPIES, ids=lambda copy: f"{copy.name}_of_{copy.length}_{copy.width}")
def test_boxes(copy: Copy) -> None:
    name, capability, _ = describe_device(current_device())
    if capability != 90:
        pytest.skip(f"{name} runs no kernels for sm_90a")
    x = copy.tensor()
    on_gpu = torch.from_numpy(x.view(np.int16)).cuda()
    y = torch.zeros(copy.rows, copy.columns, dtype=torch.int16, device="cuda")
    driver = CupyDriver(current_device())
    function = driver.function(
        compile_cuda(Text("tensor_copies", SOURCE, headers_of(SOURCE)), "sm_90a").path, copy.name, SHARED_BYTES
    )
    arguments = struct.pack("Qiii4x", y.data_ptr(), copy.column, copy.row, copy.slab)
    parameters = (ctypes.c_char_p * 2)(arguments, map_bytes(copy.tensor_map, on_gpu.data_ptr(), driver.encode))
    driver.launch(function, 1, 64, SHARED_BYTES, driver.stream(), ctypes.addressof(parameters))
    assert np.array_equal(y.cpu().numpy().view(np.uint16), copy.expected(x))
