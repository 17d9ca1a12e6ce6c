"""In which order a rank works on the keys that it needs, and what travels meanwhile.

In: the needs of a mask, the spans that ranks hold. Out: a ``Round`` for each group of sources: first the rank's own
keys, then those of others. ``ring`` takes one source after another, at each turn the one a step further, so that each
rank sends to one and receives from one; ``all_gather`` takes all others at once. A piece goes straight to who needs it.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from flashgen.distributed.blocks import Span
from flashgen.distributed.needs import Held, Needs, joined, length

_HOST = torch.device("cpu")


@dataclass(frozen=True)
class Unit:
    """One call: some of the rank's query rows, at position ``q_start``, over a span of a round's keys.

    The rows lie together in the rank's span of this number.
    """

    span: int
    rows: Span
    q_start: int
    keys: Span
    kv_start: int


@dataclass(frozen=True)
class Round:
    """Keys that are worked on together.

    ``sent``: to whom which of the own rows go in this round, None: all of them; ``received``: how many come from whom,
    in the order in which they are put one behind the other. ``order`` then makes their positions ascend; None: they do.
    """

    sent: tuple[tuple[int, Tensor | None], ...]
    received: tuple[tuple[int, int], ...]
    order: Tensor | None
    units: tuple[Unit, ...]

    @property
    def keys(self) -> int:
        """How many rows come."""
        return sum(count for _, count in self.received)

    def to(self, device: torch.device) -> Round:
        """The same with the numbers of rows on a device."""
        sent = tuple((rank, None if which is None else which.to(device)) for rank, which in self.sent)
        return replace(self, sent=sent, order=None if self.order is None else self.order.to(device))


@functools.lru_cache(maxsize=64)
def rounds_of(needs: Needs, held: Held, rank: int, *, at_once: bool, device: torch.device = _HOST) -> tuple[Round, ...]:
    """The rounds of a rank; of ``at_once`` two. Numbers of rows lie on ``device``.

    Remembered: to bring them to a device, the host would wait for all that this has to do before.
    """
    world = len(held)
    steps = [tuple(range(1, world))] if at_once else [(step,) for step in range(1, world)]
    own = Round((), (), None, tuple(_units(needs, held, rank, held[rank])))
    return (own, *(_round(needs, held, rank, each).to(device) for each in steps))


def _round(needs: Needs, held: Held, rank: int, steps: Sequence[int]) -> Round:
    world = len(held)
    sent = []
    for receiver in ((rank + step) % world for step in steps):
        wanted = needs.keys[receiver][rank]
        if wanted:
            sent.append((receiver, None if wanted == held[rank] else _local(held[rank], wanted)))
    sources = [source for source in ((rank - step) % world for step in steps) if needs.keys[rank][source]]
    spans = [span for source in sources for span in needs.keys[rank][source]]
    order = None
    if spans != sorted(spans):
        order = torch.cat([torch.arange(*span) for span in spans]).argsort()
    received = tuple((source, length(needs.keys[rank][source])) for source in sources)
    return Round(tuple(sent), received, order, tuple(_units(needs, held, rank, spans)))


def _units(needs: Needs, held: Held, rank: int, spans: Sequence[Span]) -> list[Unit]:
    """The calls over keys at these positions: of each span of queries those that see some of a run of keys."""
    found = []
    first_row = 0
    runs = joined(spans)
    for number, ((start, stop), sights) in enumerate(zip(held[rank], needs.sights[rank], strict=True)):
        first_key = 0
        for low, high in runs:
            seen = [(each.queries, x, y) for each in sights for x, y in each.keys if x < high and y > low]
            if seen:
                first, last = min(queries[0] for queries, _, _ in seen), max(queries[1] for queries, _, _ in seen)
                x, y = max(low, min(x for _, x, _ in seen)), min(high, max(y for _, _, y in seen))
                rows = (first_row + first - start, first_row + last - start)
                found.append(Unit(number, rows, first, (first_key + x - low, first_key + y - low), x))
            first_key += high - low
        first_row += stop - start
    return found


def _local(own: Sequence[Span], wanted: Sequence[Span]) -> Tensor:
    """The rows of a rank that are at these positions."""
    parts = []
    before = 0
    for start, stop in own:
        parts += [
            torch.arange(before + max(first, start) - start, before + min(last, stop) - start)
            for first, last in wanted
            if first < stop and last > start
        ]
        before += stop - start
    return torch.cat(parts)
