"""The order in which a rank processes the keys that it needs, and the messages of each round.

In: the needs of a mask, and the spans that ranks hold. Out: ``Rounds``: the rank's own keys first, then those of other
ranks. ``ring`` takes one source a round, the next one further away, so that each rank sends to one rank and receives
from one; ``all_gather`` takes all sources in one round. Keys are sent directly to the ranks that need them. Messages
follow from the needs alone, which all ranks know; how a rank groups its rows is its own choice: ``RowRun``s follow from
predicted times of work and travel.

Rows that see only their own rank's keys are computed in the first round. For other rows the own keys that they see are
copied beside the received ones, so that one call computes the rows, as on one device; with several calls, parts would
be written in float32 and added up. Rows are computed in several rounds where their keys come in several, or where the
first round would have too little work to hide the travel.
"""

from __future__ import annotations

import bisect
import functools
import itertools
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from flashgen.distributed.blocks import Held, NeededKeys, QueryRun, Span, joined, length, moved

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
        parts = {
            n: _grouped([_of_query_run(run, each.rows[0] - each.q_start, coming) for run in each.query_runs])
            for n, each in enumerate(found)
            if each.is_fused
        }
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


def overlaps(spans: Sequence[Span], others: Sequence[Span]) -> list[Span]:
    """The intersection of two lists of ascending spans."""
    found, n, m = [], 0, 0
    while n < len(spans) and m < len(others):
        start, stop = max(spans[n][0], others[m][0]), min(spans[n][1], others[m][1])
        if start < stop:
            found.append((start, stop))
        n, m = (n + 1, m) if spans[n][1] <= others[m][1] else (n, m + 1)
    return found


_HOST = torch.device("cpu")
_MOST_RUNS = 16  # runs of rows that are messages of their own; more are packed into one message

# Some rows: a span of them, or their numbers in a tensor.
RowSelection = Span | Tensor


@dataclass(frozen=True)
class Unit:
    """One call: some of the rank's query rows, at position ``q_start``, over a run of a round's keys.

    ``own`` maps spans of these keys to spans of the rank's own rows, ``foreign`` to spans of ``Round.foreign``.
    """

    segment: int
    rows: Span
    q_start: int
    keys: Span
    kv_start: int
    own: tuple[tuple[Span, Span], ...]
    foreign: tuple[tuple[Span, Span], ...] = ()


@dataclass(frozen=True)
class Message:
    """``count`` rows of keys that are sent to a rank or received from it; their gradients travel back.

    ``keys`` selects rows of ``Rounds.packed`` to send, or rows of the round's keys to receive into. ``gradients``
    selects the rank's own rows that gradients are added to, or the ``foreign`` rows whose gradients are sent.
    """

    rank: int
    count: int
    keys: RowSelection
    gradients: RowSelection


@dataclass(frozen=True)
class Round:
    """``keys`` rows, by ascending positions, that calls read together; ``foreign`` of them are of other ranks.

    ``own`` maps spans of the rank's own rows to their place among these. The first round reads the own rows in place.
    """

    keys: int
    units: tuple[Unit, ...]
    sent: tuple[Message, ...] = ()
    received: tuple[Message, ...] = ()
    own: tuple[tuple[Span, Span], ...] = ()
    foreign: int = 0


@dataclass(frozen=True)
class Rounds:
    """The whole work of a rank. ``packed`` maps spans of the own rows that other ranks need to their packed place.

    ``segments`` are the rank's query rows, in order.
    """

    segments: tuple[Segment, ...]
    rounds: tuple[Round, ...]
    packed: tuple[tuple[Span, Span], ...] = ()


class _RowIndex:
    """Finds rows by position, where the rows of ascending spans of positions lie one behind the other."""

    def __init__(self, spans: Iterable[Span]) -> None:
        self.spans = joined(spans)
        self.count = length(self.spans)
        self._firsts = tuple(itertools.accumulate((stop - start for start, stop in self.spans), initial=0))

    def at(self, span: Span) -> Span:
        """The rows of a span of positions that lies within one run."""
        n = bisect.bisect_right(self.spans, span[0], key=lambda run: run[0]) - 1
        first = self._firsts[n] + span[0] - self.spans[n][0]
        return first, first + span[1] - span[0]

    def which(self, spans: Sequence[Span], device: torch.device) -> RowSelection:
        """The rows of several spans of positions; their numbers lie on the device."""
        if len(spans) == 1:
            return self.at(spans[0])
        return torch.cat([torch.arange(*self.at(span)) for span in spans]).to(device)


