"""Heads change places with positions: each rank computes some heads of all rows, which are then brought home.

In: q, k and v of this rank's rows, who holds which. Out: the rows of all, of this rank's heads, ascending; and back.
Heads are dealt out in turn, as evenly as they divide. Key/value heads go to every rank that has a query head of theirs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from flashgen.analysis.selection import lowered
from flashgen.distributed.blocks import Span
from flashgen.distributed.exchange import Group, all_to_all, of_first_order
from flashgen.distributed.needs import Held
from flashgen.ir.expr import Symbol, SymbolKind, index_set, walk
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
    return any("hkv" in index_set(part) for part in known) or any(
        isinstance(node, Symbol) and node.kind is SymbolKind.SIZE and node.name == "Hkv" for node in walk(*known)
    )


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

    def ascending(self, device: torch.device) -> Tensor:
        """Which of the rows, those of each rank together, come first."""
        positions = [torch.arange(*span) for own in self.held for span in own]
        return torch.cat(positions).argsort().to(device) if positions else torch.arange(0, device=device)

    def heads(self, x: int) -> list[Span]:
        """The heads of each rank, of q (0), k (1) or v (2)."""
        return [share.heads if x == 0 else share.kv_heads for share in self.shares]


class _There(torch.autograd.Function):
    """All three in one exchange. Gradients of heads that several ranks had are added in float32, by rank."""

    @staticmethod
    def forward(ctx: Any, swap: Swap, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.swap, ctx.shapes = swap, [x.shape for x in tensors]
        parts = [
            torch.cat([x[:, slice(*swap.heads(n)[rank])].reshape(-1) for n, x in enumerate(tensors)])
            for rank in range(len(swap.held))
        ]
        widths = [
            (x.shape[0], count, x.shape[3]) for x, count in zip(tensors, swap.shares[swap.rank].counts, strict=True)
        ]
        each = sum(batch * count * width for batch, count, width in widths)
        flat = _exchanged(parts, [n * each for n in swap.lengths], swap.group)
        arrived: list[list[Tensor]] = [[], [], []]
        before = 0
        for n in swap.lengths:
            for found, (batch, count, width) in zip(arrived, widths, strict=True):
                size = batch * count * n * width
                found.append(flat[before : before + size].reshape(batch, count, n, width))
                before += size
        order = swap.ascending(flat.device)
        return tuple(torch.cat(found, 2).index_select(2, order) for found in arrived)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        swap: Swap = ctx.swap
        gradients = tuple(of_first_order(gradients))
        order = swap.ascending(gradients[0].device)
        together = (torch.empty_like(x).index_copy_(2, order, x) for x in gradients)
        by_rank = [torch.split(x, swap.lengths, 2) for x in together]
        parts = [torch.cat([x[rank].reshape(-1) for x in by_rank]) for rank in range(len(swap.held))]
        counts = [
            sum(
                shape[0] * (high - low) * shape[2] * shape[3]
                for shape, (low, high) in _heads_of(ctx.shapes, swap, rank)
            )
            for rank in range(len(swap.held))
        ]
        flat = _exchanged(parts, counts, swap.group)
        wide = torch.promote_types(flat.dtype, torch.float32)
        found = [flat.new_zeros(shape, dtype=wide) for shape in ctx.shapes]
        before = 0
        for rank in range(len(swap.held)):
            for total, (shape, (low, high)) in zip(found, _heads_of(ctx.shapes, swap, rank), strict=True):
                size = shape[0] * (high - low) * shape[2] * shape[3]
                part = flat[before : before + size].reshape(shape[0], high - low, shape[2], shape[3])
                total[:, low:high] += part
                before += size
        return None, *(total.to(flat.dtype) for total in found)


class _Home(torch.autograd.Function):
    """Rows to who holds them; the gradient takes the way back."""

    @staticmethod
    def forward(ctx: Any, swap: Swap, x: Tensor) -> Tensor:
        ctx.swap = swap
        order = swap.ascending(x.device)
        rows = torch.split(torch.empty_like(x).index_copy_(2, order, x), swap.lengths, 2)
        n, batch, width = swap.lengths[swap.rank], x.shape[0], x.shape[3]
        spans = swap.heads(0)
        counts = [batch * (high - low) * n * width for low, high in spans]
        flat = _exchanged([each.reshape(-1) for each in rows], counts, swap.group)
        parts = torch.split(flat, counts)
        return torch.cat(
            [part.reshape(batch, high - low, n, width) for part, (low, high) in zip(parts, spans, strict=True)], 1
        )

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        swap: Swap = ctx.swap
        (d,) = of_first_order(gradients)
        low, high = swap.heads(0)[swap.rank]
        parts = [d[:, slice(*span)].reshape(-1) for span in swap.heads(0)]
        counts = [d.shape[0] * (high - low) * n * d.shape[3] for n in swap.lengths]
        flat = _exchanged(parts, counts, swap.group)
        arrived = [
            part.reshape(d.shape[0], high - low, n, d.shape[3])
            for part, n in zip(torch.split(flat, counts), swap.lengths, strict=True)
        ]
        return None, torch.cat(arrived, 2).index_select(2, swap.ascending(d.device))


def _heads_of(shapes: Sequence[torch.Size], swap: Swap, rank: int) -> list[tuple[torch.Size, Span]]:
    return [(shape, swap.heads(n)[rank]) for n, shape in enumerate(shapes)]


def _exchanged(parts: Sequence[Tensor], counts: Sequence[int], group: Group) -> Tensor:
    """What each rank sent of elements, one behind the other."""
    flat = torch.cat(list(parts))[:, None]
    return all_to_all(flat, [part.numel() for part in parts], counts, group)[:, 0]
