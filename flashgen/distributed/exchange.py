"""Rows that change places between ranks, with their gradients, by collectives of ``torch.distributed``.

In: tensors of this rank, who needs which rows. Out: the rows that it needs. Everything that crosses ranks is a row of
bytes, so that every element type travels everywhere.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

Group = dist.ProcessGroup | None


@dataclass(frozen=True)
class Route:
    """Which rows go where. ``sent``: those of this rank that each rank needs, int64; ``received``: how many from each.

    Rows that a rank needs of itself take the same way, and cross nothing.
    """

    sent: tuple[Tensor, ...]
    received: tuple[int, ...]

    @property
    def counts(self) -> list[int]:
        """How many rows go to each rank."""
        return [len(rows) for rows in self.sent]


class Counter:
    """Bytes of rows that this process sent to other ranks."""

    def __init__(self) -> None:
        self.sent = 0


_counters: list[Counter] = []


@contextmanager
def counting() -> Iterator[Counter]:
    """Counts what is sent while it is entered: rows forward, and their gradients backward."""
    counter = Counter()
    _counters.append(counter)
    try:
        yield counter
    finally:
        _counters.remove(counter)


def all_to_all(rows: Tensor, counts: Sequence[int], received: Sequence[int], group: Group) -> Tensor:
    """``rows`` [n, C], those for each rank one behind the other → those from each rank, in the same order."""
    width = rows.shape[1] * rows.element_size()
    for counter in _counters:
        counter.sent += width * (sum(counts) - counts[dist.get_rank(group)])
    out = rows.new_empty(sum(received), rows.shape[1])
    if width == 0:
        return out
    given = rows.contiguous().view(torch.uint8) if rows.numel() else rows.new_empty(0, width, dtype=torch.uint8)
    taken = out.view(torch.uint8) if out.numel() else out.new_empty(0, width, dtype=torch.uint8)
    dist.all_to_all_single(taken, given, list(received), list(counts), group=group)
    return out


def _of_first_order(gradients: Sequence[Tensor]) -> Sequence[Tensor]:
    """Gradients that nobody differentiates again. Raises ``RuntimeError``: they would be taken for constant."""
    if torch.is_grad_enabled() and any(each.requires_grad for each in gradients):
        raise RuntimeError(
            "gradients that ranks exchange (context_parallel) cannot be differentiated again: second "
            "derivatives are those of one process. Call backward() without create_graph=True, or the op itself"
        )
    return gradients


class _Swap(torch.autograd.Function):
    """Every row to one rank; its gradient takes the way back."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, counts: Sequence[int], received: Sequence[int], group: Group) -> Tensor:
        ctx.counts, ctx.received, ctx.group = counts, received, group
        return all_to_all(rows, counts, received, group)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        (gradient,) = _of_first_order(gradients)
        return all_to_all(gradient, ctx.received, ctx.counts, ctx.group), None, None, None


def swap(rows: Tensor, counts: Sequence[int], received: Sequence[int], group: Group) -> Tensor:
    """``all_to_all`` with a gradient."""
    found: Tensor = _Swap.apply(rows, counts, received, group)  # type: ignore[no-untyped-call]
    return found


class _Exchange(torch.autograd.Function):
    """Rows by a route. Its gradient goes back, and what several ranks send of one row is added in float32, by rank."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, route: Route, group: Group) -> Tensor:
        ctx.route, ctx.group, ctx.rows = route, group, rows.shape[0]
        sent = torch.cat([rows.index_select(0, each.to(rows.device)) for each in route.sent])
        return all_to_all(sent, route.counts, route.received, group)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        (gradient,) = _of_first_order(gradients)
        route: Route = ctx.route
        back = all_to_all(gradient, route.received, route.counts, ctx.group)
        found = torch.zeros(ctx.rows, gradient.shape[1], dtype=torch.float32, device=gradient.device)
        if gradient.dtype is torch.float64:
            found = found.double()
        for index, part in zip(route.sent, torch.split(back, route.counts), strict=True):
            # A rank names a row once, so that nothing depends on the order within a part.
            found.index_add_(0, index.to(gradient.device), part.to(found.dtype))
        return found.to(gradient.dtype), None, None


def exchange(rows: Tensor, route: Route, group: Group) -> Tensor:
    """``rows`` [n, C] of this rank → the rows that it needs of all, by rank. Differentiable."""
    found: Tensor = _Exchange.apply(rows, route, group)  # type: ignore[no-untyped-call]
    return found


class _Sum(torch.autograd.Function):
    """Values that every rank has; their gradients are added over ranks, in one order, in float32 at least."""

    @staticmethod
    def forward(ctx: Any, group: Group, *values: Tensor) -> tuple[Tensor, ...]:
        ctx.group = group
        return tuple(value.view_as(value) for value in values)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        found = []
        for gradient in _of_first_order(gradients):
            wide = gradient if gradient.dtype is torch.float64 else gradient.float()
            parts = [torch.empty_like(wide) for _ in range(dist.get_world_size(ctx.group))]
            dist.all_gather(parts, wide.contiguous(), group=ctx.group)
            total = parts[0]
            for part in parts[1:]:
                total = total + part
            found.append(total.to(gradient.dtype))
        return None, *found


def summed(values: Sequence[Tensor], group: Group) -> tuple[Tensor, ...]:
    """The same values; their gradients are those of all ranks."""
    found: tuple[Tensor, ...] = _Sum.apply(group, *values)  # type: ignore[no-untyped-call]
    return found


class _Gather(torch.autograd.Function):
    """Rows of all ranks in the order of positions; the gradient is that of the own rows."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, positions: Sequence[Tensor], rank: int, group: Group) -> Tensor:
        ctx.dim, ctx.own = dim, positions[rank]
        return _whole(x, dim, positions, group)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        (gradient,) = _of_first_order(gradients)
        return gradient.index_select(ctx.dim, ctx.own.to(gradient.device)), None, None, None, None


class _Slice(torch.autograd.Function):
    """The own rows of what every rank has; the gradient is that of all ranks."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, positions: Sequence[Tensor], rank: int, group: Group) -> Tensor:
        ctx.dim, ctx.positions, ctx.group = dim, positions, group
        return x.index_select(dim, positions[rank].to(x.device))

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        (gradient,) = _of_first_order(gradients)
        return _whole(gradient, ctx.dim, ctx.positions, ctx.group), None, None, None, None


def gathered(x: Tensor, dim: int, positions: Sequence[Tensor], rank: int, group: Group) -> Tensor:
    """``x`` of every rank, whole."""
    found: Tensor = _Gather.apply(x, dim % x.dim(), positions, rank, group)  # type: ignore[no-untyped-call]
    return found


def sliced(x: Tensor, dim: int, positions: Sequence[Tensor], rank: int, group: Group) -> Tensor:
    """The rows of ``x`` that a rank holds."""
    found: Tensor = _Slice.apply(x, dim % x.dim(), positions, rank, group)  # type: ignore[no-untyped-call]
    return found


def _whole(x: Tensor, dim: int, positions: Sequence[Tensor], group: Group) -> Tensor:
    rows = x.movedim(dim, 0)
    flat = rows.reshape(rows.shape[0], -1)
    counts = [len(each) for each in positions]
    found = all_to_all(flat.repeat(len(counts), 1), [flat.shape[0]] * len(counts), counts, group)
    order = torch.argsort(torch.cat(list(positions))).to(x.device)
    return found.index_select(0, order).reshape(sum(counts), *rows.shape[1:]).movedim(0, dim)
