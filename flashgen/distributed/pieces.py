"""Keys and values as they travel: rows, of which a rank gets those that its mask keeps, beside its own.

In: k and v of this rank, its rounds. Out: k and v of a round. A row has all heads of k, then all of v, so that any run
of rows is one message, which lands where kernels read it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from flashgen.distributed.blocks import Span
from flashgen.distributed.exchange import Flight, Group, post
from flashgen.distributed.rounds import Rounds, Which
from flashgen.distributed.sums import Tensors


@dataclass(frozen=True)
class RowForm:
    """What a row holds: B · Hkv of ``qk`` elements, then as many of ``v``.

    ``together``: where both have one width, gradients of k and v are one tensor, which takes half of the calls.
    """

    batch: int
    heads: int
    qk: int
    v: int
    together: bool

    @classmethod
    def of(cls, k: Tensor, v: Tensor, *, together: bool = False) -> RowForm:
        """Of tensors like these, [B, Hkv, n, D] and [B, Hkv, n, Dv]."""
        return cls(k.shape[0], k.shape[1], k.shape[3], v.shape[3], together and k.shape[3] == v.shape[3])

    @property
    def width(self) -> int:
        """Elements."""
        return self.batch * self.heads * (self.qk + self.v)

    def keys(self, rows: Tensor, at: Span) -> tuple[Tensor, Tensor]:
        """k and v of some of ``rows`` [n, width]; views. One call each: they are made for every run of every call."""
        count, offset = at[1] - at[0], rows.storage_offset() + at[0] * self.width
        batch, heads, qk, v, row = self.batch, self.heads, self.qk, self.v, self.width
        behind = offset + batch * heads * qk
        return (
            rows.as_strided((batch, heads, count, qk), (heads * qk, qk, row, 1), offset),
            rows.as_strided((batch, heads, count, v), (heads * v, v, row, 1), behind),
        )

    def both(self, rows: Tensor, at: Span) -> Tensors:
        """The same as gradients have it: k and v each, or together, [2, B, Hkv, n, width]."""
        if not self.together:
            return self.keys(rows, at)
        count, offset = at[1] - at[0], rows.storage_offset() + at[0] * self.width
        part = self.batch * self.heads * self.qk
        sizes = (2, self.batch, self.heads, count, self.qk)
        return (rows.as_strided(sizes, (part, self.heads * self.qk, self.qk, self.width, 1), offset),)

    def empty_both(self, count: int, dtype: torch.dtype, device: torch.device) -> tuple[Tensors, tuple[Tensor, Tensor]]:
        """Room for gradients of so many keys, contiguous: as ``both`` has them, and of k and v each."""
        of_k, of_v = ((self.batch, self.heads, count, width) for width in (self.qk, self.v))
        if not self.together:
            each = torch.empty(of_k, dtype=dtype, device=device), torch.empty(of_v, dtype=dtype, device=device)
            return each, each
        one = torch.empty((2, *of_k), dtype=dtype, device=device)
        return (one,), (one[0], one[1])


@dataclass(frozen=True)
class Keys:
    """Keys and values on their way, or there: ``rows`` [n, width]; those that ``staged`` says come apart, and are put
    where these numbers say.
    """

    rows: Tensor
    flight: Flight | None = None
    staged: tuple[tuple[Tensor, Tensor], ...] = ()


class Pieces:
    """The keys and values of this rank and of others, as rows and as tensors."""

    def __init__(self, plan: Rounds, group: Group, k: Tensor, v: Tensor) -> None:
        self.plan, self.group, self.k, self.v = plan, group, k, v
        self.form = RowForm.of(k, v)
        self._packed: Tensor | None = None

    def fetch(self, number: int) -> Keys | None:
        """Begin to bring the keys of a round; None behind the last."""
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
        return Keys(rows, post(sent, received, self.group, f"keys and values of round {number}"), tuple(staged))

    def join(self, number: int, keys: Keys | None) -> None:
        """Put the own keys of a round beside those that come."""
        if keys is not None:
            self._copy(self.plan.rounds[number].own, keys.rows)

    def opened(self, keys: Keys | None) -> tuple[Tensor, Tensor]:
        """k and v of a round, positions ascending: [B, Hkv, m, D], [B, Hkv, m, Dv]."""
        if keys is None:
            return self.k, self.v
        if keys.flight is not None:
            keys.flight.wait()
            for which, rows in keys.staged:
                keys.rows.index_copy_(0, which, rows)
        return self.form.keys(keys.rows, (0, keys.rows.shape[0]))

    def _own_rows(self) -> Tensor:
        """k and v of the rows that others want, one behind the other."""
        if self._packed is None:
            packed = self.plan.packed
            self._packed = self.k.new_empty((packed[-1][1][1] if packed else 0, self.form.width))
            self._copy(packed, self._packed)
        return self._packed

    def _copy(self, places: Sequence[tuple[Span, Span]], rows: Tensor) -> None:
        """Own rows to where they belong among others."""
        for (first, end), there in places:
            to_k, to_v = self.form.keys(rows, there)
            to_k.copy_(self.k.narrow(2, first, end - first))
            to_v.copy_(self.v.narrow(2, first, end - first))


def taken(rows: Tensor, which: Which) -> Tensor:
    """Some of [n, width]; a view where they lie together."""
    return rows.index_select(0, which) if isinstance(which, Tensor) else rows.narrow(0, which[0], which[1] - which[0])
