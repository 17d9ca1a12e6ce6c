"""Whether tensors that are written to share memory, of their own elements or with each other: rows would be lost.

In: caches of keys and of values. Out: an error, or nothing. What follows from shapes and strides is found once. Tensors
that interleave, as halves of rows or of pages, share none.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor
from torch._compile import _disable_dynamo

_FAR = 1 << 62


def check_caches(k_cache: Tensor, v_cache: Tensor, *, in_memory: bool) -> None:
    """Raise ``ValueError`` where rows of k or v, once written, would overwrite each other.

    ``in_memory``: what is no more than traced does not say where it lies.
    """
    k_by, v_by = k_cache.stride(), v_cache.stride()
    if 0 in k_by:
        _refuse_expanded("k", k_cache)
    if 0 in v_by:
        _refuse_expanded("v", v_cache)
    if not in_memory:
        return
    apart = v_cache.data_ptr() - k_cache.data_ptr()
    if _meet(k_cache.shape, k_by, v_cache.shape, v_by, k_cache.itemsize, apart):
        raise ValueError(
            "'k_cache' and 'v_cache' share memory, so that rows of v overwrite those of k: pass two tensors, or halves "
            "of one"
        )


def _refuse_expanded(name: str, cache: Tensor) -> None:
    for dim, (size, by) in enumerate(zip(cache.shape, cache.stride(), strict=True)):
        if size > 1 and by == 0:
            raise ValueError(
                f"'{name}_cache' is expanded: along dimension {dim} all {size} have the same memory, so that rows of "
                f"{name} overwrite each other; make a cache of its own once, by {name}_cache.clone()"
            )


@functools.lru_cache(maxsize=512)
@_disable_dynamo  # which prints arrays that it meets, and would read this one
def _meet(
    shape: Sequence[int], strides: Sequence[int], other: Sequence[int], others: Sequence[int], size: int, apart: int
) -> bool:
    """Whether two tensors of elements of this size have one in common; the second begins ``apart`` bytes behind."""
    return np.shares_memory(_imagined(0, shape, strides, size), _imagined(apart, other, others, size))


def _imagined(begin: int, shape: Sequence[int], strides: Sequence[int], size: int) -> NDArray[Any]:
    """An array that lies like a tensor, far from everything: nobody reads it."""
    place = SimpleNamespace(
        __array_interface__={
            "version": 3,
            "typestr": f"V{size}",
            "data": (_FAR + begin, False),
            "shape": tuple(shape),
            "strides": tuple(each * size for each in strides),
        }
    )
    return np.asarray(place)
