"""Rows that change places between ranks, with their gradients, by collectives of ``torch.distributed``.

In: tensors of this rank, who needs which rows. Out: the rows that it needs. Everything that crosses ranks is a row of
bytes, so that every element type travels everywhere.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import wraps
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import PrefixStore, Store, _get_default_store
from torch.nn.parallel import DistributedDataParallel

from flashgen.op.values import type_of_sums

Group = dist.ProcessGroup | None
Backward = Callable[..., Any]


_counters: list[SimpleNamespace] = []


@contextmanager
def counting() -> Iterator[SimpleNamespace]:
    """Counts the bytes that this process has ``sent`` while it is entered: rows forward, their gradients backward."""
    counter = SimpleNamespace(sent=0)
    _counters.append(counter)
    try:
        yield counter
    finally:
        _counters.remove(counter)


def backend_of(group: Group, device: str) -> str:
    """What moves tensors of a kind of device: a group may have a backend for each."""
    config = dict(each.split(":") for each in dist.get_backend_config(group).split(","))
    return config.get(device) or next(iter(config.values()))


def check_member(group: object) -> None:
    """Raise ``ValueError`` on a rank that a group does not hold."""
    if group is dist.GroupMember.NON_GROUP_MEMBER:
        raise ValueError(f"this rank ({dist.get_rank()}) is none of the group's: only its ranks make the call")


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
    with answering(group, "rows"):
        dist.all_to_all_single(taken, given, list(received), list(counts), group=group)
    return out


def once(backward: Backward) -> Backward:
    """A backward pass that nobody differentiates again. Raises ``RuntimeError`` where somebody would.

    It is asked for before the pass: PyTorch's ``once_differentiable`` leaves the error to a node of the graph, which
    ``torch.autograd.grad`` passes by, as it runs those alone that lead to its inputs.
    """

    @wraps(backward)
    def checked(ctx: Any, *gradients: Any) -> Any:
        if torch.is_grad_enabled():  # by create_graph=True; gradients depend on inputs, whatever arrives
            raise RuntimeError(
                "gradients that ranks exchange (context_parallel) cannot be differentiated again: second "
                "derivatives are those of one process. Call backward() without create_graph=True, or the op itself"
            )
        return backward(ctx, *gradients)

    return checked


class Flight:
    """Messages between pairs of ranks that are under way. ``wait`` returns when they have come.

    On a GPU its stream waits, not the host. NCCL moves them on a stream of its own, gloo in threads, while this rank
    computes.
    """

    def __init__(self, works: Sequence[Any], peers: Sequence[int], kept: Sequence[Tensor], what: str) -> None:
        self._works, self._peers, self._kept, self._what = works, peers, kept, what

    def wait(self) -> None:
        """Raises ``RuntimeError`` with the rank that does not answer."""
        for n, work in enumerate(self._works):
            try:
                work.wait()
            except RuntimeError as error:
                who = [self._peers[n]] if len(self._works) == len(self._peers) else sorted(set(self._peers))
                raise no_answer(who, self._what, error) from error
        self._works, self._kept = (), ()


def no_answer(ranks: Sequence[int], what: str, error: Exception) -> RuntimeError:
    """The error of a call that waits for ranks in vain; none are named where all of them still answer."""
    text = (str(error).strip() or repr(error)).splitlines()[-1]
    if not ranks:
        return RuntimeError(f"not every rank sent {what} in time: did each of them make this call? ({text})")
    named = f"rank {ranks[0]} does" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))} do"
    return RuntimeError(f"{named} not answer, asked for {what}: did it end, or make another call? ({text})")


@contextmanager
def answering(group: Group, what: str) -> Iterator[None]:
    """Turns the failure of a collective that moves ``what`` into an error that names the ranks that have gone."""
    try:
        yield
    except (dist.DistError, RuntimeError) as error:
        if isinstance(error, NotImplementedError):
            raise
        raise no_answer(_gone(group), what, error) from error


_PROBE = 0xF6
_PROBE_TIME = timedelta(seconds=1)
_failures: dict[str, int] = {}  # of collectives, by group


def _gone(group: Group) -> list[int]:
    """The ranks that have no part in a collective that failed; of NCCL, which ends the process itself, none.

    One that is lost takes connections of others with it: those that are left say so where all ranks met first.
    """
    if backend_of(group, "cpu") != "gloo":
        return []
    name = "" if group is None else group.group_name
    count = _failures[name] = _failures.get(name, 0) + 1
    store = PrefixStore(f"flashgen/{name}/{count}", _get_default_store())
    others = [rank for rank in range(dist.get_world_size(group)) if rank != dist.get_rank(group)]
    silent = _silent(store, dist.get_rank(group), others)
    # One that still waits learns of the failure by this.
    lost = [rank for rank in silent if not _is_reached(group, rank)]
    return _silent(store, dist.get_rank(group), lost) or lost or silent


def _silent(store: Store, own: int, others: Sequence[int]) -> list[int]:
    """Those that do not say within a time that the collective failed for them, too."""
    found = list(others)
    try:
        store.set(str(own), "waits")
        late = time.monotonic() + _PROBE_TIME.total_seconds()
        while found and time.monotonic() < late:
            found = [rank for rank in found if not store.check([str(rank)])]
            time.sleep(0.01)
    except RuntimeError:  # it was kept by a rank that is lost
        return list(others)
    return found


def _is_reached(group: Group, rank: int) -> bool:
    try:
        work = dist.isend(torch.zeros(1), group=group, tag=_PROBE, group_dst=rank)
        if work is not None:
            work.wait(_PROBE_TIME)
    except RuntimeError:
        return False
    return True


def post(sent: Sequence[tuple[int, Tensor]], received: Sequence[tuple[int, Tensor]], group: Group, what: str) -> Flight:
    """Begin to send each rank its tensor and to receive each rank's, which is written behind ``wait``.

    ``what`` travels, for errors. Every rank has to post what others post for it; what is empty is not sent.
    """
    ops, peers, kept = [], [], []
    for function, each in ((dist.isend, sent), (dist.irecv, received)):
        for peer, x in each:
            if x.numel() == 0:
                continue
            ops.append(dist.P2POp(function, x.view(torch.uint8), group=group, group_peer=peer))
            peers.append(peer)
            kept.append(x)
            if function is dist.isend:
                for counter in _counters:
                    counter.sent += x.numel() * x.element_size()
    try:
        works = dist.batch_isend_irecv(ops) if ops else []
    except RuntimeError as error:
        raise no_answer(sorted(set(peers)), what, error) from error
    return Flight(works, peers, kept, what)


class _Sum(torch.autograd.Function):
    """Values that every rank has; their gradients are added over ranks, in one order.

    Autograd gives a gradient the type of its value. So values of 16 bits go on in float32, and what calls and ranks
    find is rounded when all of it is added.
    """

    @staticmethod
    def forward(ctx: Any, group: Group, *values: Tensor) -> tuple[Tensor, ...]:
        ctx.group, ctx.dtypes = group, [value.dtype for value in values]
        wide = (type_of_sums(value.dtype) for value in values)
        return tuple(value.view_as(value).to(dtype) for value, dtype in zip(values, wide, strict=True))

    @staticmethod
    @once
    def backward(ctx: Any, *gradients: Any) -> Any:
        wide = (_total(each, ctx.group) for each in gradients)
        return None, *(x.to(dtype) for x, dtype in zip(wide, ctx.dtypes, strict=True))


def _total(x: Tensor, group: Group) -> Tensor:
    """The sum over ranks, each of which adds up a part of it, in the order of ranks."""
    world = dist.get_world_size(group)
    wide = x.reshape(-1)
    part = -(-wide.numel() // world)
    parts = torch.nn.functional.pad(wide, (0, world * part - wide.numel())).reshape(world, part)
    taken = torch.empty_like(parts)
    if part:
        with answering(group, "gradients of captured values"):
            dist.all_to_all_single(taken, parts, group=group)
    own = taken[0]
    for each in taken[1:]:
        own = own + each
    whole = torch.empty_like(parts)
    if part:
        with answering(group, "gradients of captured values"):
            dist.all_gather(list(whole), own.contiguous(), group=group)
    return whole.reshape(-1)[: wide.numel()].reshape(x.shape)


def summed(values: Sequence[Tensor], group: Group) -> tuple[Tensor, ...]:
    """The same values, in float32 at least; their gradients are those of all ranks."""
    found: tuple[Tensor, ...] = _Sum.apply(group, *values)  # type: ignore[no-untyped-call]
    return found


def is_under_ddp(group: Group) -> bool:
    """Whether this is inside of a forward pass of DDP that averages gradients over several ranks of a group."""
    module = getattr(DistributedDataParallel, "_active_ddp_module", None)
    if module is None or dist.get_world_size(group) == 1:
        return False
    own = range(dist.get_world_size()) if group is None else dist.get_process_group_ranks(group)
    return len(set(own) & set(dist.get_process_group_ranks(module.process_group))) > 1


class _Shard(torch.autograd.Function):
    """The own rows of what every rank has, or the rows of all, ascending: each is the gradient of the other."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, gathers: bool, dim: int, positions: Sequence[Tensor], rank: int, group: Group
    ) -> Tensor:
        ctx.gathers, ctx.rest = gathers, (dim, positions, rank, group)
        return _whole(x, dim, positions, group) if gathers else x.index_select(dim, positions[rank].to(x.device))

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        (d,) = gradients
        return shard(d, not ctx.gathers, *ctx.rest), None, None, None, None, None


def shard(x: Tensor, gathers: bool, dim: int, positions: Sequence[Tensor], rank: int, group: Group) -> Tensor:
    """The rows of ``x`` that a rank holds; or, where it ``gathers``, ``x`` of every rank, whole."""
    found: Tensor = _Shard.apply(x, gathers, dim % x.dim(), positions, rank, group)  # type: ignore[no-untyped-call]
    return found


def _whole(x: Tensor, dim: int, positions: Sequence[Tensor], group: Group) -> Tensor:
    rows = x.movedim(dim, 0)
    flat = rows.unsqueeze(-1).flatten(1)  # of no rows, too, which say no width to reshape
    counts = [len(each) for each in positions]
    found = all_to_all(flat.repeat(len(counts), 1), [flat.shape[0]] * len(counts), counts, group)
    order = torch.argsort(torch.cat(list(positions))).to(x.device)
    return found.index_select(0, order).reshape(sum(counts), *rows.shape[1:]).movedim(0, dim)
