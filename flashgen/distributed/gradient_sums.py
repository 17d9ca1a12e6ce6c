"""Sums of gradients, of which each call computed a part for some rows; each sum is rounded once.

In: parts, and the spans of rows that they belong to. Out: the sums, in the gradient tensors. The order of additions
follows from the spans alone, so that sums repeat, and is cached.
"""

from __future__ import annotations

import functools
import itertools

import torch
from torch import Tensor

from flashgen.distributed.blocks import Span, moved
from flashgen.distributed.rounds import RowSelection

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
    """The sum of parts that each cover some rows of a gradient."""

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
