"""The order in which a rank processes the keys that it needs, and the messages of each round.

In: the needs of a mask, and the spans that ranks hold. Out: ``Rounds``: the rank's own keys first, then those of other
ranks. ``ring`` takes one source a round, the next one further away, so that each rank sends to one rank and receives
from one; ``all_gather`` takes all sources in one round. Keys are sent directly to the ranks that need them. Messages
follow from the needs alone, which all ranks know; how a rank groups its rows is its own choice (``segments.py``).
"""

from __future__ import annotations

import bisect
import functools
import itertools
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from flashgen.distributed.blocks import Span, moved
from flashgen.distributed.needed_keys import Held, NeededKeys, joined, length
from flashgen.distributed.segments import Pace, RowRun, Segment, overlaps, segments_of

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

    def to(self, device: torch.device) -> Message:
        """The message with its numbers of rows on a device."""
        keys, gradients = (x.to(device) if isinstance(x, Tensor) else x for x in (self.keys, self.gradients))
        return replace(self, keys=keys, gradients=gradients)


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

    def which(self, spans: Sequence[Span]) -> RowSelection:
        """The rows of several spans of positions."""
        return self.at(spans[0]) if len(spans) == 1 else torch.cat([torch.arange(*self.at(span)) for span in spans])


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
            tuple(x.to(device) for to in receivers for x in _messages(to, needs.keys[to][rank], packed, own)),
            tuple(x.to(device) for of in sources for x in _messages(of, needs.keys[rank][of], keys, foreign)),
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


def _messages(rank: int, spans: Sequence[Span], keys: _RowIndex, gradients: _RowIndex) -> Iterator[Message]:
    """The messages between two ranks in a round: one a run of rows, or one of all where there are many runs."""
    for each in [(span,) for span in spans] if len(spans) <= _MOST_RUNS else [spans]:
        yield Message(rank, length(each), keys.which(each), gradients.which(each))
