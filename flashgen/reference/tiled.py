"""Attention in slices: the dense formula over one block of rows at a time, and its derivatives of any order.

In: the arguments of ``dense.attention``. Out: ``forward``, ``backward`` and ``derive`` without autograd, in memory
linear in the lengths: derivatives compute each slice again. A slice is a shard, so that masks, biases and dropout agree
with the whole; keys that no row of a slice keeps are left out. Computes in float32 at least.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from flashgen.ir.expr import literal
from flashgen.ir.spec import AttentionSpec
from flashgen.reference.dense import Dropout, attention, evaluator, kept_by_position
from flashgen.reference.programs import Place, Program
from flashgen.reference.shard import Shard

# Pairs in one slice: 16 MiB a matrix in float32, of which a slice holds some ten.
SLICE_PAIRS = 1 << 22
# Pairs where derivatives are differentiated: some fifty matrices, of which most should stay in a cache.
DERIVATIVE_PAIRS = 1 << 18


@dataclass(frozen=True)
class Problem:
    """The arguments of one attention. ``pairs`` bounds the size of a slice; None: everything at once.

    ``tensors`` are the captured ones by name, and perhaps others.
    """

    spec: AttentionSpec
    q: Tensor
    k: Tensor
    v: Tensor
    tensors: Mapping[str, Tensor]
    params: Mapping[str, Tensor | float]
    shard: Shard
    dropout: Dropout | None = None
    pairs: int | None = SLICE_PAIRS

    @property
    def compute(self) -> torch.dtype:
        """The precision of the computation, and of every sum over slices."""
        return torch.promote_types(self.q.dtype, torch.float32)

    @property
    def inputs(self) -> tuple[Tensor | float, ...]:
        """Everything that may receive a gradient: q, k, v, then tensors, then params."""
        return (self.q, self.k, self.v, *(self.tensors[each.name] for each in self.spec.tensors), *self.params.values())


def gives_nothing(spec: AttentionSpec, shard: Shard) -> bool:
    """Whether o and every gradient of a call are 0 and lse is -∞: it has no pair, nor rows that have a sink."""
    has_rows = min(shard.batch, shard.heads, shard.q_len) > 0
    return shard.is_empty and not (has_rows and spec.weights.sink is not None)


def forward(problem: Problem) -> tuple[Tensor, Tensor | None]:
    """``o`` [B, H, Nq, Dv] in the type of q, ``lse`` [B, H, Nq] in ``compute`` (None: weights have none)."""
    shard = problem.shard
    shape = (shard.batch, shard.heads, shard.q_len)
    o = problem.q.new_empty(*shape, problem.v.shape[-1])
    normalised = problem.spec.weights.form.normalised
    lse = None if not normalised else problem.q.new_empty(shape, dtype=problem.compute)
    with torch.no_grad():
        for part in _slices(problem):
            inputs = zip(program_of(problem.spec, len(problem.inputs)).inputs, problem.inputs, strict=True)
            o_part, lse_part = _attend(problem, part, [part.cut(place, x) for place, x in inputs])
            o[part.rows] = o_part.to(o.dtype)
            if lse is not None and lse_part is not None:
                lse[part.rows] = lse_part
    return o, lse


# o and lse of rows over more keys than a problem has.
Whole = tuple[Tensor | None, Tensor | None]


def backward(
    problem: Problem, d_o: Tensor, d_lse: Tensor | None, needs: Sequence[bool], whole: Whole | None = None
) -> list[Tensor | None]:
    """The gradient of each of ``problem.inputs`` that ``needs`` asks for, in ``compute``; else None.

    ``whole``: o and lse of rows over more keys than the problem's, of which the problem is a part.
    """
    inputs = problem.inputs
    if whole is not None:
        own, sums = forward(problem)
        if sums is not None:
            d_o, d_lse = _of_part(problem, (own, sums), whole, d_o.to(own.dtype), d_lse)
    wanted = [n for n, (x, need) in enumerate(zip(inputs, needs, strict=True)) if need and isinstance(x, Tensor)]
    arriving = [d_o] if d_lse is None else [d_o, d_lse]
    program = program_of(problem.spec, len(inputs)).reverse(wanted, range(len(arriving)))
    found: list[Tensor | None] = [None] * len(inputs)
    totals = []
    for n in wanted:
        x = inputs[n]
        assert isinstance(x, Tensor)
        totals.append(torch.zeros(x.shape, dtype=problem.compute, device=x.device))
        found[n] = totals[-1]
    derive(problem, program, (*inputs, *arriving), totals)
    return found


def program_of(spec: AttentionSpec, inputs: int) -> Program:
    """Attention as a program: from q, k, v, tensors and params to o, and lse where the weights have one."""
    first = (Place.QUERIES, Place.KEYS, Place.KEYS)
    outputs = (Place.QUERIES, Place.SUMS) if spec.weights.form.normalised else (Place.QUERIES,)
    return Program((*first, *(Place.WHOLE for _ in range(inputs - len(first)))), outputs)


def derive(problem: Problem, program: Program, values: Sequence[Any], totals: Sequence[Tensor]) -> None:
    """Add the outputs of a program to ``totals``, slice by slice; these are in ``compute``.

    ``values`` are the inputs of the program, beginning with those of the problem; None stands for a param that is not
    given.
    """
    places, outputs = program.places
    values = [_wide(x, problem.compute) if place is Place.WHOLE else x for place, x in zip(places, values, strict=True)]
    with torch.no_grad():
        for part in _slices(problem):
            own = [_wide(part.cut(place, x), problem.compute) for place, x in zip(places, values, strict=True)]
            found = program.run(functools.partial(_outputs, problem, part), own)
            for place, total, x in zip(outputs, totals, found, strict=True):
                view = part.cut(place, total)
                view += x


def _wide(x: Any, dtype: torch.dtype) -> Any:
    """An undifferentiated value in the precision of the computation, detached from the caller's graph."""
    return x.detach().to(dtype) if isinstance(x, Tensor) and x.is_floating_point() else x


