"""Keys and values as rows that travel: a rank gets the rows that its mask keeps, and their gradients travel back.

In: k and v of this rank, and its rounds. Out: k and v of a round; sums of the gradients of which each call computed a
part. A row holds all heads of k, then all of v, so that a run of rows is one message, received where kernels read it.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from flashgen.distributed.blocks import Span, moved
from flashgen.distributed.exchange import Group, Wait, post
from flashgen.distributed.rounds import Rounds, RowSelection

# One tensor, or the gradients of k and v: [..., n, width] each.
Tensors = tuple[Tensor, ...]


@functools.lru_cache(maxsize=256)
def steps_of(spans: tuple[Span, ...], length: int) -> tuple[tuple[Span, tuple[int, ...]], ...]:
    """Runs of rows, ascending, each with the numbers of the parts that cover it, the longest part first."""
    order = sorted(range(len(spans)), key=lambda number: spans[number][0] - spans[number][1])
    ends = sorted({0, length, *(end for span in spans for end in span)})
    return tuple(
        (run, tuple(n for n in order if spans[n][0] <= run[0] and run[1] <= spans[n][1]))
        for run in itertools.pairwise(ends)
    )


class GradientSum:
    """The sum of parts that each cover some rows of a gradient, rounded once.

    The order of additions follows from the spans of rows alone, so that sums repeat, and is cached.
    """

    def __init__(self, length: int) -> None:
        self._length = length
        self._spans: list[RowSelection] = []
        self._parts: list[Tensors] = []

    def add(self, at: RowSelection, part: Tensors) -> None:
        """Add ``part``, which the sum may overwrite, for the rows ``at``, all different."""
        self._spans.append(at)
        self._parts.append(part)

    def put(self, into: Tensors) -> None:
        """Write the sum to ``into``, rounded to its type."""
        if any(isinstance(at, Tensor) for at in self._spans):
            for n, x in enumerate(into):
                self._put_listed(n, x)
            return
        spans = tuple(at for at in self._spans if not isinstance(at, Tensor))
        for run, numbers in steps_of(spans, self._length):
            for n, x in enumerate(into):
                to = rows_at(x, run)
                # The first part is the accumulator, and the last addition writes the rounded sum.
                parts = [rows_at(self._parts[m][n], moved(run, -spans[m][0])) for m in numbers]
                for part in parts[1:-1]:
                    parts[0].add_(part)
                if len(parts) > 1:
                    torch.add(parts[0], parts[-1], out=to)
                else:
                    to.copy_(parts[0]) if parts else to.zero_()

    def _put_listed(self, n: int, into: Tensor) -> None:
        """Write the sum to tensor ``n``, where some parts name rows by number."""
        found = torch.zeros(into.shape, dtype=self._parts[0][n].dtype, device=into.device)
        for at, parts in zip(self._spans, self._parts, strict=True):
            if isinstance(at, Tensor):
                found.index_add_(into.dim() - 2, at, parts[n])
            else:
                rows_at(found, at).add_(parts[n])
        into.copy_(found)


def rows_at(x: Tensor, at: Span, dim: int = -2) -> Tensor:
    """The rows ``at`` of a tensor, as a view."""
    return x if at[0] == 0 and at[1] == x.shape[dim] else x.narrow(dim, at[0], at[1] - at[0])


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
    wait: Wait | None = None
    staged: tuple[tuple[Tensor, Tensor], ...] = ()


class KeyExchange:
    """Sends this rank's keys and values, and receives those of other ranks, round by round."""

    def __init__(self, plan: Rounds, group: Group, k: Tensor, v: Tensor) -> None:
        self.plan, self.group, self.k, self.v = plan, group, k, v
        self.form = KeyRowLayout.of(k, v)

    def fetch(self, number: int) -> RoundKeys | None:
        """Begin to send and receive the keys of a round; None behind the last round."""
        if number >= len(self.plan.rounds):
            return None
        each, width = self.plan.rounds[number], self.form.width
        sent = [(x.rank, taken(self._own_rows, x.keys)) for x in each.sent]
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
        if keys.wait is not None:
            keys.wait()
            for which, rows in keys.staged:
                keys.rows.index_copy_(0, which, rows)
        return self.form.keys(keys.rows, (0, keys.rows.shape[0]))

    @functools.cached_property
    def _own_rows(self) -> Tensor:
        """The rows of this rank that other ranks need, packed one behind the other."""
        packed = self.plan.packed
        rows = self.k.new_empty((packed[-1][1][1] if packed else 0, self.form.width))
        self._copy(packed, rows)
        return rows

    def _copy(self, places: Sequence[tuple[Span, Span]], rows: Tensor) -> None:
        for (first, end), there in places:
            to_k, to_v = self.form.keys(rows, there)
            to_k.copy_(self.k.narrow(2, first, end - first))
            to_v.copy_(self.v.narrow(2, first, end - first))


def taken(rows: Tensor, which: RowSelection) -> Tensor:
    """Some rows of [n, width]: a view where they are one run, else a copy."""
    return rows.index_select(0, which) if isinstance(which, Tensor) else rows.narrow(0, which[0], which[1] - which[0])
