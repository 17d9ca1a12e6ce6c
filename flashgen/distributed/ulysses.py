"""Method ``"ulysses"``: an all-to-all exchanges positions for heads, so that each rank computes some heads of all rows.

In: q, k and v of this rank's rows, and the rows of each rank. Out: this rank's heads of all rows, ascending; and back.
Heads are divided evenly. Key/value heads are sent to every rank that has a query head of their group.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from flashgen.distributed.blocks import Held, Span, length
from flashgen.distributed.exchange import Group, all_to_all, once
from flashgen.ir.spec import AttentionSpec
from flashgen.op.checks import reads_key_heads


@dataclass(frozen=True)
class Share:
    """The query heads of a rank, the key/value heads that these read, and the calls that compute them.

    A call is a span of query heads and one of key/value heads, counted from the first of the share, in one ratio.
    """

    heads: Span
    kv_heads: Span
    calls: tuple[tuple[Span, Span], ...]

    @property
    def counts(self) -> tuple[int, int, int]:
        """The numbers of heads of q, k and v."""
        kv = self.kv_heads[1] - self.kv_heads[0]
        return self.heads[1] - self.heads[0], kv, kv


def shares_of(heads: int, kv_heads: int, world: int) -> tuple[Share, ...]:
    """The heads of each rank."""
    group = max(heads // kv_heads, 1) if kv_heads else 1
    return tuple(_share(group, heads * rank // world, heads * (rank + 1) // world) for rank in range(world))


def _share(group: int, low: int, high: int) -> Share:
    if low == high:
        return Share((low, low), (low // group, low // group), ())
    # Whole groups of query heads are one call; a part of a group at either end is one more.
    first, last = -(-low // group) * group, high // group * group
    borders = sorted({low, high, *(x for x in (first, last) if low < x < high)})
    kv_low = low // group
    calls = tuple(
        ((start - low, stop - low), (start // group - kv_low, -(-stop // group) - kv_low))
        for start, stop in pairwise(borders)
    )
    return Share((low, high), (kv_low, -(-high // group)), calls)


def no_heads(spec: AttentionSpec, heads: int, kv_heads: int, world: int) -> str:
    """Why method ``"ulysses"`` cannot be used; empty where it can."""
    if heads < world:
        return f"{heads} query heads cannot be dealt out to {world} ranks"
    group = max(heads // kv_heads, 1) if kv_heads else 1
    splits = any(
        stop - start != (last - first) * group
        for share in shares_of(heads, kv_heads, world)
        for (start, stop), (first, last) in share.calls
    )
    if splits and reads_key_heads(spec):
        return f"'{spec.name}' reads hkv or Hkv, and {world} ranks would share {kv_heads} key/value heads"
    return ""


@dataclass(frozen=True)
class Swap:
    """The rows that each rank of a group holds, and the heads that it computes."""

    group: Group
    held: Held
    shares: tuple[Share, ...]

    @property
    def rank(self) -> int:
        return dist.get_rank(self.group)

    @property
    def lengths(self) -> list[int]:
        return list(map(length, self.held))

    def home(self, x: Tensor) -> Tensor:
        """[B, own heads, N, D] → [B, heads, n, D], the reverse for o and lse; differentiable."""
        return _Swapped.apply(self, [self.shares[-1].heads[1]], x)[0]  # type: ignore[no-any-return,no-untyped-call]

    @functools.cached_property
    def places(self) -> Sequence[Sequence[tuple[slice, slice]]]:
        """For each rank, by spans: where its rows lie among all rows, and where among its own."""
        spans = sorted(span for own in self.held for span in own)
        firsts = dict(zip(spans, accumulate((stop - start for start, stop in spans), initial=0), strict=False))
        found = []
        for own in self.held:
            ends = accumulate((stop - start for start, stop in own), initial=0)
            runs = zip(own, pairwise(ends), strict=True)
            found.append([(slice(firsts[x], firsts[x] + x[1] - x[0]), slice(*at)) for x, at in runs])
        return found

    def heads(self, x: int) -> list[Span]:
        """The heads of each rank, of q (0), k (1) or v (2)."""
        return [share.heads if x == 0 else share.kv_heads for share in self.shares]


# Computes o and lse of some heads of all rows; takes the operator's tensors and the number of the first head.
Attend = Callable[[tuple[Any, ...], int], tuple[Tensor, Tensor | None]]


def attend_swapped(swap: Swap, tensors: Sequence[Any], has_lse: bool, attend: Attend) -> tuple[Tensor, Tensor | None]:
    """o and lse of this rank's rows, where ``attend`` computes its heads; ``tensors`` are the operator's."""
    q, k, v = _Swapped.apply(swap, None, *tensors[:3])  # type: ignore[no-untyped-call]
    own = swap.shares[swap.rank]
    found = [
        attend((q[:, slice(*of_q)], k[:, slice(*of_kv)], v[:, slice(*of_kv)], *tensors[3:]), own.heads[0] + of_q[0])
        for of_q, of_kv in own.calls
    ]
    o = swap.home(torch.cat([o for o, _ in found], 1))
    sums = [lse for _, lse in found if lse is not None and has_lse]
    return o, swap.home(torch.cat(sums, 1)[..., None])[..., 0] if sums else None


class _Swapped(torch.autograd.Function):
    """Rows to the ranks that compute their heads, in one exchange; with ``home``, numbers of heads, back again.

    Each is the gradient of the other. Gradients of heads that several ranks read are added in float32, by rank.
    """

    @staticmethod
    def forward(ctx: Any, swap: Swap, home: list[int] | None, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.swap, ctx.back = swap, [x.shape[1] for x in tensors] if home is None else None
        return _to_heads(swap, tensors) if home is None else _to_rows(swap, tensors, home)

    @staticmethod
    @once
    def backward(ctx: Any, *gradients: Any) -> Any:
        there = ctx.back is None
        return None, None, *(_to_heads(ctx.swap, gradients) if there else _to_rows(ctx.swap, gradients, ctx.back))


def _to_heads(swap: Swap, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """The rows of q, k and v of this rank (or of o alone) → all rows of its heads."""
    ranks = range(len(swap.held))
    parts = [[x[:, slice(*swap.heads(n)[rank])] for n, x in enumerate(tensors)] for rank in ranks]
    found = tuple(
        x.new_empty((x.shape[0], swap.shares[swap.rank].counts[n], sum(swap.lengths), x.shape[3]))
        for n, x in enumerate(tensors)
    )
    flat = torch.cat([part.reshape(-1) for of_rank in parts for part in of_rank])[:, None]
    sent = [sum(part.numel() for part in of_rank) for of_rank in parts]
    flat = all_to_all(flat, sent, _sizes(found, swap), swap.group)[:, 0]
    for x, rows, places in _by_rank(flat, found, swap):
        for at, own in places:
            x[:, :, at] = rows[:, :, own]
    return found


def _to_rows(swap: Swap, tensors: Sequence[Tensor], heads: Sequence[int]) -> tuple[Tensor, ...]:
    """All rows of this rank's heads → this rank's rows of all ``heads``."""
    flat = tensors[0].new_empty(sum(_sizes(tensors, swap)))
    for x, rows, places in _by_rank(flat, tensors, swap):
        for at, own in places:
            rows[:, :, own] = x[:, :, at]
    shapes = [
        [
            (x.shape[0], high - low, swap.lengths[swap.rank], x.shape[3])
            for x, (low, high) in zip(tensors, spans, strict=True)
        ]
        for spans in zip(*(swap.heads(n) for n in range(len(tensors))), strict=True)
    ]
    counts = [sum(map(math.prod, of_rank)) for of_rank in shapes]
    flat = all_to_all(flat[:, None], _sizes(tensors, swap), counts, swap.group)[:, 0]
    of_ranks = [_split(part, own) for part, own in zip(torch.split(flat, counts), shapes, strict=True)]
    return tuple(_added(count, swap.heads(n), [each[n] for each in of_ranks]) for n, count in enumerate(heads))


def _sizes(tensors: Sequence[Tensor], swap: Swap) -> list[int]:
    """The number of elements of each rank's rows, of tensors with all rows."""
    return [sum(x.shape[0] * x.shape[1] * n * x.shape[3] for x in tensors) for n in swap.lengths]


