"""Caches of keys and values: the queries are the last ones of each sequence.

On a GPU the host does not read the lengths of sequences nor their places, unless the call needs something that follows
from them. Kernels find the rows by themselves, and stay inside of the cache whatever the numbers say.

In: the arguments of the operators that end in ``_decode``: q [B, H, Nq, D], the caches as ``Cache`` says. Out: a
``CachedCall``, of which an engine computes o [B, H, Nq, Dv] and lse [B, H, Nq]. Each sequence means what a dense call
of a part of it means: Nq and Nk are its rows in the cache, queries begin at Nq less their number, keys at its left
padding. Captured tensors have the sizes of the cache. There are no gradients.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from flashgen.ir.spec import AttentionSpec
from flashgen.kinds.cached import CACHED
from flashgen.op.call import CallChecker, KindCall, OneProblem, Rest, Tensors
from flashgen.op.checks import match
from flashgen.op.conversion import as_number, check_device, is_integral, saturated, saturated_number
from flashgen.op.eight_bits import factors_of, from_8_bits
from flashgen.op.signature import F8
from flashgen.op.tensor_kinds import is_plain
from flashgen.reference import tiled
from flashgen.reference.programs import Place
from flashgen.reference.shard import Shard

_PLACES = len(CACHED.tensors)  # the tensors of a ``Cache``
_USUAL: dict[int, tuple[Tensor, ...]] = {}  # by the number of sequences, on CPUs
_MOST_USUAL = 128


@dataclass(frozen=True)
class Cache:
    """Where the keys and values of B sequences lie: int32 tensors, which ``check`` checks, and float32 factors.

    ``lengths`` [B] are the rows of each sequence, ``padding`` [B] the rows in front that are not its own. Rows lie in
    entry ``entries[b]`` of a cache [entries, Hkv, Nmax, D] or, where ``blocks`` [B, P] has columns, in pages
    ``blocks[b, 0]``, ``blocks[b, 1]``, … of a cache [pages, Hkv, page, D]. Numbers of 8 bits are multiplied by
    ``k_factors`` and ``v_factors`` [B, Hkv], unless these are empty. ``padding`` and ``entries`` may be empty, too,
    and then mean 0 and b, so that no kernel has to fill them.
    """

    lengths: Tensor
    padding: Tensor
    entries: Tensor
    blocks: Tensor
    k_factors: Tensor
    v_factors: Tensor

    @property
    def is_paged(self) -> bool:
        """Whether rows lie in pages."""
        return self.blocks.shape[1] > 0

    def in_numbers(self) -> Cache:
        """The cache with ``padding`` and ``entries`` filled in."""
        padding, entries, like = self.padding, self.entries, self.lengths
        padding = padding if padding.numel() else torch.zeros_like(like)
        entries = entries if entries.numel() else torch.arange(like.shape[0], dtype=like.dtype, device=like.device)
        return replace(self, padding=padding, entries=entries)

    def capacity(self, cache: Tensor) -> int:
        """The rows that a sequence has room for."""
        return int(self.blocks.shape[1] * cache.shape[2] if self.is_paged else cache.shape[2])

    def sequence(self, k: Tensor, v: Tensor, number: int, length: int, padding: int) -> tuple[Tensor, Tensor]:
        """The keys and values of a sequence, [1, Hkv, rows, width], as numbers of more than 8 bits."""
        k, v = (self._rows(x, number, length, padding) for x in (k, v))
        if k.dtype is not F8:
            return k, v
        k_factors, v_factors = (x[number] if x.numel() else None for x in (self.k_factors, self.v_factors))
        return from_8_bits(k, k_factors), from_8_bits(v, v_factors)

    def _rows(self, cache: Tensor, number: int, length: int, padding: int) -> Tensor:
        if not self.is_paged:
            return cache[int(self.entries[number]), :, padding:length][None]
        pages = cache[self.blocks[number, : -(-length // max(1, cache.shape[2]))].long()]
        return pages.transpose(0, 1).flatten(1, 2)[None, :, padding:length]

    def check(self, cache: Tensor, queries: int, new: int = 0) -> list[tuple[int, int]]:
        """Raise ``ValueError`` where a row would lie outside of the cache, with ``new`` ones behind those of each.

        Returns lengths and padding.
        """
        capacity, is_paged, lengths = self.capacity(cache), self.is_paged, self.lengths.tolist()
        if new:
            if min(lengths, default=0) < 0:
                b = next(b for b, length in enumerate(lengths) if length < 0)
                raise ValueError(
                    f"'cache_seqlens' of sequence {b} is {lengths[b]}; rows before those of k and v are 0 or more"
                )
            lengths = [length + new for length in lengths]
        padding = self.padding.tolist() if self.padding.numel() else [0] * len(lengths)
        entries = self.entries.tolist() if self.entries.numel() else range(len(lengths))
        for b, (length, before) in enumerate(zip(lengths, padding, strict=True)):
            if not 0 <= length <= capacity:
                raise ValueError(
                    f"'cache_seqlens' and what is new make {length} rows of sequence {b}; the cache "
                    f"has room for {capacity}"
                )
            if not 0 <= before <= length:
                raise ValueError(f"'leftpad' of sequence {b} is {before}, of {length} rows")
            if length < queries:
                raise ValueError(
                    f"sequence {b} has {length} rows in the cache, but {queries} queries, its last ones: write "
                    "their keys to the cache first, by k and v"
                )
            if not is_paged and not 0 <= entries[b] < cache.shape[0]:
                raise ValueError(
                    f"'cache_batch_idx' of sequence {b} is {entries[b]}; the cache has {cache.shape[0]} entries"
                )
        if is_paged:
            each = torch.arange(self.blocks.shape[1], device=self.blocks.device) * cache.shape[2]
            used = each < self.lengths[:, None].long() + new
            outside = used & ((self.blocks < 0) | (self.blocks >= cache.shape[0]))
            if outside.any():
                b, n = outside.nonzero()[0].tolist()
                raise ValueError(
                    f"'block_table' of sequence {b} names page {int(self.blocks[b, n])} at {n}; the cache has "
                    f"{cache.shape[0]} pages"
                )
        return list(zip(lengths, padding, strict=True))


def cache_of(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    lengths: object,
    *,
    block_table: object,
    cache_batch_idx: object,
    leftpad: object,
    k_descale: object = None,
    v_descale: object = None,
) -> Cache:
    """The cache of a call; values are not looked at. Raises what the op raises."""
    _check_rows(q, k_cache, v_cache)
    batch = q.shape[0]
    found = _numbers("cache_seqlens", lengths, (batch,), q)
    nothing, no_blocks, no_factors = _usual(batch, q)
    if block_table is not None and cache_batch_idx is not None:
        raise ValueError("'cache_batch_idx' goes with a cache of entries; in pages 'block_table' says where rows lie")
    padding = nothing if leftpad is None else _numbers("leftpad", leftpad, (batch,), q)
    entries, blocks = nothing, no_blocks
    if block_table is not None:
        blocks = _numbers("block_table", block_table, (batch, None), q)
        if blocks.shape[1] == 0 or k_cache.shape[2] == 0:
            raise ValueError(
                f"'block_table' has shape {list(blocks.shape)}; pages are of {k_cache.shape[2]} rows: none fit"
            )
    elif cache_batch_idx is not None:
        entries = _numbers("cache_batch_idx", cache_batch_idx, (batch,), q)
    elif k_cache.shape[0] != batch:
        match("k_cache", k_cache, 0, batch, "the batch size of q; 'cache_batch_idx' says which entries are meant")
    k, v, each = ("k_cache", k_cache), ("v_cache", v_cache), (batch, k_cache.shape[1])
    k_factors = no_factors if k_descale is None else factors_of("k_descale", k_descale, k, each, q.device)
    v_factors = no_factors if v_descale is None else factors_of("v_descale", v_descale, v, each, q.device)
    return Cache(found, padding, entries, blocks, k_factors, v_factors)


def _check_rows(q: Tensor, k_cache: Tensor, v_cache: Tensor) -> None:
    for name, x, form in (
        ("q", q, "[B, H, Nq, D]"),
        ("k_cache", k_cache, "[B, Hkv, Nmax, D] or, in pages, [pages, Hkv, page, D]"),
        ("v_cache", v_cache, "[B, Hkv, Nmax, Dv] or, in pages, [pages, Hkv, page, Dv]"),
    ):
        if not isinstance(x, Tensor):
            raise TypeError(f"'{name}' must be a tensor, not {type(x).__name__}")
        if x.dim() != 4:
            raise ValueError(f"'{name}' has shape {list(x.shape)}; {form} is expected")
        if x.device != q.device:  # asked here, as a call costs more than the answer
            check_device(f"'{name}'", x, q.device)
    if k_cache.shape[3] != q.shape[3] or v_cache.shape[:3] != k_cache.shape[:3]:  # of which one raises
        match("k_cache", k_cache, 3, q.shape[3], "the head dimension of q")
        for axis, what in enumerate(("entries or pages", "heads", "rows")):
            match("v_cache", v_cache, axis, k_cache.shape[axis], f"the {what} of k_cache")


def _nothing(batch: int, device: torch.device) -> tuple[Tensor, ...]:
    """Empty numbers, pages and factors of so many sequences."""
    numbers, blocks = (torch.empty(shape, dtype=torch.int32, device=device) for shape in ((0,), (batch, 0)))
    return numbers, blocks, torch.empty((0, 0), dtype=torch.float32, device=device)


def _usual(batch: int, like: Tensor) -> tuple[Tensor, ...]:
    """``_nothing`` on the device of a tensor. Nobody writes to it.

    On a CPU they are made once, as making them takes as long as a small call. They are no tensors of inference mode,
    as autograd may save them in later calls.
    """
    if not (like.is_cpu and is_plain((like,))):
        return _nothing(batch, like.device)
    found = _USUAL.get(batch)
    if found is None:
        with torch.inference_mode(mode=False):
            found = _nothing(batch, like.device)
        if len(_USUAL) < _MOST_USUAL:
            _USUAL[batch] = found
    return found


def _numbers(name: str, x: object, shape: tuple[int | None, ...], q: Tensor) -> Tensor:
    takes_number = len(shape) == 1
    number = as_number(x, whole=True) if takes_number and not isinstance(x, Tensor) else None
    if number is not None:
        return torch.full((shape[0] or 0,), saturated_number(number), dtype=torch.int32, device=q.device)
    if not isinstance(x, Tensor):
        what = f"a tensor ({_form(shape)})" + (" or an int" if takes_number else "")
        raise TypeError(f"'{name}' must be {what}, not {type(x).__name__}")
    if x.dtype is not torch.int32 and not is_integral(x.dtype):
        raise TypeError(f"'{name}' is {x.dtype}; {_form(shape)} is expected")
    if x.dim() != len(shape) or x.shape[0] != shape[0]:
        raise ValueError(f"'{name}' has shape {list(x.shape)}; {_form(shape)} is expected")
    if x.device != q.device:
        check_device(f"'{name}'", x, q.device)
    return (x if x.dtype is torch.int32 else saturated(x)).contiguous()


def _form(shape: tuple[int | None, ...]) -> str:
    """The shape of a tensor of numbers, for error messages alone: Dynamo cannot print symbolic sizes."""
    return f"i32[{', '.join('P' if length is None else str(length) for length in shape)}]"


@dataclass(frozen=True)
class CachedCall(KindCall):
    """A call over a cache; ``found`` are the rows of each sequence and its padding, where the host knows them."""

    cache: Cache
    found: Sequence[tuple[int, int]]

    @property
    def pairs(self) -> Sequence[tuple[int, int]]:
        return [(length, length) for length, _ in self.found]

    def problems(self, spec: AttentionSpec) -> Iterator[OneProblem]:
        return problems(spec, self.call.shard, self.cache.in_numbers(), self.found, self.tensors)


def kind_call(checker: CallChecker, tensors: Tensors, rest: Rest, _derives: bool) -> CachedCall:
    """The call of an operator's arguments. Raises ``ValueError`` and ``TypeError``."""
    own, cache = tensors[:-_PLACES], Cache(*tensors[-_PLACES:])
    q, k = own[:2]
    given, capacity, columns = rest[0], cache.capacity(k), cache.blocks.shape[1]
    are_seen, found = True, []
    if q.is_cuda and cache.lengths.is_cuda and checker.has_kernels:
        are_seen = checker.lengths.are_seen(own, (capacity, capacity), "cache_seqlens")
    if are_seen:
        found = cache.check(k, q.shape[2])
    numbers: Any = (*given[:4], capacity, columns, given[4])
    rest = (numbers, rest[1])
    call = checker.find(own, rest)
    if checker.spec.tensors:
        checker.lengths.check(call.head_dim, call.sizes, [(length, length) for length, _ in found])
    # An empty tensor has address 0. The last pointer is that of counters, which hosts fill in.
    pointers = [x.data_ptr() for x in tensors[-_PLACES:]]
    return CachedCall(call, own, rest, [*pointers, 0], cache, found)


def _of_sequence(number: int, place: Place, x: Any) -> Any:
    """The view that the dense problem of a sequence has of a result."""
    return x if place is Place.WHOLE or x is None else x[number][None]


def problems(
    spec: AttentionSpec, whole: Shard, cache: Cache, found: Sequence[tuple[int, int]], tensors: Sequence[Tensor]
) -> Iterator[OneProblem]:
    """The dense problem of each sequence whose results are not zero. ``cache`` is ``in_numbers``."""
    q, k, v = tensors[:3]
    b_total, h_total, _, _ = whole.totals()
    for number, (length, padding) in enumerate(found):
        shard = Shard(
            batch=1, heads=whole.heads, kv_heads=whole.kv_heads, q_len=whole.q_len, kv_len=length - padding,
            b_start=whole.b_start + number, h_start=whole.h_start, q_start=length - whole.q_len, kv_start=padding,
            b_total=b_total, h_total=h_total, q_total=length, kv_total=length,
        )  # fmt: skip
        if not tiled.gives_nothing(spec, shard):
            rows = (q[number][None], *cache.sequence(k, v, number, length, padding))
            yield number, shard, rows, functools.partial(_of_sequence, number)
