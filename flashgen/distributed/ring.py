"""Attention over the keys of all ranks, round by round, while the keys of the next round travel.

In: q, k and v of this rank, and its rounds. Out: o and lse of its rows. Rows whose keys all come in one round are
computed by one call of the op, which writes them in place; the parts of other rows are added up in float32. In the
backward pass, gradients of keys travel back in float32 to the rank that holds the keys, and are added there. Keys are
sent again for it, unless the forward pass kept them. A ring holds the keys of two rounds at a time.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from flashgen.distributed.blocks import Span, moved
from flashgen.distributed.exchange import Group, Wait, once, post
from flashgen.distributed.key_rows import GradientSum, KeyExchange, KeyRowLayout, RoundKeys, rows_at, taken
from flashgen.distributed.key_rows import Tensors as Parts
from flashgen.distributed.partial import Offsets, Partial, Seen, as_declared
from flashgen.distributed.rounds import Round, Rounds, RowSelection, Unit
from flashgen.op.call import Attended, Tensors
from flashgen.op.tensor_kinds import copied_to, layout_like, type_of_sums, with_memory

_rows = functools.partial(rows_at, dim=2)  # rows of [B, heads, n, …]


@dataclass(frozen=True)
class Walk:
    """How a rank computes a call. ``where`` are its heads and batch. ``keeps``: received keys are kept for backward."""

    partial: Partial
    plan: Rounds
    group: Group
    where: Offsets
    deterministic: bool
    keeps: bool

    def attend(self, tensors: Tensors) -> tuple[Tensor, Tensor | None]:
        """o [B, H, n, Dv] and lse [B, H, n] of the operator's tensors, of which q, k and v are this rank's rows."""
        return _RingAttention.apply(self, *tensors)  # type: ignore[no-any-return,no-untyped-call]

    def place(self, q_start: int, kv_start: int) -> Offsets:
        """The offsets of a call whose rows and keys begin at these positions."""
        return self.where._replace(q_start=q_start, kv_start=kv_start)


class _Forward:
    """One forward pass. ``closed`` are o, lse and the parts of lse of all rows."""

    def __init__(self, walk: Walk, tensors: Tensors) -> None:
        self.walk, self.tensors = walk, tensors
        q, k, v = tensors[:3]
        self.exchange = KeyExchange(walk.plan, walk.group, k, v)
        self.closed = walk.partial.room(q, v)
        self._seen: dict[int, Seen] = {}  # by the segments that several calls compute

    def run(self) -> list[RoundKeys | None]:
        """Compute all rounds; returns the keys of each.

        Messages of a round are posted before the kernels of the round before it, which may fill the GPU.
        """
        kept: list[RoundKeys | None] = []
        coming: RoundKeys | None = None
        for number, each in enumerate(self.walk.plan.rounds):
            keys, coming = coming, self.exchange.fetch(number + 1)
            k, v = self.exchange.opened(keys)
            for unit in each.units:
                self._compute(unit, k, v)
            self.exchange.join(number + 1, coming)
            kept.append(keys)
        self._close()
        return kept

    def _compute(self, unit: Unit, k: Tensor, v: Tensor) -> None:
        partial, n, of = self.walk.partial, unit.segment, self.walk.plan.segments[unit.segment]
        own = _operands(self.tensors, unit, k, v)
        where = self.walk.place(unit.q_start, unit.kv_start)
        if of.is_whole:
            partial.whole(_closed_at(self.closed, unit.rows), own, where)
        elif unit.rows == of.rows:
            self._seen[n] = partial.add(self._seen.get(n), own, where)
        else:
            if n not in self._seen:
                self._seen[n] = partial.begin(_rows(self.tensors[0], of.rows), v)
            seen, at = self._seen[n], slice(*moved(unit.rows, -of.rows[0]))
            partial.add(Seen(*(x[:, :, at] for x in (seen.o, seen.log, seen.top))), own, where)

    def _close(self) -> None:
        """Finish the rows that several calls computed, or that see no key."""
        partial, plan, (q, k, v) = self.walk.partial, self.walk.plan, self.tensors[:3]
        whole = {unit.segment for each in plan.rounds for unit in each.units if plan.segments[unit.segment].is_whole}
        for n, of in enumerate(plan.segments):
            if n in whole:
                continue
            own, sink = _rows(q, of.rows), None
            if partial.op.spec.weights.sink is not None:
                sink = partial.sink(own, v, partial.captured(self.tensors[3:]), self.walk.place(of.q_start, 0), None)
            found = partial.close(self._seen.get(n) or partial.begin(own, v), sink, (own, k, v))
            copied_to(found, _closed_at(self.closed, of.rows))


class _RingAttention(torch.autograd.Function):
    """The autograd function of a walk; arguments and gradients are those of the operator."""

    @staticmethod
    def forward(ctx: Any, walk: Walk, *tensors: Any) -> tuple[Tensor, Tensor | None]:
        ctx.dtypes = [None if x is None else x.dtype for x in tensors]
        tensors = as_declared(walk.partial.inner.signature, tensors)
        forward = _Forward(walk, tensors)
        kept = forward.run()
        o, lse, _ = forward.closed
        ctx.walk, ctx.inputs = walk, len(tensors)
        ctx.kept = [None if keys is None else RoundKeys(keys.rows) for keys in kept] if walk.keeps else None
        ctx.save_for_backward(*tensors, *forward.closed)
        ctx.set_materialize_grads(False)
        return o, lse

    @staticmethod
    @once
    def backward(ctx: Any, d_o: Tensor | None, d_lse: Tensor | None = None) -> Any:
        walk: Walk = ctx.walk
        saved = ctx.saved_tensors
        tensors, (o, lse, parts) = saved[: ctx.inputs], saved[ctx.inputs :]
        d_o, d_lse = with_memory((torch.zeros_like(o) if d_o is None else d_o, d_lse))
        d_lse = None if d_lse is None else d_lse.contiguous()
        signature = walk.partial.inner.signature
        learned = [n for n in range(3, signature.inputs) if ctx.needs_input_grad[1 + n]]
        needs = [n < 3 or n in learned for n in range(signature.inputs)]
        backward = _Backward(walk, tensors, (d_o, d_lse), (o, lse, parts), needs)
        found: list[Tensor | None] = [None] * ctx.inputs
        found[:3] = backward.run(ctx.kept)
        if walk.partial.op.spec.weights.sink is not None and learned:
            backward.add_gradients_of_sinks()
        for n in learned:
            x = backward.sums.get(n)
            found[n] = (torch.zeros_like(tensors[n]) if x is None else x).to(tensors[n].device, ctx.dtypes[n])
        return None, *found


# Gradients of keys under way: the messages, and for each received [m, width] the own rows that it belongs to.
GradientsInFlight = tuple[Wait, tuple[tuple[RowSelection, Tensor], ...]]


class _Backward:
    """One backward pass. ``sums`` are gradients of captured values, float32 at least, by the number of the input."""

    def __init__(
        self, walk: Walk, tensors: Tensors, arriving: tuple[Tensor, Tensor | None], closed: Attended, needs: list[bool]
    ) -> None:
        q, k, v = tensors[:3]
        self.walk, self.tensors, self.arriving, self.closed, self.needs = walk, tensors, arriving, closed, needs
        self.wide = type_of_sums(q.dtype)
        self.exchange = KeyExchange(walk.plan, walk.group, k, v)
        self.form = KeyRowLayout.of(k, v, together=all(of.is_whole for of in walk.plan.segments))
        self.sums: dict[int, Tensor] = {}
        self._d_q = q.new_empty_strided(*layout_like(q, q.shape))
        self._d_q_parts: dict[int, GradientSum] = {}  # by the segments that several calls compute
        self._d_keys = GradientSum(k.shape[2])
        self._learned = [n for n in range(3, len(needs)) if needs[n]]
        self._wide_o: dict[Span, Tensor] = {}

    def run(self, kept: Sequence[RoundKeys | None] | None) -> tuple[Tensor, Tensor, Tensor]:
        """The gradients of q, k and v. During a round the keys of the next one arrive, and the gradients of the one
        before travel back.

        Where keys were ``kept``, this rank's own keys come last, so that other ranks get their gradients early.
        """
        going: GradientsInFlight | None = None
        numbers = range(len(self.walk.plan.rounds))
        coming = None
        for number in numbers if kept is None else reversed(numbers):
            if kept is not None:
                keys = kept[number]
            else:
                keys, coming = coming, self.exchange.fetch(number + 1)
            foreign = self._round(self.walk.plan.rounds[number], *self.exchange.opened(keys))
            self.exchange.join(number + 1, coming)
            self._come_home(going)
            going = self._send_home(number, foreign)
        self._come_home(going)
        k = self.tensors[1]
        both, (d_k, d_v) = self.form.empty_both(k.shape[2], k.dtype, k.device)
        self._d_keys.put(both)
        for n, of in enumerate(self.walk.plan.segments):
            if n in self._d_q_parts:
                self._d_q_parts[n].put((_rows(self._d_q, of.rows),))
            elif not of.is_whole:
                _rows(self._d_q, of.rows).zero_()
        return self._d_q, d_k, d_v

    def _round(self, each: Round, k: Tensor, v: Tensor) -> Tensor | None:
        """Compute a round: add up gradients of own keys and captured values; returns those of foreign keys, as rows."""
        foreign = None
        for unit in each.units:
            both, sums = self._gradients(unit, k, v)
            for part, at in unit.own:
                self._d_keys.add(at, tuple(rows_at(x, part) for x in both))
            if unit.foreign:
                foreign = self._add_foreign(foreign, each, unit, both)
            for n, more in zip(self._learned, sums, strict=True):
                if n in self.sums:
                    self.sums[n].add_(more)
                else:
                    self.sums[n] = more.to(torch.promote_types(more.dtype, torch.float32))
        return foreign

    def _gradients(self, unit: Unit, k: Tensor, v: Tensor) -> tuple[Parts, Sequence[Tensor]]:
        """The gradients of a call by its keys and by captured values; dQ is stored or added up."""
        walk, partial, of = self.walk, self.walk.partial, self.walk.plan.segments[unit.segment]
        d_o, d_lse = self.arriving
        d_o, d_lse = _rows(d_o, unit.rows), None if d_lse is None else _rows(d_lse, unit.rows)
        own = _operands(self.tensors, unit, k, v)
        where, closed = walk.place(unit.q_start, unit.kv_start), _closed_at(self.closed, unit.rows)
        if of.is_whole:
            both, keys = self.form.empty_both(unit.keys[1] - unit.keys[0], self.wide, k.device)
            into = (_rows(self._d_q, unit.rows), *keys)
            return both, partial.gradients_of_whole(
                into, d_o, d_lse, closed, own, where, self.needs, walk.deterministic
            )
        o, lse, parts = closed
        wide_o = self._wide_o.get(unit.rows)
        if wide_o is None:
            wide_o = self._wide_o[unit.rows] = o.to(partial.type_of(o.dtype))
        found = partial.gradients(d_o, d_lse, (wide_o, lse, parts), own, where, self.needs, walk.deterministic)
        d_q, d_k, d_v = (x.to(self.wide) for x in found[:3])
        total = self._d_q_parts.setdefault(unit.segment, GradientSum(of.rows[1] - of.rows[0]))
        total.add(moved(unit.rows, -of.rows[0]), (d_q,))
        return (d_k, d_v), found[3:]

    def _add_foreign(self, rows: Tensor | None, each: Round, unit: Unit, both: Parts) -> Tensor:
        """Add the gradients of a call's foreign keys to the ``Round.foreign`` rows of the round."""
        fresh = rows is None and sum(part[1] - part[0] for part, _ in unit.foreign) == each.foreign
        if rows is None:
            make = torch.empty if fresh else torch.zeros
            rows = make((each.foreign, self.form.width), dtype=self.wide, device=both[0].device)
        for part, at in unit.foreign:
            for x, y in zip(self.form.both(rows, at), both, strict=True):
                x.copy_(rows_at(y, part)) if fresh else x.add_(rows_at(y, part))
        return rows

    def _send_home(self, number: int, foreign: Tensor | None) -> GradientsInFlight | None:
        each = self.walk.plan.rounds[number]
        if number == 0:
            return None
        rows = foreign
        if rows is None:
            rows = self.tensors[1].new_zeros((each.foreign, self.form.width), dtype=self.wide)
        sent = [(x.rank, taken(rows, x.gradients)) for x in each.received]
        parts = tuple((x.gradients, rows.new_empty((x.count, self.form.width))) for x in each.sent)
        coming = [(x.rank, part) for x, (_, part) in zip(each.sent, parts, strict=True)]
        return post(sent, coming, self.walk.group, f"gradients of round {number}"), parts

    def _come_home(self, going: GradientsInFlight | None) -> None:
        if going is None:
            return
        wait, parts = going
        wait()
        for which, rows in parts:
            self._d_keys.add(which, self.form.both(rows, (0, rows.shape[0])))

    def add_gradients_of_sinks(self) -> None:
        """Add the gradients of the values that a sink z reads: dz = -exp(z - lse) (rowsum(dO ∘ O) - d(lse))."""
        walk, tensors, (d_o, d_lse), (o, lse, _) = self.walk, self.tensors, self.arriving, self.closed
        assert lse is not None
        rest, (q, _, v) = list(tensors[3:]), tensors[:3]
        # In float32, as autograd rounds gradients to the types of their values.
        leaves = {n: tensors[n].detach().to(type_of_sums(tensors[n].dtype)).requires_grad_() for n in self._learned}
        for n, leaf in leaves.items():
            rest[n - 3] = leaf
        captured, some = walk.partial.captured(rest), lse != -torch.inf
        with torch.enable_grad():
            sinks = [
                walk.partial.sink(_rows(q, of.rows), v, captured, walk.place(of.q_start, 0), _rows(some, of.rows))
                for of in walk.plan.segments
            ]
            sink = torch.cat(sinks, 2) if sinks else lse
        if not sink.requires_grad:
            return
        delta = (d_o.to(self.wide) * o.to(self.wide)).sum(-1)
        if d_lse is not None:
            delta = delta - d_lse
        share = walk.partial.log_share_of(sink.detach(), self.closed, tensors).exp().to(delta.dtype)
        d_sink = torch.where(lse == -torch.inf, 0.0, -share * delta)
        gradients: Sequence[Tensor | None] = torch.autograd.grad(
            sink, list(leaves.values()), d_sink.to(sink.dtype), allow_unused=True
        )
        for n, gradient in zip(self._learned, gradients, strict=True):
            before = self.sums.get(n)  # None where no row has a key
            if gradient is not None:
                self.sums[n] = gradient if before is None else before + gradient.to(before.dtype)


def _operands(tensors: Tensors, unit: Unit, k: Tensor, v: Tensor) -> Tensors:
    """The operator's tensors for one call, over the keys k and v of its round."""
    return (_rows(tensors[0], unit.rows), _rows(k, unit.keys), _rows(v, unit.keys), *tensors[3:])


def _closed_at(closed: Attended, rows: Span) -> Attended:
    o, lse, parts = closed
    return _rows(o, rows), None if lse is None else _rows(lse, rows), None if parts is None else _rows(parts, rows)
