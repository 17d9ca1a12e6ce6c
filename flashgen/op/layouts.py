"""How results lie in memory: without gaps, their rows in the order in which those of q, k or v lie.

In: shapes and strides. Out: a ``Layout``. It follows from shapes and strides alone, so that fake tensors have it, too.
Projections are [B, N, H, D] in memory, and so is what is projected next: o.transpose(1, 2).reshape(B, N, -1) copies
nothing, and neither do the gradients of q, k and v.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import overload

import torch
from torch import Tensor

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
