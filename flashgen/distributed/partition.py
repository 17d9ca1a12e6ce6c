"""Which positions each rank holds.

In: an op, a length, the number of ranks, what the mask reads. Out: a ``Partition``, the same on every rank.
"""

from __future__ import annotations

import functools
import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from flashgen.distributed.blocks import MOST_BLOCKS, Mask, Span, cuts, kept, mask_of
from flashgen.distributed.exchange import Group, gathered, sliced
from flashgen.runtime.op import BaseOp

_ENOUGH = 0.05  # imbalance that is not worth more spans
_MOST_PARTS = 16  # blocks of a rank that are dealt out; each costs a launch
METHODS = ("balanced", "contiguous", "head_tail")


@dataclass(frozen=True)
class Partition:
    """The positions of a sequence, spread over ranks.

    ``spans`` are those of each rank, ascending and apart; a rank's rows lie in their order. ``work`` is the share of
    the kept pairs that each rank computes.
    """

    length: int
    spans: tuple[tuple[Span, ...], ...]
    work: tuple[float, ...]

    def __post_init__(self) -> None:
        ordered = sorted(span for own in self.spans for span in own)
        ends = [0, *(stop for _, stop in ordered)]
        if any(start != before for (start, _), before in zip(ordered, ends, strict=False)) or ends[-1] != self.length:
            raise ValueError(f"the spans {self.spans} do not hold each of {self.length} positions once")

    @property
    def world(self) -> int:
        """The number of ranks."""
        return len(self.spans)

    @property
    def lengths(self) -> tuple[int, ...]:
        """How many positions each rank holds."""
        return tuple(sum(stop - start for start, stop in own) for own in self.spans)

    @property
    def imbalance(self) -> float:
        """How much more than the mean the busiest rank computes: 0.05 is 5 %."""
        mean = sum(self.work) / len(self.work)
        return max(self.work) / mean - 1 if mean else 0.0

    def positions(self, rank: int) -> Tensor:
        """The positions of a rank's rows, int64 [n]."""
        parts = [torch.arange(*span) for span in self.spans[rank]]
        return torch.cat(parts) if parts else torch.arange(0)

    def shard(self, x: Tensor, dim: int = 2, rank: int | None = None, group: Group = None) -> Tensor:
        """The rows of a rank, by default of this process, of a tensor that every rank has whole.

        Differentiable: where the group's ranks each take theirs, x gets its whole gradient on each of them. With
        ``rank`` it is a plain choice of rows. Raises ``ValueError`` for a dimension of another length.
        """
        self._check(x, dim, self.length, "x")
        if rank is not None:
            return x.index_select(dim, self.positions(rank).to(x.device))
        return sliced(x, dim, [self.positions(n) for n in range(self.world)], self._own(group), group)

    def gather(self, x: Tensor, dim: int = 2, group: Group = None) -> Tensor:
        """The whole of a tensor of which every rank has its rows, on every rank. Differentiable: each gets its own."""
        rank = self._own(group)
        self._check(x, dim, self.lengths[rank], f"x of rank {rank}")
        return gathered(x, dim, [self.positions(n) for n in range(self.world)], rank, group)

    def _own(self, group: Group) -> int:
        if not dist.is_initialized():
            raise RuntimeError("torch.distributed is not initialised: call init_process_group first, or name the rank")
        if dist.get_world_size(group) != self.world:
            raise ValueError(f"this partition is for {self.world} ranks; the group has {dist.get_world_size(group)}")
        return dist.get_rank(group)

    def _check(self, x: Tensor, dim: int, length: int, name: str) -> None:
        if not -x.dim() <= dim < x.dim():
            raise ValueError(f"'{name}' has {x.dim()} dimensions; there is no dimension {dim}")
        if x.shape[dim] != length:
            raise ValueError(f"'{name}' has {x.shape[dim]} rows in dimension {dim}; the partition says {length}")

    def __str__(self) -> str:
        count = max(map(len, self.spans))
        return (
            f"{self.length} positions on {self.world} ranks, {min(self.lengths)} to {max(self.lengths)} each in at "
            f"most {count} {'span' if count == 1 else 'spans'}; imbalance {100 * self.imbalance:.1f} %"
        )


def partition(
    op: BaseOp,
    N: int,
    world: int,
    *,
    method: str = "balanced",
    batch: int = 1,
    heads: int = 1,
    kv_heads: int = 1,
    **captured: object,
) -> Partition:
    """Which of ``N`` positions each of ``world`` ranks holds.

    ``method``: ``"contiguous"``, equal parts one behind the other; ``"head_tail"``, two parts each, one of the first
    half and its mirror image; ``"balanced"``, as many parts as it takes until no rank computes 5 % more pairs than the
    mean, of equal lengths where that is possible. ``captured`` is what the mask reads, whole, by name; ``batch``,
    ``heads`` and ``kv_heads`` are the sizes of the whole call, where it reads these.

    Raises ``ValueError`` for sizes that are none and an unknown method, ``TypeError`` where the mask reads what was
    not given.
    """
    numbers: dict[str, object] = {"N": N, "world": world, "batch": batch, "heads": heads, "kv_heads": kv_heads}
    for name, value in numbers.items():
        if isinstance(value, bool) or not isinstance(value, int) or value < (0 if name == "N" else 1):
            raise ValueError(f"'{name}' is {value!r}; a positive integer is expected")
    if method not in METHODS:
        raise ValueError(f"unknown method '{method}'; known are {', '.join(map(repr, METHODS))}")
    sizes = {"B": batch, "H": heads, "Hkv": kv_heads, "Nq": N, "Nk": N}
    return dealt(mask_of(op.spec, op.spec.head_dims[0], sizes, captured), N, world, method)


