"""Addresses and strides of tensors as arguments of a kernel, and the type that their sums have."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from flashgen.hosts.kernel import Kernel, Values
from flashgen.kinds.operand import AXES, HEAD_ROWS, stride_of


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
