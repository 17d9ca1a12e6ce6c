"""Which positions each rank holds.

In: an op, a length, the number of ranks, what the mask reads. Out: a ``Partition``, the same on every rank.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from flashgen.distributed.blocks import (
    MOST_BLOCKS,
    Held,
    Mask,
    Span,
    cuts,
    joined,
    kept,
    kept_of_pairs,
    length,
    mask_of,
    needs_of,
    read_by,
)
from flashgen.distributed.exchange import Group, check_member, shard
from flashgen.ir.expr import Symbol
from flashgen.op.checks import check_captured
from flashgen.op.conversion import param_argument, tensor_argument
from flashgen.op.op import BaseOp
from flashgen.reference.shard import MOST_POSITIONS

_ENOUGH = 0.05  # an imbalance below this is not worth more spans
_MOST_PARTS = 16  # blocks of a rank that are dealt out; each costs a launch
_EQUAL_PARTS = 4  # up to so many blocks a rank, all ranks get equal lengths
_FINE, _FINEST = 64, 2048  # for runs: blocks a rank, and at least in all
_LONGEST = 1.25  # the longest run over the mean: the rest of a model takes time by rows
# Pairs that a row takes beside its own, where sequences are not short: an H200 took 9.96 and 10.47 ms, forward and
# backward, for documents of 39,424 rows and 77.3 M pairs and of 26,112 and 84.8 M, 13.8 and 14.7 for windows of 32,768.
_ROW, _ROWS_OF_PAIRS = 192, 128
_HEAVY = 0.2  # a block with more than this share of a rank's work is halved
_MOST_HALVINGS = 5
_MOST_BORDERS = 1 << 14  # positions that are tried as borders of documents
_HOST = torch.device("cpu")
METHODS = ("balanced", "contiguous", "head_tail", "runs", "documents")


@dataclass(frozen=True)
class Partition:
    """The positions of a sequence, spread over ranks.

    ``spans`` are the ascending, disjoint spans of each rank; its rows lie in their order. ``work`` is each rank's share
    of the work, by the pairs that the mask keeps and the cost of a row. ``sent`` are the bytes of keys and values that
    each rank sends forward; it is empty where that is not known.
    """

    length: int
    spans: Held
    work: tuple[float, ...]
    sent: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if not 0 <= self.length < MOST_POSITIONS:
            raise ValueError(f"the partition is of {self.length} positions; 0 to {MOST_POSITIONS - 1} are expected")
        if len(self.work) != len(self.spans):
            raise ValueError(f"'work' has {len(self.work)} shares; {len(self.spans)} are expected, one a rank")
        for rank, own in enumerate(self.spans):
            ends = [end for span in own for end in span]
            if ends != sorted(ends):
                raise ValueError(
                    f"the spans of rank {rank}, {tuple(own)}, do not ascend; they are expected in order, as rows lie"
                )
        ordered = sorted(tuple(span) for own in self.spans for span in own)
        ends = [0, *(stop for _, stop in ordered)]
        if any(start != before for (start, _), before in zip(ordered, ends, strict=False)) or ends[-1] != self.length:
            raise ValueError(f"the spans {self.spans} do not hold each of {self.length} positions once")
        # Neighbours are merged, as plans are cached by spans.
        object.__setattr__(self, "spans", tuple(joined((start, stop) for start, stop in own) for own in self.spans))

    @property
    def world(self) -> int:
        return len(self.spans)

    @property
    def lengths(self) -> tuple[int, ...]:
        return tuple(map(length, self.spans))

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
        ``rank`` it is a plain choice of rows. Raises ``ValueError`` for a dimension of another length, and a rank that
        is none.
        """
        self._check(x, dim, self.length, "x")
        if rank is not None:
            given: object = rank
            if isinstance(given, bool) or not isinstance(given, int) or not 0 <= given < self.world:
                raise ValueError(f"'rank' is {rank!r}; one of {self.world} ranks is expected, 0 the first")
            return x.index_select(dim, self.positions(rank).to(x.device))
        return shard(x, False, dim, [self.positions(n) for n in range(self.world)], self._own(group), group)

    def gather(self, x: Tensor, dim: int = 2, group: Group = None) -> Tensor:
        """The whole of a tensor of which every rank has its rows, on every rank. Differentiable: each gets its own."""
        rank = self._own(group)
        self._check(x, dim, self.lengths[rank], f"x of rank {rank}")
        return shard(x, True, dim, [self.positions(n) for n in range(self.world)], rank, group)

    def _own(self, group: Group) -> int:
        if not dist.is_initialized():
            raise RuntimeError("torch.distributed is not initialised: call init_process_group first, or name the rank")
        check_member(group)
        if dist.get_world_size(group) != self.world:
            raise ValueError(f"this partition is for {self.world} ranks; the group has {dist.get_world_size(group)}")
        return dist.get_rank(group)

    def _check(self, x: Tensor, dim: int, length: int, name: str) -> None:
        if not isinstance(x, Tensor):
            raise TypeError(f"'{name}' must be a tensor, not {type(x).__name__}")
        if not -x.dim() <= dim < x.dim():
            raise ValueError(f"'{name}' has {x.dim()} dimensions; there is no dimension {dim}")
        if x.shape[dim] != length:
            raise ValueError(f"'{name}' has {x.shape[dim]} rows in dimension {dim}; the partition says {length}")

    def __str__(self) -> str:
        count = max(map(len, self.spans))
        travels = f"; {min(self.sent) / 1e6:.3f} to {max(self.sent) / 1e6:.3f} MB sent a rank" if self.sent else ""
        return (
            f"{self.length} positions on {self.world} ranks, {min(self.lengths)} to {max(self.lengths)} each in at "
            f"most {count} {'span' if count == 1 else 'spans'}; imbalance {100 * self.imbalance:.1f} %{travels}"
        )


