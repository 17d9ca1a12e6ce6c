"""Which keys each rank needs of which other, by the mask.

In: a mask, a partition. Out: ``Needs``: for each span of queries the keys that its call reads, and the route of rows.
The same on every rank, so that senders and receivers agree without a word.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
from torch import Tensor

from flashgen.distributed.blocks import MOST_BLOCKS, MOST_ROWS, Mask, Span, cuts, kept
from flashgen.distributed.exchange import Route
from flashgen.distributed.partition import Partition


@dataclass(frozen=True)
class Needs:
    """Of every rank, the keys of every other that it needs, as spans of positions.

    ``keys[rank][source]`` are ascending spans of what ``source`` holds; ``reads[rank]`` has for each span of the rank's
    queries the one span of keys that its call covers.
    """

    keys: tuple[tuple[tuple[Span, ...], ...], ...]
    reads: tuple[tuple[Span, ...], ...]

    def rows(self, rank: int) -> int:
        """Rows that a rank gets from others."""
        return sum(_length(spans) for source, spans in enumerate(self.keys[rank]) if source != rank)

    def rows_sent(self, rank: int) -> int:
        """Rows that a rank sends to others."""
        return sum(_length(own[rank]) for receiver, own in enumerate(self.keys) if receiver != rank)

    def route(self, partition: Partition, rank: int) -> Route:
        """The rows that a rank sends, as indices of its own, and how many it gets."""
        sent = tuple(_local(partition.spans[rank], own[rank]) for own in self.keys)
        return Route(sent, tuple(_length(spans) for spans in self.keys[rank]))

    def positions(self, rank: int) -> Tensor:
        """Where the rows are that a rank gets, in the order in which they come."""
        parts = [torch.arange(*span) for spans in self.keys[rank] for span in spans]
        return torch.cat(parts) if parts else torch.arange(0)


_cache: dict[tuple[str, Partition], Needs] = {}
_MOST_KEPT = 64


def needs_of(mask: Mask, partition: Partition) -> Needs:
    """The needs of a mask, remembered for equal ones."""
    key = (mask.key, partition)
    found = _cache.get(key)
    if found is None:
        if len(_cache) >= _MOST_KEPT:
            _cache.clear()
        found = _cache[key] = _found(mask, partition)
    return found


def _found(mask: Mask, partition: Partition) -> Needs:
    blocks = [(owner, block) for owner, own in enumerate(partition.spans) for block in _blocks(partition, own)]
    keys, reads = [], []
    for own in partition.spans:
        needed = [False] * len(blocks)
        covered = []
        for start, stop in own:
            shares = kept(mask, cuts(start, stop, MOST_ROWS), [block for _, block in blocks])
            some: list[bool] = (shares.max(0) > 0).tolist()
            mine = [block for (_, block), is_kept in zip(blocks, some, strict=True) if is_kept]
            covered.append((min(x for x, _ in mine), max(y for _, y in mine)) if mine else (0, 0))
            needed = [before or now for before, now in zip(needed, some, strict=True)]
        chosen = [each for each, is_needed in zip(blocks, needed, strict=True) if is_needed]
        keys.append(
            tuple(_joined([block for owner, block in chosen if owner == source]) for source in range(partition.world))
        )
        reads.append(tuple(covered))
    return Needs(tuple(keys), tuple(reads))


def _blocks(partition: Partition, own: tuple[Span, ...]) -> list[Span]:
    size = max(partition.length // MOST_BLOCKS, 1)
    return [block for start, stop in own for block in cuts(start, stop, max((stop - start) // size, 1))]


def _joined(blocks: list[Span]) -> tuple[Span, ...]:
    found: list[Span] = []
    for start, stop in blocks:
        if found and found[-1][1] == start:
            found[-1] = (found[-1][0], stop)
        else:
            found.append((start, stop))
    return tuple(found)


def _length(spans: tuple[Span, ...]) -> int:
    return sum(stop - start for start, stop in spans)


@functools.lru_cache(maxsize=256)
def _local(own: tuple[Span, ...], wanted: tuple[Span, ...]) -> Tensor:
    """The rows of a rank that are at these positions."""
    parts = []
    before = 0
    for start, stop in own:
        for first, last in wanted:
            if start <= first and last <= stop:
                parts.append(torch.arange(before + first - start, before + last - start))
        before += stop - start
    return torch.cat(parts) if parts else torch.arange(0)
