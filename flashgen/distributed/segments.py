"""Which query rows of a rank are computed by one call, and in which round.

In: the needs of a mask, the spans that ranks hold, predicted times of work and travel. Out: ``RowRun``s. Rows that see
only their own rank's keys are computed in the first round. For other rows the own keys that they see are copied beside
the received ones, so that one call computes the rows, as on one device; with several calls, parts would be written in
float32 and added up. Rows are computed in several rounds where their keys come in several, or where the first round
would have too little work to hide the travel.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from flashgen.distributed.blocks import Span, moved
from flashgen.distributed.needed_keys import Held, NeededKeys, QueryRun, joined, length

_MOST_GROUPS = 4  # runs of a span whose keys come in several rounds; each costs a launch


@dataclass(frozen=True)
class Pace:
    """Predicted seconds of the steps of a call."""

    pair: float  # a query and a key, all heads together
    travel: float  # a row of keys between ranks
    copy: float  # an own row of keys, beside received ones
    merge: float  # a row of queries, added to an earlier part
    call: float


@dataclass(frozen=True)
class Segment:
    """A run of a rank's query rows, the first at position ``q_start``. ``is_whole``: one call sees all of its keys."""

    rows: Span
    q_start: int
    is_whole: bool


@dataclass(frozen=True)
class RowRun:
    """A run of query rows, and the keys that they see. ``late`` are the rounds in which other ranks' keys come.

    ``is_fused``: all keys, also those of the own rank, are seen in the one round of ``late``. ``pairs`` is the number
    of kept pairs, ``own`` the number of those with keys of the own rank.
    """

    rows: Span
    q_start: int
    query_runs: tuple[QueryRun, ...]
    late: tuple[int, ...]
    is_fused: bool
    pairs: float
    own: float

    @property
    def round(self) -> int | None:
        """The round in which the rows are computed; None: several rounds."""
        if self.late and not self.is_fused:
            return None
        return self.late[0] if self.late else 0


def segments_of(needs: NeededKeys, held: Held, rank: int, *, at_once: bool, pace: Pace | None) -> tuple[RowRun, ...]:
    """The query rows of a rank as runs, in order. ``pace`` None: travel need not be hidden."""
    world = len(held)
    coming: dict[int, list[Span]] = {}
    for step in range(1, world):
        coming.setdefault(1 if at_once else step, []).extend(needs.keys[rank][(rank - step) % world])
    spans = {number: joined(each) for number, each in coming.items()}
    found: list[RowRun] = []
    first = 0
    for (start, stop), query_runs in zip(held[rank], needs.query_runs[rank], strict=True):
        if start == stop:
            continue
        groups = _grouped([_of_query_run(query_run, first - start, spans) for query_run in query_runs])
        whole = _joined(groups)
        found += [whole] if len(whole.late) < 2 or len(groups) > _MOST_GROUPS else groups
        first += stop - start
    return tuple(found if pace is None else _hidden(found, spans, pace))


def _of_query_run(run: QueryRun, offset: int, coming: Mapping[int, Sequence[Span]]) -> RowRun:
    """The rows of one query_run; ``offset`` from positions to rows."""
    foreign = {number: length(overlaps(run.keys, spans)) for number, spans in coming.items()}
    late, keys = tuple(number for number, count in foreign.items() if count), length(run.keys)
    own = run.pairs * (1 - sum(foreign.values()) / keys) if keys else 0.0
    return RowRun(moved(run.queries, offset), run.queries[0], (run,), late, len(late) == 1, run.pairs, own)


def _grouped(parts: Sequence[RowRun]) -> list[RowRun]:
    """Join neighbours that wait for the same rounds."""
    return [_joined(list(each)) for _, each in itertools.groupby(parts, lambda part: part.late)]


def _joined(parts: Sequence[RowRun]) -> RowRun:
    late = tuple(sorted({number for part in parts for number in part.late}))
    return RowRun(
        (parts[0].rows[0], parts[-1].rows[1]),
        parts[0].q_start,
        tuple(query_run for part in parts for query_run in part.query_runs),
        late,
        len(late) == 1,
        sum(part.pairs for part in parts),
        sum(part.own for part in parts),
    )


def _hidden(found: list[RowRun], coming: Mapping[int, Sequence[Span]], pace: Pace) -> list[RowRun]:
    """The runs, with more work in the first round where that hides travel and pays.

    First, runs are divided: rows that need no other rank's keys move to the first round, and fewer own keys have to be
    copied. Then some runs see their own keys in the first round, by a call of its own.
    """
    if not any(each.is_fused for each in found):
        return found
    travel = pace.travel * length(coming[min(each.late[0] for each in found if each.is_fused)])
    before = sum(pace.call + pace.pair * each.own for each in found if not each.is_fused)
    while True:
        parts = {n: _grouped(_parts(each, coming)) for n, each in enumerate(found) if each.is_fused}
        early = {n: pace.pair * sum(part.pairs for part in each if not part.late) for n, each in parts.items()}
        # The seconds that dividing each run saves.
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


def _copied(found: Sequence[RowRun], coming: Mapping[int, Sequence[Span]]) -> int:
    """The number of own keys that these rows see, and that are copied beside the received keys."""
    keys = (query_run.keys for each in found for query_run in each.query_runs)
    foreign = joined(span for each in found for number in each.late for span in coming[number])
    seen = joined(span for spans in keys for span in spans)
    return length(seen) - length(overlaps(seen, foreign))


def _parts(each: RowRun, coming: Mapping[int, Sequence[Span]]) -> list[RowRun]:
    return [_of_query_run(query_run, each.rows[0] - each.q_start, coming) for query_run in each.query_runs]


def overlaps(spans: Sequence[Span], others: Sequence[Span]) -> list[Span]:
    """The intersection of two lists of ascending spans."""
    found, n, m = [], 0, 0
    while n < len(spans) and m < len(others):
        start, stop = max(spans[n][0], others[m][0]), min(spans[n][1], others[m][1])
        if start < stop:
            found.append((start, stop))
        n, m = (n + 1, m) if spans[n][1] <= others[m][1] else (n, m + 1)
    return found