def dealt(mask: Mask, N: int, world: int, method: str = "balanced") -> Partition:
    """The same of a mask."""
    parts = {"contiguous": 1, "head_tail": 2}.get(method)
    if parts is not None:
        blocks = _padded(cuts(0, N, parts * world), parts * world)
        return _made(N, blocks, _work(mask, N, blocks), _in_mirror(world, parts), world)
    return _balanced(N, world, functools.partial(_work, mask, N))


def _balanced(length: int, world: int, work: Callable[[Sequence[Span]], list[float]]) -> Partition:
    """The fewest blocks a rank that leave no more than ``_ENOUGH``, else those that leave least."""
    most = _MOST_PARTS if length >= _MOST_PARTS * world else 1
    finest = _padded(cuts(0, length, most * world), most * world)
    weights = work(finest)
    best: Partition | None = None
    parts = 1
    while parts <= most:
        each = most // parts
        blocks = [(finest[n][0], finest[n + each - 1][1]) for n in range(0, len(finest), each)]
        sums = [sum(weights[n : n + each]) for n in range(0, len(finest), each)]
        # Lengths stay equal where they can: a row that sees every key leaves its rank less room for others.
        for owners in (_in_mirror(world, parts), _by_weight(sums, world, parts), _by_weight(sums, world, len(blocks))):
            other = _made(length, blocks, sums, owners, world)
            if best is None or other.imbalance < best.imbalance:
                best = other
            if best.imbalance <= _ENOUGH:
                return best
        parts *= 2
    assert best is not None
    return best


def _padded(spans: Sequence[Span], world: int) -> list[Span]:
    """As many spans as ranks; the last ones are empty where there are fewer positions."""
    end = spans[-1][1] if spans else 0
    return [*spans, *[(end, end)] * (world - len(spans))]


def _in_mirror(world: int, parts: int) -> list[int]:
    """The owners of blocks, forth and back in turn: equal where work grows or falls along the sequence."""
    both = [*range(world), *reversed(range(world))]
    return [both[n % (2 * world)] for n in range(parts * world)]


def _by_weight(weights: Sequence[float], world: int, most: int) -> list[int]:
    """The heaviest block that is left goes to the rank with the least work that has less than ``most`` blocks."""
    owners = [0] * len(weights)
    room = [most] * world
    least = [(0.0, rank) for rank in range(world)]  # a heap
    for n in sorted(range(len(weights)), key=lambda n: (-weights[n], n)):
        load, rank = heapq.heappop(least)
        owners[n] = rank
        room[rank] -= 1
        if room[rank]:
            heapq.heappush(least, (load + weights[n], rank))
    return owners


def _made(
    length: int, blocks: Sequence[Span], weights: Sequence[float], owners: Sequence[int], world: int
) -> Partition:
    load = [0.0] * world
    for weight, owner in zip(weights, owners, strict=True):
        load[owner] += weight
    total = sum(load)
    spans = (
        _joined([block for block, owner in zip(blocks, owners, strict=True) if owner == rank]) for rank in range(world)
    )
    return Partition(length, tuple(spans), tuple(each / total if total else 0.0 for each in load))


def _joined(spans: Sequence[Span]) -> tuple[Span, ...]:
    """Neighbours are one; empty ones are none."""
    found: list[Span] = []
    for start, stop in sorted(span for span in spans if span[1] > span[0]):
        if found and found[-1][1] == start:
            found[-1] = (found[-1][0], stop)
        else:
            found.append((start, stop))
    return tuple(found)


def _work(mask: Mask, length: int, spans: Sequence[Span]) -> list[float]:
    """Kept pairs of the queries of each span, as far as blocks tell."""
    keys = cuts(0, length, MOST_BLOCKS)
    widths = np.array([stop - start for start, stop in keys], np.float64)
    size = max(length // MOST_BLOCKS, 1)
    rows = [
        (owner, row)
        for owner, (start, stop) in enumerate(spans)
        if stop > start
        for row in cuts(start, stop, max((stop - start) // size, 1))
    ]
    heights = np.array([last - first for _, (first, last) in rows], np.float64)
    pairs = heights * (kept(mask, [row for _, row in rows], keys) @ widths)
    owners = np.array([owner for owner, _ in rows], np.int64)
    found: list[float] = np.bincount(owners, weights=pairs, minlength=len(spans)).tolist()
    return found
