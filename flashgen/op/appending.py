"""Writes new rows of keys and values behind those that a cache has: by a kernel on a GPU, else by PyTorch's operators.

In: a ``Cache`` of B sequences with the rows that they have, k_cache and v_cache as it says, k and v
[B, Hkv, new, width]. Out: the cache with the rows that they have now. Whatever numbers say, nothing is written outside
of the cache. On a CPU a row without a place is an error before anything is written. On a GPU nobody waits, and such a
row is left out: sequences that only fill up a batch need no rows of their own. A graph may be captured.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch._compile import _disable_dynamo
from torch.autograd.graph import increment_version
from torch.compiler import is_compiling

from flashgen.hosts.standalone import Standalone
from flashgen.op.cached import Cache
from flashgen.op.conversion import require
from flashgen.op.eight_bits import to_8_bits
from flashgen.op.lengths import checks_lengths
from flashgen.op.registered import NAMESPACE
from flashgen.op.registration import library
from flashgen.op.signature import ELEMENTS, F8
from flashgen.op.tensor_kinds import is_plain, lies_in_memory, transforming

KERNEL = Standalone("append")
_ROUNDED = {torch.float32: 1, torch.bfloat16: 2, torch.float16: 3}
_OPERATOR = "append_rows"


@functools.cache
def _is_usable() -> bool:
    from flashgen.hosts import cuda  # noqa: PLC0415 - who has no GPU needs no driver

    return cuda.is_usable()


Strides = tuple[int, ...]


def append(cache: Cache, k_cache: Tensor, v_cache: Tensor, k: Tensor, v: Tensor) -> Cache:
    """Write k and v behind the rows of each sequence. Wider k and v are divided by the factors of a cache of 8 bits.

    Two rows at one place are an error on a CPU, and where lengths are checked; else one of them stays. Caches that
    share memory are an error everywhere. Raises ``ValueError`` and ``TypeError``.
    """
    new, batch = k.shape[2] if k.dim() == 4 else 0, cache.lengths.shape[0]
    for name, x, to in (("k", k, k_cache), ("v", v, v_cache)):
        wanted = (batch, to.shape[1], new, to.shape[3])
        if x.dim() != 4 or tuple(x.shape) != wanted:
            raise ValueError(f"'{name}' has shape {list(x.shape)}; {list(wanted)} is expected, rows for the cache")
        fits = x.dtype is to.dtype or (to.dtype is F8 and x.dtype in ELEMENTS)
        if not fits or x.device != to.device:
            raise TypeError(f"'{name}' is {x.dtype} on {x.device}; the cache is {to.dtype} on {to.device}")
    if new == 0:
        return cache
    written = (k_cache, v_cache, k, v)
    if not k.is_cuda or (torch.is_grad_enabled() and any(x.requires_grad for x in written)):
        filled = _by_operators(cache, *written)
    else:
        if checks_lengths():
            cache.check(k_cache, new, new)
            _check_places(*_places(cache, k_cache, new)[1:])
        arguments = (cache.lengths, cache.entries, cache.blocks, cache.k_factors, cache.v_factors, *written)
        if is_compiling() or not lies_in_memory((cache.lengths, *written)):
            filled = getattr(getattr(torch.ops, NAMESPACE), _OPERATOR)(*arguments)
        else:
            filled = _append(*arguments)
            for x in (k_cache, v_cache):
                if not x.is_inference():
                    increment_version(x)
    return Cache(filled, cache.padding, cache.entries, cache.blocks, cache.k_factors, cache.v_factors)


def written(cache: Cache, k_cache: Tensor, v_cache: Tensor, k: Tensor, v: Tensor) -> tuple[Cache, Tensor, Tensor]:
    """``append`` unseen by autograd, as a cache would hold the graphs of all steps. Returns the caches to read, too.

    k and v have no gradients. Where one is asked for, the keys that are returned require a gradient, so that the call
    refuses it.
    """
    is_watched = torch.is_grad_enabled() and (k.requires_grad or v.requires_grad)
    if not is_watched or is_compiling() or transforming():
        return append(cache, k_cache, v_cache, k, v), k_cache, v_cache
    with torch.no_grad():
        cache = append(cache, k_cache, v_cache, k, v)
    return cache, k_cache.detach().requires_grad_(), v_cache


# -- by PyTorch's operators --------------------------------------------------------------------------------------------


def _places(cache: Cache, k_cache: Tensor, new: int) -> tuple[Tensor, Tensor, Tensor]:
    """The numbers of the new rows of each sequence, their entry or page, and their places in it."""
    places = cache.lengths[:, None].long() + torch.arange(new, device=k_cache.device)
    if not cache.is_paged:
        entries = cache.entries if cache.entries.numel() else torch.arange(places.shape[0], device=k_cache.device)
        return places, entries.long()[:, None], places
    page = k_cache.shape[2]
    columns = places.div(page, rounding_mode="floor").clamp(0, cache.blocks.shape[1] - 1)
    return places, cache.blocks.long().gather(1, columns), places % page


def _check_places(outer: Tensor, inner: Tensor) -> None:
    at = (outer * (2**31) + inner).flatten().sort().values
    require((at[1:] != at[:-1]).all(), "two rows of k and v lie at the same place of the cache")


def _by_operators(cache: Cache, k_cache: Tensor, v_cache: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The rows of each sequence once those of k and v are written, by PyTorch's operators.

    On a GPU a row without a place fails an assertion before rows are written.
    """
    new, all_of_them = k.shape[2], (cache.lengths, k_cache, v_cache, k, v)
    in_memory = (k.is_cpu and is_plain(all_of_them)) or (not is_compiling() and lies_in_memory(all_of_them))
    check_caches(k_cache, v_cache, in_memory=in_memory)
    places, outer, inner = _places(cache, k_cache, new)
    if k.is_cpu and in_memory:
        cache.check(k_cache, new, new)
    else:
        capacity = cache.capacity(k_cache)
        inside = (places >= 0) & (places < capacity) & (outer >= 0) & (outer < k_cache.shape[0])
        require(inside.all(), f"rows of k and v lie outside of the cache, of {capacity} rows a sequence")
    if not k.is_cuda and (cache.is_paged or cache.entries.numel()):
        _check_places(outer, inner)
    # Positions, then heads: indices that stand side by side are what torch.vmap maps.
    for cached, x, factors in ((k_cache, k, cache.k_factors), (v_cache, v, cache.v_factors)):
        rows = cached.transpose(1, 2)
        if cached.dtype is F8:  # whose rows are written as bytes
            own = x if x.dtype is F8 else to_8_bits(x, factors)
            rows.view(torch.uint8)[outer, inner] = own.view(torch.uint8).transpose(1, 2)
        else:
            rows[outer, inner] = x.transpose(1, 2)
    return cache.lengths + new


