"""Attention over some of the keys of a row at a time, and the merge of such parts.

In: an op, and its calls over parts of the keys. Out: o and lse over all keys; with these, the gradients of each part.
Sums are float32. With ``wide``, kernels write the parts of 16-bit tensors in float32, too. A sink belongs to a row, not
to a part: the spec of parts has none, and ``close`` adds it. Parts are merged in place, by a kernel on a GPU, else by
PyTorch's operators. lse is kept as two numbers, c top + log, as one number would lose the weights beside scores near
float32's end. ``top`` is the score that kernels subtract where scores are extreme, else 0; c makes a natural exponent
of it.

    lse = log Σ exp(p lse') / p      o = Σ exp(lse' - lse) o'      p: the power of a denominator that is a plain sum
    pointwise weights: o = Σ o'
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flashgen.analysis.variant import analyse, constant_factor
from flashgen.distributed.exchange import once
from flashgen.hosts.standalone import Standalone
from flashgen.ir.spec import HeadDim
from flashgen.kinds.slices import PARTS, SLICES
from flashgen.op.call import Attended, Rest, Tensors
from flashgen.op.engine import Engine
from flashgen.op.loading import load_spec
from flashgen.op.op import AttentionOp
from flashgen.op.signature import Signature
from flashgen.op.tensor_kinds import address, copied_to, layout_like, type_of_sums, with_memory
from flashgen.reference.dense import evaluator
from flashgen.reference.shard import Shard

LOG2_E = 1.0 / math.log(2.0)
KERNEL = Standalone("add_part")
_MOST_LSE = 88.0  # as in kernels: a larger lse is kept as two numbers


@dataclass(frozen=True)
class Exponents:
    """``factor`` makes an exponent in base 2 of an extreme score; ``degree`` is p."""

    factor: float
    degree: float

    @property
    def natural(self) -> float:
        """The factor that makes a natural exponent of an extreme score."""
        return self.factor / LOG2_E


@dataclass
class Seen:
    """Rows that have seen some of their keys: ``o`` [B, H, n, Dv], float32 at least, and lse as ``log`` and ``top``
    [B, H, n], float64. Each is a slice of rows, or whole. For pointwise weights ``log`` and ``top`` have no elements.
    """

    o: Tensor
    log: Tensor
    top: Tensor


def first_part(o: Tensor, lse: Tensor, extremes: Tensor | None, exponents: Exponents) -> Seen:
    """Rows that have seen one part; ``extremes`` [B, H, n, 2] as kernels leave them, None where there are none."""
    if _has_kernel(o, o, lse):
        found = Seen(o, *(torch.empty_like(lse, dtype=torch.float64) for _ in range(2)))
        _launch(found, None, lse, extremes, exponents)
        return found
    return Seen(o, *exact(lse, extremes))


def _pointwise(o: Tensor) -> Seen:
    return Seen(o, *[o.new_empty((0, 0, 0))] * 2)


def add_part(rows: Seen, o: Tensor, lse: Tensor, extremes: Tensor | None, exponents: Exponents) -> None:
    """Merge one more part into rows, in place; its o has the type of theirs."""
    if _has_kernel(rows.o, o, lse):
        return _launch(rows, o, lse, extremes, exponents)
    log, top = exact(lse, extremes)
    before, p = rows.log, exponents.degree
    # Not by differences of lse: equal tops cancel here, however large they are.
    ahead = (top - rows.top) * exponents.natural + (log - before)
    grown = torch.log1p((-p * ahead.abs()).exp()) / p
    most, least = (-grown).exp(), (-ahead.abs() - grown).exp()
    is_ahead, nothing = ahead > 0, (before == -math.inf) & (log == -math.inf)  # of two parts without keys none is left
    kept = torch.where(nothing, 0.0, torch.where(is_ahead, least, most)).to(rows.o.dtype)
    added = torch.where(nothing, 0.0, torch.where(is_ahead, most, least)).to(rows.o.dtype)
    rows.o.mul_(kept[..., None]).addcmul_(o, added[..., None])
    rows.log.copy_(torch.where(nothing, -math.inf, torch.where(is_ahead, log, before) + grown))
    rows.top.copy_(torch.where(is_ahead, top, rows.top))
    return None


def exact(lse: Tensor, extremes: Tensor | None) -> tuple[Tensor, Tensor]:
    """log and top of rows, float64; of rows without extreme scores log is lse."""
    whole = lse.double()
    if extremes is None:
        return whole, torch.zeros_like(whole)
    top, log = extremes.double().unbind(-1)
    return torch.where((top != 0) | (log != 0), log / LOG2_E, whole), top


# -- on a GPU ----------------------------------------------------------------------------------------------------------


class Arguments(ctypes.Structure):
    """``struct AddPart``."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("o", "part_o", "log", "top", "part_lse", "extremes")),
        *((name, ctypes.c_int64) for name in ("heads", "rows", "o_by_head", "log_by_head")),
        *((name, ctypes.c_double) for name in ("factor", "degree")),
        *((name, ctypes.c_int) for name in ("width", "padding")),
    )


