"""Attention over keys that ranks hold: round by round, while the keys of the next round travel.

In: q, k and v of this rank, its rounds. Out: o and lse of its rows. Backward, gradients of keys go back to who holds
them in float32, and are added there in the order of rounds. The keys of a round are sent again then, unless they are
kept: a ring holds those of two rounds at a time, and a rank of a group of any size as much as its own.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from flashgen.distributed.blocks import Span
from flashgen.distributed.exchange import Flight, Group, post
from flashgen.distributed.partial import Closed, Partial, Rows, Where
from flashgen.distributed.rounds import Round, Unit
from flashgen.runtime.engine import Tensors
from flashgen.runtime.parts import type_of_sums
from flashgen.runtime.plain import with_memory


@dataclass(frozen=True)
class Walk:
    """How a rank computes a call. ``own`` are the positions of its rows, ``where`` says its heads and batch.

    ``keeps``: backward finds what forward got.
    """

    partial: Partial
    own: tuple[Span, ...]
    rounds: tuple[Round, ...]
    group: Group
    where: Where
    deterministic: bool
    keeps: bool

    def attend(self, tensors: Tensors) -> tuple[Tensor, Tensor | None]:
        """o [B, H, n, Dv] and lse [B, H, n] of the operator's tensors, of which q, k and v are this rank's rows."""
        found: tuple[Tensor, Tensor | None] = _Attend.apply(self, *tensors)  # type: ignore[no-untyped-call]
        return found

    def spans(self) -> Iterator[tuple[int, slice]]:
        """The first position of each span of rows, and where these are."""
        before = 0
        for start, stop in self.own:
            yield start, slice(before, before + stop - start)
            before += stop - start

    def place(self, q_start: int, kv_start: int) -> Where:
        """Of a call of some rows and keys."""
        at = self.where
        return Where(q_start, kv_start, at.b_start, at.h_start, at.q_total, at.kv_total, at.b_total, at.h_total)


@dataclass(frozen=True)
class Keys:
    """Keys and values on their way, or there: ``rows`` [n, B · Hkv · (D + Dv)], those of each source together."""

    rows: Tensor
    flight: Flight | None


class _Pieces:
    """The keys and values of this rank and of others, as rows and as tensors."""

    def __init__(self, walk: Walk, k: Tensor, v: Tensor) -> None:
        self.walk, self.k, self.v = walk, k, v
        self._rows: Tensor | None = None

    def own_rows(self) -> Tensor:
        """k and v, [n, B · Hkv · (D + Dv)]."""
        if self._rows is None:
            self._rows = rows_of(self.k, self.v)
        return self._rows

    def fetch(self, number: int) -> Keys | None:
        """Begin to bring the keys of a round; None behind the last."""
        if number >= len(self.walk.rounds):
            return None
        each = self.walk.rounds[number]
        sent = [(to, _chosen(self.own_rows(), which)) for to, which in each.sent]
        width = self.k.shape[0] * self.k.shape[1] * (self.k.shape[3] + self.v.shape[3])
        found = self.k.new_empty(each.keys, width)
        parts = _split(found, each)
        return Keys(found, post(sent, parts, self.walk.group, f"keys and values of round {number}"))

    def opened(self, number: int, keys: Keys | None) -> tuple[Tensor, Tensor]:
        """k and v of a round, positions ascending: [B, Hkv, m, D], [B, Hkv, m, Dv]."""
        if keys is None:
            return self.k, self.v
        if keys.flight is not None:
            keys.flight.wait()
        order = self.walk.rounds[number].order
        rows = keys.rows if order is None else keys.rows.index_select(0, order)
        return keys_of(rows, self.k, self.v)


class _Attend(torch.autograd.Function):
    """The walk of a call; arguments and gradients are those of the operator."""

    @staticmethod
    def forward(ctx: Any, walk: Walk, *tensors: Any) -> tuple[Tensor, Tensor | None]:
        tensors = with_memory(tensors)
        q, k, v = tensors[:3]
        rest = tensors[3:]
        partial = walk.partial
        pieces = _Pieces(walk, k, v)
        spans = [at for _, at in walk.spans()]
        rows: dict[int, Rows] = {}  # of each span that has seen keys
        kept: list[Keys | None] = []
        coming: Keys | None = None
        for number, each in enumerate(walk.rounds):
            keys, coming = coming, pieces.fetch(number + 1)
            k_of_round, v_of_round = pieces.opened(number, keys)
            for unit in each.units:
                at, of_keys = slice(*unit.rows), slice(*unit.keys)
                own = (q[:, :, at], k_of_round[:, :, of_keys], v_of_round[:, :, of_keys], *rest)
                where = walk.place(unit.q_start, unit.kv_start)
                if at == spans[unit.span]:
                    rows[unit.span] = partial.add(rows.get(unit.span), own, where)
                    continue
                if unit.span not in rows:
                    rows[unit.span] = partial.begin(q[:, :, spans[unit.span]], v)
                partial.add_to(rows[unit.span], _within(spans[unit.span], at), own, where)
            kept.append(keys)
        sink = None
        if partial.op.spec.weights.sink is not None:
            sink = _sinks(walk, q, v, partial.captured(rest))
        closed = [(at, rows.get(n) or partial.begin(q[:, :, at], v)) for n, at in enumerate(spans)]
        o, lse, parts = partial.close(closed, sink, (q, k, v))
        ctx.walk, ctx.inputs = walk, len(tensors)
        ctx.kept = [None if keys is None else keys.rows for keys in kept] if walk.keeps else None
        ctx.save_for_backward(*tensors, o, lse, parts)
        ctx.set_materialize_grads(False)
        return o, lse

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_o: Tensor | None, d_lse: Tensor | None = None) -> Any:
        walk: Walk = ctx.walk
        saved = ctx.saved_tensors
        tensors, (o, lse, parts) = saved[: ctx.inputs], saved[ctx.inputs :]
        q, k, v = tensors[:3]
        d_o, d_lse = with_memory((torch.zeros_like(o) if d_o is None else d_o, d_lse))
        wide = type_of_sums(q.dtype)
        signature = walk.partial.inner.signature
        learned = [n for n in range(3, signature.inputs) if ctx.needs_input_grad[1 + n]]
        needs = [n < 3 or n in learned for n in range(signature.inputs)]
        closed = (o.to(walk.partial.type_of(q.dtype)), lse, parts)
        backward = _Backward(walk, tensors, (d_o, d_lse), closed, needs)
        backward.run(ctx.kept)
        found: list[Tensor | None] = [None] * ctx.inputs
        found[:3] = backward.d_queries(), *(x.to(k.dtype) for x in keys_of(backward.d_rows, k, v))
        for n, total in zip(learned, backward.sums, strict=True):
            found[n] = total
        if walk.partial.op.spec.weights.sink is not None and learned:
            _add_gradients_of_sinks(walk, tensors, (d_o.to(wide), d_lse), (o.to(wide), lse, parts), learned, found)
        for n in learned:
            x = found[n]
            found[n] = None if x is None else x.to(tensors[n])
        return None, *found


class _Backward:
    """One backward pass. ``d_q`` [B, H, n, D], by number of its span of rows, and ``d_rows``, of k and v,
    are of this rank's rows; ``sums`` of what is captured. All float32 at least.
    """

    def __init__(
        self, walk: Walk, tensors: Tensors, arriving: tuple[Tensor, Tensor | None], closed: Closed, needs: list[bool]
    ) -> None:
        q, k, v = tensors[:3]
        self.walk, self.arriving, self.closed, self.needs = walk, arriving, closed, needs
        self.q, self.rest, wide = q, tensors[3:], type_of_sums(q.dtype)
        self.pieces = _Pieces(walk, k, v)
        self.spans = [at for _, at in walk.spans()]
        self.d_q: dict[int, Tensor] = {}
        width = k.shape[0] * k.shape[1] * (k.shape[3] + v.shape[3])
        self.d_rows = k.new_zeros(k.shape[2], width, dtype=wide)
        self.sums: list[Tensor] = [
            torch.zeros(x.shape, dtype=torch.promote_types(x.dtype, torch.float32), device=q.device)
            for x, need in zip(tensors[3:], needs[3:], strict=False)
            if need
        ]

    def run(self, kept: Sequence[Tensor | None] | None) -> None:
        """All rounds. While one is worked on, keys of the next come and gradients of the one before go home."""
        coming: Keys | None = None
        going: tuple[Flight, list[tuple[Tensor | None, Tensor]]] | None = None
        for number, each in enumerate(self.walk.rounds):
            if kept is not None:
                rows = kept[number]
                keys = None if rows is None else Keys(rows, None)
            else:
                keys, coming = coming, self.pieces.fetch(number + 1)
            d_keys = self._round(each, *self.pieces.opened(number, keys))
            self._come_home(going)
            going = None
            if number == 0:
                self.d_rows += d_keys
            else:
                going = self._send_home(number, each, d_keys)
        self._come_home(going)

    def d_queries(self) -> Tensor:
        """The gradient of q, in its type; zero where no key is seen."""
        found = torch.empty_like(self.q, memory_format=torch.contiguous_format)
        for n, at in enumerate(self.spans):
            found[:, :, at] = self.d_q.get(n, 0.0)
        return found

    def _add_to_queries(self, unit: Unit, at: slice, part: Tensor) -> None:
        own, before = self.spans[unit.span], self.d_q.get(unit.span)
        if at == own and before is None:
            self.d_q[unit.span] = part.to(self.d_rows.dtype)
            return
        if before is None:
            before = self.d_q[unit.span] = torch.zeros_like(self.q[:, :, own], dtype=self.d_rows.dtype)
        before[:, :, _within(own, at)].add_(part)

    def _round(self, each: Round, k: Tensor, v: Tensor) -> Tensor:
        """The gradients of a round's keys, as rows; adds to others what is theirs."""
        d_k, d_v = (torch.zeros(x.shape, dtype=self.d_rows.dtype, device=x.device) for x in (k, v))
        d_o, d_lse = self.arriving
        for unit in each.units:
            at, of_keys = slice(*unit.rows), slice(*unit.keys)
            closed: Any = tuple(None if x is None else x[:, :, at] for x in self.closed)
            own = (self.q[:, :, at], k[:, :, of_keys], v[:, :, of_keys], *self.rest)
            found = self.walk.partial.gradients(
                d_o[:, :, at], None if d_lse is None else d_lse[:, :, at], closed, own,
                self.walk.place(unit.q_start, unit.kv_start), self.needs, self.walk.deterministic,
            )  # fmt: skip
            self._add_to_queries(unit, at, found[0])
            d_k[:, :, of_keys] += found[1]
            d_v[:, :, of_keys] += found[2]
            for total, more in zip(self.sums, found[3:], strict=True):
                total.add_(more)
        return rows_of(d_k, d_v)

    def _send_home(self, number: int, each: Round, d_keys: Tensor) -> tuple[Flight, list[tuple[Tensor | None, Tensor]]]:
        if each.order is not None:
            d_keys = torch.empty_like(d_keys).index_copy_(0, each.order, d_keys)
        sent = _split(d_keys, each)
        coming = [
            (to, which, self.d_rows.new_empty(self.d_rows.shape[0] if which is None else len(which), d_keys.shape[1]))
            for to, which in each.sent
        ]
        flight = post(sent, [(to, x) for to, _, x in coming], self.walk.group, f"gradients of round {number}")
        return flight, [(which, x) for _, which, x in coming]

    def _come_home(self, going: tuple[Flight, list[tuple[Tensor | None, Tensor]]] | None) -> None:
        if going is None:
            return
        flight, parts = going
        flight.wait()
        for which, part in parts:
            if which is None:
                self.d_rows += part
            else:  # a rank names a row once, so that nothing is added twice at one place
                self.d_rows.index_add_(0, which, part)