def _outputs(problem: Problem, part: _Slice, values: Sequence[Any]) -> tuple[Tensor, ...]:
    own = problem.inputs
    o, lse = _attend(problem, part, [mine if x is None else x for mine, x in zip(own, values, strict=False)])
    return (o,) if lse is None else (o, lse)


def _of_part(
    problem: Problem,
    own: tuple[Tensor, Tensor],
    whole: Sequence[Tensor | None],
    d_o: Tensor,
    d_lse: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """The gradients of o and lse over some of a row's keys, from those over all keys: o = Σ exp(lse' - lse) o'."""
    (o, lse), (all_o, all_lse) = (x.detach() for x in own), whole
    assert all_o is not None
    assert all_lse is not None
    factor = torch.where(lse == -torch.inf, 0.0, (lse - all_lse).exp())
    delta = (d_o * all_o.to(o.dtype)).sum(-1)
    if d_lse is not None:
        delta = delta - d_lse
    share = factor**problem.spec.weights.form.degree
    return d_o * factor[..., None], factor * (d_o * o).sum(-1) - share * delta


@dataclass(frozen=True)
class _Slice:
    """A block of query rows of some heads, and the keys that it may keep: a shard, and where its rows and keys lie."""

    shard: Shard
    rows: tuple[slice, slice, slice]
    columns: tuple[slice, slice, slice]

    def cut(self, place: Place, x: Any) -> Any:
        """The part of a value that the slice uses: a view of its rows or keys, or the value if it is not divided."""
        if place is Place.WHOLE or x is None:
            return x
        return x[self.columns if place is Place.KEYS else self.rows]


def _slices(problem: Problem) -> Iterator[_Slice]:
    shard = problem.shard
    pairs = shard.batch * shard.heads * shard.q_len * shard.kv_len if problem.pairs is None else problem.pairs
    row = max(1, shard.group * shard.kv_len)
    rows = max(1, min(shard.q_len, pairs // row))
    heads = max(1, min(shard.kv_heads, pairs // (row * rows)))
    batch = max(1, min(shard.batch, pairs // (row * rows * heads)))
    is_whole = problem.pairs is None or (rows, heads, batch) == (shard.q_len, shard.kv_heads, shard.batch)
    for b, h, i in itertools.product(
        _blocks(shard.batch, batch), _blocks(shard.kv_heads, heads), _blocks(shard.q_len, rows)
    ):
        query_heads = slice(h.start * shard.group, h.stop * shard.group)
        part = shard.part(b, h, i)
        keys = range(shard.kv_len) if is_whole else _kept_keys(problem, part)
        yield _Slice(
            part.of_keys(keys),
            (slice(b.start, b.stop), query_heads, slice(i.start, i.stop)),
            (slice(b.start, b.stop), slice(h.start, h.stop), slice(keys.start, keys.stop)),
        )


def _kept_keys(problem: Problem, part: Shard) -> range:
    """The keys from the first to the last that mask and layout keep for any row of a part; at least one key."""
    spec = problem.spec
    if spec.layout is None and spec.mask == literal(value=True):
        return range(part.kv_len)
    evaluate, _ = evaluator(spec, problem.q, problem.v, part, problem.tensors, problem.params, problem.compute)
    keep = kept_by_position(spec, evaluate)
    if keep.shape[3] != part.kv_len:  # it does not depend on the key
        return range(part.kv_len)
    some = keep.flatten(0, 2).any(0).nonzero()
    return range(int(some[0]), int(some[-1]) + 1) if len(some) else range(min(1, part.kv_len))


def _blocks(length: int, block: int) -> list[range]:
    return [range(start, min(start + block, length)) for start in range(0, length, block)]


def _attend(problem: Problem, part: _Slice, inputs: Sequence[Tensor | float]) -> tuple[Tensor, Tensor | None]:
    q, k, v, *captured = inputs
    assert isinstance(q, Tensor)
    assert isinstance(k, Tensor)
    assert isinstance(v, Tensor)
    tensors = {name: x for name, x in zip(problem.tensors, captured, strict=False) if isinstance(x, Tensor)}
    return attention(
        problem.spec,
        q,
        k,
        v,
        tensors=tensors,
        params=dict(zip(problem.params, captured[len(tensors) :], strict=True)),
        shard=part.shard,
        dropout=problem.dropout,
        dtype=problem.compute,
        settles=True,
    )
