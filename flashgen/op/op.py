"""AttentionOp: what a user calls.

In: an ``AttentionSpec`` and its kernels. Out: a callable over tensors, registered with ``torch.library``. A
call binds names to positions and goes to the operator (``op_calls.py``).

The dense formula judges the op (``op.reference``). It takes what the op takes, in any floating type and head dimension,
and gives ``o``, or ``(o, lse)``, by PyTorch's operators on any device, differentiable any number of times by autograd.
Ragged batches are computed sequence by sequence.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Never, overload

import torch
from torch import Tensor

from flashgen.ir.spec import AttentionSpec, HeadDim
from flashgen.kinds.cached import CACHED
from flashgen.kinds.eight_bits import EIGHT_BITS
from flashgen.kinds.ragged import RAGGED
from flashgen.op import cached, ragged
from flashgen.op.appending import append, check_caches, written
from flashgen.op.cached import Cache, cache_of
from flashgen.op.call import Tensors, probability_in_force
from flashgen.op.checks import check_rows
from flashgen.op.conversion import offset_arguments, splits_argument
from flashgen.op.eight_bits import from_8_bits
from flashgen.op.lengths import lengths
from flashgen.op.op_calls import BACKENDS, OpParts, check_backend, is_repeatable
from flashgen.op.op_shown import ShownOp, explained_call, with_device
from flashgen.op.registered import Registered
from flashgen.op.selected import check_selection
from flashgen.op.signature import F8
from flashgen.op.tensor_kinds import check_tensors, lies_in_memory, refuse_distributed
from flashgen.plan.explanation import Explanation
from flashgen.reference import dense
from flashgen.reference.programs import Place
from flashgen.reference.shard import Shard

__all__ = ["BACKENDS", "AttentionOp", "BaseOp", "OpParts", "check_backend", "is_repeatable"]


@dataclass(frozen=True)
class Reference:
    """The dense formula in a type of choice: ``float64`` judges the op. It is called like the op.

    ``dtype=None`` composes the formula in the type of ``q``, as a person would in PyTorch. Results are in ``dtype``.
    ``op_with`` makes the op whose calls something else runs.
    """

    op_with: Callable[..., Any]

    def __call__(self, *tensors: Tensor, dtype: torch.dtype | None = torch.float64, **arguments: Any) -> Any:
        """What the op computes of these arguments. Raises what the op raises.

        What is of 8 bits is multiplied by its factors first, in ``dtype``; of None that is float32.
        """
        return self._op(dtype)(*tensors, **arguments)

    def varlen(self, *tensors: Any, dtype: torch.dtype | None = torch.float64, **arguments: Any) -> Any:
        """What ``op.varlen`` computes of these arguments: the dense formula of each sequence. Raises what it raises."""
        return self._op(dtype).varlen(*tensors, **arguments)

    def decode(self, *tensors: Any, dtype: torch.dtype | None = torch.float64, **arguments: Any) -> Any:
        """What ``op.decode`` computes of these arguments: the dense formula of each sequence. Raises what it raises.

        Nothing is written to the cache: k and v stand behind its rows in copies. ``num_splits`` changes nothing.
        """
        return self._op(dtype).decode(*tensors, **arguments)

    def _op(self, dtype: torch.dtype | None) -> Any:
        if dtype is not None and not getattr(dtype, "is_floating_point", False):
            raise TypeError(f"'dtype' is {dtype}; a floating torch.dtype is expected, or None for that of q")
        return self.op_with(_run=functools.partial(_evaluated, dtype), _write=_to_copies, _is_exact=True)


def _evaluated(
    dtype: torch.dtype | None,
    op: Registered,
    tensors: Tensors,
    offsets: tuple[object, ...],
    _deterministic: bool,
    return_lse: bool,
) -> Any:
    """What ``registration.call`` gives of the same arguments."""
    signature, checker, spec = op.signature, op.engine.checker, op.engine.spec
    check_tensors(signature.inputs_by_name, tensors)
    refuse_distributed("references", tensors)
    q, k, v = rows = tensors[:3]
    for name, x in zip("qkv", rows, strict=True):
        if not x.is_floating_point():
            raise TypeError(f"'{name}' is {x.dtype}; a floating type is expected")
    kind, end = signature.kind, 3 + len(spec.tensors)
    captured, own = tensors[3:end], tensors[signature.tensor_arguments - len(kind.tensors) :]
    numbers = offset_arguments(offsets, kind)
    formula = functools.partial(_formula, spec, captured, tensors[end:], dtype)
    if kind is RAGGED:
        check_rows(q, k, v)
        found = lengths(own[0], own[1], (q.shape[0], k.shape[0]), numbers[4:])
        pairs, numbers = found.pairs, (*numbers[:4], found.max_q, found.max_k, found.count)
    elif kind is CACHED:
        cache = Cache(*own).in_numbers()
        filled = cache.check(k, q.shape[2])
        pairs, numbers = [(length, length) for length, _ in filled], (*numbers[:4], cache.capacity(k))
    shard, sizes = checker.checks.shapes(spec, q, k, v, captured, numbers)
    head_dim = HeadDim(q.shape[-1], v.shape[-1])
    check_selection(spec, captured, sizes)
    if not kind.by_sequence:
        checker.indices.check(head_dim, sizes)
        if F8 in (q.dtype, k.dtype, v.dtype):
            wide, factors = dtype or torch.float32, own if kind is EIGHT_BITS else (None,) * 3
            rows = tuple(from_8_bits(x, each, wide) for x, each in zip(rows, factors, strict=True))
        o, lse = formula(rows, shard)
        return (o, lse) if return_lse else o
    checker.lengths.check(head_dim, sizes, pairs)
    nothing = _nothing_of((*rows, *captured, *tensors[end : signature.inputs]), dtype or q.dtype)
    o = q.new_zeros((*q.shape[:-1], v.shape[-1]), dtype=nothing.dtype) + nothing
    sums = q.new_full(kind.rows(q), -torch.inf, dtype=nothing.dtype) + nothing
    if kind is RAGGED:
        sums[:, sum(length for length, _ in pairs) :] = 0.0  # of no sequence
        problems = ragged.problems(spec, shard, found, rows)
    else:
        problems = cached.problems(spec, shard, cache, filled, rows)
    for _, part, each, view in problems:
        of_part, lse = formula(each, part)
        view(Place.QUERIES, o).copy_(of_part)
        if lse is not None:
            view(Place.SUMS, sums).copy_(lse)
    return (o, sums) if return_lse else o


def _formula(
    spec: AttentionSpec,
    tensors: Sequence[Tensor],
    others: Sequence[Tensor | None],
    dtype: torch.dtype | None,
    rows: Sequence[Tensor],
    shard: Shard,
) -> tuple[Tensor, Tensor | None]:
    """o and lse of a dense problem. ``others``: params, then seed and drop probability where pairs are dropped."""
    q, k, v = rows
    params = {param.name: x for param, x in zip(spec.params, others, strict=False) if x is not None}
    dropout = None
    if spec.dropout is not None:
        seed, chosen = others[len(spec.params) : len(spec.params) + 2]
        sizes = shard.sizes(q.shape[3], v.shape[3])
        values = dense.param_values(spec, {name: x.item() for name, x in params.items()}, sizes)
        probability = probability_in_force(spec, values, sizes, chosen)
        if probability:
            assert seed is not None, "calls that may drop have one"
            dropout = dense.Dropout(probability, seed)
    named = {tensor.name: x for tensor, x in zip(spec.tensors, tensors, strict=True)}
    return dense.attention(spec, q, k, v, tensors=named, params=params, shard=shard, dropout=dropout, dtype=dtype)


def _to_copies(cache: Cache, k_cache: Tensor, v_cache: Tensor, k: Tensor, v: Tensor) -> tuple[Cache, Tensor, Tensor]:
    """What ``appending.written`` gives, of caches that stay as they are."""
    check_caches(k_cache, v_cache, in_memory=lies_in_memory((k_cache, v_cache)))
    k_cache, v_cache = k_cache.clone(), v_cache.clone()
    return append(cache, k_cache, v_cache, k, v), k_cache, v_cache


def _nothing_of(tensors: Sequence[Any], dtype: torch.dtype) -> Tensor:
    """0, for results without a pair, which autograd follows back to every tensor as the op's does."""
    zero = torch.zeros((), dtype=dtype, device=tensors[0].device)
    for x in tensors:
        if x is not None and x.is_floating_point():
            zero = zero + x.flatten()[:0].to(zero).sum()
    return zero