def partition(
    op: BaseOp,
    N: int,
    world: int,
    *,
    method: str = "balanced",
    batch: int | None = None,
    heads: int | None = None,
    kv_heads: int | None = None,
    dtype: torch.dtype = torch.bfloat16,
    **captured: object,
) -> Partition:
    """Which of ``N`` positions each of ``world`` ranks holds.

    ``method``: ``"contiguous"``, equal parts one behind the other; ``"head_tail"``, two parts each, one of the first
    half and its mirror image; ``"runs"``, one part each, as long as work asks, so that what is not attention may take
    ranks unlike times; ``"balanced"``, as many parts as it takes until no rank computes 5 % more than the mean, of
    equal lengths where that is possible, else as ``"runs"`` where none is longer than the mean by a quarter;
    ``"documents"``, only whole documents, which are what lies between places that no kept pair crosses: nothing
    travels. ``captured`` is what the mask reads, whole, by name; ``batch``, ``heads`` and ``kv_heads`` are the sizes of
    the whole call, by default what shapes of captured tensors say, else 1; ``dtype`` is the type of keys and values.

    Raises ``ValueError`` for sizes that are none, an unknown method, and tensors of another shape than the mask reads;
    ``TypeError`` where it reads what was not given, and for what the spec does not capture.
    """
    if not isinstance(op, BaseOp):
        raise TypeError(f"'op' must be an op of flashgen.load or loads, not {type(op).__name__}")
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"'dtype' is {dtype!r}; a torch.dtype is expected, as in torch.bfloat16")
    said = _sizes_said(op, captured)
    batch = said.get("B", 1) if batch is None else batch
    kv_heads = said.get("Hkv", 1) if kv_heads is None else kv_heads
    heads = said.get("H", kv_heads) if heads is None else heads
    numbers: dict[str, object] = {"N": N, "world": world, "batch": batch, "heads": heads, "kv_heads": kv_heads}
    for name, value in numbers.items():
        if isinstance(value, bool) or not isinstance(value, int) or value < (0 if name == "N" else 1):
            raise ValueError(f"'{name}' is {value!r}; a positive integer is expected")
    if method not in METHODS:
        raise ValueError(f"unknown method '{method}'; known are {', '.join(map(repr, METHODS))}")
    sizes = {"B": batch, "H": heads, "Hkv": kv_heads, "Nq": N, "Nk": N}
    mask = mask_of(op.spec, op.spec.head_dims[0], sizes, _as_declared(op, sizes, captured))
    found = dealt(mask, N, world, method)
    head_dim = op.spec.head_dims[0]
    row = batch * kv_heads * (head_dim.qk + head_dim.v) * dtype.itemsize
    needs = needs_of(mask, found.spans)
    return replace(found, sent=tuple(needs.rows_sent(rank) * row for rank in range(world)))


