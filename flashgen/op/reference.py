"""The dense formula of an op, which judges it: ``op.reference``.

In: what the op takes, in any floating type and head dimension. Out: ``o``, or ``(o, lse)``, by PyTorch's operators on
any device, differentiable any number of times by autograd. Ragged batches are computed sequence by sequence.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from flashgen.ir.spec import AttentionSpec, HeadDim
from flashgen.kinds.cached import CACHED
from flashgen.kinds.ragged import RAGGED
from flashgen.op.appending import append
from flashgen.op.cached import cache_of, cached_sequences
from flashgen.op.call import CallChecker, Tensors, check_probability
from flashgen.op.checks import check_cached, check_ragged, check_rows, check_shapes
from flashgen.op.conversion import (
    check_switch,
    offset_arguments,
    probability_argument,
    seed_argument,
    splits_argument,
)
from flashgen.op.eight_bits import F8, from_8_bits
from flashgen.op.f8 import factors_of_call
from flashgen.op.lengths import LengthChecks, check_starts, lengths
from flashgen.op.nested import is_nested, sequences
from flashgen.op.plain import check_tensors, lies_in_memory, refuse_distributed
from flashgen.op.ragged import of_sequence
from flashgen.op.selected import check_selection
from flashgen.op.sharing import check_caches
from flashgen.op.signature import Signature
from flashgen.reference import dense
from flashgen.reference.shard import Shard
from flashgen.reference.tiled import gives_nothing


@dataclass(frozen=True)
class Reference:
    """The dense formula in a type of choice: ``float64`` judges the op.

    ``dtype=None`` composes the formula in the type of ``q``, as a person would in PyTorch. Results are in ``dtype``.
    """

    spec: AttentionSpec
    signature: Signature
    positional: Callable[..., Tensors]
    checker: CallChecker

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        dtype: torch.dtype | None = torch.float64,
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
        """What the op computes of these arguments. Raises what the op raises.

        What is of 8 bits is multiplied by its factors first, in ``dtype``; of None that is float32.
        """
        if is_nested(q, k, v):
            given = sequences(q, k, v, (q_start, kv_start, q_total, kv_total))
            found = self.varlen(
                given.q, given.k, given.v, given.q_offsets, given.k_offsets, dtype=dtype, return_lse=return_lse,
                dropout_p=dropout_p, seed=seed, b_start=b_start, h_start=h_start, b_total=b_total, h_total=h_total,
                deterministic=deterministic, **captured,
            )  # fmt: skip
            return given.nested(found)
        tensors, params = self._bound(q, k, v, captured, dtype, return_lse, deterministic)
        offsets = offset_arguments((q_start, kv_start, b_start, h_start, q_total, kv_total, b_total, h_total))
        shard, sizes = check_shapes(self.spec, q, k, v, tensors, offsets)
        factors = factors_of_call((q, k, v), (q_descale, k_descale, v_descale))
        if F8 in (q.dtype, k.dtype, v.dtype):
            dtype = dtype or torch.float32
            q, k, v = (from_8_bits(x, each, dtype) for x, each in zip((q, k, v), factors, strict=True))
        self.checker.indices.check(HeadDim(q.shape[3], v.shape[3]), sizes)
        check_selection(self.spec, tensors, sizes)
        drawn = self._drawn(q, dropout_p, seed)
        o, lse = self._formula((q, k, v), tensors, params, shard, drawn, dtype)
        return (o, lse) if return_lse else o

    def varlen(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cu_seqlens_q: Tensor,
        cu_seqlens_k: Tensor,
        max_seqlen_q: int | None = None,
        max_seqlen_k: int | None = None,
        *,
        dtype: torch.dtype | None = torch.float64,
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
        """What ``op.varlen`` computes of these arguments: the dense formula of each sequence. Raises what it raises."""
        tensors, params = self._bound(q, k, v, captured, dtype, return_lse, deterministic)
        starts = tuple(
            check_starts(name, x, q.device)
            for name, x in zip(RAGGED.tensors, (cu_seqlens_q, cu_seqlens_k), strict=True)
        )
        numbers = offset_arguments((b_start, h_start, b_total, h_total, max_seqlen_q, max_seqlen_k), RAGGED)
        check_rows(q, k, v)
        found = lengths(starts[0], starts[1], (q.shape[0], k.shape[0]), numbers[4:])
        most = (found.max_q, found.max_k, found.count)
        shard, sizes = check_ragged(self.spec, q, k, v, tensors, (*numbers[:4], *most))
        LengthChecks(self.spec, self.checker.indices).check(HeadDim(q.shape[2], v.shape[2]), sizes, found.pairs)
        check_selection(self.spec, tensors, sizes)
        drawn = self._drawn(q, dropout_p, seed)
        dtype = dtype or q.dtype
        nothing = _nothing_of((q, k, v, *tensors, *params.values()), dtype)
        rows, sums = [], []
        for number, q_rows, k_rows in found.sequences():
            own = of_sequence(shard, number, q_rows, k_rows)
            each = tuple(x[rows].transpose(0, 1)[None] for x, rows in ((q, q_rows), (k, k_rows), (v, k_rows)))
            if gives_nothing(self.spec, own):
                rows.append(q.new_zeros((own.q_len, own.heads, v.shape[2]), dtype=dtype) + nothing)
                sums.append(q.new_full((own.heads, own.q_len), -torch.inf, dtype=dtype) + nothing)
                continue
            o, lse = self._formula(each, tensors, params, own, drawn, dtype)
            rows.append(o[0].transpose(0, 1))
            sums.append(o.new_empty(0, 0) if lse is None else lse[0])
        behind, heads = q.shape[0] - int(found.q_starts[-1]), q.shape[1]
        rows.append(q.new_zeros((behind, heads, v.shape[2]), dtype=dtype) + nothing)
        sums.append(q.new_zeros((heads, behind), dtype=dtype) + nothing)
        return (torch.cat(rows), torch.cat(sums, 1)) if return_lse else torch.cat(rows)

    def decode(
        self,
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        cache_seqlens: Tensor | int,
        *,
        k: Tensor | None = None,
        v: Tensor | None = None,
        block_table: Tensor | None = None,
        cache_batch_idx: Tensor | None = None,
        leftpad: Tensor | None = None,
        num_splits: Any = 0,
        k_descale: Tensor | float | None = None,
        v_descale: Tensor | float | None = None,
        dtype: torch.dtype | None = torch.float64,
        return_lse: bool = False,
        b_start: int = 0,
        h_start: int = 0,
        b_total: int | None = None,
        h_total: int | None = None,
        **captured: Any,
    ) -> Any:
        """What ``op.decode`` computes of these arguments: the dense formula of each sequence. Raises what it raises.

        Nothing is written to the cache: k and v stand behind its rows in copies. ``num_splits`` changes nothing.
        """
        splits_argument(num_splits)
        cache = cache_of(
            q, k_cache, v_cache, cache_seqlens, block_table=block_table, cache_batch_idx=cache_batch_idx,
            leftpad=leftpad, k_descale=k_descale, v_descale=v_descale,
        ).in_numbers()  # fmt: skip
        tensors, params = self._bound(q, k_cache, v_cache, captured, dtype, return_lse, None)
        if k is not None and v is not None:
            check_caches(k_cache, v_cache, in_memory=lies_in_memory((k_cache, v_cache)))
            k_cache, v_cache = k_cache.clone(), v_cache.clone()
            cache = append(cache, k_cache, v_cache, k, v)
        *numbers, _ = offset_arguments((b_start, h_start, b_total, h_total, 0), CACHED)
        found = cache.check(k_cache, q.shape[2])
        whole = (*numbers, cache.capacity(k_cache))
        shard, sizes = check_cached(self.spec, q, k_cache, v_cache, tensors, whole)
        pairs = [(length, length) for length, _ in found]
        LengthChecks(self.spec, self.checker.indices).check(HeadDim(q.shape[3], v_cache.shape[3]), sizes, pairs)
        check_selection(self.spec, tensors, sizes)
        dtype = dtype or q.dtype
        nothing = self._drawn(q, 0.0 if self.signature.has_dropout else None, None)
        rows = list(q.new_zeros((*q.shape[:-1], v_cache.shape[3]), dtype=dtype))
        sums = list(q.new_full(q.shape[:-1], -torch.inf, dtype=dtype))
        for number, own, inputs in cached_sequences(self.spec, shard, cache, found, (q, k_cache, v_cache)):
            o, lse = self._formula(inputs, tensors, params, own, nothing, dtype)
            rows[number] = o[0]
            if lse is not None:
                sums[number] = lse[0]
        o = torch.stack(rows) if rows else q.new_zeros((*q.shape[:-1], v_cache.shape[3]), dtype=dtype)
        if not return_lse:
            return o
        return o, torch.stack(sums) if sums else q.new_zeros(q.shape[:-1], dtype=dtype)

    def _bound(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        captured: dict[str, Any],
        dtype: torch.dtype | None,
        return_lse: bool,
        deterministic: bool | None,
    ) -> tuple[Tensors, Mapping[str, Tensor]]:
        """The captured tensors, and the params that are given."""
        bound = self.positional((q, k, v), self.signature.bind(captured), is_exact=True)
        check_tensors(self.signature.inputs_by_name, bound)
        refuse_distributed("references", bound)
        _check_floating(q, k, v, dtype)
        if deterministic is not None:
            check_switch("deterministic", deterministic)
        check_return_lse(self.spec, self.signature, return_lse)
        tensors, params = bound[3 : 3 + len(self.spec.tensors)], bound[3 + len(self.spec.tensors) :]
        return tensors, {param.name: x for param, x in zip(self.spec.params, params, strict=True) if x is not None}

    def _drawn(
        self, q: Tensor, dropout_p: float | Tensor | None, seed: int | Tensor | None
    ) -> tuple[Tensor | None, Callable[[], Tensor]]:
        """The drop probability that is passed, and what gives the seed, the same one for all sequences."""
        if not self.signature.has_dropout:
            if dropout_p is not None:
                refuse_dropout(self.spec, dropout_p)
            drawn = None if seed is None else seed_argument(seed, q.device)
            return None, lambda: seed_argument(None, q.device) if drawn is None else drawn
        chosen = probability_argument(dropout_p, q.device)
        # Also where nothing is dropped: what is wrong with it is no matter of the probability.
        known = [] if seed is None else [seed_argument(seed, q.device)]

        def draw() -> Tensor:
            if not known:
                known.append(seed_argument(None, q.device))
            return known[0]

        return chosen, draw

    def _formula(
        self,
        inputs: Sequence[Tensor],
        tensors: Sequence[Tensor],
        params: Mapping[str, Tensor],
        shard: Shard,
        drawn: tuple[Tensor | None, Callable[[], Tensor]],
        dtype: torch.dtype | None,
    ) -> tuple[Tensor, Tensor | None]:
        q, k, v = inputs
        probability = 0.0
        if self.signature.has_dropout:
            sizes = shard.sizes(q.shape[3], v.shape[3])
            values = dense.param_values(self.spec, {name: x.item() for name, x in params.items()}, sizes)
            chosen = drawn[0]
            probability = dense.drop_probability(self.spec, values, sizes) if chosen is None else float(chosen.item())
            check_probability("dropout" if chosen is None else "dropout_p", probability)
        return dense.attention(
            self.spec,
            q,
            k,
            v,
            tensors={tensor.name: x for tensor, x in zip(self.spec.tensors, tensors, strict=True)},
            params=params,
            shard=shard,
            dropout=dense.Dropout(probability, drawn[1]()) if probability else None,
            dtype=dtype,
        )


def _nothing_of(tensors: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    """0, for results without a pair, which autograd follows back to every tensor as the op's does."""
    zero = torch.zeros((), dtype=dtype, device=tensors[0].device)
    for x in tensors:
        if x.is_floating_point():
            zero = zero + x.flatten()[:0].to(zero).sum()
    return zero


