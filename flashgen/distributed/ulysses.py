"""Heads change places with positions: each rank computes some heads of all rows, which are then brought home.

In: q, k and v of this rank's rows, who holds which. Out: the rows of all, of this rank's heads, ascending; and back.
Heads are dealt out in turn, as evenly as they divide. Key/value heads go to every rank that has a query head of theirs.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from flashgen.analysis.selection import lowered
from flashgen.distributed.blocks import Span
from flashgen.distributed.exchange import Group, all_to_all, of_first_order
from flashgen.distributed.needs import Held
from flashgen.ir.expr import Symbol, SymbolKind, walk
from flashgen.ir.spec import AttentionSpec


@dataclass(frozen=True)
class Share:
    """The heads of a rank: query heads, the key/value heads that these read, and the calls that compute them.

    A call is query heads and key/value heads, counted from the first of the share; those of one call share evenly.
    """

    heads: Span
    kv_heads: Span
    calls: tuple[tuple[Span, Span], ...]

    @property
    def counts(self) -> tuple[int, int, int]:
        """Heads of q, k and v."""
        kv = self.kv_heads[1] - self.kv_heads[0]
        return self.heads[1] - self.heads[0], kv, kv


def shares_of(heads: int, kv_heads: int, world: int) -> tuple[Share, ...]:
    """The share of each rank."""
    group = max(heads // kv_heads, 1) if kv_heads else 1
    return tuple(_share(group, heads * rank // world, heads * (rank + 1) // world) for rank in range(world))


def _share(group: int, low: int, high: int) -> Share:
    if low == high:
        return Share((low, low), (low // group, low // group), ())
    # Whole groups are one call; what is left of a group at either end is one more.
    first, last = -(-low // group) * group, high // group * group
    borders = sorted({low, high, *(x for x in (first, last) if low < x < high)})
    kv_low = low // group
    calls = tuple(
        ((start - low, stop - low), (start // group - kv_low, -(-stop // group) - kv_low))
        for start, stop in pairwise(borders)
    )
    return Share((low, high), (kv_low, -(-high // group)), calls)


def no_heads(spec: AttentionSpec, heads: int, kv_heads: int, world: int) -> str:
    """Why heads cannot change places; empty where they can."""
    if heads < world:
        return f"{heads} query heads cannot be dealt out to {world} ranks"
    group = max(heads // kv_heads, 1) if kv_heads else 1
    splits = any(
        stop - start != (last - first) * group
        for share in shares_of(heads, kv_heads, world)
        for (start, stop), (first, last) in share.calls
    )
    if splits and _reads_kv_heads(spec):
        return f"'{spec.name}' reads hkv or Hkv, and {world} ranks would share {kv_heads} key/value heads"
    return ""


def _reads_kv_heads(spec: AttentionSpec) -> bool:
    spec = lowered(spec)
    parts = [spec.scale, spec.score, spec.mask, spec.weights.expression, spec.dropout]
    parts += [spec.layout.keep] if spec.layout is not None else []
    parts += [each.default for each in spec.params]
    parts += [each for tensor in spec.tensors for each in tensor.shape]
    known = [part for part in parts if part is not None]
    names = {SymbolKind.INDEX: "hkv", SymbolKind.SIZE: "Hkv"}
    return any(isinstance(node, Symbol) and names.get(node.kind) == node.name for node in walk(*known))


@dataclass(frozen=True)
class Swap:
    """Who of a group holds which rows, and computes which heads."""

    group: Group
    held: Held
    shares: tuple[Share, ...]

    @property
    def rank(self) -> int:
        """The number of this rank in the group."""
        return dist.get_rank(self.group)

    @property
    def lengths(self) -> list[int]:
        """The rows of each rank."""
        return [sum(stop - start for start, stop in own) for own in self.held]

    def there(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """[B, heads, n, D] of this rank's rows → [B, own heads, N, D] of all, ascending; differentiable."""
        found: tuple[Tensor, Tensor, Tensor] = _There.apply(self, q, k, v)  # type: ignore[no-untyped-call]
        return found

    def home(self, x: Tensor) -> Tensor:
        """[B, own heads, N, D] → [B, heads, n, D]: the reverse, of what queries have; differentiable."""
        found: Tensor = _Home.apply(self, x)  # type: ignore[no-untyped-call]
        return found

    def rows_of(self, x: Tensor, rank: int) -> Iterator[tuple[Tensor, slice]]:
        """The rows of ``x`` [B, heads, N, width] that a rank holds, span by span, and where they lie among its own."""
        before = 0
        for span in self.held[rank]:
            first, count = self._places[span], span[1] - span[0]
            yield x[:, :, first : first + count], slice(before, before + count)
            before += count

    @functools.cached_property
    def _places(self) -> Mapping[Span, int]:
        """How many of all these rows come before a span."""
        spans = sorted(span for own in self.held for span in own)
        return dict(zip(spans, accumulate((stop - start for start, stop in spans), initial=0), strict=False))

    @property
    def total(self) -> int:
        """N."""
        return sum(self.lengths)

    def heads(self, x: int) -> list[Span]:
        """The heads of each rank, of q (0), k (1) or v (2)."""
        return [share.heads if x == 0 else share.kv_heads for share in self.shares]