def arguments(rows: Seen, o: Tensor | None, lse: Tensor, extremes: Tensor | None, exponents: Exponents) -> Arguments:
    """The arguments of a launch."""
    batch, heads, count, width = rows.o.shape
    return Arguments(
        rows.o.data_ptr(), address(o), rows.log.data_ptr(), rows.top.data_ptr(), lse.data_ptr(),
        address(extremes), batch * heads, count, rows.o.stride(1), rows.log.stride(1),
        exponents.factor, exponents.degree, width, 0,
    )  # fmt: skip


def _has_kernel(o: Tensor, part: Tensor, lse: Tensor) -> bool:
    """Whether tensors lie as the kernel takes them: one stride for [B, H], rows together."""
    if not o.is_cuda or not o.dtype is part.dtype is lse.dtype is torch.float32 or not part.is_contiguous():
        return False
    batch, heads, rows, width = o.shape
    together = o.stride(3) == 1 and o.stride(2) == width and (batch == 1 or o.stride(0) == heads * o.stride(1))
    return together and rows > 0 and width > 0 and o.data_ptr() % 16 == 0


def _launch(rows: Seen, o: Tensor | None, lse: Tensor, extremes: Tensor | None, exponents: Exponents) -> None:
    packed = arguments(rows, o, lse, extremes, exponents)
    KERNEL.launch(rows.o.device.index, packed, math.prod(rows.log.shape))


class Offsets(NamedTuple):
    """The positions of a call's rows, keys, batch and heads in the whole: the operator's offsets, in their order."""

    q_start: int
    kv_start: int
    b_start: int
    h_start: int
    q_total: int
    kv_total: int
    b_total: int
    h_total: int


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
        # Kernels count exponents in base 2 from a score: the factor between the two, by head dimensions.
        found = ((each, constant_factor(analyse(of_parts, each))) for each in of_parts.head_dims)
        self._factors = {each: LOG2_E * (factor or 1.0) for each, factor in found}

    def type_of(self, dtype: torch.dtype) -> torch.dtype:
        """The type in which kernels write parts, and read o in the backward pass."""
        return type_of_sums(dtype) if self.wide else dtype

    def captured(self, rest: Sequence[Any]) -> dict[str, Tensor | None]:
        """The captured values by name, from the operator's tensors behind q, k and v."""
        return dict(zip(self.op.signature.names, rest, strict=False))

    def begin(self, q: Tensor, v: Tensor) -> Seen:
        """Rows that have seen no key yet."""
        o = q.new_zeros((*q.shape[:3], v.shape[3]), dtype=type_of_sums(q.dtype))
        if not self.form.normalised:
            return _pointwise(o)
        log = q.new_full(q.shape[:3], -math.inf, dtype=torch.float64)
        return Seen(o, log, torch.zeros_like(log))

    def add(self, rows: Seen | None, tensors: Tensors, where: Offsets) -> Seen:
        """Add the keys of ``tensors`` to rows, in place; ``rows`` None: they have seen no key yet."""
        o, lse, extremes = self.engine.attend(tensors, (where, False))
        if lse is None:
            if rows is None:
                return _pointwise(o.to(type_of_sums(o.dtype)))
            rows.o += o
            return rows
        exponents = self._exponents(tensors)
        if not self.form.exponential:
            extremes = None
        if rows is None:
            return first_part(o.to(type_of_sums(o.dtype)), lse, extremes, exponents)
        add_part(rows, o.to(rows.o.dtype), lse, extremes, exponents)
        return rows

    def room(self, q: Tensor, v: Tensor) -> Attended:
        """Uninitialised results of ``close`` for rows like ``q``."""
        o = q.new_empty_strided(*layout_like(q, (*q.shape[:3], v.shape[3])))
        if not self.form.normalised:
            return o, None, None
        lse = torch.empty(q.shape[:3], dtype=type_of_sums(q.dtype), device=q.device)
        return o, lse, torch.empty((*q.shape[:3], 2), dtype=torch.float32, device=q.device)

    def whole(self, into: Attended, tensors: Tensors, where: Offsets) -> None:
        """Write the results of rows whose keys are all in ``tensors`` to ``into``, by one call of the op."""
        if self._writes_slices(self.op, tensors):
            self.op.engine_of(SLICES).attend(tensors, (where, False), into=into)
            return
        copied_to(self.op.engine.attend(tensors, (where, False)), into)

    def _writes_slices(self, op: AttentionOp, tensors: Tensors) -> bool:
        """Whether the kernels of slices are used: they write rows in place, and gradients of keys in float32.

        Tensors that are float32 already gain nothing by them, and would wait for a compiler.
        """
        q, v = tensors[0], tensors[2]
        key = (op is self.op, q.dtype, q.device, q.shape[3], v.shape[3])
        found = self._sliced.get(key)
        if found is None:
            found = q.dtype is not type_of_sums(q.dtype) and op.engine_of(SLICES).has_kernel(q, v)
            self._sliced[key] = found
        return found

    def close(self, rows: Seen, sink: Tensor | None, tensors: Tensors) -> Attended:
        """o in the type of q, lse and its parts, of rows that have seen every key and ``sink`` [B, H, n]."""
        q = tensors[0]
        if not self.form.normalised:
            return rows.o.to(q.dtype), None, None
        log, top, o, exponents = rows.log, rows.top, rows.o, self._exponents(tensors)
        if sink is not None:
            # ``top`` stays the maximum of the scores alone, without the sink.
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

    def log_share_of(self, sink: Tensor, closed: Attended, tensors: Tensors) -> Tensor:
        """sink - lse [B, H, n], float64. Where lse has parts, these are used: they are more precise."""
        _, lse, parts = closed
        assert lse is not None
        log, top = exact(lse, parts if self.form.exponential else None)
        return sink.double() - top * self._exponents(tensors).natural - log

    def gradients(
        self, d_o: Tensor, d_lse: Tensor | None, closed: Attended, tensors: Tensors, where: Offsets,
        needs: Sequence[bool], deterministic: bool,
    ) -> list[Tensor]:  # fmt: skip
        """The gradients of a part, float32 at least, by the inputs that ``needs`` marks; q, k and v are among them."""
        rows = (d_lse, *closed) if self.form.normalised else (None,) * 4
        return self.engine.gradients(d_o, rows, tensors, (where, deterministic), needs, is_part=True)

    def gradients_of_whole(
        self, into: Sequence[Tensor], d_o: Tensor, d_lse: Tensor | None, closed: Attended, tensors: Tensors,
        where: Offsets, needs: Sequence[bool], deterministic: bool,
    ) -> list[Tensor]:  # fmt: skip
        """The gradients of rows whose keys are all in ``tensors``. Those by q, k and v are written to ``into``, where
        dQ is a slice of a larger tensor; the others are returned.
        """
        if self.wide and self._writes_slices(self.inner, tensors):
            rows, engine = (d_lse, *closed) if self.form.normalised else (None,) * 4, self.inner.engine_of(SLICES)
            return engine.gradients(d_o, rows, tensors, (where, deterministic), needs, is_part=True, into=into)[3:]
        o, lse, parts = closed
        rows_read = (o.to(self.type_of(o.dtype)), lse, parts)
        found = self.gradients(d_o, d_lse, rows_read, tensors, where, needs, deterministic)
        copied_to(found[:3], into)
        return found[3:]

    def _exponents(self, tensors: Tensors) -> Exponents:
        return Exponents(self._factors[HeadDim(tensors[0].shape[3], tensors[2].shape[3])], self.form.degree)

    def sink(
        self, q: Tensor, v: Tensor, captured: Mapping[str, Tensor | None], where: Offsets, some: Tensor | None
    ) -> Tensor:
        """The sinks of rows [B, H, n], differentiable in ``captured``; ``some`` [B, H, n] marks rows with a key."""
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