class BaseOp(ShownOp):
    """One attention operator, over ragged batches and caches as well; subclasses say how the plain call is made."""

    _write = staticmethod(written)

    def _with(self, **own: Any) -> AttentionOp:
        """An op that is called like this one, of which something is otherwise, such as what runs calls."""
        made = object.__new__(AttentionOp)
        vars(made).update(vars(self), **own)
        return made

    @property
    def reference(self) -> Reference:
        """The dense formula: called like the op, ``op.reference(q, k, v, dtype=torch.float64)``; see ``Reference``."""
        return Reference(self._with)

    def varlen(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cu_seqlens_q: Tensor,
        cu_seqlens_k: Tensor,
        max_seqlen_q: int | None = None,
        max_seqlen_k: int | None = None,
        *spare: Never,
        return_lse: bool = False,
        dropout_p: float | Tensor | None = None,
        seed: int | Tensor | None = None,
        b_start: int = 0,
        h_start: int = 0,
        b_total: int | None = None,
        h_total: int | None = None,
        deterministic: bool | None = None,
        **captured: Any,
    ) -> Any:
        """Attention within each sequence of a ragged batch: ``q`` [Tq, H, D], ``k`` [Tk, Hkv, D], ``v`` [Tk, Hkv, Dv]
        → ``o`` [Tq, H, Dv].

        Sequence b is the rows ``cu_seqlens_q[b]`` to ``cu_seqlens_q[b + 1]`` of q, and those of ``cu_seqlens_k`` of k
        and v; both are int32 [B + 1] and begin with 0. Any length may be 0. Of rows behind the last sequence o, lse
        and gradients are 0. A spec means what it means for a dense call of that sequence alone: b is its number, i and
        j count inside of it, Nq and Nk are its own lengths. In shapes of captured tensors they are ``max_seqlen_q`` and
        ``max_seqlen_k``, by default the longest; clamped indices are clamped to these. ``return_lse`` adds ``lse``
        [H, Tq]. All else is as for the op.

        Raises what the op raises, and ``ValueError`` for lengths that fall, end behind T, or pass the maximum.
        """
        if spare:
            raise self.signature.by_position("q, k, v, lengths and their maxima", spare)
        return self._call_ragged(
            q, k, v, (cu_seqlens_q, cu_seqlens_k), (b_start, h_start, b_total, h_total, max_seqlen_q, max_seqlen_k),
            self.signature.bind(captured) if captured or self.signature.names else (),
            deterministic, return_lse, dropout_p, seed,
        )  # fmt: skip

    def decode(
        self,
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        cache_seqlens: Tensor | int,
        *spare: Never,
        k: Tensor | None = None,
        v: Tensor | None = None,
        block_table: Tensor | None = None,
        cache_batch_idx: Tensor | None = None,
        leftpad: Tensor | None = None,
        num_splits: Any = 0,
        k_descale: Tensor | float | None = None,
        v_descale: Tensor | float | None = None,
        return_lse: bool = False,
        b_start: int = 0,
        h_start: int = 0,
        b_total: int | None = None,
        h_total: int | None = None,
        **captured: Any,
    ) -> Any:
        """Attention of the last queries of each sequence over a cache: ``q`` [B, H, Nq, D] → ``o`` [B, H, Nq, Dv].

        ``k_cache`` is [B, Hkv, Nmax, D], ``v_cache`` [B, Hkv, Nmax, Dv]; with ``block_table`` int32 [B, P] they are
        pages [pages, Hkv, page, D], of which the table names those of each sequence. ``cache_seqlens`` int32 [B], or
        one number, are the rows that are filled. ``k`` and ``v`` [B, Hkv, new, D] are written behind them first.
        ``cache_batch_idx`` int32 [B] says which entries of the cache are meant; rows before ``leftpad`` int32 [B] are
        not seen. Nq and Nk both mean ``cache_seqlens[b] + new``, j counts the rows of the cache, and i those of the
        queries, of which the last is the last row. In shapes of captured tensors Nq and Nk are the rows that the cache
        has room for. The keys of a head are computed in ``num_splits`` parts, which threads or a GPU's blocks share and
        which are merged; 0: as many as the lengths, on a GPU the room, ask for. Nothing is dropped. There are no
        gradients.

        The cache may be of 8 bits, ``torch.float8_e4m3fn``, beside q of more: then ``k_descale`` and ``v_descale``,
        float32 [B, Hkv] or one number, are what its keys and values are multiplied by, by default 1, and k and v are
        written divided by them, no further out than ±448; where they are of 8 bits, too, as they are.

        Raises what the op raises, and ``ValueError`` where a length or a page lies outside of the cache. Nobody waits
        for those on a GPU: the nearest that lie within are taken, and rows of k and v without a place are left out,
        unless ``FLASHGEN_CHECK_LENGTHS`` is set.
        """
        if spare:
            raise self.signature.by_position("q, k_cache, v_cache and cache_seqlens", spare)
        self._check_names("decode", CACHED)
        splits = splits_argument(num_splits)
        if (k is None) != (v is None):
            raise ValueError("k and v are written to the cache together: pass both, or neither")
        cache = cache_of(
            q, k_cache, v_cache, cache_seqlens, block_table=block_table, cache_batch_idx=cache_batch_idx,
            leftpad=leftpad, k_descale=k_descale, v_descale=v_descale,
        )  # fmt: skip
        bound = self.signature.bind(captured) if captured or self.signature.names else ()
        nothing = 0.0 if self.signature.has_dropout else None
        tensors = self._tensors(q, k_cache, v_cache, bound, return_lse, nothing, None)
        if k is not None and v is not None:
            cache, k_cache, v_cache = self._write(cache, k_cache, v_cache, k, v)
            tensors = (tensors[0], k_cache, v_cache, *tensors[3:])
        places = (cache.lengths, cache.padding, cache.entries, cache.blocks, cache.k_factors, cache.v_factors)
        return self._run(
            self._kinds[CACHED.name],
            (*tensors, *places),
            (b_start, h_start, b_total, h_total, splits),
            False,
            return_lse,
        )

    def explain(self, q: Tensor, k: Tensor, v: Tensor, **arguments: Any) -> Explanation:
        """What a call with these arguments runs, and why, without running it: tiles, kernels, bytes, predicted time.

        Takes what the op takes, also fake tensors; those on ``meta`` are taken to be on the GPU where the op can use
        one, else on the CPU. Kernels of a GPU are compiled if they were not before. Raises what the op raises.
        """
        device = self._device()
        check_tensors("qkv", (q, k, v))
        if self.signature.has_dropout:
            arguments["seed"] = 0  # none is drawn
        asking = self._with(_run=functools.partial(self._explained, device))
        found: Any = asking(with_device(q, device), with_device(k, device), with_device(v, device), **arguments)
        return found  # type: ignore[no-any-return]

    def explain_decode(
        self,
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        *,
        block_table: Tensor | None = None,
        num_splits: int = 0,
        b_start: int = 0,
        h_start: int = 0,
        b_total: int | None = None,
        h_total: int | None = None,
        **captured: Any,
    ) -> Explanation:
        """What ``decode`` runs for these arguments on a GPU, or on the emulator, and why, without running it.

        Takes those arguments that it depends on; tensors as ``explain`` does. Bytes and time are those of a full cache.
        Raises what ``decode`` raises, and ``ValueError`` where other kernels run, or none.
        """
        device = self._device()
        tensors = self._positional(
            (with_device(q, device), with_device(k_cache, device), with_device(v_cache, device)),
            self.signature.bind(captured),
        )
        if block_table is not None and block_table.dim() != 2:
            raise ValueError(f"'block_table' has shape {list(block_table.shape)}; i32[B, P] is expected")
        columns = 0 if block_table is None else block_table.shape[1]
        room, splits = k_cache.shape[2] * max(columns, 1), splits_argument(num_splits)
        numbers: Any = (b_start, h_start, b_total, h_total, room, columns, splits)
        nothing = 0.0 if self.signature.has_dropout else None
        call, told = explained_call(self._kinds[CACHED.name].engine, tensors, (numbers, False), nothing, device)
        shows = self._shows(call.device.type)
        found = None if shows is None or call.is_empty else shows.explain(self.spec.name, told)
        if found is None:
            raise ValueError(
                f"'{self.spec.name}': explain_decode says what calls with pairs run on GPUs and on the emulator; "
                f"q is on {call.device}, with backend={self._parts.backend!r}"
            )
        return found


