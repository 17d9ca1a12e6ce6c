"""Attention over keys that ranks hold: round by round, while the keys of the next round travel.

In: q, k and v of this rank, its rounds. Out: o and lse of its rows. Rows whose keys one call sees are those of the op
itself; others are added up in float32. Backward, gradients of keys go back to who holds them in float32, and are added
there. The keys of a round are sent again then, unless they are kept: a ring holds those of two rounds at a time, and a
rank of a group of any size as much as its own.
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
from flashgen.distributed.rounds import Round, Rounds, Unit, Which
from flashgen.distributed.segments import overlaps
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
    plan: Rounds
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
    """Keys and values on their way, or there: ``rows`` [n, B · Hkv · (D + Dv)]; those that ``staged`` says come apart,
    and are put where these numbers say.
    """

    rows: Tensor
    flight: Flight | None = None
    staged: tuple[tuple[Tensor, Tensor], ...] = ()


class _Pieces:
    """The keys and values of this rank and of others, as rows and as tensors."""

    def __init__(self, walk: Walk, k: Tensor, v: Tensor) -> None:
        self.walk, self.k, self.v = walk, k, v
        self.width = k.shape[0] * k.shape[1] * (k.shape[3] + v.shape[3])
        self._packed: Tensor | None = None

    def fetch(self, number: int) -> Keys | None:
        """Begin to bring the keys of a round; None behind the last."""
        if number >= len(self.walk.plan.rounds):
            return None
        each = self.walk.plan.rounds[number]
        rows = self.k.new_empty(each.keys, self.width)
        received = []
        staged = []
        for x in each.received:
            if isinstance(x.keys, Tensor):
                staged.append((x.keys, rows.new_empty(x.count, self.width)))
                received.append((x.rank, staged[-1][1]))
            else:
                received.append((x.rank, _taken(rows, x.keys)))
        sent = [(x.rank, _taken(self._own_rows(), x.packed)) for x in each.sent]
        flight = post(sent, received, self.walk.group, f"keys and values of round {number}")
        _copy(each.own, (self.k, self.v), keys_of(rows, self.k, self.v))
        return Keys(rows, flight, tuple(staged))

    def opened(self, keys: Keys | None) -> tuple[Tensor, Tensor]:
        """k and v of a round, positions ascending: [B, Hkv, m, D], [B, Hkv, m, Dv]."""
        if keys is None:
            return self.k, self.v
        if keys.flight is not None:
            keys.flight.wait()
            for which, rows in keys.staged:
                keys.rows.index_copy_(0, which, rows)
        return keys_of(keys.rows, self.k, self.v)

    def _own_rows(self) -> Tensor:
        """k and v of the rows that others want, one behind the other."""
        if self._packed is None:
            packed = self.walk.plan.packed
            self._packed = self.k.new_empty(packed[-1][1][1] if packed else 0, self.width)
            _copy(packed, (self.k, self.v), keys_of(self._packed, self.k, self.v))
        return self._packed


class _Attend(torch.autograd.Function):
    """The walk of a call; arguments and gradients are those of the operator."""

    @staticmethod
    def forward(ctx: Any, walk: Walk, *tensors: Any) -> tuple[Tensor, Tensor | None]:
        tensors = with_memory(tensors)
        q, k, v = tensors[:3]
        rest, partial = tensors[3:], walk.partial
        pieces, segments = _Pieces(walk, k, v), walk.plan.segments
        closed: dict[int, Closed] = {}
        rows: dict[int, Rows] = {}  # of each segment that has seen keys, but not all
        kept: list[Keys | None] = []
        coming: Keys | None = None
        for number, each in enumerate(walk.plan.rounds):
            keys, coming = coming, pieces.fetch(number + 1)
            k_of_round, v_of_round = pieces.opened(keys)
            for unit in each.units:
                n, of = unit.segment, segments[unit.segment]
                own = (_rows(q, unit.rows), _rows(k_of_round, unit.keys), _rows(v_of_round, unit.keys), *rest)
                where = walk.place(unit.q_start, unit.kv_start)
                if of.is_whole:
                    closed[n] = partial.whole(own, where)
                elif unit.rows == of.rows:
                    rows[n] = partial.add(rows.get(n), own, where)
                else:
                    if n not in rows:
                        rows[n] = partial.begin(_rows(q, of.rows), v)
                    partial.add_to(rows[n], slice(*_within(of.rows, unit.rows)), own, where)
            kept.append(keys)
        for n, of in enumerate(segments):
            if n not in closed:
                own_q = _rows(q, of.rows)
                sink = None
                if partial.op.spec.weights.sink is not None:
                    sink = partial.sink(own_q, v, partial.captured(rest), walk.place(of.q_start, 0), None)
                closed[n] = partial.close(rows.get(n) or partial.begin(own_q, v), sink, (own_q, k, v))
        found = [closed[n] for n in range(len(segments))] or [partial.close(partial.begin(q, v), None, (q, k, v))]
        o, lse, parts = (_one(each) for each in zip(*found, strict=True))
        assert o is not None, "only lse may be none"
        ctx.walk, ctx.inputs = walk, len(tensors)
        ctx.kept = [None if keys is None else Keys(keys.rows) for keys in kept] if walk.keeps else None
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
        backward = _Backward(walk, tensors, (d_o, d_lse), (o, lse, parts), needs)
        backward.run(ctx.kept)
        found: list[Tensor | None] = [None] * ctx.inputs
        found[:3] = backward.d_q.total(q.dtype), backward.d_k.total(k.dtype), backward.d_v.total(v.dtype)
        for n, total in backward.sums.items():
            found[n] = total
        if walk.partial.op.spec.weights.sink is not None and learned:
            _add_gradients_of_sinks(walk, tensors, (d_o.to(wide), d_lse), (o.to(wide), lse, parts), learned, found)
        for n in learned:
            x = found[n]
            found[n] = torch.zeros_like(tensors[n]) if x is None else x.to(tensors[n])
        return None, *found


class _Total:
    """The sum of what calls found for rows of ``like`` [B, heads, n, width], each for some of them.

    What is found first for rows is what others are added to: nothing is cleared, and next to nothing read twice.
    """

    def __init__(self, like: Tensor, dtype: torch.dtype) -> None:
        self._like, self._dtype = like, dtype
        self._parts: list[tuple[Which, Tensor]] = []

    def add(self, at: Which, part: Tensor) -> None:
        """Takes ``part`` over, which may be written to; of its rows each is named once."""
        self._parts.append((at, part.to(self._dtype)))

    def total(self, dtype: torch.dtype) -> Tensor:
        """All, rounded to a type."""
        if any(isinstance(at, Tensor) for at, _ in self._parts):
            found = self._like.new_zeros(self._like.shape, dtype=self._dtype)
            for at, part in self._parts:
                found.index_add_(2, at, part) if isinstance(at, Tensor) else _rows(found, at).add_(part)
            return found.to(dtype)
        bases: list[tuple[Span, Tensor]] = []
        # Sums have one order, whatever comes first: the longest.
        spans: list[tuple[Span, Tensor]] = [(at, part) for at, part in self._parts if not isinstance(at, Tensor)]
        for at, part in sorted(spans, key=lambda each: each[0][0] - each[0][1]):
            known = sorted(span for span, _ in bases)
            for span in overlaps((at,), known):
                base, sums = next(each for each in bases if each[0][0] <= span[0] and span[1] <= each[0][1])
                _rows(sums, _within(base, span)).add_(_rows(part, _within(at, span)))
            bases += [(gap, _rows(part, _within(at, gap))) for gap in _gaps(at, known)]
        whole = (0, self._like.shape[2])
        if len(bases) == 1 and bases[0][0] == whole:
            return bases[0][1].to(dtype)
        found = self._like.new_empty(self._like.shape, dtype=dtype)
        for at, part in bases:
            _rows(found, at).copy_(part)
        for gap in _gaps(whole, sorted(span for span, _ in bases)):
            _rows(found, gap).zero_()
        return found


def _gaps(whole: Span, known: Sequence[Span]) -> list[Span]:
    """What ascending spans leave of one."""
    ends = [whole[0], *(end for span in overlaps((whole,), known) for end in span), whole[1]]
    return [(ends[n], ends[n + 1]) for n in range(0, len(ends), 2) if ends[n] < ends[n + 1]]


@dataclass(frozen=True)
class Going:
    """Gradients of keys on their way home, and those that come: of which own rows, [m, B · Hkv · (D + Dv)]."""

    flight: Flight
    parts: tuple[tuple[Which, Tensor], ...]


class _Backward:
    """One backward pass. ``d_q``, ``d_k`` and ``d_v`` are of this rank's rows, ``sums`` of what is captured, by its
    number among the inputs. All float32 at least.
    """

    def __init__(
        self, walk: Walk, tensors: Tensors, arriving: tuple[Tensor, Tensor | None], closed: Closed, needs: list[bool]
    ) -> None:
        q, k, v = tensors[:3]
        self.walk, self.tensors, self.arriving, self.closed, self.needs = walk, tensors, arriving, closed, needs
        self.wide = type_of_sums(q.dtype)
        self.pieces = _Pieces(walk, k, v)
        self.d_q, self.d_k, self.d_v = (_Total(x, self.wide) for x in (q, k, v))
        self.sums: dict[int, Tensor] = {}
        self._learned = [n for n in range(3, len(needs)) if needs[n]]
        self._closed_rows: dict[Span, Closed] = {}

    def run(self, kept: Sequence[Keys | None] | None) -> None:
        """All rounds. While one is worked on, keys of the next come and gradients of the one before go home.

        Where keys were ``kept`` the own ones come last: what others wait for goes before.
        """
        going: Going | None = None
        numbers = range(len(self.walk.plan.rounds))
        coming = None
        for number in numbers if kept is None else reversed(numbers):
            if kept is not None:
                keys = kept[number]
            else:
                keys, coming = coming, self.pieces.fetch(number + 1)
            foreign = self._round(self.walk.plan.rounds[number], *self.pieces.opened(keys))
            self._come_home(going)
            going = self._send_home(number, foreign)
        self._come_home(going)

    def _round(self, each: Round, k: Tensor, v: Tensor) -> Tensor | None:
        """The gradients of a round's foreign keys, as rows; adds to others what is theirs."""
        foreign = None
        d_o, d_lse = self.arriving
        for unit in each.units:
            own = (_rows(self.tensors[0], unit.rows), _rows(k, unit.keys), _rows(v, unit.keys), *self.tensors[3:])
            d_q, d_k, d_v, *sums = self.walk.partial.gradients(
                _rows(d_o, unit.rows), None if d_lse is None else _rows(d_lse, unit.rows),
                self._closed_at(unit.rows), own, self.walk.place(unit.q_start, unit.kv_start), self.needs,
                self.walk.deterministic,
            )  # fmt: skip
            self.d_q.add(unit.rows, d_q)
            for part, at in unit.own:
                self.d_k.add(at, _rows(d_k, part))
                self.d_v.add(at, _rows(d_v, part))
            if unit.foreign:
                foreign = self._add_foreign(foreign, each, unit, d_k, d_v)
            for n, more in zip(self._learned, sums, strict=True):
                if n in self.sums:
                    self.sums[n].add_(more)
                else:
                    self.sums[n] = more.to(torch.promote_types(more.dtype, torch.float32))
        return foreign

    def _add_foreign(self, rows: Tensor | None, each: Round, unit: Unit, d_k: Tensor, d_v: Tensor) -> Tensor:
        """``Round.foreign`` rows with what a call found for some of them more."""
        shape = (each.foreign, self.pieces.width)
        k, v = self.tensors[1:3]
        if rows is None and sum(part[1] - part[0] for part, _ in unit.foreign) == each.foreign:
            rows = torch.empty(shape, dtype=self.wide, device=k.device)
            _copy(unit.foreign, (d_k, d_v), keys_of(rows, k, v))
            return rows
        if rows is None:
            rows = torch.zeros(shape, dtype=self.wide, device=k.device)
        for x, d_x in zip(keys_of(rows, k, v), (d_k, d_v), strict=True):
            for part, at in unit.foreign:
                _rows(x, at).add_(_rows(d_x, part))
        return rows

    def _closed_at(self, rows: Span) -> Closed:
        """o, in the type in which it is read, lse and its parts, of some rows."""
        found = self._closed_rows.get(rows)
        if found is None:
            o, lse, parts = (None if x is None else _rows(x, rows) for x in self.closed)
            assert o is not None, "only lse may be none"
            self._closed_rows[rows] = found = (o.to(self.walk.partial.type_of(o.dtype)), lse, parts)
        return found

    def _send_home(self, number: int, foreign: Tensor | None) -> Going | None:
        each = self.walk.plan.rounds[number]
        if number == 0:
            return None
        rows = foreign
        if rows is None:
            rows = self.tensors[1].new_zeros(each.foreign, self.pieces.width, dtype=self.wide)
        sent = [(x.rank, _taken(rows, x.foreign)) for x in each.received]
        parts = tuple((x.own, rows.new_empty(_count(x.own), self.pieces.width)) for x in each.sent)
        coming = [(x.rank, part) for x, (_, part) in zip(each.sent, parts, strict=True)]
        return Going(post(sent, coming, self.walk.group, f"gradients of round {number}"), parts)

    def _come_home(self, going: Going | None) -> None:
        if going is None:
            return
        going.flight.wait()
        for which, rows in going.parts:
            for total, part in zip((self.d_k, self.d_v), keys_of(rows, *self.tensors[1:3]), strict=True):
                total.add(which, part)


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


def _rows(x: Tensor, at: Span) -> Tensor:
    """Some rows of [B, heads, n, …]; a view, or all."""
    return x if at == (0, x.shape[2]) else x[:, :, at[0] : at[1]]


def _within(segment: Span, rows: Span) -> Span:
    """The same rows, counted from the first of a segment."""
    return rows[0] - segment[0], rows[1] - segment[0]


def _count(which: Which) -> int:
    return len(which) if isinstance(which, Tensor) else which[1] - which[0]


def _taken(rows: Tensor, which: Which) -> Tensor:
    return rows.index_select(0, which) if isinstance(which, Tensor) else rows[which[0] : which[1]]


def _copy(places: Sequence[tuple[Span, Span]], source: Sequence[Tensor], to: Sequence[Tensor]) -> None:
    """Rows of k and v to where they belong."""
    for x, y in zip(source, to, strict=True):
        for at, there in places:
            _rows(y, there).copy_(_rows(x, at))


def _one(parts: Sequence[Tensor | None]) -> Tensor | None:
    """Neighbouring rows as one."""
    known = [each for each in parts if each is not None]
    return known[0] if len(known) == 1 else torch.cat(known, 2) if known else None
