"""Which keys each rank needs of which other, by the mask.

In: a mask, the spans that ranks hold. Out: ``Needs``: of each span of queries the keys that the mask keeps for it. The
same on every rank, so that senders and receivers agree without a word.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from flashgen.distributed.blocks import MOST_BLOCKS, MOST_ROWS, Mask, Span, cuts, kept

# The ascending spans of each rank.
Held = tuple[tuple[Span, ...], ...]

_MOST_ROWS_OF_ALL = 64  # parts of all spans together, where each may have more than ``MOST_ROWS``


@dataclass(frozen=True)
class Sight:
    """Queries, and the ascending spans of keys, whoever holds them, of which the mask keeps a pair for one of them.

    ``pairs`` are about how many it keeps, in the mean over b and h.
    """

    queries: Span
    keys: tuple[Span, ...]
    pairs: float


@dataclass(frozen=True, eq=False)
class Needs:
    """Of every rank, the keys of every other that it needs, as spans of positions. Made once for equal masks.

    ``keys[rank][source]`` are ascending spans of what ``source`` holds. ``sights[rank]`` has for each span of the
    rank's queries, in parts of it, the keys that they see.
    """

    keys: tuple[tuple[tuple[Span, ...], ...], ...]
    sights: tuple[tuple[tuple[Sight, ...], ...], ...]

    def rows_sent(self, rank: int) -> int:
        """Rows that a rank sends to others."""
        return sum(length(own[rank]) for receiver, own in enumerate(self.keys) if receiver != rank)

    def rows_received(self, rank: int) -> int:
        """Rows that a rank gets from others."""
        return sum(length(spans) for source, spans in enumerate(self.keys[rank]) if source != rank)

    def are_few(self, held: Held) -> bool:
        """Whether a ring keeps the keys of others for the backward pass."""
        return are_few([self.rows_received(rank) for rank in range(len(held))], [length(own) for own in held])


_cache: dict[tuple[str, Held], Needs] = {}
_MOST_KEPT = 64


def needs_of(mask: Mask, held: Held) -> Needs:
    """The needs of a mask, remembered for equal ones."""
    key = (mask.key, held)
    found = _cache.get(key)
    if found is None:
        if len(_cache) >= _MOST_KEPT:
            _cache.clear()
        found = _cache[key] = _found(mask, held)
    return found


def _found(mask: Mask, held: Held) -> Needs:
    size = max(mask.sizes["Nk"] // MOST_BLOCKS, 1)
    blocks = [
        (owner, block)
        for owner, own in enumerate(held)
        for start, stop in own
        for block in cuts(start, stop, max((stop - start) // size, 1))
    ]
    widths = np.array([stop - start for _, (start, stop) in blocks], np.float64)
    keys, sights = [], []
    # Rows that wait for keys of others are computed apart from those that do not, as far as parts tell them apart.
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
                    Sight(
                        each, joined(block for (_, block), is_kept in zip(blocks, own, strict=True) if is_kept), count
                    )
                    for each, own, count in zip(rows, some.tolist(), pairs.tolist(), strict=True)
                )
            )
            needed = [before or bool(now) for before, now in zip(needed, np.any(some, axis=0), strict=True)]
        chosen = [each for each, is_needed in zip(blocks, needed, strict=True) if is_needed]
        keys.append(tuple(joined(block for owner, block in chosen if owner == source) for source in range(len(held))))
        sights.append(tuple(of_spans))
    return Needs(tuple(keys), tuple(sights))


def are_few(received: Sequence[float], lengths: Sequence[int]) -> bool:
    """Whether each rank gets fewer keys than it holds, or none. Asked of all: what is kept is not sent again."""
    return all(got < own or got == 0 for got, own in zip(received, lengths, strict=True))


def joined(spans: Iterable[Span]) -> tuple[Span, ...]:
    """The same positions, ascending: neighbours and what overlaps are one, empty ones are none."""
    found: list[Span] = []
    for start, stop in sorted(span for span in spans if span[1] > span[0]):
        if found and found[-1][1] >= start:
            found[-1] = (found[-1][0], max(found[-1][1], stop))
        else:
            found.append((start, stop))
    return tuple(found)


def length(spans: Iterable[Span]) -> int:
    """How many positions they have."""
    return sum(stop - start for start, stop in spans)