class AttentionOp(BaseOp):
    """An op whose captured tensors and params are passed by name."""

    @overload
    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, *, return_lse: Literal[False] = False, **arguments: Any
    ) -> Tensor: ...

    @overload
    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, *, return_lse: Literal[True], **arguments: Any
    ) -> tuple[Tensor, Tensor]: ...

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *spare: Never,
        return_lse: bool = False,
        dropout_p: float | Tensor | None = None,
        seed: int | Tensor | None = None,
        q_start: int = 0,
        kv_start: int = 0,
        b_start: int = 0,
        h_start: int = 0,
        q_total: int | None = None,
        kv_total: int | None = None,
        b_total: int | None = None,
        h_total: int | None = None,
        deterministic: bool | None = None,
        q_descale: Tensor | float | None = None,
        k_descale: Tensor | float | None = None,
        v_descale: Tensor | float | None = None,
        **captured: Any,
    ) -> Any:
        """Attention: ``q`` [B, H, Nq, D], ``k`` [B, Hkv, Nk, D], ``v`` [B, Hkv, Nk, Dv] → ``o`` [B, H, Nq, Dv].

        ``captured`` holds the spec's tensors and params by name; params are numbers or 0-dim tensors
        (float32 or int32). q, k and v may be jagged NestedTensors [B, H, j, D], as is the result then: sequences are
        computed as ``varlen`` says. ``return_lse`` adds ``lse`` [B, H, Nq], float32. ``dropout_p`` overrides the
        spec's; ``seed`` None draws one from torch's generator. ``*_start`` and ``*_total`` place a shard in
        the whole. ``deterministic``: gradients are the same bit by bit again and again, on CPUs on any number of
        threads; None follows ``torch.use_deterministic_algorithms``.

        q, k and v may be of 8 bits, ``torch.float8_e4m3fn``, all three; ``o`` then is bfloat16, and there are no
        gradients. They are multiplied by ``q_descale``, ``k_descale`` and ``v_descale``, float32 [B, Hkv] or one
        number each, by default 1; the queries of a head by the factor of its key/value head.

        Raises ``TypeError`` (a missing or unknown argument, a wrong dtype) and ``ValueError`` (a wrong
        shape, device, offset or probability), naming the argument, what was expected and what came.
        """
        if spare:
            raise self.signature.by_position("q, k and v", spare)
        return self._call(
            q, k, v, self.signature.bind(captured) if captured or self.signature.names else (),
            (q_start, kv_start, b_start, h_start, q_total, kv_total, b_total, h_total),
            deterministic, return_lse, dropout_p, seed, (q_descale, k_descale, v_descale),
        )  # fmt: skip