def _sinks(walk: Walk, q: Tensor, v: Tensor, captured: dict[str, Tensor | None], some: Tensor | None = None) -> Tensor:
    """[B, H, n]; differentiable where ``some`` says which rows keep a key."""
    parts = [
        walk.partial.sink(q[:, :, at], v, captured, walk.place(start, 0), None if some is None else some[:, :, at])
        for start, at in walk.spans()
    ]
    return torch.cat(parts, 2) if parts else q.new_zeros(q.shape[:3], dtype=type_of_sums(q.dtype))


def _add_gradients_of_sinks(
    walk: Walk,
    tensors: Tensors,
    arriving: tuple[Tensor, Tensor | None],
    closed: Closed,
    learned: Sequence[int],
    found: list[Tensor | None],
) -> None:
    """Of a sink z: -exp(z - lse) (rowsum(dO ∘ O) - d(lse)); those of what it reads are added to ``found``."""
    (d_o, d_lse), (o, lse, _) = arriving, closed
    assert lse is not None
    rest = list(tensors[3:])
    leaves = {n: tensors[n].detach().requires_grad_() for n in learned}
    for n, leaf in leaves.items():
        rest[n - 3] = leaf
    with torch.enable_grad():
        sink = _sinks(walk, tensors[0], tensors[2], walk.partial.captured(rest), lse != -torch.inf)
    if not sink.requires_grad:
        return
    delta = (d_o * o).sum(-1)
    if d_lse is not None:
        delta = delta - d_lse
    d_sink = torch.where(lse == -torch.inf, 0.0, -(sink.detach() - lse).exp() * delta)
    gradients: Sequence[Tensor | None] = torch.autograd.grad(
        sink, list(leaves.values()), d_sink.to(sink.dtype), allow_unused=True
    )
    for n, gradient in zip(learned, gradients, strict=True):
        before = found[n]
        if gradient is not None and before is not None:
            found[n] = before + gradient.to(before.dtype)


