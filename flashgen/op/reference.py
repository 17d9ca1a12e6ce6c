"""The dense formula of an op, which judges it: ``op.reference``.

In: what the op takes, in any floating type and head dimension. Out: ``o``, or ``(o, lse)``, by PyTorch's operators on
any device, differentiable any number of times by autograd. Ragged batches are computed sequence by sequence.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from flashgen.ir.spec import AttentionSpec, HeadDim
from flashgen.kinds.cached import CACHED
from flashgen.kinds.eight_bits import EIGHT_BITS
from flashgen.kinds.ragged import RAGGED
from flashgen.op import cached, ragged
from flashgen.op.appending import append, check_caches
from flashgen.op.cached import Cache
from flashgen.op.call import Tensors, probability_in_force
from flashgen.op.checks import check_rows
from flashgen.op.conversion import offset_arguments
from flashgen.op.eight_bits import from_8_bits
from flashgen.op.lengths import lengths
from flashgen.op.registered import Registered
from flashgen.op.selected import check_selection
from flashgen.op.signature import F8
from flashgen.op.tensor_kinds import check_tensors, lies_in_memory, refuse_distributed
from flashgen.reference import dense
from flashgen.reference.programs import Place
from flashgen.reference.shard import Shard


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
