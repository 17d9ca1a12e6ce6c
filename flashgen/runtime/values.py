"""What values of tensors become in the arguments of a kernel: addresses, strides; and the type of sums of them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from flashgen.plan.operands import HEAD_ROWS
from flashgen.runtime.kernel import Kernel, Values


def type_of_sums(dtype: torch.dtype) -> torch.dtype:
    """The type of sums of what has this one."""
    return torch.promote_types(dtype, torch.float32)


def packed(x: Tensor | None) -> Tensor | None:
    """A tensor without gaps."""
    return None if x is None else x.contiguous()


def address(x: Tensor | None) -> int:
    """Where a tensor lies; a null pointer for none."""
    return 0 if x is None else x.data_ptr()


def with_strides(kernel: Kernel, settled: Values, strides: Sequence[int]) -> Values:
    """The settled values of a backward pass: those of a call, and the strides of d_o."""
    layout, values = kernel.layout, list(settled)
    for axis, stride in zip("bhn", strides, strict=False):
        values[layout.slots[f"d_o_stride_{axis}"] - layout.varying] = stride
    return values


def with_head_rows(kernel: Kernel, settled: Values, rows: Tensor) -> Values:
    """The settled values of a call, and how far the heads of some rows of a larger tensor are apart."""
    values = list(settled)
    values[kernel.layout.slots[HEAD_ROWS] - kernel.layout.varying] = rows.stride(1) // rows.shape[3]
    return values