def _split(flat: Tensor, shapes: Sequence[Sequence[int]]) -> list[Tensor]:
    """Views of tensors that lie one behind the other."""
    parts = torch.split(flat, [math.prod(shape) for shape in shapes])
    return [part.reshape(tuple(shape)) for part, shape in zip(parts, shapes, strict=True)]


def _by_rank(
    flat: Tensor, tensors: Sequence[Tensor], swap: Swap
) -> Iterator[tuple[Tensor, Tensor, Sequence[tuple[slice, slice]]]]:
    """For each rank and tensor: the tensor, a view of the rank's rows in ``flat``, and their places in the tensor."""
    for rank, part in enumerate(torch.split(flat, _sizes(tensors, swap))):
        shapes = [(*x.shape[:2], swap.lengths[rank], x.shape[3]) for x in tensors]
        for x, rows in zip(tensors, _split(part, shapes), strict=True):
            yield x, rows, swap.places[rank]


def _added(heads: int, spans: Sequence[Span], parts: Sequence[Tensor]) -> Tensor:
    """The heads of all ranks as one tensor; heads that several ranks have are added in float32, by rank."""
    if sum(high - low for low, high in spans) == heads:
        return torch.cat(list(parts), 1)
    batch, _, *rest = parts[0].shape
    dtype = parts[0].dtype
    total = parts[0].new_zeros((batch, heads, *rest), dtype=torch.promote_types(dtype, torch.float32))
    for part, (low, high) in zip(parts, spans, strict=True):
        total[:, low:high] += part
    return total.to(dtype)