def check_return_lse(spec: AttentionSpec, signature: Signature, return_lse: object) -> None:
    """Raise ``TypeError`` for what is no bool, and ``ValueError`` where there is no lse to return."""
    if not return_lse:
        return
    check_switch("return_lse", return_lse)
    if not signature.has_lse:
        raise ValueError(f"return_lse: '{spec.name}' has pointwise weights, which have no denominator and so no lse")


def refuse_dropout(spec: AttentionSpec, probability: float | Tensor) -> None:
    """Raise ``ValueError`` where a spec without dropout is to drop anything."""
    if isinstance(probability, Tensor) or probability != 0:
        raise ValueError(f"dropout_p: '{spec.name}' has no dropout; add the statement `dropout 0.0` to the spec")


def _check_floating(q: Tensor, k: Tensor, v: Tensor, dtype: torch.dtype | None) -> None:
    """Raise ``TypeError`` where the reference is asked to compute what is not real, or in what is not."""
    for name, x in (("q", q), ("k", k), ("v", v)):
        if not x.is_floating_point():
            raise TypeError(f"'{name}' is {x.dtype}; a floating type is expected")
    if dtype is not None and not getattr(dtype, "is_floating_point", False):
        raise TypeError(f"'dtype' is {dtype}; a floating torch.dtype is expected, or None for that of q")
