"""Attention over some of the keys of a row at a time, and how the parts make the whole.

In: an op, and calls of it over parts of the keys. Out: o and lse of all keys; gradients of each part, given these. Sums
are float32 whatever the tensors hold; so are parts where ``wide``, by kernels that write it of 16 bits. A sink belongs
to a row, not to its parts: their spec has none, and it joins when the row is closed.

    softmax and what is divided: ``op/sums.py``
    pointwise weights: o = Σ o'
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flashgen.analysis.variant import analyse, constant_factor
from flashgen.ir.spec import HeadDim
from flashgen.kinds.parts import PARTS
from flashgen.kinds.slices import SLICES
from flashgen.op.call import Attended, Tensors
from flashgen.op.engine import Engine
from flashgen.op.layouts import layout_like
from flashgen.op.loading import load_spec
from flashgen.op.op import AttentionOp
from flashgen.op.sums import LOG2_E, Exponents, Seen, add_part, exact, first_part
from flashgen.op.values import type_of_sums
from flashgen.reference.dense import evaluator
from flashgen.reference.shard import Shard

_MOST_LSE = 88.0  # as kernels have it: beyond, a row's lse is in parts


class Where(NamedTuple):
    """Where rows and keys of a call lie in the whole: the offsets of the operator, in their order."""

    q_start: int
    kv_start: int
    b_start: int
    h_start: int
    q_total: int
    kv_total: int
    b_total: int
    h_total: int


@dataclass
class Rows:
    """A span of rows so far: ``o`` [B, H, n, Dv], float32 at least; ``log`` and ``top`` [B, H, n] in float64, lse in
    two numbers as ``op/sums.py`` has it. Both None for pointwise weights.
    """

    o: Tensor
    log: Tensor | None
    top: Tensor | None


# What a backward pass reads of rows: o, lse, and its parts.
Closed = Attended


class Partial:
    """A spec over some of the keys at a time."""

    def __init__(self, op: AttentionOp, *, wide: bool = True) -> None:
        self.op, self.wide = op, wide
        of_parts, self.inner = op.spec, op
        if of_parts.weights.sink is not None:
            of_parts = replace(of_parts, weights=of_parts.weights.over(None))
            self.inner = op.of_spec(of_parts, load_spec)
        self.form = of_parts.weights.form
        self.engine: Engine = self.inner.engine_of(PARTS) if wide else self.inner.engine
        self._sliced: dict[object, bool] = {}
        # What makes what kernels count from an exponent in base 2.
        found = ((each, constant_factor(analyse(of_parts, each))) for each in of_parts.head_dims)
        self._factors = {each: LOG2_E * (factor or 1.0) for each, factor in found}

    def type_of(self, dtype: torch.dtype) -> torch.dtype:
        """The type in which parts are written, and o is read backward."""
        return type_of_sums(dtype) if self.wide else dtype

    def captured(self, rest: Sequence[Any]) -> dict[str, Tensor | None]:
        """What is captured, by name, of the operator's tensors behind q, k and v."""
        return dict(zip(self.op.signature.names, rest, strict=False))

    def begin(self, q: Tensor, v: Tensor) -> Rows:
        """Rows that see no key."""
        o = q.new_zeros((*q.shape[:3], v.shape[3]), dtype=type_of_sums(q.dtype))
        if not self.form.normalised:
            return Rows(o, None, None)
        log = q.new_full(q.shape[:3], -math.inf, dtype=torch.float64)
        return Rows(o, log, torch.zeros_like(log))

    def add(self, rows: Rows | None, tensors: Tensors, where: Where) -> Rows:
        """Rows with a part of the keys, k and v of ``tensors``, more, in place; None: they have seen none."""
        o, lse, extremes = self.engine.attend(tensors, (where, False))
        if lse is None:
            if rows is None:
                return Rows(o.to(type_of_sums(o.dtype)), None, None)
            rows.o += o
            return rows
        exponents = self._exponents(tensors)
        if not self.form.exponential:
            extremes = None
        if rows is None or rows.log is None or rows.top is None:
            found = first_part(o.to(type_of_sums(o.dtype)), lse, extremes, exponents)
            return Rows(found.o, found.log, found.top)
        add_part(Seen(rows.o, rows.log, rows.top), o.to(rows.o.dtype), lse, extremes, exponents)
        return rows

    def add_to(self, rows: Rows, at: slice, tensors: Tensors, where: Where) -> None:
        """The same of some of these rows."""
        log, top = (None if x is None else x[:, :, at] for x in (rows.log, rows.top))
        self.add(Rows(rows.o[:, :, at], log, top), tensors, where)

    def room(self, q: Tensor, v: Tensor) -> Closed:
        """What ``close`` gives of rows like ``q``, to be written."""
        o = q.new_empty_strided(*layout_like(q, (*q.shape[:3], v.shape[3])))
        if not self.form.normalised:
            return o, None, None
        lse = torch.empty(q.shape[:3], dtype=type_of_sums(q.dtype), device=q.device)
        return o, lse, torch.empty((*q.shape[:3], 2), dtype=torch.float32, device=q.device)

    def whole(self, into: Closed, tensors: Tensors, where: Where) -> None:
        """What ``close`` gives of rows whose keys are all here, in their place among others: one call of the op."""
        if self._writes_slices(self.op, tensors):
            self.op.engine_of(SLICES).attend(tensors, (where, False), into=into)
            return
        for x, place in zip(self.op.engine.attend(tensors, (where, False)), into, strict=True):
            if x is not None and place is not None:
                place.copy_(x)

    def _writes_slices(self, op: AttentionOp, tensors: Tensors) -> bool:
        """Whether kernels write rows in their place, and gradients of their keys wide: of what is wide they have to do
        neither, for which nobody should wait for a compiler.
        """
        q, v = tensors[0], tensors[2]
        key = (op is self.op, q.dtype, q.device, q.shape[3], v.shape[3])
        found = self._sliced.get(key)
        if found is None:
            found = q.dtype is not type_of_sums(q.dtype) and op.engine_of(SLICES).has_kernel(q, v)
            self._sliced[key] = found
        return found

    def close(self, rows: Rows, sink: Tensor | None, tensors: Tensors) -> Closed:
        """o in the type of q, lse and its parts, of rows that have seen every key; ``sink`` [B, H, n] where there is
        one.
        """
        q = tensors[0]
        if rows.log is None or rows.top is None:
            return rows.o.to(q.dtype), None, None
        log, top, o, exponents = rows.log, rows.top, rows.o, self._exponents(tensors)
        if sink is not None:
            # Scores are counted from their own maximum, whatever the sink is.
            whole = torch.logaddexp(log, sink.double() - top * exponents.natural)
            o = o * torch.where(log == -math.inf, 0.0, (log - whole).exp()).to(o.dtype)[..., None]
            log = whole
        lse = top * exponents.natural + log
        parts = torch.zeros((*lse.shape, 2), dtype=torch.float32, device=q.device)
        if self.form.exponential:
            is_far = (lse.abs() > _MOST_LSE) & lse.isfinite()
            parts[..., 0] = torch.where(is_far, top, 0.0)
            parts[..., 1] = torch.where(is_far, log * LOG2_E, 0.0)
        else:
            parts[..., 0] = torch.where(lse == -math.inf, 0.0, (-lse).exp())  # 1 / Z
        return o.to(q.dtype), lse.to(type_of_sums(q.dtype)), parts

    def log_share_of(self, sink: Tensor, closed: Closed, tensors: Tensors) -> Tensor:
        """sink - lse of rows [B, H, n], float64: not by lse where its parts hold more."""
        _, lse, parts = closed
        assert lse is not None
        log, top = exact(lse, parts if self.form.exponential else None)
        return sink.double() - top * self._exponents(tensors).natural - log

    def gradients(
        self, d_o: Tensor, d_lse: Tensor | None, closed: Closed, tensors: Tensors, where: Where, needs: Sequence[bool],
        deterministic: bool,
    ) -> list[Tensor]:  # fmt: skip
        """The gradients of a part, float32 at least, of those inputs that ``needs`` names; q, k and v among them."""
        rows = (d_lse, *closed) if self.form.normalised else (None,) * 4
        return self.engine.gradients(d_o, rows, tensors, (where, deterministic), needs, is_part=True)

    def gradients_of_whole(
        self, into: Sequence[Tensor], d_o: Tensor, d_lse: Tensor | None, closed: Closed, tensors: Tensors, where: Where,
        needs: Sequence[bool], deterministic: bool,
    ) -> list[Tensor]:  # fmt: skip
        """The same of rows whose keys are all here: those of q, k and v are written to ``into``, where that of q is
        among others. The rest.
        """
        if self.wide and self._writes_slices(self.inner, tensors):
            rows = (d_lse, *closed) if self.form.normalised else (None,) * 4
            engine = self.inner.engine_of(SLICES)
            rest = (where, deterministic)
            return engine.gradients(d_o, rows, tensors, rest, needs, is_part=True, into=into)[3:]
        o, lse, parts = closed
        rows_read = (o.to(self.type_of(o.dtype)), lse, parts)
        found = self.gradients(d_o, d_lse, rows_read, tensors, where, needs, deterministic)
        for x, place in zip(found, into, strict=False):
            place.copy_(x)
        return found[3:]

    def _exponents(self, tensors: Tensors) -> Exponents:
        return Exponents(self._factors[HeadDim(tensors[0].shape[3], tensors[2].shape[3])], self.form.degree)

    def sink(
        self, q: Tensor, v: Tensor, captured: Mapping[str, Tensor | None], where: Where, some: Tensor | None
    ) -> Tensor:
        """The sinks of rows, [B, H, n], differentiable in ``captured`` where ``some`` [B, H, n] says: lse is finite."""
        spec = self.op.spec
        assert spec.weights.sink is not None
        shard = Shard(
            q.shape[0], q.shape[1], v.shape[1], q.shape[2], 1, where.b_start, where.h_start, where.q_start, 0,
            where.b_total, where.h_total, where.q_total, where.kv_total,
        )  # fmt: skip
        tensors = {each.name: x for each in spec.tensors if (x := captured[each.name]) is not None}
        params = {each.name: x for each in spec.params if (x := captured[each.name]) is not None}
        evaluate, _ = evaluator(spec, q, v, shard, tensors, params, type_of_sums(q.dtype))
        if some is not None:
            evaluate.guard.narrow(some[..., None])
        found = evaluate.real(spec.weights.sink)
        return found.expand(*q.shape[:3], 1)[..., 0]