def rows_of(k: Tensor, v: Tensor) -> Tensor:
    """[B, Hkv, n, D] and [B, Hkv, n, Dv] → [n, B · Hkv · (D + Dv)]."""
    parts = (x.permute(2, 0, 1, 3).reshape(x.shape[2], x.shape[0] * x.shape[1] * x.shape[3]) for x in (k, v))
    return torch.cat(list(parts), 1)


def keys_of(rows: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """The reverse, for tensors like ``k`` and ``v``; views."""
    batch, heads = k.shape[:2]
    split = batch * heads * k.shape[3]
    parts = rows[:, :split], rows[:, split:]
    found = (
        part.reshape(rows.shape[0], batch, heads, x.shape[3]).permute(1, 2, 0, 3)
        for part, x in zip(parts, (k, v), strict=True)
    )
    first, second = found
    return first, second


def _within(span: slice, at: slice) -> slice:
    """The same rows, counted from the first of a span."""
    return slice(at.start - span.start, at.stop - span.start)


def _chosen(rows: Tensor, which: Tensor | None) -> Tensor:
    return rows if which is None else rows.index_select(0, which)


def _split(rows: Tensor, each: Round) -> list[tuple[int, Tensor]]:
    """What comes from each source, views."""
    parts = torch.split(rows, [count for _, count in each.received]) if each.received else ()
    return [(source, part) for (source, _), part in zip(each.received, parts, strict=True)]
