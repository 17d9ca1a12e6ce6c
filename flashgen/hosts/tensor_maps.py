"""Tensor maps: how tensor copies (TMA, cp.async.bulk.tensor) find boxes of q, k, v and d_o in global memory.

In: a ``Box`` of a launch (``plan/launches.py``) and the values of ``struct Arguments``. Out: a ``TensorMap``, and its
bytes for a kernel: ``struct TensorMap`` of ``templates/include/flashgen/tensor_copies.cuh``, of which the first 128 are
the driver's or the emulator's. The driver encodes by ``cuTensorMapEncodeTiled``, which neither CuPy nor torch binds;
source: CUDA driver API, "Tensor Map Object Management". Nothing here imports torch.

A tensor [B, H, N, D] of any strides becomes one of three dimensions: elements of a row, rows, and slabs. Slabs are as
far apart as the greatest common divisor of the strides of B and H says, so that a head is found at
``b * batch_slabs + h * head_slabs``, whatever the order of the axes, and where a stride is 0.

Rows [T, H, D] of a ragged batch have two dimensions more, by which a copy sees one sequence as if it were all there is:
rows behind its last become zero, whatever lies there. Rows are counted such that every sequence ends at ``END``, where
the dimension does. The fourth dimension, as far apart as rows, says where the sequence ends among all; the fifth, of
which a copy always takes number ``END``, brings that back: ``END`` of its strides and ``END`` rows are together 2^64,
and addresses are numbers modulo that.
"""

from __future__ import annotations

import ctypes
import functools
import itertools
import math
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Any

from flashgen.hosts.kernel import Values
from flashgen.ir.spec import HeadDim
from flashgen.kinds.dense import OPERANDS
from flashgen.kinds.operand import Operand
from flashgen.plan.launches import TURNED_KEYS, Box

SWIZZLES = (128, 64, 32)  # bytes of a row of a box whose chunks of 16 bytes can be permuted
_SWIZZLE_CODES = dict(zip(SWIZZLES, (3, 2, 1), strict=True))
_TYPES = {1: 0, 2: 1}
BYTES, WORD_BYTES = 192, 128  # of a map as a kernel takes it, and of what is the driver's
PARAMETER_ALIGNMENT = 64  # of maps among the parameters of a kernel
MOST_REMEMBERED = 64  # parameters of one launch
END = 1 << 30  # templates/include/flashgen/sequence_copies.cuh says the same
_END_STRIDE = (1 << 64) // END
_MANY = (1 << 31) - (1 << 16)  # more than END, and than all rows
_DIMENSIONS = 5
_BESIDE = struct.Struct(f"<ii{BYTES - WORD_BYTES - 8}x")
_EMULATED = struct.Struct(f"<Q5Q4Q3I{WORD_BYTES - 92}x")  # MappedTensor of templates/emulator/interface.h


@dataclass(frozen=True)
class TensorMap:
    """A tensor but for its address, and the box of it that one copy brings; elements are of 2 bytes or of 1.

    ``extents`` are the elements of a row, the rows and the slabs, and of a ragged batch what places a sequence;
    ``strides`` the bytes from one to the next, but of elements. ``box`` has columns and rows.
    """

    tensor: str
    extents: tuple[int, ...]
    strides: tuple[int, ...]
    box: tuple[int, int]
    batch_slabs: int
    head_slabs: int
    element_bytes: int = 2

    @property
    def row_bytes(self) -> int:
        """Of a box: 128, 64 or 32, by which its chunks are permuted."""
        return self.box[0] * self.element_bytes

    @property
    def element_code(self) -> int:
        """The driver's number for unsigned integers of as many bytes."""
        return _TYPES[self.element_bytes]

    @property
    def swizzle_code(self) -> int:
        """The driver's number for how chunks are permuted."""
        return _SWIZZLE_CODES[self.row_bytes]

    @property
    def words(self) -> tuple[int, ...]:
        """``struct Map`` of templates/host/node.cpp, without its slot."""
        box = (*self.box, *(1,) * (len(self.extents) - 2))
        lists = itertools.chain.from_iterable((len(each), *each) for each in (self.extents, self.strides, box))
        return (self.element_code, self.swizzle_code, *lists, self.batch_slabs, self.head_slabs)


# The first 128 bytes of a map, for the address of its tensor.
Encode = Callable[[TensorMap, int], bytes]


