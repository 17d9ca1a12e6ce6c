"""Attention over some of the keys of a row at a time, and how the parts make the whole.

In: an op, and calls of it over parts of the keys. Out: o and lse of all keys; gradients of each part, given these. Sums
are float32 whatever the tensors hold; so are parts where ``wide``, by an op for float32 of the same spec. A sink
belongs to a row, not to its parts: their spec has none, and it joins when the row is closed.

    lse = log Σ exp(p lse') / p      o = Σ exp(lse' - lse) o'      p: the power of a denominator that is a plain sum
    pointwise weights: o = Σ o'
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from flashgen.analysis.variant import analyse, linear_factor
from flashgen.ir.spec import HeadDim
from flashgen.ir.types import ElementType
from flashgen.pipeline import load_spec
from flashgen.reference.dense import evaluator
from flashgen.reference.shard import Shard
from flashgen.runtime.engine import Engine, Tensors
from flashgen.runtime.op import AttentionOp

_LOG2_E = 1.0 / math.log(2.0)
_MOST_LSE = 88.0  # as kernels have it: beyond, a row's lse is in parts


@dataclass(frozen=True)
class Where:
    """Where rows and keys of a call lie in the whole, as the offsets of the op say it."""

    q_start: int
    kv_start: int
    b_start: int
    h_start: int
    q_total: int
    kv_total: int
    b_total: int
    h_total: int

    @property
    def offsets(self) -> Any:
        """In the order of the operator."""
        return (
            self.q_start, self.kv_start, self.b_start, self.h_start,
            self.q_total, self.kv_total, self.b_total, self.h_total,
        )  # fmt: skip


@dataclass
class Rows:
    """Rows so far: ``o`` [B, H, n, Dv], float32 at least; ``lse`` [B, H, n] in float64, and a maximum of their scores.

    The latter is what kernels count scores from, as far as they are extreme. Both None for pointwise weights.
    """

    o: Tensor
    lse: Tensor | None
    top: Tensor | None


# What a backward pass reads of rows: o, lse, and its parts.
Closed = tuple[Tensor, Tensor | None, Tensor | None]


class Partial:
    """A spec over some of the keys at a time."""

    def __init__(self, op: AttentionOp, *, wide: bool = True) -> None:
        self.op, self.wide = op, wide
        spec = op.spec
        dtypes = spec.dtypes
        if wide and dtypes is not None and ElementType.F32 not in dtypes:
            dtypes = (*dtypes, ElementType.F32)
        sinkless = spec.weights if spec.weights.sink is None else spec.weights.over(None)
        of_parts = replace(spec, weights=sinkless, dtypes=dtypes)
        self.inner = op if of_parts == spec else load_spec(of_parts, op._parts.backend, op._parts.label or None)
        self.form = spec.weights.form
        self.engine: Engine = self.inner._registered.engine
        # What makes what kernels count from an exponent in base 2.
        self._factors = {each: _LOG2_E * (linear_factor(analyse(of_parts, each)) or 1.0) for each in of_parts.head_dims}

    def type_of(self, dtype: torch.dtype) -> torch.dtype:
        """The type that parts are computed in."""
        return widened(dtype) if self.wide else dtype

    def captured(self, rest: Sequence[Any]) -> dict[str, Tensor | None]:
        """What is captured, by name, of the operator's tensors behind q, k and v."""
        return dict(zip(self.op._signature.names, rest, strict=False))

    def begin(self, q: Tensor, v: Tensor) -> Rows:
        """Rows that have seen no key yet."""
        o = q.new_zeros((*q.shape[:3], v.shape[3]), dtype=widened(q.dtype))
        if not self.form.normalised:
            return Rows(o, None, None)
        lse = q.new_full(q.shape[:3], -math.inf, dtype=torch.float64)
        return Rows(o, lse, torch.zeros_like(lse))

    def add(self, rows: Rows, at: slice, tensors: Tensors, where: Where, *, is_first: bool) -> None:
        """Add a part of the keys, k and v of ``tensors``, to some rows; ``is_first``: they have seen none."""
        o, lse, parts = self.engine.attend(tensors, (where.offsets, False))
        if rows.lse is None or rows.top is None or lse is None:
            rows.o[:, :, at] += o
            return
        factor = self._factor(tensors)
        exact = lse.double()
        top = torch.zeros_like(exact)
        if parts is not None and self.form.exponential:
            far = parts.double()
            is_far = (parts != 0).any(-1)
            top = torch.where(is_far, far[..., 0], 0.0)
            exact = torch.where(is_far, (far[..., 0] * factor + far[..., 1]) / _LOG2_E, exact)
        if is_first:
            rows.o[:, :, at], rows.lse[:, :, at], rows.top[:, :, at] = o, exact, top
            return
        before, degree = rows.lse[:, :, at], self.form.degree
        both = torch.logaddexp(degree * before, degree * exact) / degree
        # Of two parts without keys none is left.
        kept, added = (torch.where(x == -math.inf, 0.0, (x - both).exp()).to(o.dtype) for x in (before, exact))
        rows.o[:, :, at] = rows.o[:, :, at] * kept[..., None] + o * added[..., None]
        rows.top[:, :, at] = torch.where(exact > before, top, rows.top[:, :, at])
        rows.lse[:, :, at] = both

    def close(self, rows: Rows, sink: Tensor | None, tensors: Tensors) -> Closed:
        """o, lse and its parts of rows that have seen every key; ``sink`` [B, H, n] where there is one."""
        if rows.lse is None or rows.top is None:
            return rows.o, None, None
        lse, o = rows.lse, rows.o
        if sink is not None:
            # A row that keeps no key stays empty.
            closed = torch.where(lse == -math.inf, lse, torch.logaddexp(lse, sink.double()))
            o = o * torch.where(lse == -math.inf, 0.0, (lse - closed).exp()).to(o.dtype)[..., None]
            lse = closed
        parts = torch.zeros((*lse.shape, 2), dtype=torch.float32, device=o.device)
        if self.form.exponential:
            is_far = (lse.abs() > _MOST_LSE) & lse.isfinite()
            rest = lse * _LOG2_E - rows.top * self._factor(tensors)
            parts[..., 0] = torch.where(is_far, rows.top, 0.0)
            parts[..., 1] = torch.where(is_far, rest, 0.0)
        return o, lse.to(o.dtype), parts

    def gradients(
        self, d_o: Tensor, d_lse: Tensor | None, closed: Closed, tensors: Tensors, where: Where, needs: Sequence[bool],
        deterministic: bool,
    ) -> list[Tensor]:  # fmt: skip
        """The gradients of a part, float32 at least, of those inputs that ``needs`` names; q, k and v among them."""
        rows = (d_lse, *closed) if self.form.normalised else (None,) * 4
        return self.engine.gradients_of_part(d_o, rows, tensors, (where.offsets, deterministic), needs)

    def _factor(self, tensors: Tensors) -> float:
        return self._factors[HeadDim(tensors[0].shape[3], tensors[2].shape[3])]

    def sink(
        self, q: Tensor, v: Tensor, captured: Mapping[str, Tensor | None], where: Where, some: Tensor | None
    ) -> Tensor:
        """The sinks of rows, [B, H, n], differentiable in ``captured`` where ``some`` [B, H, n] says: a key is kept."""
        spec = self.op.spec
        assert spec.weights.sink is not None
        shard = Shard(
            q.shape[0], q.shape[1], v.shape[1], q.shape[2], 1, where.b_start, where.h_start, where.q_start, 0,
            where.b_total, where.h_total, where.q_total, where.kv_total,
        )  # fmt: skip
        tensors = {each.name: x for each in spec.tensors if (x := captured[each.name]) is not None}
        params = {each.name: x for each in spec.params if (x := captured[each.name]) is not None}
        evaluate, _ = evaluator(spec, q, v, shard, tensors, params, widened(q.dtype))
        if some is not None:
            evaluate.guard.narrow(some[..., None])
        found = evaluate.real(spec.weights.sink)
        return found.expand(*q.shape[:3], 1)[..., 0]


def widened(dtype: torch.dtype) -> torch.dtype:
    """The type of sums."""
    return torch.promote_types(dtype, torch.float32)