def attend_whole(engine: Engine, tensors: Sequence[Any], rest: Rest) -> tuple[Tensor, Tensor | None]:
    """``o`` and ``lse``, as the engine's operator has them; None for pointwise weights."""
    return _WholeAttention.apply(engine, rest, *tensors)  # type: ignore[no-any-return,no-untyped-call]


def as_declared(signature: Signature, tensors: Sequence[Any]) -> Tensors:
    """The operator's tensors, with captured values rounded to the types that the spec declares."""
    found = list(with_memory(tensors))
    for n, dtype in enumerate(signature.dtypes, start=3):
        if found[n] is not None and dtype.is_floating_point and dtype.itemsize < found[n].dtype.itemsize == 4:
            found[n] = found[n].to(dtype)
    return tuple(found)


class _WholeAttention(torch.autograd.Function):
    """A call over all keys of some heads, whose gradients of captured values are later summed over calls and ranks.

    Kernels get captured values in the declared types. Gradients of values that came wider stay wide, so that their sum
    is rounded once.
    """

    @staticmethod
    def forward(ctx: Any, engine: Engine, rest: Rest, *tensors: Any) -> tuple[Tensor, Tensor | None]:
        own = as_declared(engine.signature, tensors)
        o, lse, parts = engine.attend(own, rest)
        ctx.engine, ctx.rest = engine, rest
        ctx.is_wide = any(x is not None and x.dtype is not y.dtype for x, y in zip(tensors, own, strict=True))
        ctx.save_for_backward(*own, o, lse, parts)
        ctx.set_materialize_grads(False)
        return o, lse

    @staticmethod
    @once
    def backward(ctx: Any, d_o: Tensor | None, d_lse: Tensor | None = None) -> Any:
        engine: Engine = ctx.engine
        *tensors, o, lse, parts = ctx.saved_tensors
        needs = ctx.needs_input_grad[2 : 2 + engine.signature.inputs]
        d_o, d_lse = with_memory((torch.zeros_like(o) if d_o is None else d_o, d_lse))
        rows = (d_lse, o, lse, parts) if engine.signature.has_lse else (None,) * 4
        found = iter(engine.gradients(d_o, rows, tuple(tensors), ctx.rest, needs, is_part=ctx.is_wide))
        rest = len(tensors) - len(needs)
        return (None, None, *(next(found) if need else None for need in needs), *(None,) * rest)
