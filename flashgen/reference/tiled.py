"""Attention in slices, for where no compiler exists: the dense formula over one block of rows at a time.

In: what ``dense.attention`` takes. Out: ``forward`` and ``backward`` without autograd, in memory linear in
the lengths: backward computes each slice again. A slice is a shard, so that masks, biases and dropout agree
with the whole. Computes in float32 at least, whatever the tensors hold.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from flashgen.ir.spec import AttentionSpec
from flashgen.reference.dense import Dropout, attention
from flashgen.reference.shard import Shard

# Pairs in one slice: 16 MiB a matrix in float32, of which a slice holds some ten.
SLICE_PAIRS = 1 << 22


@dataclass(frozen=True)
class Problem:
    """The arguments of one attention. ``pairs`` bounds the size of a slice; None: everything at once."""

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
        return (self.q, self.k, self.v, *self.tensors.values(), *self.params.values())


def forward(problem: Problem) -> tuple[Tensor, Tensor | None]:
    """``o`` [B, H, Nq, Dv] in the type of q, ``lse`` [B, H, Nq] in ``compute`` (None: weights have none)."""
    shard = problem.shard
    shape = (shard.batch, shard.heads, shard.q_len)
    o = problem.q.new_empty(*shape, problem.v.shape[-1])
    normalised = problem.spec.weights.form.normalised
    lse = None if not normalised else problem.q.new_empty(shape, dtype=problem.compute)
    with torch.no_grad():
        for part in _slices(problem):
            o_part, lse_part = _attend(problem, part, [part.cut(n, x) for n, x in enumerate(problem.inputs)])
            o[part.rows] = o_part.to(o.dtype)
            if lse is not None and lse_part is not None:
                lse[part.rows] = lse_part
    return o, lse


def backward(problem: Problem, d_o: Tensor, d_lse: Tensor | None, needs: Sequence[bool]) -> list[Tensor | None]:
    """The gradient of each of ``problem.inputs`` that ``needs`` asks for, in ``compute``; else None."""
    inputs = problem.inputs
    sums = [
        torch.zeros(x.shape, dtype=problem.compute, device=x.device) if need and isinstance(x, Tensor) else None
        for x, need in zip(inputs, needs, strict=True)
    ]
    wanted = [n for n, total in enumerate(sums) if total is not None]
    for part in _slices(problem):
        leaves = [part.cut(n, x) for n, x in enumerate(inputs)]
        for n in wanted:
            leaves[n] = _leaf(leaves[n], problem.compute)
        with torch.enable_grad():
            o, lse = _attend(problem, part, leaves)
        reached = [(o, d_o[part.rows].to(o.dtype))] if o.requires_grad else []
        if lse is not None and lse.requires_grad and d_lse is not None:
            reached.append((lse, d_lse[part.rows].to(lse.dtype)))
        if not reached:
            continue
        found: Sequence[Tensor | None] = torch.autograd.grad(
            [output for output, _ in reached],
            [leaf for n in wanted if isinstance(leaf := leaves[n], Tensor)],
            [gradient for _, gradient in reached],
            allow_unused=True,
        )
        for n, gradient in zip(wanted, found, strict=True):
            total = sums[n]
            if gradient is not None and total is not None:
                view = part.cut(n, total)
                assert isinstance(view, Tensor)
                view += gradient
    return sums


@dataclass(frozen=True)
class _Slice:
    """A block of query rows of some heads, with every key: a shard, and where its rows and keys lie."""

    shard: Shard
    rows: tuple[slice, slice, slice]
    columns: tuple[slice, slice]

    def cut(self, n: int, x: Tensor | float) -> Tensor | float:
        """What input number ``n`` is to this slice: a view of q, k or v, everything of the rest."""
        if n > 2 or not isinstance(x, Tensor):
            return x
        return x[self.rows] if n == 0 else x[self.columns]


def _slices(problem: Problem) -> Iterator[_Slice]:
    shard = problem.shard
    pairs = shard.batch * shard.heads * shard.q_len * shard.kv_len if problem.pairs is None else problem.pairs
    row = max(1, shard.group * shard.kv_len)
    rows = max(1, min(shard.q_len, pairs // row))
    heads = max(1, min(shard.kv_heads, pairs // (row * rows)))
    batch = max(1, min(shard.batch, pairs // (row * rows * heads)))
    for b, h, i in itertools.product(
        _blocks(shard.batch, batch), _blocks(shard.kv_heads, heads), _blocks(shard.q_len, rows)
    ):
        query_heads = slice(h.start * shard.group, h.stop * shard.group)
        yield _Slice(
            shard.part(b, h, i),
            (slice(b.start, b.stop), query_heads, slice(i.start, i.stop)),
            (slice(b.start, b.stop), slice(h.start, h.stop)),
        )


def _blocks(length: int, block: int) -> list[range]:
    return [range(start, min(start + block, length)) for start in range(0, length, block)]


def _leaf(x: Tensor | float, dtype: torch.dtype) -> Tensor:
    assert isinstance(x, Tensor)
    return x.detach().to(dtype).requires_grad_()


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
    )
