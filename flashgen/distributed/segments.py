"""Which query rows of a rank are computed together, and when.

In: the needs of a mask, the spans that ranks hold, what work and travel take. Out: ``Wanted`` runs of rows. Rows that
see their own rank's keys alone need not wait. Others take a copy of the own keys that they see beside those that come,
so that one call computes them whole, as on one device: a row of which each source is a call of its own has to be
written wide and added up. Rows see keys of several rounds where there is no other way, and where too little work would
be left to hide what travels behind.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from flashgen.distributed.blocks import Span, moved
from flashgen.distributed.needs import Held, Needs, Sight, joined, length

_MOST_GROUPS = 4  # of a span whose keys come in several rounds; each costs a launch


@dataclass(frozen=True)
class Pace:
    """Seconds of a pair of a query and a key, all heads together; of a row of keys that comes; of an own one that is
    put beside those; of a row of queries that is added to what was found for it; and of a call.
    """

    pair: float
    travel: float
    copy: float
    merge: float
    call: float


@dataclass(frozen=True)
class Segment:
    """A run of a rank's query rows, the first at position ``q_start``. ``is_whole``: one call sees all of its keys."""

    rows: Span
    q_start: int
    is_whole: bool


@dataclass(frozen=True)
class Wanted:
    """A run of rows with what it sees. ``late`` are the rounds in which others' keys for it come.

    ``is_fused``: it waits for the one of these, and then sees its own rank's keys, too. ``pairs`` are all, ``own``
    those that need no other rank.
    """

    rows: Span
    q_start: int
    sights: tuple[Sight, ...]
    late: tuple[int, ...]
    is_fused: bool
    pairs: float
    own: float

    @property
    def round(self) -> int | None:
        """The one in which it is computed; None: in several."""
        if self.late and not self.is_fused:
            return None
        return self.late[0] if self.late else 0


def segments_of(needs: Needs, held: Held, rank: int, *, at_once: bool, pace: Pace | None) -> tuple[Wanted, ...]:
    """The rows of a rank, in order. ``pace`` None: nothing has to be hidden."""
    world = len(held)
    coming: dict[int, list[Span]] = {}
    for step in range(1, world):
        coming.setdefault(1 if at_once else step, []).extend(needs.keys[rank][(rank - step) % world])
    spans = {number: joined(each) for number, each in coming.items()}
    found: list[Wanted] = []
    first = 0
    for (start, stop), sights in zip(held[rank], needs.sights[rank], strict=True):
        if start == stop:
            continue
        groups = _grouped([_of_sight(sight, first - start, spans) for sight in sights])
        whole = _joined(groups)
        found += [whole] if len(whole.late) < 2 or len(groups) > _MOST_GROUPS else groups
        first += stop - start
    return tuple(found if pace is None else _hidden(found, spans, pace))


def _of_sight(sight: Sight, offset: int, coming: Mapping[int, Sequence[Span]]) -> Wanted:
    """The rows of one sight; ``offset`` from positions to rows."""
    foreign = {number: length(overlaps(sight.keys, spans)) for number, spans in coming.items()}
    late, keys = tuple(number for number, count in foreign.items() if count), length(sight.keys)
    own = sight.pairs * (1 - sum(foreign.values()) / keys) if keys else 0.0
    return Wanted(moved(sight.queries, offset), sight.queries[0], (sight,), late, len(late) == 1, sight.pairs, own)


def _grouped(parts: Sequence[Wanted]) -> list[Wanted]:
    """Neighbours that wait for the same rounds as one."""
    return [_joined(list(each)) for _, each in itertools.groupby(parts, lambda part: part.late)]


def _joined(parts: Sequence[Wanted]) -> Wanted:
    late = tuple(sorted({number for part in parts for number in part.late}))
    return Wanted(
        (parts[0].rows[0], parts[-1].rows[1]),
        parts[0].q_start,
        tuple(sight for part in parts for sight in part.sights),
        late,
        len(late) == 1,
        sum(part.pairs for part in parts),
        sum(part.own for part in parts),
    )


def _hidden(found: list[Wanted], coming: Mapping[int, Sequence[Span]], pace: Pace) -> list[Wanted]:
    """The same, with as much work before others' keys are there as pays: rows that need none of these go first, which
    leaves fewer own keys to be put beside others, too; then the own keys of some that do are a call of their own.
    """
    if not any(each.is_fused for each in found):
        return found
    travel = pace.travel * length(coming[min(each.late[0] for each in found if each.is_fused)])
    before = sum(pace.call + pace.pair * each.own for each in found if not each.is_fused)
    while True:
        parts = {n: _grouped(_parts(each, coming)) for n, each in enumerate(found) if each.is_fused}
        early = {n: pace.pair * sum(part.pairs for part in each if not part.late) for n, each in parts.items()}
        # What to divide one saves.
        gains = {
            n: max(min(travel - before, early[n]), 0.0)
            + pace.copy * (_copied([found[n]], coming) - _copied([part for part in each if part.late], coming))
            - pace.call * (len(each) - 1)
            for n, each in parts.items()
            if len(each) > 1
        }
        n = max(gains, key=lambda n: gains[n], default=None)
        if n is None or gains[n] <= 0.0:
            break
        found = [*found[:n], *parts[n], *found[n + 1 :]]
        before += early[n]
    for n in sorted(range(len(found)), key=lambda n: -found[n].own):
        each = found[n]
        added = pace.merge * (each.rows[1] - each.rows[0]) + pace.call
        if each.is_fused and min(travel - before, pace.pair * each.own) > added:
            found[n] = replace(each, is_fused=False)
            before += pace.pair * each.own
    return found


def _copied(found: Sequence[Wanted], coming: Mapping[int, Sequence[Span]]) -> int:
    """Own keys that these rows, which wait for others', see."""
    keys = (sight.keys for each in found for sight in each.sights)
    foreign = joined(span for each in found for number in each.late for span in coming[number])
    seen = joined(span for spans in keys for span in spans)
    return length(seen) - length(overlaps(seen, foreign))


def _parts(each: Wanted, coming: Mapping[int, Sequence[Span]]) -> list[Wanted]:
    return [_of_sight(sight, each.rows[0] - each.q_start, coming) for sight in each.sights]


def overlaps(spans: Sequence[Span], others: Sequence[Span]) -> list[Span]:
    """What two lists of ascending spans have in common."""
    found, n, m = [], 0, 0
    while n < len(spans) and m < len(others):
        start, stop = max(spans[n][0], others[m][0]), min(spans[n][1], others[m][1])
        if start < stop:
            found.append((start, stop))
        n, m = (n + 1, m) if spans[n][1] <= others[m][1] else (n, m + 1)
    return found
