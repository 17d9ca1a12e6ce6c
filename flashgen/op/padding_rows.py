"""Padding rows: those behind the last sequence of a ragged batch. Their o, lse and gradients are 0.

In: tensors in which kernels wrote the rows of sequences. Out: the same tensors with zeros in the padding rows. On a GPU
a kernel reads where the last sequence ends, as the host does not know.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from flashgen.hosts.standalone import Standalone
from flashgen.op.lengths import Lengths

KERNEL = Standalone("clear_behind")
WARPS = 256  # that share the rows of a tensor


class Behind(ctypes.Structure):
    """``struct Behind``."""

    _fields_ = (
        ("at", ctypes.c_void_p),
        ("end", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("rows", "heads", "width", "by_row", "by_head", "by_x", "bytes")),
    )


class Cleared(ctypes.Structure):
    """``struct Cleared``."""

    _fields_ = (("of", Behind * 3), ("count", ctypes.c_int64), ("warps", ctypes.c_int64))


def clear_padding_rows(
    found: Lengths, starts: tuple[Tensor, Tensor], of_q: Sequence[Tensor], of_k: Sequence[Tensor]
) -> None:
    """Write zeros to the padding rows of tensors [rows, H, width], by the starts of q and by those of k."""
    if found.starts is None and starts[0].is_cuda:
        packed = arguments([(x, starts[0]) for x in of_q] + [(x, starts[1]) for x in of_k])
        KERNEL.launch(starts[0].device.index, packed, WARPS)
        return
    known: Sequence[Any] = found.starts or starts
    for own, ends in zip((of_q, of_k), known, strict=True):
        end = max(int(ends[-1]), 0)
        for x in own:
            if end < x.shape[0]:
                x[end:].zero_()


def arguments(cleared: Sequence[tuple[Tensor, Tensor]]) -> Cleared:
    """The arguments of a launch, by tensors, each with the starts of sequences among its rows."""
    layouts = tuple([(x.shape, x.stride(), x.element_size()) for x, _ in cleared])
    packed = Cleared.from_buffer_copy(_fixed(layouts))
    for place, (x, starts) in zip(packed.of, cleared, strict=False):
        place.at, place.end = x.data_ptr(), starts.data_ptr() + 4 * (starts.shape[0] - 1)
    return packed


@functools.lru_cache(maxsize=512)
def _fixed(layouts: tuple[tuple[Sequence[int], Sequence[int], int], ...]) -> bytes:
    """The bytes of ``Cleared`` without addresses."""
    places = [Behind(0, 0, *shape, *strides, size) for shape, strides, size in layouts]
    return bytes(Cleared((Behind * 3)(*places), len(places), WARPS))
