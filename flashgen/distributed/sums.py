"""Gradients of which calls found parts, each of some rows: they are added up, and rounded once.

In: spans of rows, and what was found for them. Out: the sums, in the tensors that they belong to. In which order parts
are added follows from their spans, so that sums repeat, and is found once.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from flashgen.distributed.blocks import Span, moved
from flashgen.distributed.rounds import Which
from flashgen.distributed.segments import overlaps

# Rows of one tensor, or of gradients of k and of v: [..., n, width] each.
Tensors = tuple[Tensor, ...]


@dataclass(frozen=True)
class Placed:
    """Rows of a part, and where they go; ``last`` are those of another part that are added on the way."""

    part: int
    rows: Span
    into: Span
    last: tuple[int, Span] | None


@dataclass(frozen=True)
class Steps:
    """``added``: rows of a part to rows of another, by number. ``placed``: then rows go to where they belong.

    ``gaps`` are rows of which there is no part.
    """

    added: tuple[tuple[int, Span, int, Span], ...]
    placed: tuple[Placed, ...]
    gaps: tuple[Span, ...]


@functools.lru_cache(maxsize=256)
def steps_of(spans: tuple[Span, ...], length: int) -> Steps:
    """What is found first for rows is what others are added to: nothing is cleared, and next to nothing read twice."""
    bases: list[tuple[Span, int, Span]] = []  # where it belongs, of which part, and which rows of it
    added = []
    # Sums have one order, whatever comes first: the longest.
    for number in sorted(range(len(spans)), key=lambda number: spans[number][0] - spans[number][1]):
        at = spans[number]
        known = sorted(span for span, _, _ in bases)
        for span in overlaps((at,), known):
            place, base, rows = next(each for each in bases if each[0][0] <= span[0] and span[1] <= each[0][1])
            first = rows[0] + span[0] - place[0]
            added.append((base, (first, first + span[1] - span[0]), number, moved(span, -at[0])))
        bases += [(gap, number, moved(gap, -at[0])) for gap in gaps_of(at, known)]
    gaps = gaps_of((0, length), sorted(span for span, _, _ in bases))
    return Steps(*_with_last(added, bases), tuple(gaps))


def _with_last(
    added: Sequence[tuple[int, Span, int, Span]], bases: Sequence[tuple[Span, int, Span]]
) -> tuple[tuple[tuple[int, Span, int, Span], ...], tuple[Placed, ...]]:
    """The same, but what is added to rows last is so where they are rounded: they are read and written once less."""
    before, placed = list(added), []
    for place, base, rows in bases:
        shift = place[0] - rows[0]  # from rows of the part to where they belong
        free, left = [rows], [rows]  # to which nothing is added later; which are not placed
        for step in reversed(added):
            to, span, number, own = step
            if to != base or not rows[0] <= span[0] < span[1] <= rows[1]:
                continue
            if overlaps(free, (span,)) == [span]:
                before.remove(step)
                placed.append(Placed(base, span, moved(span, shift), (number, own)))
                left = _without(left, span)
            free = _without(free, span)
        placed += [Placed(base, each, moved(each, shift), None) for each in left]
    return tuple(before), tuple(placed)


def _without(spans: Sequence[Span], span: Span) -> list[Span]:
    return [part for each in spans for part in gaps_of(each, overlaps((each,), (span,)))]


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
        steps = steps_of(tuple(at for at in self._spans if not isinstance(at, Tensor)), self._length)
        for base, rows, number, own in steps.added:
            for x, y in zip(self._parts[base], self._parts[number], strict=True):
                rows_at(x, rows).add_(rows_at(y, own))
        for each in steps.placed:
            number, own = each.last or (each.part, each.rows)
            for x, y, z in zip(into, self._parts[each.part], self._parts[number], strict=True):
                to, part = rows_at(x, each.into), rows_at(y, each.rows)
                if each.last is None:
                    to.copy_(part)
                else:
                    torch.add(part, rows_at(z, own), out=to)
        for at in steps.gaps:
            for x in into:
                rows_at(x, at).zero_()

    def _put_listed(self, n: int, into: Tensor) -> None:
        """The same of one of the tensors, where rows are named by number."""
        found = torch.zeros(into.shape, dtype=self._parts[0][n].dtype, device=into.device)
        for at, parts in zip(self._spans, self._parts, strict=True):
            if isinstance(at, Tensor):
                found.index_add_(into.dim() - 2, at, parts[n])
            else:
                rows_at(found, at).add_(parts[n])
        into.copy_(found)


def rows_at(x: Tensor, at: Span) -> Tensor:
    """Some rows of [..., n, width]; a view, or all."""
    return x if at[0] == 0 and at[1] == x.shape[-2] else x.narrow(-2, at[0], at[1] - at[0])


def gaps_of(whole: Span, known: Sequence[Span]) -> list[Span]:
    """What ascending spans leave of one."""
    ends = [whole[0], *(end for span in overlaps((whole,), known) for end in span), whole[1]]
    return [(ends[n], ends[n + 1]) for n in range(0, len(ends), 2) if ends[n] < ends[n + 1]]