def _sizes_said(op: BaseOp, captured: Mapping[str, object]) -> dict[str, int]:
    """The sizes of a call by name, read from shapes of captured tensors; the first tensor decides."""
    return {
        extent.name: length
        for declared in reversed(op.spec.tensors)
        if isinstance(x := captured.get(declared.name), Tensor) and x.dim() == len(declared.shape)
        for extent, length in zip(declared.shape, x.shape, strict=True)
        if isinstance(extent, Symbol)
    }


def _as_declared(op: BaseOp, sizes: Mapping[str, int], captured: Mapping[str, object]) -> dict[str, object]:
    """The captured values that the mask reads, in the spec's types. Raises what a call raises."""
    spec, signature, head_dim = op.spec, op.signature, op.spec.head_dims[0]
    narrow = op.narrowing.narrowed(signature.bind(dict(captured)))
    values = dict(zip(signature.names, narrow, strict=True))
    tensors, params = read_by(spec, head_dim)
    found: dict[str, object] = {name: values[name] for name in (*tensors, *params) if values[name] is not None}
    for declared in spec.tensors:
        if declared.name in tensors and declared.name in found:
            x = tensor_argument(declared, found[declared.name])
            check_captured(declared, x, {**sizes, "D": head_dim.qk, "Dv": head_dim.v}, x.device)
            found[declared.name] = x
    for param in spec.params:
        if param.name in params and (value := param_argument(param, values[param.name], _HOST)) is not None:
            found[param.name] = value
    return found


def dealt(mask: Mask, length: int, world: int, method: str = "balanced") -> Partition:
    """The partition of a mask, with ``sent`` empty."""
    if method == "documents":
        blocks = _documents(mask, length)
        blocks, weights = _together(blocks, work_of(mask, length, blocks), _FINE * world)
        return _made(length, blocks, weights, _by_weight(weights, world, len(blocks)), world)
    parts = {"contiguous": 1, "head_tail": 2}.get(method)
    if parts is not None:
        blocks = _equal(length, parts * world)
        return _made(length, blocks, work_of(mask, length, blocks), _in_mirror(world, parts), world)
    return (_runs if method == "runs" else _balanced)(mask, length, world)


def _documents(mask: Mask, length: int) -> list[Span]:
    """The spans between positions that no kept pair crosses, as far as ranges can prove that.

    Of a long sequence only some positions are tried: even steps, and those where a tensor of the mask changes.
    """
    if length <= _MOST_BORDERS:
        places = set(range(1, length))
    else:
        places = {start for start, _ in cuts(0, length, _MOST_BORDERS)} - {0}
        for array in mask.tensors.values():
            for axis, extent in enumerate(array.shape):
                if extent == length:
                    rows = np.moveaxis(array, axis, 0).reshape(length, -1)
                    changes = (rows[1:] != rows[:-1]).any(1).nonzero()[0] + 1
                    places |= set(changes[:_MOST_BORDERS].tolist())
    tried = np.array(sorted(places), np.int64)
    before, behind = np.stack([0 * tried, tried], 1), np.stack([tried, 0 * tried + length], 1)
    crosses = kept_of_pairs(mask, before, behind) + kept_of_pairs(mask, behind, before)
    ends = [0, *tried[crosses == 0.0].tolist(), length]
    return list(itertools.pairwise(ends))


def _together(blocks: Sequence[Span], weights: Sequence[float], most: int) -> tuple[list[Span], list[float]]:
    """Merge neighbours into at most ``most`` blocks of about equal weight, as a call's host time grows with spans."""
    if len(blocks) <= most:
        return list(blocks), list(weights)
    each = np.array(weights if any(weights) else [stop - start for start, stop in blocks], np.float64)
    middles = np.cumsum(each) - each / 2
    first = np.unique((middles * (most / each.sum())).astype(np.int64), return_index=True)[1].tolist()
    parts = list(itertools.pairwise([*first, len(blocks)]))
    return [(blocks[m][0], blocks[n - 1][1]) for m, n in parts], [sum(weights[m:n]) for m, n in parts]


