"""Keys and values as rows that travel: a rank gets the rows that its mask keeps.

In: k and v of this rank, and its rounds. Out: k and v of a round. A row holds all heads of k, then all of v, so that a
run of rows is one message, received where kernels read it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from flashgen.distributed.blocks import Span
from flashgen.distributed.exchange import Flight, Group, post
from flashgen.distributed.gradient_sums import Tensors
from flashgen.distributed.rounds import Rounds, RowSelection


@dataclass(frozen=True)
class KeyRowLayout:
    """The layout of a row: B · Hkv times ``qk`` elements of k, then B · Hkv times ``v`` elements of v.

    ``together``: gradients of k and v, of one width, are one tensor, which halves the number of calls.
    """

    batch: int
    heads: int
    qk: int
    v: int
    together: bool

    @classmethod
    def of(cls, k: Tensor, v: Tensor, *, together: bool = False) -> KeyRowLayout:
        """The layout of rows of k [B, Hkv, n, D] and v [B, Hkv, n, Dv]."""
        return cls(k.shape[0], k.shape[1], k.shape[3], v.shape[3], together and k.shape[3] == v.shape[3])

    @property
    def width(self) -> int:
        return self.batch * self.heads * (self.qk + self.v)

    def keys(self, rows: Tensor, at: Span) -> tuple[Tensor, Tensor]:
        """k and v of the span ``at`` of ``rows`` [n, width], as views. One torch call each: this is a hot path."""
        count, offset = at[1] - at[0], rows.storage_offset() + at[0] * self.width
        batch, heads, qk, v, row = self.batch, self.heads, self.qk, self.v, self.width
        behind = offset + batch * heads * qk
        return (
            rows.as_strided((batch, heads, count, qk), (heads * qk, qk, row, 1), offset),
            rows.as_strided((batch, heads, count, v), (heads * v, v, row, 1), behind),
        )

    def both(self, rows: Tensor, at: Span) -> Tensors:
        """The span ``at`` of ``rows`` as gradients are kept: k and v, or, ``together``, one [2, B, Hkv, n, width]."""
        if not self.together:
            return self.keys(rows, at)
        count, offset = at[1] - at[0], rows.storage_offset() + at[0] * self.width
        part = self.batch * self.heads * self.qk
        sizes = (2, self.batch, self.heads, count, self.qk)
        return (rows.as_strided(sizes, (part, self.heads * self.qk, self.qk, self.width, 1), offset),)

    def empty_both(self, count: int, dtype: torch.dtype, device: torch.device) -> tuple[Tensors, tuple[Tensor, Tensor]]:
        """Uninitialised gradients of ``count`` keys, contiguous: in the form of ``both``, and as k and v."""
        of_k, of_v = ((self.batch, self.heads, count, width) for width in (self.qk, self.v))
        if not self.together:
            each = torch.empty(of_k, dtype=dtype, device=device), torch.empty(of_v, dtype=dtype, device=device)
            return each, each
        one = torch.empty((2, *of_k), dtype=dtype, device=device)
        return (one,), (one[0], one[1])


@dataclass(frozen=True)
class RoundKeys:
    """Keys and values of a round, arrived or under way: ``rows`` [n, width].

    ``staged`` are messages whose rows are scattered: the numbers of the rows, and a tensor that receives them.
    """

    rows: Tensor
    flight: Flight | None = None
    staged: tuple[tuple[Tensor, Tensor], ...] = ()


class KeyExchange:
    """Sends this rank's keys and values, and receives those of other ranks, round by round."""

    def __init__(self, plan: Rounds, group: Group, k: Tensor, v: Tensor) -> None:
        self.plan, self.group, self.k, self.v = plan, group, k, v
        self.form = KeyRowLayout.of(k, v)
        self._packed: Tensor | None = None

    def fetch(self, number: int) -> RoundKeys | None:
        """Begin to send and receive the keys of a round; None behind the last round."""
        if number >= len(self.plan.rounds):
            return None
        each, width = self.plan.rounds[number], self.form.width
        sent = [(x.rank, taken(self._own_rows(), x.keys)) for x in each.sent]
        rows = self.k.new_empty((each.keys, width))
        received = []
        staged = []
        for x in each.received:
            if isinstance(x.keys, Tensor):
                staged.append((x.keys, rows.new_empty((x.count, width))))
                received.append((x.rank, staged[-1][1]))
            else:
                received.append((x.rank, taken(rows, x.keys)))
        return RoundKeys(rows, post(sent, received, self.group, f"keys and values of round {number}"), tuple(staged))

    def join(self, number: int, keys: RoundKeys | None) -> None:
        """Copy this rank's own keys of a round to their place among the received ones."""
        if keys is not None:
            self._copy(self.plan.rounds[number].own, keys.rows)

    def opened(self, keys: RoundKeys | None) -> tuple[Tensor, Tensor]:
        """Wait for the keys of a round; k [B, Hkv, m, D] and v [B, Hkv, m, Dv], by ascending positions."""
        if keys is None:
            return self.k, self.v
        if keys.flight is not None:
            keys.flight.wait()
            for which, rows in keys.staged:
                keys.rows.index_copy_(0, which, rows)
        return self.form.keys(keys.rows, (0, keys.rows.shape[0]))

    def _own_rows(self) -> Tensor:
        """The rows of this rank that other ranks need, packed one behind the other."""
        if self._packed is None:
            packed = self.plan.packed
            self._packed = self.k.new_empty((packed[-1][1][1] if packed else 0, self.form.width))
            self._copy(packed, self._packed)
        return self._packed

    def _copy(self, places: Sequence[tuple[Span, Span]], rows: Tensor) -> None:
        for (first, end), there in places:
            to_k, to_v = self.form.keys(rows, there)
            to_k.copy_(self.k.narrow(2, first, end - first))
            to_v.copy_(self.v.narrow(2, first, end - first))


def taken(rows: Tensor, which: RowSelection) -> Tensor:
    """Some rows of [n, width]: a view where they are one run, else a copy."""
    return rows.index_select(0, which) if isinstance(which, Tensor) else rows.narrow(0, which[0], which[1] - which[0])
