"""An op over the ranks of a group, each of which holds a part of the sequence.

In: an op, a group, a partition. Out: a callable that takes this rank's rows and returns this rank's rows. What
crosses ranks goes by collectives of ``torch.distributed``; kernels are those of one device, told where their rows are.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from flashgen.analysis.selection import lowered
from flashgen.distributed.agreement import Given, agree
from flashgen.distributed.blocks import mask_of
from flashgen.distributed.exchange import Group, exchange, summed, swap
from flashgen.distributed.needs import Needs, needs_of
from flashgen.distributed.partition import Partition
from flashgen.ir.expr import Symbol, walk
from flashgen.ir.spec import AttentionSpec, HeadDim
from flashgen.runtime.conversion import seed_argument
from flashgen.runtime.op import AttentionOp

METHODS = ("auto", "all_gather", "ulysses")


@dataclass(frozen=True)
class Choice:
    """How a call is spread: ``method``, the bytes of q, k, v and o that each rank sends forward, and why."""

    method: str
    sent: tuple[int, ...]
    reason: str


def context_parallel(
    op: AttentionOp,
    mesh: DeviceMesh | dist.ProcessGroup | None = None,
    method: str = "auto",
    partition: Partition | None = None,
) -> ContextParallel:
    """``op`` over the ranks of ``mesh``: a mesh of one dimension, a process group, or None for all ranks.

    ``method``: ``"all_gather"``: each rank gets the keys and values that the mask keeps for its queries; ``"ulysses"``:
    heads change places with positions, and each rank computes some heads of the whole sequence; ``"auto"``: what sends
    less. ``partition`` says which positions each rank holds; None: ranks hold equal or unequal parts one behind the
    other, as long as their tensors are. Raises ``TypeError`` and ``ValueError`` for what is none of these.
    """
    if not isinstance(op, AttentionOp):
        raise TypeError(f"'op' must be an op of flashgen.load or loads, not {type(op).__name__}")
    if method == "ring":
        raise NotImplementedError(
            "method 'ring' does not exist yet: 'all_gather' sends the same rows, all before the first kernel"
        )
    if method not in METHODS:
        raise ValueError(f"unknown method '{method}'; known are {', '.join(map(repr, METHODS))}")
    if partition is not None and not isinstance(partition, Partition):
        raise TypeError(f"'partition' must be a Partition, not {type(partition).__name__}")
    return ContextParallel(op, _group_of(mesh), method, partition)


def _group_of(mesh: object) -> Group:
    if not dist.is_initialized():
        raise RuntimeError("torch.distributed is not initialised: call torch.distributed.init_process_group first")
    if isinstance(mesh, DeviceMesh):
        if mesh.ndim != 1:
            raise ValueError(
                f"'mesh' has the dimensions {mesh.mesh_dim_names or mesh.ndim}; choose the one that the sequence is "
                "spread over: mesh['name']"
            )
        group: dist.ProcessGroup = mesh.get_group()
        return group
    if mesh is None or isinstance(mesh, dist.ProcessGroup):
        return mesh
    raise TypeError(f"'mesh' must be a DeviceMesh or a process group, not {type(mesh).__name__}")


class ContextParallel:
    """An op whose sequence is spread over the ranks of a group. Every rank calls it, with its own rows."""

    def __init__(self, op: AttentionOp, group: Group, method: str, partition: Partition | None) -> None:
        self.op, self.group, self.method = op, group, method
        self.rank, self.world = dist.get_rank(group), dist.get_world_size(group)
        if partition is not None and partition.world != self.world:
            raise ValueError(f"the partition is for {partition.world} ranks; the group has {self.world}")
        self._partition = partition

    def __repr__(self) -> str:
        return f"<{self.op.name} over {self.world} ranks by {self.method}; this is rank {self.rank}>"

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        return_lse: bool = False,
        dropout_p: float | Tensor | None = None,
        seed: int | Tensor | None = None,
        deterministic: bool | None = None,
        **captured: Any,
    ) -> Any:
        """The rows of this rank: ``q`` [B, H, n, D], ``k`` [B, Hkv, n, D], ``v`` [B, Hkv, n, Dv] → ``o`` [B, H, n, Dv].

        Captured tensors and params are whole, and the same on every rank; their gradients are those of all ranks, on
        each. ``return_lse`` adds ``lse`` [B, H, n]. With dropout the decisions are those of one device with the same
        ``seed``; None: rank 0 draws it. Where gradients are wanted, every rank has to go backward.

        Raises on every rank what a call of the op raises on any, and ``ValueError`` where ranks were given what does
        not go together, naming the rank and the argument.
        """
        options = {"return_lse": return_lse, "dropout_p": dropout_p, "deterministic": deterministic}
        call, choice = self._agreed(q, k, v, options, seed, captured)
        learned = [name for name, x in captured.items() if isinstance(x, Tensor) and x.requires_grad]
        if learned and torch.is_grad_enabled():
            captured = {
                **captured,
                **dict(zip(learned, summed([captured[n] for n in learned], self.group), strict=True)),
            }
        named: dict[str, Any] = {"deterministic": deterministic, **captured}
        if self.op.spec.dropout is not None or dropout_p is not None:
            named["dropout_p"] = dropout_p
        if self.op.spec.dropout is not None:
            named["seed"] = call.seed
        run = self._ulysses if choice.method == "ulysses" else self._all_gather
        o, lse = run(call, q, k, v, named, has_lse=return_lse)
        return (o, lse) if return_lse else o

    def explain(self, q: Tensor, k: Tensor, v: Tensor, **captured: Any) -> Choice:
        """How such a call is spread, and why. Every rank has to ask."""
        _, choice = self._agreed(q, k, v, {}, None, captured)
        return choice

    def _agreed(
        self, q: Tensor, k: Tensor, v: Tensor, options: Mapping[str, object], seed: object, captured: Mapping[str, Any]
    ) -> tuple[_Call, Choice]:
        spec = self.op.spec

        def given() -> Given:
            head_dim = _checked(spec, q, k, v, dist.get_backend(self.group))
            if self._partition is not None and q.shape[2] != self._partition.lengths[self.rank]:
                wanted = self._partition.lengths[self.rank]
                raise ValueError(f"'q' has {q.shape[2]} rows; the partition says {wanted} ({self._partition})")
            bound = self.op._signature.bind(dict(captured))
            names = self.op._signature.names
            sizes = {"B": q.shape[0], "H": q.shape[1], "Hkv": k.shape[1], "Nq": 0, "Nk": 0}
            mask = mask_of(spec, head_dim, sizes, captured)
            flag = torch.is_grad_enabled()
            drawn = None
            if spec.dropout is not None:
                drawn = int(seed_argument(seed, torch.device("cpu")).item())
            return Given(
                op=self.op.name,
                method=self.method,
                partition=str(self._partition and self._partition.spans),
                q=_described(q, flag),
                k=_described(k, flag),
                v=_described(v, flag),
                captured=", ".join(f"{name} {_value(value, flag)}" for name, value in zip(names, bound, strict=True)),
                options=", ".join(f"{name} {_value(value, flag)}" for name, value in options.items()),
                mask=mask.key,
                length=q.shape[2],
                seed=drawn,
            )

        said = agree(given, self.group)
        lengths = [each.length for each in said]
        own = self._partition or _in_order(lengths)
        head_dim = next(each for each in spec.head_dims if (each.qk, each.v) == (q.shape[3], v.shape[3]))
        N = own.length
        sizes = {"B": q.shape[0], "H": q.shape[1], "Hkv": k.shape[1], "Nq": N, "Nk": N}
        needs = needs_of(mask_of(spec, head_dim, sizes, captured), own)
        call = _Call(own, needs, said[0].seed)
        return call, self._choice(call, q, k, v)

    def _choice(self, call: _Call, q: Tensor, k: Tensor, v: Tensor) -> Choice:
        element, lengths = q.element_size(), call.partition.lengths
        row = q.shape[0] * k.shape[1] * (k.shape[3] + v.shape[3]) * element
        gather = tuple(call.needs.rows_sent(rank) * row for rank in range(self.world))
        why = _no_heads(self.op.spec, q.shape[1], k.shape[1], self.world)
        if why and self.method == "ulysses":
            raise ValueError(f"method 'ulysses': {why}; 'all_gather' can")
        swapped: tuple[int, ...] = ()
        if not why:
            heads, kv_heads = q.shape[1] // self.world, max(k.shape[1] // self.world, 1)
            there = q.shape[0] * (heads * q.shape[3] + kv_heads * (k.shape[3] + v.shape[3])) * element
            back = q.shape[0] * heads * v.shape[3] * element
            swapped = tuple(n * (self.world - 1) * there + (call.partition.length - n) * back for n in lengths)
        if self.method == "all_gather" or (self.method == "auto" and why):
            return Choice("all_gather", gather, "as asked" if self.method == "all_gather" else f"heads stay: {why}")
        if self.method == "ulysses":
            return Choice("ulysses", swapped, "as asked")
        texts = f"{max(gather) / 1e6:.3f} MB of keys and values against {max(swapped) / 1e6:.3f} MB of heads"
        if max(gather) <= max(swapped):
            return Choice("all_gather", gather, f"the busiest rank sends {texts}")
        return Choice("ulysses", swapped, f"the busiest rank sends less by heads: {texts}")

    def _all_gather(
        self, call: _Call, q: Tensor, k: Tensor, v: Tensor, named: Mapping[str, Any], *, has_lse: bool
    ) -> tuple[Tensor, Tensor | None]:
        (batch, kv_heads, _, D), Dv, N = k.shape, v.shape[3], call.partition.length
        rows = torch.cat([_rows(k), _rows(v)], 1)
        found = exchange(rows, call.needs.route(call.partition, self.rank), self.group)
        positions = call.needs.positions(self.rank)
        first, last = (int(positions.min()), int(positions.max()) + 1) if len(positions) else (0, 0)
        # Positions between that no query sees stay 0; no kernel keeps a pair of them.
        held = found.new_zeros(last - first, found.shape[1]).index_copy(0, (positions - first).to(q.device), found)
        split = kv_heads * batch * D
        keys = held[:, :split].reshape(-1, batch, kv_heads, D).permute(1, 2, 0, 3)
        values = held[:, split:].reshape(-1, batch, kv_heads, Dv).permute(1, 2, 0, 3)
        parts = []
        before = 0
        spans = call.partition.spans[self.rank] or ((0, 0),)
        reads = [span if span[1] > span[0] else (first, first) for span in call.needs.reads[self.rank] or ((0, 0),)]
        for (start, stop), (x, y) in zip(spans, reads, strict=True):
            own = q[:, :, before : before + stop - start]
            seen = keys[:, :, x - first : y - first], values[:, :, x - first : y - first]
            where = {"q_start": start, "kv_start": x, "q_total": N, "kv_total": N}
            parts.append(self._run((own, *seen), has_lse, {**where, **named}))
            before += stop - start
        o = torch.cat([o for o, _ in parts], 2)
        return o, torch.cat([lse for _, lse in parts], 2) if has_lse else None

    def _ulysses(
        self, call: _Call, q: Tensor, k: Tensor, v: Tensor, named: Mapping[str, Any], *, has_lse: bool
    ) -> tuple[Tensor, Tensor | None]:
        world, lengths, n = self.world, call.partition.lengths, q.shape[2]
        batch, heads, group = q.shape[0], q.shape[1] // world, q.shape[1] // k.shape[1]
        kv_heads = max(k.shape[1] // world, 1)
        sent = []
        for rank in range(world):
            low = rank * heads // group
            mine = q[:, rank * heads : (rank + 1) * heads], k[:, low : low + kv_heads], v[:, low : low + kv_heads]
            sent.append(torch.cat([_rows(x) for x in mine], 1))
        found = swap(torch.cat(sent), [n] * world, lengths, self.group)
        positions = torch.cat([call.partition.positions(rank) for rank in range(world)]).to(q.device)
        found = found.index_select(0, torch.argsort(positions))
        widths = [batch * heads * q.shape[3], batch * kv_heads * k.shape[3], batch * kv_heads * v.shape[3]]
        parts: tuple[Tensor, ...] = torch.split(found, widths, 1)
        owned = (heads, kv_heads, kv_heads)
        shares = (_share(part, batch, own, width) for part, own, width in zip(parts, owned, widths, strict=True))
        q_share, k_share, v_share = shares
        where = {"h_start": self.rank * heads, "h_total": heads * world}
        o, lse = self._run((q_share, k_share, v_share), has_lse, {**where, **named})

        def home(x: Tensor) -> Tensor:
            rows = _rows(x).index_select(0, positions)
            back = swap(rows, lengths, [n] * world, self.group)
            return back.reshape(world, n, batch, heads, x.shape[3]).permute(2, 0, 3, 1, 4).flatten(1, 2)

        return home(o), home(lse[..., None])[..., 0] if lse is not None else None

    def _run(self, tensors: tuple[Tensor, Tensor, Tensor], has_lse: bool, named: Mapping[str, Any]) -> Any:
        """``o`` and ``lse``, which is None where nobody asked."""
        found: Any = self.op(*tensors, **{**named, "return_lse": has_lse})
        return found if has_lse else (found, None)


@dataclass(frozen=True)
class _Call:
    """What all ranks know of a call."""

    partition: Partition
    needs: Needs
    seed: int | None


def _in_order(lengths: list[int]) -> Partition:
    ends = [sum(lengths[:n]) for n in range(len(lengths) + 1)]
    spans = tuple(((start, stop),) if stop > start else () for start, stop in pairwise(ends))
    return Partition(ends[-1], spans, tuple(n / (ends[-1] or 1) for n in lengths))


def _checked(spec: AttentionSpec, q: Tensor, k: Tensor, v: Tensor, backend: str) -> HeadDim:
    for name, x in (("q", q), ("k", k), ("v", v)):
        if not isinstance(x, Tensor):
            raise TypeError(f"'{name}' must be a tensor, not {type(x).__name__}")
        if x.dim() != 4:
            raise ValueError(f"'{name}' has shape {list(x.shape)}; [B, H, n, D] is expected, n rows of this rank")
        if backend == "nccl" and not x.is_cuda:
            raise ValueError(f"'{name}' is on {x.device}; NCCL, which this group has, takes tensors on GPUs")
    if not q.shape[2] == k.shape[2] == v.shape[2]:
        raise ValueError(
            f"q, k and v have {q.shape[2]}, {k.shape[2]} and {v.shape[2]} rows; a rank holds the same positions of each"
        )
    for each in spec.head_dims:
        if (each.qk, each.v) == (q.shape[3], v.shape[3]):
            return each
    known = " or ".join(map(str, spec.head_dims))
    raise ValueError(f"head dimension {q.shape[3]} of q and {v.shape[3]} of v; '{spec.name}' is compiled for {known}")


def _no_heads(spec: AttentionSpec, heads: int, kv_heads: int, world: int) -> str:
    """Why heads cannot change places; empty where they can."""
    if heads % world:
        return f"{heads} query heads cannot be dealt out to {world} ranks"
    if kv_heads % world and world % kv_heads:
        return f"{kv_heads} key/value heads cannot be dealt out to {world} ranks"
    if kv_heads % world and (word := _of_kv_heads(spec)):
        return f"'{spec.name}' reads {word}, and {world} ranks share {kv_heads} key/value heads"
    return ""


def _of_kv_heads(spec: AttentionSpec) -> str:
    """What a spec reads that changes where ranks have copies of key/value heads; empty where that is nothing."""
    spec = lowered(spec)
    parts = [spec.scale, spec.score, spec.mask, *(extent for each in spec.tensors for extent in each.shape)]
    parts += [] if spec.layout is None else [spec.layout.keep]
    parts += [part for part in (spec.weights.weight, spec.weights.sink, spec.dropout) if part is not None]
    parts += [param.default for param in spec.params if param.default is not None]
    names = {node.name for node in walk(*parts) if isinstance(node, Symbol)}
    return next((word for word in ("hkv", "Hkv") if word in names), "")


def _rows(x: Tensor) -> Tensor:
    """[B, H, n, width] → [n, B · H · width]."""
    return x.permute(2, 0, 1, 3).reshape(x.shape[2], x.shape[0] * x.shape[1] * x.shape[3])


def _share(rows: Tensor, batch: int, heads: int, width: int) -> Tensor:
    """[N, B · H · width] → [B, H, N, width]."""
    return rows.reshape(len(rows), batch, heads, width // (batch * heads)).permute(1, 2, 0, 3).contiguous()


def _described(x: Tensor, flag: bool) -> str:
    sizes = ", ".join("n" if axis == 2 else str(extent) for axis, extent in enumerate(x.shape))
    return f"[{sizes}] {x.dtype} on {x.device.type}{' with gradient' if flag and x.requires_grad else ''}"


def _value(value: object, flag: bool) -> str:
    if isinstance(value, Tensor) and value.dim():
        gradient = " with gradient" if flag and value.requires_grad else ""
        return f"{list(value.shape)} {value.dtype}{gradient}"
    return str(value.item()) if isinstance(value, Tensor) else repr(value)
