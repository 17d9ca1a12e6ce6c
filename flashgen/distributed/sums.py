"""Gradients of which calls found parts, each of some rows: they are added up, and rounded once.

In: spans of rows, and what was found for them. Out: the sums, in the tensors that they belong to. In which order parts
are added follows from their spans, so that sums repeat, and is found once.
"""

from __future__ import annotations

import functools
import itertools

import torch
from torch import Tensor

from flashgen.distributed.blocks import Span, moved
from flashgen.distributed.rounds import Which

# Rows of one tensor, or of gradients of k and of v: [..., n, width] each.
Tensors = tuple[Tensor, ...]


@functools.lru_cache(maxsize=256)
def steps_of(spans: tuple[Span, ...], length: int) -> tuple[tuple[Span, tuple[int, ...]], ...]:
    """Runs of rows, ascending, each with the numbers of the parts that have all of it.

    Sums have one order, whatever comes first: the longest.
    """
    order = sorted(range(len(spans)), key=lambda number: spans[number][0] - spans[number][1])
    ends = sorted({0, length, *(end for span in spans for end in span)})
    return tuple(
        (run, tuple(n for n in order if spans[n][0] <= run[0] and run[1] <= spans[n][1]))
        for run in itertools.pairwise(ends)
    )


class Total:
    """The sum of what calls found for rows of tensors, each for some of them."""

    def __init__(self, length: int) -> None:
        self._length = length
        self._spans: list[Which] = []
        self._parts: list[Tensors] = []

    def add(self, at: Which, part: Tensors) -> None:
        """Takes ``part`` over, which may be written to; of its rows each is named once."""
        self._spans.append(at)
        self._parts.append(part)

    def put(self, into: Tensors) -> None:
        """All, rounded to the type of ``into``."""
        if any(isinstance(at, Tensor) for at in self._spans):
            for n, x in enumerate(into):
                self._put_listed(n, x)
            return
        spans = tuple(at for at in self._spans if not isinstance(at, Tensor))
        for run, numbers in steps_of(spans, self._length):
            for n, x in enumerate(into):
                to = rows_at(x, run)
                # Parts are added to the first one, and the last addition rounds the sum: no sum is cleared before.
                parts = [rows_at(self._parts[m][n], moved(run, -spans[m][0])) for m in numbers]
                for part in parts[1:-1]:
                    parts[0].add_(part)
                if len(parts) > 1:
                    torch.add(parts[0], parts[-1], out=to)
                else:
                    to.copy_(parts[0]) if parts else to.zero_()

    def _put_listed(self, n: int, into: Tensor) -> None:
        """The same of one of the tensors, where rows are named by number."""
        found = torch.zeros(into.shape, dtype=self._parts[0][n].dtype, device=into.device)
        for at, parts in zip(self._spans, self._parts, strict=True):
            if isinstance(at, Tensor):
                found.index_add_(into.dim() - 2, at, parts[n])
            else:
                rows_at(found, at).add_(parts[n])
        into.copy_(found)


def rows_at(x: Tensor, at: Span, dim: int = -2) -> Tensor:
    """Some rows of [..., n, width]; a view, or all."""
    return x if at[0] == 0 and at[1] == x.shape[dim] else x.narrow(dim, at[0], at[1] - at[0])
