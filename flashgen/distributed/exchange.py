"""The exchange of rows, and of their gradients, between ranks, by collectives of ``torch.distributed``.

In: tensors of this rank, and which rank gets which rows. Out: the rows that this rank gets. Rows cross ranks as bytes,
so that every backend moves every element type. A ``Topology`` has the groups of ranks along which keys and heads
travel. Ranks are counted over the whole mesh, its last dimension first, as ``Partition`` counts them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import reduce, wraps
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import PrefixStore, Store, _get_default_store
from torch.nn.parallel import DistributedDataParallel

from flashgen.distributed.blocks import Held, joined
from flashgen.op.tensor_kinds import type_of_sums

Group = dist.ProcessGroup | None
Wait = Callable[[], None]


_counters: list[SimpleNamespace] = []


@contextmanager
def counting() -> Iterator[SimpleNamespace]:
    """Count the bytes that this process sends within the context, rows and gradients of rows, in ``sent``."""
    counter = SimpleNamespace(sent=0)
    _counters.append(counter)
    try:
        yield counter
    finally:
        _counters.remove(counter)


def backend_of(group: Group, device: str) -> str:
    """The backend of a group for tensors of a kind of device."""
    config = dict(each.split(":") for each in dist.get_backend_config(group).split(","))
    return config.get(device) or next(iter(config.values()))


def check_member(group: object) -> None:
    """Raise ``ValueError`` on a rank outside of the group."""
    if group is dist.GroupMember.NON_GROUP_MEMBER:
        raise ValueError(f"this rank ({dist.get_rank()}) is none of the group's: only its ranks make the call")


def all_to_all(rows: Tensor, counts: Sequence[int], received: Sequence[int], group: Group) -> Tensor:
    """Send ``rows`` [n, C], sorted by receiver, ``counts`` each; returns the rows from each rank, sorted by sender."""
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


def once(backward: Callable[..., Any]) -> Callable[..., Any]:
    """A backward pass that raises ``RuntimeError`` with ``create_graph=True``.

    PyTorch's ``once_differentiable`` raises in a node of the graph instead, and ``torch.autograd.grad`` runs only the
    nodes that lead to its inputs: it would skip the error.
    """

    @wraps(backward)
    def checked(ctx: Any, *gradients: Any) -> Any:
        if torch.is_grad_enabled():  # by create_graph=True
            raise RuntimeError(
                "gradients that ranks exchange (context_parallel) cannot be differentiated again: second "
                "derivatives are those of one process. Call backward() without create_graph=True, or the op itself"
            )
        return backward(ctx, *gradients)

    return checked


def no_answer(ranks: Sequence[int], what: str, error: Exception) -> RuntimeError:
    """The error of a call that got no answer. ``ranks`` do not answer; empty: all of them still do."""
    text = (str(error).strip() or repr(error)).splitlines()[-1]
    if not ranks:
        return RuntimeError(f"not every rank sent {what} in time: did each of them make this call? ({text})")
    named = f"rank {ranks[0]} does" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))} do"
    return RuntimeError(f"{named} not answer, asked for {what}: did it end, or make another call? ({text})")


@contextmanager
def answering(group: Group, what: str) -> Iterator[None]:
    """Turn the failure of a collective that moves ``what`` into an error that names the ranks that are lost."""
    try:
        yield
    except (dist.DistError, RuntimeError) as error:
        if isinstance(error, NotImplementedError):
            raise
        raise no_answer(_gone(group), what, error) from error


_PROBE = 0xF6
_PROBE_TIME = timedelta(seconds=1)
_failures: dict[str, int] = {}  # failed collectives of each group


def _gone(group: Group) -> list[int]:
    """The ranks that took no part in a failed collective. Empty for NCCL, which ends the process itself.

    A lost rank also breaks connections between others. So the remaining ranks report in the store at which all met.
    """
    if backend_of(group, "cpu") != "gloo":
        return []
    name = "" if group is None else group.group_name
    count = _failures[name] = _failures.get(name, 0) + 1
    store = PrefixStore(f"flashgen/{name}/{count}", _get_default_store())
    others = [rank for rank in range(dist.get_world_size(group)) if rank != dist.get_rank(group)]
    silent = _silent(store, dist.get_rank(group), others)
    # The probe makes the collective fail on a rank that still waits in it.
    lost = [rank for rank in silent if not _is_reached(group, rank)]
    return _silent(store, dist.get_rank(group), lost) or lost or silent


def _silent(store: Store, own: int, others: Sequence[int]) -> list[int]:
    """The ranks that do not report within ``_PROBE_TIME`` that the collective failed for them, too."""
    found = list(others)
    try:
        store.set(str(own), "waits")
        late = time.monotonic() + _PROBE_TIME.total_seconds()
        while found and time.monotonic() < late:
            found = [rank for rank in found if not store.check([str(rank)])]
            time.sleep(0.01)
    except RuntimeError:  # the lost rank hosted the store
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


def post(sent: Sequence[tuple[int, Tensor]], received: Sequence[tuple[int, Tensor]], group: Group, what: str) -> Wait:
    """Begin to send a tensor to each rank of ``sent``, and to receive into those of ``received``.

    Both ends of a message have to post it; empty tensors are not sent. ``what`` names the contents in errors.
    Returns a function that waits until all have arrived, and raises ``RuntimeError`` with a rank that does not answer.
    On a GPU the stream waits, not the host. NCCL uses a stream of its own, gloo threads, so that this rank computes
    meanwhile.
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

    def wait() -> None:
        for n, work in enumerate(works):
            try:
                work.wait()
            except RuntimeError as error:
                who = [peers[n]] if len(works) == len(peers) else sorted(set(peers))
                raise no_answer(who, what, error) from error
        works.clear()
        kept.clear()

    return wait


