"""Runs an op over caches of keys and values: the queries are the last ones of each sequence.

On a GPU the host knows neither how long sequences are nor where they lie, unless a call asks for what follows from
that: kernels find their rows by themselves, and stay inside of the cache whatever the numbers say.

In: the arguments of the operators that end in ``_decode``: q [B, H, Nq, D], the caches as ``Cache`` says. Out: o
[B, H, Nq, Dv], lse [B, H, Nq]. Each sequence means what a dense call of a part of it means: Nq and Nk are its rows in
the cache, queries begin at Nq less their number, keys at its left padding. Captured tensors have the sizes of the
cache. There are no gradients.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from flashgen.ir.spec import AttentionSpec, HeadDim
from flashgen.kinds.cached import CACHED
from flashgen.kinds.kind import Kind
from flashgen.op.call import ELEMENTS, Call, CallChecker, Rest, check_captured, check_shard, match
from flashgen.op.conversion import as_number, is_integral, saturated, saturated_number
from flashgen.op.eight_bits import F8, factors_of, from_8_bits
from flashgen.op.engine import Attended, Engine, Rows, Tensors
from flashgen.op.layouts import laid, layout_like
from flashgen.op.per_sequence import PerSequence
from flashgen.op.plain import is_plain
from flashgen.op.ragged import check_memory, no_ragged_kernels, readable
from flashgen.op.ragged_checks import RaggedChecker
from flashgen.op.values import address
from flashgen.reference import tiled
from flashgen.reference.programs import Program
from flashgen.reference.shard import Shard

_Make = Callable[[int, torch.device], tuple[Tensor, ...]]
_USUAL: dict[tuple[_Make, int], tuple[Tensor, ...]] = {}  # by the number of sequences, on CPUs
_MOST_USUAL = 128


@dataclass(frozen=True)
class Cache:
    """Where the keys and values of B sequences lie, all but factors int32 and checked by ``check``.

    ``lengths`` [B] are the rows of each, ``padding`` [B] those in front that are not its own. Rows lie in entry
    ``entries[b]`` of the cache [entries, Hkv, Nmax, D] or, where ``blocks`` [B, P] has columns, in pages
    ``blocks[b, 0]``, ``blocks[b, 1]``, … of one [pages, Hkv, page, D]. Numbers of 8 bits are multiplied by
    ``k_factors`` and ``v_factors`` [B, Hkv], float32, or as they are where these have no rows. Nothing has to be
    launched for what nobody asked for: ``padding`` and ``entries`` without numbers mean 0, and b.
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

    def factors(self) -> Iterator[Tensor | None]:
        """Those of keys and of values; None where numbers are what they are."""
        return (x if x.numel() else None for x in (self.k_factors, self.v_factors))

    def in_numbers(self) -> Cache:
        """The same, with ``padding`` and ``entries`` written out."""
        if self.padding.numel() and self.entries.numel():
            return self
        padding, entries = _usual(_written_out, self.lengths.shape[0], self.lengths)
        padding = self.padding if self.padding.numel() else padding
        return replace(self, padding=padding, entries=self.entries if self.entries.numel() else entries)

    def capacity(self, cache: Tensor) -> int:
        """The rows that there may be."""
        return int(self.blocks.shape[1] * cache.shape[2] if self.is_paged else cache.shape[2])

    def sequence(self, k: Tensor, v: Tensor, number: int, length: int, padding: int) -> tuple[Tensor, Tensor]:
        """The keys and values of a sequence, [1, Hkv, rows, width], as numbers of more than 8 bits."""
        k, v = (self._rows(x, number, length, padding) for x in (k, v))
        if k.dtype is not F8:
            return k, v
        k_factors, v_factors = (None if x is None else x[number] for x in self.factors())
        return from_8_bits(k, k_factors), from_8_bits(v, v_factors)

    def _rows(self, cache: Tensor, number: int, length: int, padding: int) -> Tensor:
        if not self.is_paged:
            return cache[int(self.entries[number]), :, padding:length][None]
        pages = cache[self.blocks[number, : -(-length // max(1, cache.shape[2]))].long()]
        return pages.transpose(0, 1).flatten(1, 2)[None, :, padding:length]

    def check(self, cache: Tensor, queries: int) -> list[tuple[int, int]]:
        """Raise ``ValueError`` where a row would lie outside of the cache; returns lengths and padding."""
        capacity, is_paged, written = self.capacity(cache), self.is_paged, self.in_numbers()
        lengths, padding, entries = (x.tolist() for x in (written.lengths, written.padding, written.entries))
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
            used = each < self.lengths[:, None]
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
    for name, x, form in (
        ("q", q, "[B, H, Nq, D]"),
        ("k_cache", k_cache, "[B, Hkv, Nmax, D] or, in pages, [pages, Hkv, page, D]"),
        ("v_cache", v_cache, "[B, Hkv, Nmax, Dv] or, in pages, [pages, Hkv, page, Dv]"),
    ):
        if not isinstance(x, Tensor):
            raise TypeError(f"'{name}' must be a tensor, not {type(x).__name__}")
        if x.dim() != 4:
            raise ValueError(f"'{name}' has shape {list(x.shape)}; {form} is expected")
        if x.device != q.device:
            raise ValueError(f"'{name}' is on {x.device}, but 'q' is on {q.device}")
    match("k_cache", k_cache, 3, q.shape[3], "the head dimension of q")
    for axis, what in enumerate(("entries or pages", "heads", "rows")):
        match("v_cache", v_cache, axis, k_cache.shape[axis], f"the {what} of k_cache")
    batch = q.shape[0]
    found = _numbers("cache_seqlens", lengths, (batch,), q)
    nothing, no_blocks, no_factors = _usual(_nothing, batch, q)
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
    else:
        match("k_cache", k_cache, 0, batch, "the batch size of q; 'cache_batch_idx' says which entries are meant")
    factors = [
        no_factors if given is None else factors_of(name, given, of, (batch, k_cache.shape[1]), q.device)
        for name, given, of in (
            ("k_descale", k_descale, ("k_cache", k_cache)),
            ("v_descale", v_descale, ("v_cache", v_cache)),
        )
    ]
    return Cache(found, padding, entries, blocks, *factors)


def _nothing(batch: int, device: torch.device) -> tuple[Tensor, ...]:
    """No numbers, no pages and no factors of so many sequences."""
    numbers, blocks = (torch.empty(shape, dtype=torch.int32, device=device) for shape in ((0,), (batch, 0)))
    return numbers, blocks, torch.empty((0, 0), dtype=torch.float32, device=device)


def _written_out(batch: int, device: torch.device) -> tuple[Tensor, ...]:
    """The padding and the entries of so many sequences where nobody gives others."""
    return torch.zeros(batch, dtype=torch.int32, device=device), torch.arange(batch, dtype=torch.int32, device=device)


def _usual(make: _Make, batch: int, like: Tensor) -> tuple[Tensor, ...]:
    """What most calls of so many sequences say, on the device of a tensor. Nobody writes to it.

    On a CPU it is made once: a small call takes as long as to make it. Autograd saves it for calls to come, whatever
    mode this one is in.
    """
    if not (like.is_cpu and is_plain((like,))):
        return make(batch, like.device)
    found = _USUAL.get((make, batch))
    if found is None:
        with torch.inference_mode(mode=False):
            found = make(batch, like.device)
        if len(_USUAL) < _MOST_USUAL:
            _USUAL[make, batch] = found
    return found


def _numbers(name: str, x: object, shape: tuple[int | None, ...], q: Tensor) -> Tensor:
    takes_number = len(shape) == 1
    number = as_number(x, whole=True) if takes_number else None
    if number is not None:
        return torch.full((shape[0] or 0,), saturated_number(number), dtype=torch.int32, device=q.device)
    if not isinstance(x, Tensor):
        what = f"a tensor ({_form(shape)})" + (" or an int" if takes_number else "")
        raise TypeError(f"'{name}' must be {what}, not {type(x).__name__}")
    if not is_integral(x.dtype):
        raise TypeError(f"'{name}' is {x.dtype}; {_form(shape)} is expected")
    if x.dim() != len(shape) or any(
        wanted not in (None, length) for wanted, length in zip(shape, x.shape, strict=True)
    ):
        raise ValueError(f"'{name}' has shape {list(x.shape)}; {_form(shape)} is expected")
    if x.device != q.device:
        raise ValueError(f"'{name}' is on {x.device}, but 'q' is on {q.device}")
    return saturated(x).contiguous()


def _form(shape: tuple[int | None, ...]) -> str:
    """What a tensor of numbers looks like. Written where one does not fit alone: Dynamo writes no symbolic size."""
    return f"i32[{', '.join('P' if length is None else str(length) for length in shape)}]"


class CachedChecker(RaggedChecker):
    """Turns calls with a cache into ``Call``s: the shard is the last rows of a cache that is full."""

    keys_and_values: ClassVar[tuple[str, str]] = ("k_cache", "v_cache")

    def _check(self, q: Tensor, k: Tensor, v: Tensor, tensors: Sequence[Tensor], rest: Rest, threads: int) -> Call:
        numbers: Any = rest[0]
        shard, sizes = self.check_cached(q, k, v, tensors, numbers)
        _, kernel = self.check_what_runs(q, k, v, tensors)
        return self._made(q, k, v, tensors, shard, sizes, kernel, rest[1], threads)

    def check_cached(
        self, q: Tensor, k: Tensor, v: Tensor, tensors: Sequence[Tensor], numbers: Sequence[Any]
    ) -> tuple[Shard, dict[str, int]]:
        """The shard and the sizes of sequences that fill the cache. Raises ``ValueError``."""
        b_start, h_start, b_total, h_total, capacity = numbers
        heads, kv_heads = q.shape[1], k.shape[1]
        if (kv_heads == 0 and heads > 0) or (kv_heads > 0 and heads % kv_heads):
            raise ValueError(f"q has {heads} heads and the cache has {kv_heads}; H must be a multiple of Hkv")
        shard = Shard(
            batch=q.shape[0], heads=heads, kv_heads=kv_heads, q_len=q.shape[2], kv_len=capacity,
            b_start=b_start, h_start=h_start, b_total=b_total, h_total=h_total,
            q_total=max(capacity, q.shape[2]), kv_total=max(capacity, q.shape[2]),
        )  # fmt: skip
        check_shard(self.spec, shard)
        sizes = shard.sizes(q.shape[3], v.shape[3])
        for declared, tensor in zip(self.spec.tensors, tensors, strict=True):
            check_captured(declared, tensor, sizes, q.device)
        return shard, sizes

    def _check_types(self, q: Tensor, k: Tensor, v: Tensor) -> None:
        if k.dtype is not F8 and v.dtype is not F8:
            super()._check_types(q, k, v)
            return
        if k.dtype is not v.dtype:
            raise TypeError(f"'k_cache' is {k.dtype}, but 'v_cache' is {v.dtype}; both are of 8 bits, or neither")
        if not self.spec.takes_f8:
            known = ", ".join(map(str, self.dtypes))
            raise TypeError(
                f"'k_cache' and 'v_cache' are {F8}; '{self.spec.name}' is built for {known}: name f8e4m3 in its dtype "
                "statement, too"
            )
        super()._check_types(q, q, q)


class CachedEngine(Engine):
    """Forward of one spec over caches: on CPUs, or on the reference, sequence by sequence."""

    kind: Kind = CACHED
    checks: ClassVar[type[CallChecker]] = CachedChecker

    def attend(self, tensors: Tensors, rest: Rest, keeps_lse: bool = True) -> Attended:
        """``o``, ``lse`` and its parts, as of a dense call."""
        *own_list, lengths, padding, entries, blocks, k_factors, v_factors = tensors
        own: Tensors = tuple(own_list)
        asked = cache = Cache(lengths, padding, entries, blocks, k_factors, v_factors)
        q, k, v = own[0], own[1], own[2]
        checker = self.checker
        assert isinstance(checker, CachedChecker)
        given: Any = rest[0]
        capacity = cache.capacity(k)
        numbers: Any = (*given[:-1], capacity)
        found: Sequence[tuple[int, int]] = ()
        if self._sees(own, lengths, capacity):
            cache = asked.in_numbers()
            found = cache.check(k, q.shape[2])
        call = checker.find(own, (numbers, rest[1]))
        pairs = [(length, length) for length, _ in found]
        checker.check_lengths(call.head_dim, call.sizes, pairs)
        captured = self._captured(call, own)
        each = PerSequence(self.spec, call, pairs, own, captured)
        kernel = call.kernel
        if call.is_empty or kernel is None:
            return self._attend_each(call, cache, found, own, each)
        if call.needs_copy or (q.data_ptr() | k.data_ptr() | v.data_ptr()) % kernel.row_alignment:
            q, k, v = (readable(kernel, x) for x in (q, k, v))
            own = (q, k, v, *own[3:])
            call = checker.find(own, (numbers, rest[1]))
        check_memory(q, k, v)
        o = torch.empty_strided(*call.o, dtype=q.dtype, device=call.device)
        lse, parts, parts_at = None, None, 0
        if self.signature.has_lse and keeps_lse:
            lse = torch.empty_strided(*call.lse, dtype=torch.float32, device=call.device)
            make = torch.empty if kernel.writes_parts else torch.zeros
            parts = make(call.lse_parts[0], dtype=torch.float32, device=call.device)
            parts_at = parts.data_ptr() if kernel.writes_parts else 0
        values: list[float] = [
            0, q.data_ptr(), k.data_ptr(), v.data_ptr(), o.data_ptr(), address(lse), parts_at, 0, 0, 0, 0, 0
        ]  # fmt: skip
        self._values.add(values, call, captured, self._values.no_gradients)
        self._run_kernel(call, values, asked, (k, given[-1]), each)
        return o if q is tensors[0] else laid(o, layout_like(tensors[0], o.shape)), lse, parts

    def _sees(self, own: Tensors, lengths: Tensor, capacity: int) -> bool:
        """Whether the host looks at what says where rows lie. On a GPU it waits for nothing that kernels do without."""
        q, v, checker = own[0], own[2], self.checker
        assert isinstance(checker, CachedChecker)
        if not (q.is_cuda and lengths.is_cuda and self.kernels):
            return True
        why = checker.asks_lengths(HeadDim(q.shape[3], v.shape[3]), own, (capacity, capacity))
        if why and torch.cuda.is_current_stream_capturing():
            raise ValueError(
                f"'{self.spec.name}': {why}, so that the host has to wait for cache_seqlens, which it cannot while a "
                "graph is captured"
            )
        return bool(why)

    def _run_kernel(
        self, call: Call, values: list[float], cache: Cache, given: tuple[Tensor, int], each: PerSequence
    ) -> None:
        """Run kernels, which find sequences in the cache by themselves. ``given``: it, and the splits."""
        kernel, (k, splits) = call.kernel, given
        assert kernel is not None, "there is one"
        pages = cache.blocks if cache.is_paged else None
        padding, entries = (x if x.numel() else None for x in (cache.padding, cache.entries))
        places = [cache.lengths, padding, entries, pages, *cache.factors()]
        tables = [None if x is None else torch.from_numpy(x).to(call.device) for x in each.arrays()]
        values += [*(address(x) for x in places), 0, *(address(x) for x in tables)]
        known = sizes_of_cache(call, k, cache.blocks.shape[1], splits)
        settled, layout = list(call.settled), kernel.layout
        for name, number in known.items():
            settled[layout.slots[name] - layout.varying] = number
        key = tuple(known.values())
        prepared = call.backward.get(key)  # there is no backward pass
        if prepared is None:
            try:
                prepared = call.backward[key] = kernel.prepare("forward", (*values, *settled))
            except LookupError:
                raise no_ragged_kernels(self.spec.name, "decode") from None
        self._workspaces.run(call, prepared, values)

    def gradients(self, d_o: Tensor, rows: Rows, tensors: Tensors, rest: Rest, needs: Sequence[bool]) -> list[Tensor]:  # noqa: ARG002
        """There are none. Raises ``RuntimeError``."""
        raise RuntimeError(
            f"'{self.spec.name}': decode has no gradients; call it under torch.no_grad(), or train with the op"
        )

    def derive(self, program: Program, values: Sequence[Any], rest: Rest) -> list[Tensor]:  # noqa: ARG002
        """There are none. Raises ``RuntimeError``."""
        raise RuntimeError(
            f"'{self.spec.name}': decode has no derivatives, of neither mode: call the op, or op.reference.decode"
        )

    def _attend_each(
        self, call: Call, cache: Cache, found: Sequence[tuple[int, int]], tensors: Tensors, each: PerSequence
    ) -> Attended:
        q, has_lse = tensors[0], self.signature.has_lse
        dtype = torch.float64 if q.dtype is torch.float64 else torch.float32
        o = q.new_empty_strided(*call.o).zero_()
        lse = q.new_full(call.lse[0], -math.inf, dtype=dtype) if has_lse else None
        names = [param.name for param in self.spec.params]
        for number, shard, own in cached_sequences(self.spec, call.shard, cache, found, tensors[:3]):
            params = zip(names, each.params_of(number), each.captured.given, strict=True)
            problem = tiled.Problem(
                spec=self.spec,
                q=own[0],
                k=own[1],
                v=own[2],
                tensors={x.name: given for x, given in zip(self.spec.tensors, each.captured.tensors, strict=True)},
                params={name: value if x is None else x for name, value, x in params},
                shard=shard,
                pairs=self._pairs,
            )
            rows, sums = tiled.forward(problem)
            o[number] = rows[0]
            if lse is not None and sums is not None:
                lse[number] = sums[0].to(dtype)
        return o, lse, q.new_zeros(call.lse_parts[0], dtype=torch.float32) if has_lse else None


def sizes_of_cache(call: Call, k: Tensor, columns: int, splits: int) -> dict[str, int]:
    """What kernels for GPUs are told of a cache, k, of a table of pages with so many columns, and of splits."""
    group_rows = call.shard.q_len * (call.shard.heads // call.shard.kv_heads)
    known = {"cache_entries": k.shape[0], "cache_rows": k.shape[2], "table_columns": columns}
    return known | {"group_rows": group_rows, "key_element": element_of_cache(k), "splits": splits}


def cached_sequences(
    spec: AttentionSpec, whole: Shard, cache: Cache, found: Sequence[tuple[int, int]], tensors: Sequence[Tensor]
) -> Iterator[tuple[int, Shard, tuple[Tensor, Tensor, Tensor]]]:
    """Each sequence that gives anything: its number, its place, and q, k and v as a dense call takes them."""
    q, k, v = tensors
    b_total, h_total, _, _ = whole.totals()
    for number, (length, padding) in enumerate(found):
        shard = Shard(
            batch=1, heads=whole.heads, kv_heads=whole.kv_heads, q_len=whole.q_len, kv_len=length - padding,
            b_start=whole.b_start + number, h_start=whole.h_start, q_start=length - whole.q_len, kv_start=padding,
            b_total=b_total, h_total=h_total, q_total=length, kv_total=length,
        )  # fmt: skip
        if not tiled.gives_nothing(spec, shard):
            yield number, shard, (q[number][None], *cache.sequence(k, v, number, length, padding))


def element_of_cache(k: Tensor) -> int:
    """The code of what a cache holds, which is of the type of q or of 8 bits."""
    return ELEMENTS[k.dtype]