def _balanced(mask: Mask, length: int, world: int) -> Partition:
    """The fewest blocks a rank whose imbalance is at most ``_ENOUGH``, else the best that was tried.

    One run a rank is tried, too, with lengths that differ up to ``_LONGEST``: fewer keys travel, in fewer calls.
    """
    most = _MOST_PARTS if length >= _MOST_PARTS * world else 1
    finest = _equal(length, most * world)
    weights = work_of(mask, length, finest)
    best: Partition | None = None
    parts = 1
    while parts <= most:
        each = most // parts
        blocks = [(finest[n][0], finest[n + each - 1][1]) for n in range(0, len(finest), each)]
        sums = [sum(weights[n : n + each]) for n in range(0, len(finest), each)]
        # Equal lengths first. Where one row sees every key, its rank should get fewer rows.
        found = [
            _made(length, blocks, sums, owners, world)
            for owners in (_in_mirror(world, parts), _by_weight(sums, world, parts))
        ]
        if parts >= _EQUAL_PARTS:
            runs = _runs(mask, length, world) if parts == _EQUAL_PARTS else None
            found += [runs] if runs is not None and max(runs.lengths) * world <= _LONGEST * length else []
            found.append(_made(length, blocks, sums, _by_weight(sums, world, len(blocks)), world))
        for other in found:
            if best is None or other.imbalance < best.imbalance:
                best = other
            if best.imbalance <= _ENOUGH:
                return best
        parts *= 2
    blocks, sums = _without_heavy(mask, length, finest, weights, sum(weights) / world * _HEAVY)
    other = _made(length, blocks, sums, _by_weight(sums, world, len(blocks)), world)
    return other if best is None or other.imbalance < best.imbalance else best


def _runs(mask: Mask, length: int, world: int) -> Partition:
    """One run of blocks a rank, of nearly equal weight."""
    blocks = _equal(length, max(_FINE * world, _FINEST))
    weights = work_of(mask, length, blocks)
    middles, whole = np.cumsum(weights) - np.array(weights) / 2, float(sum(weights))
    owners: list[int] = np.minimum(middles * world / whole, world - 1).astype(np.int64).tolist() if whole else []
    owners = owners or [min(n * world // len(weights), world - 1) for n in range(len(weights))]
    return _made(length, blocks, weights, owners, world)


def _without_heavy(
    mask: Mask, length: int, spans: Sequence[Span], weights: Sequence[float], most: float
) -> tuple[list[Span], list[float]]:
    """The spans, those with more work than ``most`` divided: a few rows may see every key."""
    found = list(zip(spans, weights, strict=True))
    for _ in range(_MOST_HALVINGS):
        heavy = [span for span, weight in found if weight > most and span[1] - span[0] > 1]
        if not heavy:
            break
        halves = [half for span in heavy for half in cuts(*span, 2)]
        light = [each for each in found if each[0] not in heavy]
        found = sorted([*light, *zip(halves, work_of(mask, length, halves), strict=True)])
    return [span for span, _ in found], [weight for _, weight in found]


def _equal(length: int, count: int) -> list[Span]:
    """``count`` spans of nearly equal length; the last are empty where there are fewer positions."""
    spans = cuts(0, length, count)
    return [*spans, *[(length, length)] * (count - len(spans))]


def _in_mirror(world: int, parts: int) -> list[int]:
    """Owners of blocks in the order 0 … n-1, n-1 … 0: balanced where work grows or falls along the sequence."""
    both = [*range(world), *reversed(range(world))]
    return [both[n % (2 * world)] for n in range(parts * world)]


def _by_weight(weights: Sequence[float], world: int, most: int) -> list[int]:
    """Owners of blocks: each, the heaviest first, goes to the rank of least work with fewer than ``most`` blocks."""
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


def in_order(lengths: Sequence[int]) -> Held:
    """One span a rank, of these lengths, in the order of ranks."""
    ends = itertools.accumulate(lengths, initial=0)
    return tuple(((start, stop),) if stop > start else () for start, stop in itertools.pairwise(ends))


def _made(
    length: int, blocks: Sequence[Span], weights: Sequence[float], owners: Sequence[int], world: int
) -> Partition:
    load = [0.0] * world
    for weight, owner in zip(weights, owners, strict=True):
        load[owner] += weight
    total = sum(load)
    spans = (
        joined(block for block, owner in zip(blocks, owners, strict=True) if owner == rank) for rank in range(world)
    )
    return Partition(length, tuple(spans), tuple(each / total if total else 0.0 for each in load))


def work_of(mask: Mask, length: int, spans: Sequence[Span]) -> list[float]:
    """The work of the queries of each span, in pairs: kept pairs, and the cost of each row as pairs."""
    beside = min(_ROW, length // _ROWS_OF_PAIRS)
    found = zip(pairs_of(mask, length, spans), spans, strict=True)
    return [pairs + beside * (stop - start) for pairs, (start, stop) in found]


def pairs_of(mask: Mask, length: int, spans: Sequence[Span]) -> list[float]:
    """About how many pairs of the queries of each span are kept."""
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
