"""Which keys each rank needs of each other rank, by the mask.

In: a mask, and the spans that ranks hold. Out: ``NeededKeys``: for each run of queries the keys that the mask keeps.
Every rank computes the same ``NeededKeys``, so that senders and receivers agree without messages.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from flashgen.distributed.blocks import MOST_BLOCKS, MOST_ROWS, Mask, Span, cuts, kept

# The ascending spans of each rank.
Held = tuple[tuple[Span, ...], ...]

_MOST_ROWS_OF_ALL = 64  # parts of all spans together, where few spans may have more than ``MOST_ROWS`` each


@dataclass(frozen=True)
class QueryRun:
    """A run of queries, and ascending spans of the keys, of all ranks, that the mask keeps for some of them.

    ``pairs`` is about how many pairs the mask keeps, as the mean over b and h.
    """

    queries: Span
    keys: tuple[Span, ...]
    pairs: float


@dataclass(frozen=True, eq=False)
class NeededKeys:
    """The keys that every rank needs of every other, as spans of positions.

    ``keys[rank][source]`` are the ascending spans of the positions that ``source`` holds and ``rank`` needs.
    ``query_runs[rank]`` divides each span of the rank's queries into runs, with the keys that they see.
    """

    keys: tuple[tuple[tuple[Span, ...], ...], ...]
    query_runs: tuple[tuple[tuple[QueryRun, ...], ...], ...]

    def rows_sent(self, rank: int) -> int:
        return sum(length(own[rank]) for receiver, own in enumerate(self.keys) if receiver != rank)

    def rows_received(self, rank: int) -> int:
        return sum(length(spans) for source, spans in enumerate(self.keys[rank]) if source != rank)

    def are_few(self, held: Held) -> bool:
        """Whether a ring keeps the keys of other ranks for the backward pass."""
        return are_few([self.rows_received(rank) for rank in range(len(held))], [length(own) for own in held])


_cache: dict[tuple[str, Held], NeededKeys] = {}
_MOST_KEPT = 64


def needs_of(mask: Mask, held: Held) -> NeededKeys:
    """The needs of a mask, computed once for equal masks."""
    key = (mask.key, held)
    found = _cache.get(key)
    if found is None:
        if len(_cache) >= _MOST_KEPT:
            _cache.clear()
        found = _cache[key] = _compute(mask, held)
    return found


def _compute(mask: Mask, held: Held) -> NeededKeys:
    size = max(mask.sizes["Nk"] // MOST_BLOCKS, 1)
    blocks = [
        (owner, block)
        for owner, own in enumerate(held)
        for start, stop in own
        for block in cuts(start, stop, max((stop - start) // size, 1))
    ]
    widths = np.array([stop - start for _, (start, stop) in blocks], np.float64)
    keys, query_runs = [], []
    # Queries that need other ranks' keys are computed apart from the rest: smaller runs separate them better.
    parts = max(MOST_ROWS, _MOST_ROWS_OF_ALL // max(sum(map(len, held)), 1))
    for own in held:
        needed = [False] * len(blocks)
        of_spans = []
        for start, stop in own:
            rows = cuts(start, stop, parts)
            shares = kept(mask, rows, [block for _, block in blocks])
            some, pairs = shares > 0, shares @ widths * [last - first for first, last in rows]
            of_spans.append(
                tuple(
                    QueryRun(
                        each, joined(block for (_, block), is_kept in zip(blocks, own, strict=True) if is_kept), count
                    )
                    for each, own, count in zip(rows, some.tolist(), pairs.tolist(), strict=True)
                )
            )
            needed = [before or bool(now) for before, now in zip(needed, np.any(some, axis=0), strict=True)]
        chosen = [each for each, is_needed in zip(blocks, needed, strict=True) if is_needed]
        keys.append(tuple(joined(block for owner, block in chosen if owner == source) for source in range(len(held))))
        query_runs.append(tuple(of_spans))
    return NeededKeys(tuple(keys), tuple(query_runs))


def are_few(received: Sequence[float], lengths: Sequence[int]) -> bool:
    """Whether every rank receives fewer keys than it holds, or none. All ranks have to decide alike."""
    return all(got < own or got == 0 for got, own in zip(received, lengths, strict=True))


def joined(spans: Iterable[Span]) -> tuple[Span, ...]:
    """The union of spans, ascending: neighbours and overlapping spans are merged, empty ones dropped."""
    found: list[Span] = []
    for start, stop in sorted(span for span in spans if span[1] > span[0]):
        if found and found[-1][1] >= start:
            found[-1] = (found[-1][0], max(found[-1][1], stop))
        else:
            found.append((start, stop))
    return tuple(found)


def length(spans: Iterable[Span]) -> int:
    """The number of positions in the spans."""
    return sum(stop - start for start, stop in spans)
