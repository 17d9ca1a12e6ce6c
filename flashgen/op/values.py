"""Where tensors lie: strides of results, addresses and strides as arguments of a kernel; the type of their sums.

Results have no gaps, and their rows lie in the order of those of q, k or v: projections are [B, N, H, D] in memory, and
so is what is projected next: o.transpose(1, 2).reshape(B, N, -1) copies nothing, nor do gradients of q, k and v.
That follows from shapes and strides alone, so that fake tensors have it, too.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Mapping, Sequence
from typing import Any, overload

import torch
from torch import Tensor

from flashgen.hosts.kernel import Kernel, Values
from flashgen.kinds.operand import AXES, HEAD_ROWS, stride_of

# A shape and its strides. PyTorch makes a tensor faster from both than from a shape.
Layout = tuple[tuple[int, ...], tuple[int, ...]]


def packed_layout(*shape: int) -> Layout:
    """A shape and the strides of a contiguous tensor."""
    return shape, tuple(math.prod(shape[axis + 1 :]) for axis in range(len(shape)))


def layout_like(x: Tensor, shape: Sequence[int]) -> Layout:
    """Where rows of a shape lie in the order of those of ``x``; contiguous where some of these lie in one place."""
    strides = x.stride()
    if x.is_contiguous() or 0 in strides:
        return packed_layout(*shape)
    inner_first = sorted(range(len(shape) - 2, -1, -1), key=lambda axis: strides[axis])
    found, step = [1] * len(shape), shape[-1]
    for axis in inner_first:
        found[axis], step = step, step * shape[axis]
    return tuple(shape), tuple(found)


@overload
def laid(x: Tensor, layout: Layout) -> Tensor: ...
@overload
def laid(x: Tensor | None, layout: Layout) -> Tensor | None: ...
def laid(x: Tensor | None, layout: Layout) -> Tensor | None:
    """A tensor that lies so: itself, or a copy. None is left alone."""
    if x is None or x.stride() == layout[1]:
        return x
    return torch.empty_strided(*layout, dtype=x.dtype, device=x.device).copy_(x)


def type_of_sums(dtype: torch.dtype) -> torch.dtype:
    """The type in which elements of a type are added up."""
    return torch.promote_types(dtype, torch.float32)


def packed(x: Tensor | None) -> Tensor | None:
    """A tensor without gaps."""
    return None if x is None else x.contiguous()


def copied_to(found: Sequence[Tensor | None], into: Sequence[Tensor | None]) -> Any:
    """Copy results to the tensors where they are wanted, and return these."""
    for x, place in zip(found, into, strict=True):
        if x is not None and place is not None:
            place.copy_(x)
    return into


def address(x: Tensor | None) -> int:
    """The address of a tensor; 0, a null pointer, for None."""
    return 0 if x is None else x.data_ptr()


def with_strides(kernel: Kernel, fixed: Values, rows: Mapping[str, Sequence[int]]) -> Values:
    """The fixed values of a call with other strides of b, h and n for these operands."""
    layout, values = kernel.layout, list(fixed)
    for name, strides in rows.items():
        for axis, stride in zip(AXES, strides, strict=False):
            values[layout.slots[stride_of(name, axis)] - layout.varying] = stride
    return values


def by_axis(strides: Sequence[int]) -> Sequence[int]:
    """Strides of b, h and n of [B, H, N, width], or of [T, H, width], where T are the rows of all sequences."""
    return strides if len(strides) == 4 else (0, strides[1], strides[0])


def places_of(rows: Sequence[Tensor | None]) -> tuple[tuple[int, ...], ...]:
    """The strides of each tensor; an empty tuple for None."""
    return tuple(() if x is None else x.stride() for x in rows)


def in_slices(kernel: Kernel, fixed: Values, rows: Mapping[str, Tensor | None], lse: Tensor | None) -> Values:
    """The fixed values of a call whose results are slices of larger tensors."""
    strides = {name: x.stride() for name, x in rows.items() if x is not None}
    values = list(with_strides(kernel, fixed, strides))
    if lse is not None:
        values[kernel.layout.slots[HEAD_ROWS] - kernel.layout.varying] = lse.stride(1)
    return values


class UnchangedTensor:
    """A tensor as it is now: equal to another record of the same tensor if nothing was written in between.

    PyTorch counts writes, but not those to tensors of inference mode.
    """

    def __init__(self, x: Tensor) -> None:
        self._tensor, self._version = weakref.ref(x), x._version

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, UnchangedTensor):
            return NotImplemented
        x = self._tensor()
        return x is not None and x is other._tensor() and self._version == other._version

    __hash__ = None  # type: ignore[assignment]