class LaunchMaps:
    """The second parameter of one launch: its maps, encoded once for each combination of addresses.

    ``maps`` are the slots of the tensors' addresses among the values of ``struct Arguments``, and what follows from
    shapes.
    """

    def __init__(self, maps: Sequence[tuple[int, TensorMap]], encode: Encode) -> None:
        self._maps = tuple(maps)
        self._addresses = itemgetter(*(slot for slot, _ in maps))
        self._encode = encode
        self._known: dict[object, bytes] = {}

    @property
    def words(self) -> tuple[int, ...]:
        """Of all maps, behind their number: the slot of the address, and ``TensorMap.words``."""
        return (len(self._maps), *(word for slot, tensor in self._maps for word in (slot, *tensor.words)))

    def __call__(self, values: Values) -> bytes:
        addresses = self._addresses(values)
        found = self._known.get(addresses)
        if found is None:
            if len(self._known) >= MOST_REMEMBERED:
                self._known.clear()
            found = b"".join(map_bytes(tensor, int(values[slot]), self._encode) for slot, tensor in self._maps)
            self._known[addresses] = found
        return found


def tensor_map(
    box: Box, head_dim: HeadDim, known: Mapping[str, float], operands: Mapping[str, Operand] = OPERANDS
) -> TensorMap:
    """The map of a box for values of ``struct Arguments`` by name, whose strides are multiples of 16 bytes."""
    operand = operands[box.tensor]
    if box.turned:
        return _turned(box, operand, head_dim, known)
    if operand.rows.is_packed:
        return _of_sequences(box, operand, head_dim, known)
    width = operand.columns(head_dim)
    batch, heads, rows = (int(known[name]) for name in operand.counts)
    # The stride of an axis of one element says nothing.
    by_batch, by_head, by_row = (
        int(known[name]) * box.element_bytes if size > 1 else 0
        for name, size in zip(operand.stride_fields, (batch, heads, rows), strict=True)
    )
    row_bytes = by_row or width * box.element_bytes
    slab_bytes = math.gcd(by_batch, by_head) or row_bytes
    batch_slabs, head_slabs = by_batch // slab_bytes, by_head // slab_bytes
    return TensorMap(
        tensor=box.tensor,
        extents=(width, rows, (batch - 1) * batch_slabs + (heads - 1) * head_slabs + 1),
        strides=(row_bytes, slab_bytes),
        box=(box.columns, box.rows),
        batch_slabs=batch_slabs,
        head_slabs=head_slabs,
        element_bytes=box.element_bytes,
    )


def map_field(box: Box) -> str:
    """The field that says where the tensor of a box begins."""
    return "workspace" if box.turned else box.tensor


def _turned(box: Box, operand: Operand, head_dim: HeadDim, known: Mapping[str, float]) -> TensorMap:
    rows = operand.columns(head_dim)
    batch, heads, keys = (int(known[name]) for name in operand.counts)
    row_bytes = -(-keys // TURNED_KEYS) * TURNED_KEYS * box.element_bytes
    return TensorMap(
        tensor=map_field(box),
        extents=(row_bytes // box.element_bytes, rows, batch * heads),
        strides=(row_bytes, rows * row_bytes),
        box=(box.columns, box.rows),
        batch_slabs=heads,
        head_slabs=1,
        element_bytes=box.element_bytes,
    )


def _of_sequences(box: Box, operand: Operand, head_dim: HeadDim, known: Mapping[str, float]) -> TensorMap:
    width = operand.columns(head_dim)
    _, heads, rows = operand.counts
    _, of_head, of_row = operand.stride_fields
    row_bytes = (int(known[of_row]) if known[rows] > 1 else width) * box.element_bytes
    head_bytes = int(known[of_head]) * box.element_bytes if known[heads] > 1 else 0
    head_slabs = int(head_bytes > 0)
    return TensorMap(
        tensor=box.tensor,
        extents=(width, END, (int(known[heads]) - 1) * head_slabs + 1, _MANY, _MANY),
        strides=(row_bytes, head_bytes or row_bytes, row_bytes, _END_STRIDE - row_bytes),
        box=(box.columns, box.rows),
        batch_slabs=0,
        head_slabs=head_slabs,
        element_bytes=box.element_bytes,
    )


def map_bytes(tensor: TensorMap, address: int, encode: Encode) -> bytes:
    """A map as kernels take it; ``encode`` makes the first 128 bytes. Of a tensor that is not there nobody reads it."""
    if not address:
        return bytes(BYTES)
    return encode(tensor, address) + _BESIDE.pack(tensor.batch_slabs, tensor.head_slabs)


def emulated(tensor: TensorMap, address: int) -> bytes:
    """The words that the emulator reads."""
    more = _DIMENSIONS - len(tensor.extents)
    extents, strides = (*tensor.extents, *(1,) * more), (*tensor.strides, *(0,) * more)
    return _EMULATED.pack(address, *extents, *strides, *tensor.box, tensor.element_bytes)


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
