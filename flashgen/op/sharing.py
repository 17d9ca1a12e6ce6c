"""Whether tensors that are written to share memory, of their own elements or with each other: rows would be lost.

In: caches of keys and of values. Out: an error, or nothing. What follows from shapes and strides is found once. Tensors
that interleave, as halves of rows or of pages, share none.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

from torch import Tensor

Layout = tuple[Sequence[int], Sequence[int]]  # shape and strides


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
    size, of_keys, of_values = k_cache.itemsize, (k_cache.shape, k_by), (v_cache.shape, v_by)
    apart = v_cache.data_ptr() - k_cache.data_ptr()
    if -_reach(*of_values) * size < apart < _reach(*of_keys) * size and _meet(of_keys, of_values, apart // size):
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
def _reach(shape: Sequence[int], strides: Sequence[int]) -> int:
    """How many elements lie from the first to the last."""
    return 1 + sum((size - 1) * by for size, by in zip(shape, strides, strict=True))


@functools.lru_cache(maxsize=512)
def _meet(first: Layout, second: Layout, apart: int) -> bool:
    """Whether two tensors, by their shapes and strides, have an element in common; the second begins ``apart`` behind.

    That is: whether ``apart`` is a sum of strides, each times a number that indices of both allow.
    """
    terms: dict[int, list[int]] = {}
    for sign, (shape, strides) in ((1, first), (-1, second)):
        for size, by in zip(shape, strides, strict=True):
            if size == 0:
                return False
            low, high = terms.setdefault(by, [0, 0])
            terms[by] = [low - (size - 1) * (sign < 0), high + (size - 1) * (sign > 0)]
    terms.pop(0, None)
    return _is_sum(apart, tuple((by, low, high) for by, (low, high) in sorted(terms.items(), reverse=True)))


def _is_sum(wanted: int, terms: Sequence[tuple[int, int, int]]) -> bool:
    if not terms:
        return wanted == 0
    (by, low, high), *rest = terms
    least, most = sum(s * x for s, x, _ in rest), sum(s * x for s, _, x in rest)
    first, last = -((most - wanted) // by), (wanted - least) // by  # ⌈(wanted - most) / by⌉
    return any(_is_sum(wanted - by * times, rest) for times in range(max(low, first), min(high, last) + 1))