# -- by the kernel -----------------------------------------------------------------------------------------------------


class AppendedRows(ctypes.Structure):
    """``struct Appended``."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("source", "to", "factors")),
        ("from_by", ctypes.c_int64 * 4),
        ("to_by", ctypes.c_int64 * 4),
        *((name, ctypes.c_int) for name in ("width", "unit", "element", "padding")),
    )


class Arguments(ctypes.Structure):
    """``struct Append``."""

    _fields_ = (
        ("of", AppendedRows * 2),
        *((name, ctypes.c_void_p) for name in ("lengths", "entries", "pages", "filled")),
        *((name, ctypes.c_int64) for name in ("batch", "heads", "fresh")),
        *((name, ctypes.c_int) for name in ("rows", "columns", "count", "padding")),
    )


def arguments(
    filled: Tensor,
    lengths: Tensor,
    entries: Tensor,
    blocks: Tensor,
    factors: Sequence[Tensor],
    cached: Sequence[Tensor],
    fresh: Sequence[Tensor],
) -> Arguments:
    """The arguments of a launch, of the operator's tensors, keys before values. An empty tensor has address 0."""
    (k, v), (k_cache, v_cache), (k_factors, v_factors) = fresh, cached, factors
    at = k.data_ptr(), k_cache.data_ptr(), v.data_ptr(), v_cache.data_ptr()
    key = (
        k.shape, k.stride(), k_cache.shape, k_cache.stride(), v.shape, v.stride(), v_cache.stride(),
        (k.dtype, k_cache.dtype), (v.dtype, v_cache.dtype), blocks.shape[1],
        at[0] % 16, at[1] % 16, at[2] % 16, at[3] % 16,
    )  # fmt: skip
    packed = Arguments.from_buffer_copy(_fixed(key))
    keys, values = packed.of
    keys.source, keys.to, keys.factors = at[0], at[1], k_factors.data_ptr()
    values.source, values.to, values.factors = at[2], at[3], v_factors.data_ptr()
    packed.lengths, packed.filled = lengths.data_ptr(), filled.data_ptr()
    packed.entries, packed.pages = entries.data_ptr(), blocks.data_ptr()
    return packed


