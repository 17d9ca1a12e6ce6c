"""In which order a rank works on the keys that it needs, and what travels meanwhile.

In: the needs of a mask, the spans that ranks hold. Out: ``Rounds``: first the rank's own keys, then those of others.
``ring`` takes one source after another, at each turn the one a step further, so that each rank sends to one and
receives from one; ``all_gather`` takes all others at once. A piece goes straight to who needs it. What is sent follows
from the needs alone, the same on every rank; how a rank works on it is its own affair (``segments.py``).
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
from flashgen.distributed.needs import Held, Needs, joined, length
from flashgen.distributed.segments import Pace, Segment, Wanted, overlaps, segments_of

_HOST = torch.device("cpu")
_MOST_RUNS = 16  # of rows that one rank sends another in a round as they lie; more are put together first

# Some rows: those from a first to a last, or by number.
Which = Span | Tensor


@dataclass(frozen=True)
class Unit:
    """One call: some of the rank's query rows, at position ``q_start``, over a run of a round's keys.

    ``own`` says which rows of its keys are which of the rank's own, ``foreign`` which are which of ``Round.foreign``.
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
    """``count`` rows of keys that go to a rank, or come from it, and whose gradients take the way back.

    ``keys`` are those of ``Rounds.packed`` that go, or of the round's keys that come; ``gradients`` of the rank's own
    rows, or of the round's ``foreign`` ones.
    """

    rank: int
    count: int
    keys: Which
    gradients: Which

    def to(self, device: torch.device) -> Message:
        """The same with numbers of rows on a device."""
        keys, gradients = (x.to(device) if isinstance(x, Tensor) else x for x in (self.keys, self.gradients))
        return replace(self, keys=keys, gradients=gradients)


@dataclass(frozen=True)
class Round:
    """Keys that are worked on together, positions ascending: ``keys`` rows, of which ``foreign`` are of other ranks.

    ``own`` are those of the rank that lie among them, and where. In the first round all are its own, where they are.
    """

    keys: int
    units: tuple[Unit, ...]
    sent: tuple[Message, ...] = ()
    received: tuple[Message, ...] = ()
    own: tuple[tuple[Span, Span], ...] = ()
    foreign: int = 0


@dataclass(frozen=True)
class Rounds:
    """All that a rank does of a call. ``packed`` are the own rows that others want, and where they lie together.

    ``segments`` are its query rows, in order.
    """

    segments: tuple[Segment, ...]
    rounds: tuple[Round, ...]
    packed: tuple[tuple[Span, Span], ...] = ()


class _Rows:
    """Rows at ascending positions, one run behind the other."""

    def __init__(self, spans: Iterable[Span]) -> None:
        self.spans = joined(spans)
        self.count = length(self.spans)
        self._firsts = tuple(itertools.accumulate((stop - start for start, stop in self.spans), initial=0))

    def at(self, span: Span) -> Span:
        """Where the rows of a span are, which one run holds."""
        n = bisect.bisect_right(self.spans, span[0], key=lambda run: run[0]) - 1
        first = self._firsts[n] + span[0] - self.spans[n][0]
        return first, first + span[1] - span[0]

    def which(self, spans: Sequence[Span]) -> Which:
        """The rows of some spans."""
        return self.at(spans[0]) if len(spans) == 1 else torch.cat([torch.arange(*self.at(span)) for span in spans])


@functools.lru_cache(maxsize=64)
def rounds_of(
    needs: Needs, held: Held, rank: int, *, at_once: bool, device: torch.device = _HOST, pace: Pace | None = None
) -> Rounds:
    """The rounds of a rank; of ``at_once`` two. Numbers of rows lie on ``device``.

    ``pace``: what work and travel take; None: nothing has to be hidden. Remembered: to bring numbers to a device, the
    host would wait for all that this has to do before.
    """
    world = len(held)
    wanted = segments_of(needs, held, rank, at_once=at_once, pace=pace)
    by_others = joined(span for other, of in enumerate(needs.keys) if other != rank for span in of[rank])
    own, packed = _Rows(held[rank]), _Rows(by_others)
    rounds = [Round(own.count, tuple(_units(wanted, 0, own, own, _Rows(()), own.spans)))]
    for number, steps in enumerate([range(1, world)] if at_once else [(step,) for step in range(1, world)], 1):
        receivers, sources = ([(rank + sign * step) % world for step in steps] for sign in (1, -1))
        foreign = _Rows(span for source in sources for span in needs.keys[rank][source])
        seen = (sight.keys for each in wanted if each.round == number for sight in each.sights)
        beside = joined(span for keys in seen for span in overlaps(keys, own.spans))
        keys = _Rows((*foreign.spans, *beside))
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
    wanted: Sequence[Wanted], number: int, keys: _Rows, own: _Rows, foreign: _Rows, beside: Sequence[Span]
) -> Iterator[Unit]:
    """The calls of a round over ``keys``, of which those ``beside`` are own ones."""
    for n, each in enumerate(wanted):
        if each.round not in (number, None):
            continue
        for run in (keys if each.round is not None or number == 0 else foreign).spans:
            seen = [(sight.queries, span) for sight in each.sights for span in overlaps(sight.keys, (run,))]
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
    """The same: a call that computes a segment whole writes all of its rows, those that see nothing as well."""
    pairs = ((unit, segments[unit.segment]) for unit in each.units)
    return replace(
        each, units=tuple(replace(x, rows=of.rows, q_start=of.q_start) if of.is_whole else x for x, of in pairs)
    )


def _messages(rank: int, spans: Sequence[Span], keys: _Rows, gradients: _Rows) -> Iterator[Message]:
    """What a rank sends another in a round, known to both: each run as it lies, or all of many at once."""
    for each in [(span,) for span in spans] if len(spans) <= _MOST_RUNS else [spans]:
        yield Message(rank, length(each), keys.which(each), gradients.which(each))
