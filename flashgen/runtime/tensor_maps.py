"""Tensor maps: how tensor copies (TMA, cp.async.bulk.tensor) find boxes of q, k, v and d_o in global memory.

In: a ``Box`` of a launch (``plan/launches.py``) and the values of ``struct Arguments``. Out: a ``TensorMap``, and its
bytes for a kernel: ``struct TensorMap`` of ``templates/cuda/primitives/tensor_copies.cuh``, of which the first 128 are
the driver's (``driver_maps.py``) or the emulator's. Nothing here imports torch.

A tensor [B, H, N, D] of any strides becomes one of three dimensions: elements of a row, rows, and slabs. Slabs are as
far apart as the greatest common divisor of the strides of B and H says, so that a head is found at
``b * batch_slabs + h * head_slabs``, whatever the order of the axes, and where a stride is 0.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter

from flashgen.ir.spec import HeadDim
from flashgen.plan.launches import Box
from flashgen.plan.operands import OPERANDS
from flashgen.runtime.kernel import Values

ELEMENT_BYTES = 2  # of what warpgroups multiply
SWIZZLES = (128, 64, 32)  # bytes of a row of a box whose chunks of 16 bytes can be permuted
BYTES, WORD_BYTES = 192, 128  # of a map as a kernel takes it, and of what is the driver's
PARAMETER_ALIGNMENT = 64  # of maps among the parameters of a kernel
MOST_REMEMBERED = 64  # parameters of one launch
_BESIDE = struct.Struct(f"<ii{BYTES - WORD_BYTES - 8}x")
_EMULATED = struct.Struct(f"<Q3Q2Q2I{WORD_BYTES - 56}x")  # MappedTensor of templates/emulator/interface.h


@dataclass(frozen=True)
class TensorMap:
    """A tensor of 2-byte elements but for its address, and the box of it that one copy brings.

    ``extents`` are the elements of a row, the rows and the slabs, ``strides`` the bytes from a row and from a slab to
    the next; ``box`` has columns and rows.
    """

    tensor: str
    extents: tuple[int, int, int]
    strides: tuple[int, int]
    box: tuple[int, int]
    batch_slabs: int
    head_slabs: int

    @property
    def row_bytes(self) -> int:
        """Of a box: 128, 64 or 32, by which its chunks are permuted."""
        return self.box[0] * ELEMENT_BYTES


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

    def __call__(self, values: Values) -> bytes:
        addresses = self._addresses(values)
        found = self._known.get(addresses)
        if found is None:
            if len(self._known) >= MOST_REMEMBERED:
                self._known.clear()
            found = b"".join(map_bytes(tensor, int(values[slot]), self._encode) for slot, tensor in self._maps)
            self._known[addresses] = found
        return found


def tensor_map(box: Box, head_dim: HeadDim, known: Mapping[str, float]) -> TensorMap:
    """The map of a box for values of ``struct Arguments`` by name, whose strides are multiples of 16 bytes."""
    operand = OPERANDS[box.tensor]
    width = operand.columns(head_dim)
    batch, heads, rows = (int(known[name]) for name in operand.counts)
    # The stride of an axis of one element says nothing.
    by_batch, by_head, by_row = (
        int(known[name]) * ELEMENT_BYTES if size > 1 else 0
        for name, size in zip(operand.stride_fields, (batch, heads, rows), strict=True)
    )
    row_bytes = by_row or width * ELEMENT_BYTES
    slab_bytes = math.gcd(by_batch, by_head) or row_bytes
    batch_slabs, head_slabs = by_batch // slab_bytes, by_head // slab_bytes
    return TensorMap(
        tensor=box.tensor,
        extents=(width, rows, (batch - 1) * batch_slabs + (heads - 1) * head_slabs + 1),
        strides=(row_bytes, slab_bytes),
        box=(box.columns, box.rows),
        batch_slabs=batch_slabs,
        head_slabs=head_slabs,
    )


def map_bytes(tensor: TensorMap, address: int, encode: Encode) -> bytes:
    """A map as kernels take it; ``encode`` makes the first 128 bytes."""
    return encode(tensor, address) + _BESIDE.pack(tensor.batch_slabs, tensor.head_slabs)


def emulated(tensor: TensorMap, address: int) -> bytes:
    """The words that the emulator reads."""
    return _EMULATED.pack(address, *tensor.extents, *tensor.strides, *tensor.box)