class _SumGradients(torch.autograd.Function):
    """Values that every rank has; backward, their gradients are summed over ranks, in one order.

    Autograd gives a gradient the type of its value. So values of 16 bits are passed on in float32: gradients of all
    calls and ranks are summed in float32 and rounded once.
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
    """The sum of ``x`` over ranks, in the order of ranks. Each rank sums one part, and parts are gathered."""
    world = dist.get_world_size(group)
    part = -(-x.numel() // world)
    if part == 0:
        return x
    parts = torch.nn.functional.pad(x.reshape(-1), (0, world * part - x.numel())).reshape(world, part)
    taken, whole = torch.empty_like(parts), torch.empty_like(parts)
    with answering(group, "gradients of captured values"):
        dist.all_to_all_single(taken, parts, group=group)
        dist.all_gather(list(whole), reduce(torch.add, taken).contiguous(), group=group)
    return whole.reshape(-1)[: x.numel()].reshape(x.shape)


def summed(values: Sequence[Tensor], group: Group) -> tuple[Tensor, ...]:
    """``values`` in float32 or wider, whose gradients are summed over ranks."""
    return _SumGradients.apply(group, *values)  # type: ignore[no-any-return,no-untyped-call]


def is_under_ddp(group: Group) -> bool:
    """Whether a forward pass of DDP is running that averages gradients over several ranks of the group."""
    module = getattr(DistributedDataParallel, "_active_ddp_module", None)
    if module is None or dist.get_world_size(group) == 1:
        return False
    own = range(dist.get_world_size()) if group is None else dist.get_process_group_ranks(group)
    return len(set(own) & set(dist.get_process_group_ranks(module.process_group))) > 1


class _ShardRows(torch.autograd.Function):
    """A rank's rows of a whole tensor, or the whole of all ranks' rows: each is the gradient of the other."""

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
    """The rank's rows of a whole ``x``; with ``gathers`` the whole of which ``x`` are the rank's rows."""
    found: Tensor = _ShardRows.apply(x, gathers, dim % x.dim(), positions, rank, group)  # type: ignore[no-untyped-call]
    return found


def _whole(x: Tensor, dim: int, positions: Sequence[Tensor], group: Group) -> Tensor:
    rows = x.movedim(dim, 0)
    flat = rows.unsqueeze(-1).flatten(1)  # with no rows, reshape could not tell the width
    counts = [len(each) for each in positions]
    found = all_to_all(flat.repeat(len(counts), 1), [flat.shape[0]] * len(counts), counts, group)
    order = torch.argsort(torch.cat(list(positions))).to(x.device)
    return found.index_select(0, order).reshape(sum(counts), *rows.shape[1:]).movedim(0, dim)


KEYS = ("all_gather", "ring")
METHODS = ("auto", *KEYS, "ulysses")


@dataclass(frozen=True)
class Topology:
    """The groups of a call: ``whole`` has all ranks; keys travel in ``by_keys``, heads are exchanged in ``by_heads``.

    ``extents`` are the sizes of the mesh; ``heads_axis`` is the dimension of ``by_heads``, where there are two.
    Reductions over each group of ``sums``, one after the other, are a reduction over all ranks.
    """

    whole: Group
    by_keys: Group
    by_heads: Group
    extents: tuple[int, ...]
    heads_axis: int | None
    sums: tuple[Group, ...]

    @property
    def rank(self) -> int:
        return dist.get_rank(self.whole)

    @property
    def world(self) -> int:
        return dist.get_world_size(self.whole)

    def along(self, rank: int) -> tuple[int, int]:
        """The index of a rank in its ``by_keys`` group, and in its ``by_heads`` group."""
        if self.heads_axis is None:
            return rank, 0
        first, second = divmod(rank, self.extents[1])
        return (first, second) if self.heads_axis == 1 else (second, first)

    def of_heads(self, held: Held, rank: int) -> Held:
        """The positions of each rank with which ``rank`` exchanges heads."""
        line = self.along(rank)[0]
        return tuple(own for other, own in enumerate(held) if self.along(other)[0] == line)

    def of_keys(self, held: Held) -> Held:
        """The positions of each index of ``by_keys``: ranks that exchange heads count as one."""
        count = 1 + max(self.along(rank)[0] for rank in range(len(held)))
        return tuple(
            joined(span for rank, own in enumerate(held) if self.along(rank)[0] == line for span in own)
            for line in range(count)
        )


def topology_of(mesh: object, method: str | Sequence[str]) -> Topology:
    """The topology of a mesh. Raises ``TypeError`` and ``ValueError`` where the methods do not fit it."""
    if not dist.is_initialized():
        raise RuntimeError("torch.distributed is not initialised: call torch.distributed.init_process_group first")
    if isinstance(mesh, DeviceMesh) and mesh.get_coordinate() is None:
        raise ValueError(f"this rank ({dist.get_rank()}) is none of the mesh's: only its ranks make the call")
    check_member(mesh)
    is_one: bool = isinstance(method, str) or not isinstance(method, Sequence)
    methods: tuple[Any, ...] = (method,) if is_one else tuple(method)
    for each in methods:
        if each not in METHODS:
            raise ValueError(f"unknown method {each!r}; known are {', '.join(map(repr, METHODS))}")
    if is_one:
        group = _one(mesh)
        return Topology(group, group, group, (dist.get_world_size(group),), None, (group,))
    if not isinstance(mesh, DeviceMesh) or mesh.ndim != len(methods):
        what = f"a DeviceMesh of {mesh.ndim} dimensions" if isinstance(mesh, DeviceMesh) else type(mesh).__name__
        raise ValueError(
            f"'method' names {len(methods)} methods, one for each dimension of a DeviceMesh; 'mesh' is {what}"
        )
    if len(methods) == 1:
        return topology_of(mesh, methods[0])
    if len(methods) != 2 or methods.count("ulysses") != 1 or "auto" in methods:
        raise ValueError(
            f"'method' is {methods!r}; of two dimensions one is 'ulysses' and the other 'ring' or 'all_gather', as in "
            "('ring', 'ulysses') for a mesh of hosts × their GPUs"
        )
    heads_axis = methods.index("ulysses")
    groups = [mesh.get_group(axis) for axis in range(2)]
    flat: Any = mesh._flatten()
    whole = flat.get_group()
    return Topology(whole, groups[1 - heads_axis], groups[heads_axis], tuple(mesh.shape), heads_axis, tuple(groups))


def _one(mesh: object) -> Group:
    if isinstance(mesh, DeviceMesh):
        if mesh.ndim != 1:
            raise ValueError(
                f"'mesh' has the dimensions {mesh.mesh_dim_names or mesh.ndim}; choose the one that the sequence is "
                "spread over, mesh['name'], or name a method for each of them: method=('ring', 'ulysses')"
            )
        group: dist.ProcessGroup = mesh.get_group()
        return group
    if mesh is None or isinstance(mesh, dist.ProcessGroup):
        return mesh
    raise TypeError(f"'mesh' must be a DeviceMesh or a process group, not {type(mesh).__name__}")