class _There(torch.autograd.Function):
    """All three in one exchange. Gradients of heads that several ranks had are added in float32, by rank."""

    @staticmethod
    def forward(ctx: Any, swap: Swap, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.swap, ctx.shapes = swap, [x.shape for x in tensors]
        parts = [[x[:, slice(*swap.heads(n)[rank])] for n, x in enumerate(tensors)] for rank in range(len(swap.held))]
        found = tuple(tensors[0].new_empty(shape) for shape in _whole_shapes(ctx.shapes, swap))
        flat = _exchanged(
            [part for of_rank in parts for part in of_rank], _counts(parts), _sizes(found, swap), swap.group
        )
        _to_places(flat, found, swap)
        return found

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        swap: Swap = ctx.swap
        gradients = tuple(of_first_order(gradients))
        ranks = range(len(swap.held))
        pieces = [
            [(shape[0], high - low, *shape[2:]) for shape, (low, high) in _heads_of(ctx.shapes, swap, rank)]
            for rank in ranks
        ]
        flat = _from_places(gradients, swap)
        counts = [sum(map(_count, of_rank)) for of_rank in pieces]
        flat = all_to_all(flat[:, None], _sizes(gradients, swap), counts, swap.group)[:, 0]
        of_ranks = [_split(part, shapes) for part, shapes in zip(torch.split(flat, counts), pieces, strict=True)]
        return None, *(
            _added(shape, swap.heads(n), [each[n] for each in of_ranks]) for n, shape in enumerate(ctx.shapes)
        )


class _Home(torch.autograd.Function):
    """Rows to who holds them; the gradient takes the way back."""

    @staticmethod
    def forward(ctx: Any, swap: Swap, x: Tensor) -> Tensor:
        ctx.swap = swap
        n, batch, width = swap.lengths[swap.rank], x.shape[0], x.shape[3]
        spans = swap.heads(0)
        counts = [batch * (high - low) * n * width for low, high in spans]
        flat = all_to_all(_from_places((x,), swap)[:, None], _sizes((x,), swap), counts, swap.group)[:, 0]
        parts = torch.split(flat, counts)
        return torch.cat(
            [part.reshape(batch, high - low, n, width) for part, (low, high) in zip(parts, spans, strict=True)], 1
        )

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        swap: Swap = ctx.swap
        (d,) = of_first_order(gradients)
        low, high = swap.heads(0)[swap.rank]
        parts = [[d[:, slice(*span)]] for span in swap.heads(0)]
        counts = [d.shape[0] * (high - low) * n * d.shape[3] for n in swap.lengths]
        flat = _exchanged([part for (part,) in parts], _counts(parts), counts, swap.group)
        found = flat.new_empty((d.shape[0], high - low, swap.total, d.shape[3]))
        _to_places(flat, (found,), swap)
        return None, found


def _heads_of(shapes: Sequence[torch.Size], swap: Swap, rank: int) -> list[tuple[torch.Size, Span]]:
    return [(shape, swap.heads(n)[rank]) for n, shape in enumerate(shapes)]


def _whole_shapes(shapes: Sequence[torch.Size], swap: Swap) -> list[tuple[int, ...]]:
    """Of own heads and all rows."""
    own = swap.shares[swap.rank].counts
    return [(shape[0], count, swap.total, shape[3]) for shape, count in zip(shapes, own, strict=True)]


def _count(shape: Sequence[int]) -> int:
    return math.prod(shape)


def _counts(parts: Sequence[Sequence[Tensor]]) -> list[int]:
    """Elements for each rank."""
    return [sum(part.numel() for part in of_rank) for of_rank in parts]


def _sizes(tensors: Sequence[Tensor], swap: Swap) -> list[int]:
    """Elements of each rank's rows of these, which have all rows."""
    return [sum(x.shape[0] * x.shape[1] * n * x.shape[3] for x in tensors) for n in swap.lengths]


def _split(flat: Tensor, shapes: Sequence[Sequence[int]]) -> list[Tensor]:
    """Tensors that lie one behind the other; views."""
    parts = torch.split(flat, [_count(shape) for shape in shapes])
    return [part.reshape(tuple(shape)) for part, shape in zip(parts, shapes, strict=True)]


def _by_rank(flat: Tensor, tensors: Sequence[Tensor], swap: Swap) -> Iterator[tuple[int, Tensor, Tensor]]:
    """Each rank, each tensor, and the rank's rows of it as they lie in ``flat``: rank by rank; views."""
    for rank, part in enumerate(torch.split(flat, _sizes(tensors, swap))):
        shapes = [(*x.shape[:2], swap.lengths[rank], x.shape[3]) for x in tensors]
        for x, rows in zip(tensors, _split(part, shapes), strict=True):
            yield rank, x, rows


def _to_places(flat: Tensor, tensors: Sequence[Tensor], swap: Swap) -> None:
    """Rows of each rank, one behind the other, to where they belong among all."""
    for rank, x, rows in _by_rank(flat, tensors, swap):
        for place, own in swap.rows_of(x, rank):
            place.copy_(rows[:, :, own])


def _from_places(tensors: Sequence[Tensor], swap: Swap) -> Tensor:
    """The reverse."""
    flat = tensors[0].new_empty(sum(_sizes(tensors, swap)))
    for rank, x, rows in _by_rank(flat, tensors, swap):
        for place, own in swap.rows_of(x, rank):
            rows[:, :, own] = place
    return flat


def _added(shape: torch.Size, spans: Sequence[Span], parts: Sequence[Tensor]) -> Tensor:
    """Heads of all ranks as one tensor; those that several ranks had are added in float32 at least, by rank."""
    dtype = parts[0].dtype
    if sum(high - low for low, high in spans) == shape[1]:
        return torch.cat(list(parts), 1)
    total = parts[0].new_zeros(shape, dtype=torch.promote_types(dtype, torch.float32))
    for part, (low, high) in zip(parts, spans, strict=True):
        total[:, low:high] += part
    return total.to(dtype)


def _exchanged(parts: Sequence[Tensor], sent: Sequence[int], counts: Sequence[int], group: Group) -> Tensor:
    """What each rank sent of elements, one behind the other; ``parts`` are those for each rank, ``sent`` how many."""
    flat = torch.cat([part.reshape(-1) for part in parts])[:, None]
    return all_to_all(flat, sent, counts, group)[:, 0]