@functools.lru_cache(maxsize=512)
def _fixed(key: tuple[Any, ...]) -> bytes:
    """The bytes of ``Arguments`` without addresses, of which the key has the remainders modulo 16."""
    k, k_by, k_cache, k_cache_by, v, v_by, v_cache_by, of_k, of_v, columns, *ends = key
    of_keys = _rows(k[3], (k_by, k_cache_by), of_k, ends[:2])
    of_values = _rows(v[3], (v_by, v_cache_by), of_v, ends[2:])
    batch, heads, new, _ = k
    of = (AppendedRows * 2)(of_keys, of_values)
    return bytes(Arguments(of, 0, 0, 0, 0, batch, heads, new, k_cache[2], columns, k_cache[0], 0))


def _rows(
    width: int, strides: tuple[Strides, Strides], dtypes: tuple[torch.dtype, torch.dtype], ends: Sequence[int]
) -> AppendedRows:
    """How rows of a type are written to a cache of one; ``ends`` are their addresses modulo 16."""
    (dtype, cached), (from_by, to_by), element = dtypes, strides, 0
    if cached is not dtype:
        unit, element = _unit((1, 4), width, ends[1:], (to_by,)), _ROUNDED[dtype]
    else:
        unit = _unit((dtype.itemsize, 16), width, ends, (from_by, to_by))
        together = unit // dtype.itemsize
        width //= together
        from_by, to_by = (tuple(s // together for s in (*by[:3], by[3] * together)) for by in (from_by, to_by))
    each = ctypes.c_int64 * 4
    return AppendedRows(0, 0, 0, each(*from_by), each(*to_by), width, unit, element, 0)


def _unit(sizes: tuple[int, int], width: int, addresses: Sequence[int], strides: Sequence[Sequence[int]]) -> int:
    """The most bytes that all rows are multiples of, and lie at multiples of. ``sizes``: least and most."""
    size, most = sizes
    if any(by[3] != 1 for by in strides):
        return size
    numbers = [*addresses, width * size, *(stride * size for by in strides for stride in by[:3])]
    return next((unit for unit in (16, 8, 4) if size < unit <= most and not any(n % unit for n in numbers)), size)


def _append(
    lengths: Tensor, entries: Tensor, blocks: Tensor, k_factors: Tensor, v_factors: Tensor,
    k_cache: Tensor, v_cache: Tensor, k: Tensor, v: Tensor,
) -> Tensor:  # fmt: skip
    """The rows of each sequence, once those of k and v are written. There are some."""
    rows = 2 * k.shape[0] * k.shape[1] * k.shape[2]
    if rows == 0 or not (k.is_cuda and _is_usable()):
        nothing = Cache(lengths, entries.new_empty(0), entries, blocks, k_factors, v_factors)
        return _by_operators(nothing, k_cache, v_cache, k, v)
    check_caches(k_cache, v_cache, in_memory=True)
    filled = torch.empty_like(lengths)
    packed = arguments(filled, lengths, entries, blocks, (k_factors, v_factors), (k_cache, v_cache), (k, v))
    KERNEL.launch(k.device.index, packed, rows)
    return filled


def _register() -> None:
    names = ("lengths", "entries", "blocks", "k_factors", "v_factors", "k_cache", "v_cache", "k", "v")
    marks: dict[str, str] = {"k_cache": "(a!)", "v_cache": "(b!)"}
    schema = ", ".join(f"Tensor{marks.get(name, '')} {name}" for name in names)
    made: Any = library()
    made.define(f"{_OPERATOR}({schema}) -> Tensor", tags=(torch.Tag.pt2_compliant_tag,))
    made.impl(_OPERATOR, _append, "CompositeExplicitAutograd")
    torch.library.register_fake(f"{NAMESPACE}::{_OPERATOR}", lambda lengths, *_: torch.empty_like(lengths), lib=made)


_register()


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
