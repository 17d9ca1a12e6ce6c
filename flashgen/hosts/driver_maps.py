"""Tensor maps as the driver of a GPU encodes them: ``cuTensorMapEncodeTiled``, which neither CuPy nor torch binds.

In: a ``TensorMap`` and an address in the memory of a GPU. Out: 128 bytes; no device is asked for anything.
Source: CUDA driver API, "Tensor Map Object Management".
"""

from __future__ import annotations

import ctypes
import functools
from typing import Any

from flashgen.hosts.tensor_maps import PARAMETER_ALIGNMENT, WORD_BYTES, TensorMap

_LIBRARY = "libcuda.so.1"
_INTERLEAVE_NONE, _PROMOTE_L2_128B, _FILL_ZEROS = 0, 2, 0


class TensorMapRefused(RuntimeError):  # noqa: N818 - reads as what happened
    """The driver describes no tensors to tensor copies, or not this one; the message says what to do about it."""


def encode(tensor: TensorMap, address: int, library: str = _LIBRARY) -> bytes:
    """The driver's description of a tensor at this address. Raises ``TensorMapRefused``."""
    memory = ctypes.create_string_buffer(WORD_BYTES + PARAMETER_ALIGNMENT)
    shift = -ctypes.addressof(memory) % PARAMETER_ALIGNMENT
    count = len(tensor.extents)
    sizes, boxes = ctypes.c_uint64 * count, ctypes.c_uint32 * count
    error = _function(library)(
        ctypes.addressof(memory) + shift,
        tensor.element_code,
        count,
        address,
        sizes(*tensor.extents),
        (ctypes.c_uint64 * (count - 1))(*tensor.strides),
        boxes(*tensor.box, *(1,) * (count - 2)),
        boxes(*(1,) * count),
        _INTERLEAVE_NONE,
        tensor.swizzle_code,
        _PROMOTE_L2_128B,
        _FILL_ZEROS,
    )
    if error:
        width, length, slabs = tensor.extents[:3]
        raise TensorMapRefused(
            f"the driver cannot describe '{tensor.tensor}' to tensor copies (CUDA error {error}): {slabs} x {length} "
            f"rows of {width} elements at address {address:#x}, {tensor.strides[1]} and {tensor.strides[0]} bytes "
            "apart; make the tensor contiguous"
        )
    return memory.raw[shift : shift + WORD_BYTES]


@functools.cache
def entry_points() -> tuple[int, int, int, int] | None:
    """The addresses of the driver's functions that launch a kernel, clear memory and encode maps, and of torch's
    function that tells the current stream of a device; None where one is missing.
    """
    try:
        driver, own = ctypes.CDLL(_LIBRARY), ctypes.CDLL("libtorch_cuda.so")
        found = (
            driver.cuLaunchKernel,
            driver.cuMemsetD8Async,
            driver.cuTensorMapEncodeTiled,
            own.aoti_torch_get_current_cuda_stream,
        )
    except (OSError, AttributeError):
        return None
    launch, clear, encode, stream = (ctypes.cast(each, ctypes.c_void_p).value or 0 for each in found)
    return launch, clear, encode, stream


@functools.cache
def _function(library: str) -> Any:
    try:
        found = ctypes.CDLL(library).cuTensorMapEncodeTiled
    except (OSError, AttributeError) as error:
        raise TensorMapRefused(
            f"kernels for sm_90a need cuTensorMapEncodeTiled of the driver, which cannot be used ({error}); "
            "install a driver for CUDA 12 or later"
        ) from None
    found.argtypes = [
        ctypes.c_void_p, ctypes.c_int, ctypes.c_uint32, ctypes.c_void_p, ctypes.POINTER(ctypes.c_uint64),
        ctypes.POINTER(ctypes.c_uint64), ctypes.POINTER(ctypes.c_uint32), ctypes.POINTER(ctypes.c_uint32),
        ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_int,
    ]  # fmt: skip
    found.restype = ctypes.c_int
    return found