@functools.lru_cache(maxsize=64)
def rounds_of(
    needs: NeededKeys, held: Held, rank: int, *, at_once: bool, device: torch.device = _HOST, pace: Pace | None = None
) -> Rounds:
    """The rounds of a rank, two with ``at_once``. Numbers of rows lie on ``device``.

    ``pace`` are predicted times of work and travel; None: travel need not be hidden. Results are cached, as copying
    numbers to a device makes the host wait for it.
    """
    world = len(held)
    wanted = segments_of(needs, held, rank, at_once=at_once, pace=pace)
    by_others = joined(span for other, of in enumerate(needs.keys) if other != rank for span in of[rank])
    own, packed = _RowIndex(held[rank]), _RowIndex(by_others)
    rounds = [Round(own.count, tuple(_units(wanted, 0, own, own, _RowIndex(()), own.spans)))]
    for number, steps in enumerate([range(1, world)] if at_once else [(step,) for step in range(1, world)], 1):
        receivers, sources = ([(rank + sign * step) % world for step in steps] for sign in (1, -1))
        foreign = _RowIndex(span for source in sources for span in needs.keys[rank][source])
        seen = (query_run.keys for each in wanted if each.round == number for query_run in each.query_runs)
        beside = joined(span for keys in seen for span in overlaps(keys, own.spans))
        keys = _RowIndex((*foreign.spans, *beside))
        each = Round(
            keys.count,
            tuple(_units(wanted, number, keys, own, foreign, beside)),
            tuple(x for to in receivers for x in _messages(to, needs.keys[to][rank], packed, own, device)),
            tuple(x for of in sources for x in _messages(of, needs.keys[rank][of], keys, foreign, device)),
            tuple((own.at(span), keys.at(span)) for span in beside),
            foreign.count,
        )
        rounds.append(each)
    counts = Counter(unit.segment for each in rounds for unit in each.units)
    segments = tuple(Segment(each.rows, each.q_start, counts[n] == 1) for n, each in enumerate(wanted))
    pack = tuple((own.at(span), packed.at(span)) for span in by_others)
    return Rounds(segments, tuple(_of_whole_segments(each, segments) for each in rounds), pack)


def _units(
    wanted: Sequence[RowRun], number: int, keys: _RowIndex, own: _RowIndex, foreign: _RowIndex, beside: Sequence[Span]
) -> Iterator[Unit]:
    """The calls of a round over ``keys``; ``beside`` are the spans of these that are the rank's own."""
    for n, each in enumerate(wanted):
        if each.round not in (number, None):
            continue
        for run in (keys if each.round is not None or number == 0 else foreign).spans:
            seen = [
                (query_run.queries, span) for query_run in each.query_runs for span in overlaps(query_run.keys, (run,))
            ]
            if seen:
                rows = min(queries[0] for queries, _ in seen), max(queries[1] for queries, _ in seen)
                span = min(span[0] for _, span in seen), max(span[1] for _, span in seen)
                offset = each.rows[0] - each.q_start
                yield Unit(
                    n,
                    moved(rows, offset),
                    rows[0],
                    keys.at(span),
                    span[0],
                    tuple((moved(part, -span[0]), own.at(part)) for part in overlaps(beside, (span,))),
                    tuple((moved(part, -span[0]), foreign.at(part)) for part in overlaps(foreign.spans, (span,))),
                )


def _of_whole_segments(each: Round, segments: Sequence[Segment]) -> Round:
    """The round, where a call that computes a whole segment also writes the rows that see no key."""
    pairs = ((unit, segments[unit.segment]) for unit in each.units)
    return replace(
        each, units=tuple(replace(x, rows=of.rows, q_start=of.q_start) if of.is_whole else x for x, of in pairs)
    )


def _messages(
    rank: int, spans: Sequence[Span], keys: _RowIndex, gradients: _RowIndex, device: torch.device
) -> Iterator[Message]:
    """The messages between two ranks in a round: one a run of rows, or one of all where there are many runs."""
    for each in [(span,) for span in spans] if len(spans) <= _MOST_RUNS else [spans]:
        yield Message(rank, length(each), keys.which(each, device), gradients.which(each, device))
