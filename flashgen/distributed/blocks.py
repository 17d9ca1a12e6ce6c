"""Which pairs a mask keeps, by blocks of queries and keys, and which keys each rank therefore needs of each other rank.

In: a spec, sizes, captured tensors, the spans that ranks hold. Out: NumPy arrays of shares, ``NeededKeys``. Runs on the
host; ranks that have the same captured tensors get the same, so that senders and receivers agree without messages.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from flashgen.analysis.selection import read_of_calls, selection_of
from flashgen.analysis.tiles import Boxes, TileClass, classify_boxes, loads_of
from flashgen.analysis.variant import Variant, analyse
from flashgen.ir.expr import Load, Symbol, SymbolKind, index_set, walk
from flashgen.ir.shape import Shape
from flashgen.ir.spec import AttentionSpec, HeadDim
from flashgen.op.selected import lowered_tensors
from flashgen.op.tensor_kinds import as_arrays
from flashgen.plan.tile_counts import known_params

Span = tuple[int, int]  # positions from the first to the one behind the last
_Ends = tuple[NDArray[np.int64], NDArray[np.int64]] | NDArray[np.int64]

MOST_BLOCKS = 256  # blocks of keys: to classify a mask then takes milliseconds
MOST_ROWS = 8  # parts into which a span of queries is divided
_SETTLED_AT_ONCE = 4096  # pairs of spans up to which each is classified alone; else larger boxes come first
_COARSE = 32  # larger boxes along queries, and along keys
_MOST_HEADS = 64  # pairs (b, h) up to which each is classified; masks that differ by more count as half kept


_variant = functools.lru_cache(maxsize=64)(analyse)


@dataclass(frozen=True)
class Mask:
    """The mask of one call, with the sizes of the whole call and the values of the params and tensors that it reads."""

    variant: Variant
    sizes: Mapping[str, int]
    params: Mapping[str, bool | int | float]
    tensors: Mapping[str, NDArray[np.generic]]
    b: int | None = None  # the sequence of a ragged batch that the mask is for; None: all of the batch

    @property
    def key(self) -> str:
        """A digest, equal for equal masks."""
        digest = hashlib.sha256(
            repr((self.variant.keep, sorted(self.sizes.items()), sorted(self.params.items()), self.b)).encode()
        )
        for name, array in sorted(self.tensors.items()):
            digest.update(f"{name}{array.shape}{array.dtype}".encode())
            digest.update(np.ascontiguousarray(array).tobytes())
        return digest.hexdigest()


def mask_of(
    spec: AttentionSpec,
    head_dim: HeadDim,
    sizes: Mapping[str, int],
    captured: Mapping[str, object],
    b: int | None = None,
) -> Mask:
    """The mask of a call, or of its sequence ``b``. Tensors that the mask reads are copied to the host."""
    variant = _variant(spec, head_dim)
    sizes = {**sizes, "D": head_dim.qk, "Dv": head_dim.v}
    reads, names = read_by(spec, head_dim)
    found: dict[str, Tensor] = {}
    for name in sorted(reads):
        given = captured.get(name)
        if not isinstance(given, Tensor):
            came = "it was not given" if name not in captured else f"{type(given).__name__} came"
            raise TypeError(f"the mask of '{spec.name}' reads the tensor '{name}': {came}")
        found[name] = given.detach().cpu()
    selection = selection_of(spec)
    if selection is not None and selection.select.tensor in found:  # a mask that keeps nothing reads none of it
        found |= lowered_tensors(spec, found, sizes)
    shape = Shape(sizes["B"], sizes["H"], sizes["Hkv"], sizes["Nq"], sizes["Nk"])
    params = {name: value for name, value in known_params(spec.params, shape).items() if name in names}
    for name in names:
        value = captured.get(name)
        if isinstance(value, Tensor):
            value = value.item()
        if isinstance(value, (bool, int, float)):
            params[name] = value
    return Mask(variant, sizes, params, as_arrays(found), b)


@functools.lru_cache(maxsize=64)
def read_by(spec: AttentionSpec, head_dim: HeadDim) -> tuple[frozenset[str], frozenset[str]]:
    """The names of tensors and of params that the mask reads."""
    nodes = set(walk(_variant(spec, head_dim).keep))
    tensors = read_of_calls(spec, (node.tensor for node in nodes if isinstance(node, Load)))
    params = {node.name for node in nodes if isinstance(node, Symbol) and node.kind is SymbolKind.PARAM}
    return frozenset(tensors), frozenset(params)


def cuts(start: int, stop: int, parts: int) -> list[Span]:
    """``parts`` spans of nearly equal length, fewer where there are fewer positions."""
    length = stop - start
    parts = max(min(parts, length), 1)
    ends = [start + length * n // parts for n in range(parts + 1)]
    return list(itertools.pairwise(ends))


def moved(span: Span, by: int) -> Span:
    """The span with ``by`` added to both ends."""
    return span[0] + by, span[1] + by


def kept(mask: Mask, queries: Sequence[Span], keys: Sequence[Span]) -> NDArray[np.float64]:
    """The share of kept pairs of each two spans, [queries, keys]: 0 for none, 1 for all, else a half.

    Shares are means over b and h, and 0 only where no b and h keeps a pair.
    """
    pairs = _distinct_heads(mask)
    if not queries or not keys or not pairs:  # of no batch and no heads nothing is kept
        return np.zeros((len(queries), len(keys)))
    if len(pairs) > _MOST_HEADS:
        return np.full((len(queries), len(keys)), 0.5)
    q, k = _Spans(queries), _Spans(keys)
    found = np.zeros((len(queries), len(keys)))
    if q.count and k.count:
        shares = sum(_shares(mask, place, q, k) for place in pairs)
        found[np.ix_(q.places, k.places)] = shares / len(pairs)
    return found


class _Spans:
    """The spans that are not empty, ascending. ``places`` are their numbers in the given list."""

    def __init__(self, spans: Sequence[Span]) -> None:
        ends = np.array(spans, np.int64)
        order = np.argsort(ends[:, 0], kind="stable")
        self.places = order[ends[order, 1] > ends[order, 0]]
        self.starts, self.stops = ends[self.places].T
        self.count = len(self.places)

    def steps(self, parts: int) -> NDArray[np.int64]:
        """Where each of ``parts`` equal groups of spans begins, and the end of the last."""
        return np.linspace(0, self.count, min(parts, self.count) + 1).astype(np.int64)


def _shares(mask: Mask, place: tuple[int, int], q: _Spans, k: _Spans) -> NDArray[np.float64]:
    """The shares of one (b, h). A box of many spans that is neither full nor empty is halved."""
    found = np.zeros((q.count, k.count))
    rows, columns = (spans.steps(spans.count if q.count * k.count <= _SETTLED_AT_ONCE else _COARSE) for spans in (q, k))
    r0, c0 = (each.ravel() for each in np.meshgrid(rows[:-1], columns[:-1], indexing="ij"))
    r1, c1 = (each.ravel() for each in np.meshgrid(rows[1:], columns[1:], indexing="ij"))
    while len(r0):
        classes = _classes(mask, place, (q.starts[r0], q.stops[r1 - 1]), (k.starts[c0], k.stops[c1 - 1]))
        single = (r1 - r0 == 1) & (c1 - c0 == 1)
        found[r0[single], c0[single]] = classes[single] / TileClass.FULL  # PARTIAL counts as a half
        for x0, x1, y0, y1 in np.stack([r0, r1, c0, c1], 1)[~single & (classes == TileClass.FULL)].tolist():
            found[x0:x1, y0:y1] = 1.0
        left = ~single & (classes != TileClass.EMPTY) & (classes != TileClass.FULL)
        r0, r1, c0, c1 = r0[left], r1[left], c0[left], c1[left]
        across = r1 - r0 >= c1 - c0
        middle = np.where(across, (r0 + r1) // 2, (c0 + c1) // 2)
        r0, r1 = np.concatenate([r0, np.where(across, middle, r0)]), np.concatenate([np.where(across, middle, r1), r1])
        c0, c1 = np.concatenate([c0, np.where(across, c0, middle)]), np.concatenate([np.where(across, c1, middle), c1])
    return found


def kept_of_pairs(mask: Mask, q: NDArray[np.int64], k: NDArray[np.int64]) -> NDArray[np.float64]:
    """The shares of kept pairs of n spans of queries [n, 2], each with one span of keys [n, 2]."""
    pairs = _distinct_heads(mask)
    some = (q[:, 1] > q[:, 0]) & (k[:, 1] > k[:, 0])
    if len(pairs) > _MOST_HEADS:
        return np.where(some, 0.5, 0.0)
    total = np.zeros(len(q))
    for place in pairs:  # PARTIAL counts as a half
        total += _classes(mask, place, q.T, k.T) / TileClass.FULL
    return np.where(some, total / max(len(pairs), 1), 0.0)


def _classes(mask: Mask, place: tuple[int, int], queries: _Ends, keys: _Ends) -> NDArray[np.int8]:
    """The classes of the boxes that spans of queries and of keys make, for one (b, h)."""
    count = len(queries[0])
    boxes = Boxes(
        b=np.full(count, place[0]),
        h=np.full(count, place[1]),
        first_i=queries[0],
        last_i=np.maximum(queries[1] - 1, queries[0]),
        first_j=keys[0],
        last_j=np.maximum(keys[1] - 1, keys[0]),
        sizes=mask.sizes,
        params=mask.params,
    )
    return classify_boxes(mask.variant.keep, boxes, loads_of(mask.tensors))


def _distinct_heads(mask: Mask) -> list[tuple[int, int]]:
    """The pairs (b, h) for which the mask may differ."""
    axes = index_set(mask.variant.keep)
    batches = range(mask.sizes["B"]) if "b" in axes else range(1)
    if mask.b is not None:
        batches = range(mask.b, mask.b + 1)
    heads = range(mask.sizes["H"]) if {"h", "hkv"} & axes else range(1)
    return [(b, h) for b in batches for h in heads]


# The ascending spans of each rank.
Held = tuple[tuple[Span, ...], ...]

_MOST_ROWS_OF_ALL = 64  # parts of all spans together, where few spans may have more than ``MOST_ROWS`` each


@dataclass(frozen=True)
class QueryRun:
    """A run of queries, and ascending spans of the keys, of all ranks, that the mask keeps for some of them.

    ``pairs`` is about how many pairs the mask keeps, as the mean over b and h.
    """

    queries: Span
    keys: tuple[Span, ...]
    pairs: float


@dataclass(frozen=True, eq=False)
class NeededKeys:
    """The keys that every rank needs of every other, as spans of positions.

    ``keys[rank][source]`` are the ascending spans of the positions that ``source`` holds and ``rank`` needs.
    ``query_runs[rank]`` divides each span of the rank's queries into runs, with the keys that they see.
    """

    keys: tuple[tuple[tuple[Span, ...], ...], ...]
    query_runs: tuple[tuple[tuple[QueryRun, ...], ...], ...]

    def rows_sent(self, rank: int) -> int:
        return sum(length(own[rank]) for receiver, own in enumerate(self.keys) if receiver != rank)

    def rows_received(self, rank: int) -> int:
        return sum(length(spans) for source, spans in enumerate(self.keys[rank]) if source != rank)

    def are_few(self, held: Held) -> bool:
        """Whether a ring keeps the keys of other ranks for the backward pass."""
        return are_few([self.rows_received(rank) for rank in range(len(held))], [length(own) for own in held])


_cache: dict[tuple[str, Held], NeededKeys] = {}
_MOST_KEPT = 64


def needs_of(mask: Mask, held: Held) -> NeededKeys:
    """The needs of a mask, computed once for equal masks."""
    key = (mask.key, held)
    found = _cache.get(key)
    if found is None:
        if len(_cache) >= _MOST_KEPT:
            _cache.clear()
        found = _cache[key] = _compute(mask, held)
    return found


def _compute(mask: Mask, held: Held) -> NeededKeys:
    size = max(mask.sizes["Nk"] // MOST_BLOCKS, 1)
    blocks = [
        (owner, block)
        for owner, own in enumerate(held)
        for start, stop in own
        for block in cuts(start, stop, max((stop - start) // size, 1))
    ]
    widths = np.array([stop - start for _, (start, stop) in blocks], np.float64)
    keys, query_runs = [], []
    # Queries that need other ranks' keys are computed apart from the rest: smaller runs separate them better.
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
                    QueryRun(
                        each, joined(block for (_, block), is_kept in zip(blocks, own, strict=True) if is_kept), count
                    )
                    for each, own, count in zip(rows, some.tolist(), pairs.tolist(), strict=True)
                )
            )
            needed = [before or bool(now) for before, now in zip(needed, np.any(some, axis=0), strict=True)]
        chosen = [each for each, is_needed in zip(blocks, needed, strict=True) if is_needed]
        keys.append(tuple(joined(block for owner, block in chosen if owner == source) for source in range(len(held))))
        query_runs.append(tuple(of_spans))
    return NeededKeys(tuple(keys), tuple(query_runs))


def are_few(received: Sequence[float], lengths: Sequence[int]) -> bool:
    """Whether every rank receives fewer keys than it holds, or none. All ranks have to decide alike."""
    return all(got < own or got == 0 for got, own in zip(received, lengths, strict=True))


def joined(spans: Iterable[Span]) -> tuple[Span, ...]:
    """The union of spans, ascending: neighbours and overlapping spans are merged, empty ones dropped."""
    found: list[Span] = []
    for start, stop in sorted(span for span in spans if span[1] > span[0]):
        if found and found[-1][1] >= start:
            found[-1] = (found[-1][0], max(found[-1][1], stop))
        else:
            found.append((start, stop))
    return tuple(found)


def length(spans: Iterable[Span]) -> int:
    """The number of positions in the spans."""
    return sum(stop - start for start, stop in spans)
