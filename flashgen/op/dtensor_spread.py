"""How a call over a mesh is spread: what a rank passes to the operator, and what it makes of the results.

In: the operator's arguments, DTensors among them. Out: a ``Spread``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from flashgen.kinds.dense import DENSE
from flashgen.op.dtensor_axes import DENSE_AXES, RAGGED_AXES, STARTS, axis_of, heads_of, part_of
from flashgen.op.dtensor_captured import indexed, is_told_by_tensors_alone, sharded_dims
from flashgen.op.layouts import layout_like
from flashgen.op.registered import Registered

Placements = tuple[Placement, ...]


@dataclass(frozen=True)
class Cut:
    """Of a dimension of a tensor a rank holds ``held``, and passes ``read``: a part of it, or more, which is zero."""

    dim: int
    held: range
    read: range


@dataclass(frozen=True)
class Operand:
    """How a tensor is passed: placed so, then cut; what is returned for it is placed as ``gradient`` says."""

    shape: torch.Size
    placements: Placements
    gradient: Placements
    cuts: tuple[Cut, ...] = ()

    def passed(self, x: Any) -> Any:
        """What this rank passes to the operator; tensors that are no DTensors are whole on every rank."""
        own = x
        if isinstance(x, DTensor):
            own = (x if x.placements == self.placements else x.redistribute(placements=self.placements)).to_local()
        for cut in self.cuts:
            own = _fitted(own, cut.dim, cut.held, cut.read)
        return own

    def returned(self, x: Tensor, mesh: DeviceMesh) -> DTensor:
        """A result, or the gradient, from that of what was passed."""
        for cut in reversed(self.cuts):
            x = _fitted(x, cut.dim, cut.read, cut.held)
        strides = layout_like(x, self.shape)[1]
        return DTensor.from_local(x, mesh, self.gradient, run_check=False, shape=self.shape, stride=strides)


@dataclass(frozen=True)
class Spread:
    """A call over a mesh: how each of its tensors is passed and returned, and the numbers that say where that lies."""

    mesh: DeviceMesh
    operands: tuple[Operand | None, ...]
    numbers: tuple[Any, ...]
    results: tuple[Operand, Operand, Operand]  # o, lse and its parts
    is_idle: bool  # nothing of q lies on this rank

    def tensors(self, given: Sequence[Any]) -> list[Any]:
        """What this rank passes."""
        return [
            x if x is None or operand is None else operand.passed(x)
            for x, operand in zip(given, self.operands, strict=True)
        ]


def spread_of(op: Registered, tensors: Sequence[Any], numbers: Sequence[Any]) -> Spread:
    """How this rank takes part. Raises ``ValueError`` for what cannot be computed from shards."""
    spec, kind = op.engine.spec, op.signature.kind
    lies = DENSE_AXES if kind is DENSE else RAGGED_AXES
    q, k, v = tensors[:3]
    mesh: DeviceMesh = q.device_mesh
    along = tuple(axis_of(lies, mesh, dim, tensors[:3]) for dim in range(mesh.ndim))
    extents = {axis: q.shape[dim] for axis, dim in lies.q.items()} | {"hkv": k.shape[lies.kv["h"]]}
    heads = heads_of(spec, extents, mesh, along)
    own = {axis: part_of(extents[axis], mesh, along, axis) for axis in lies.q} | {"hkv": heads.own}
    given = dict(zip(kind.numbers, numbers, strict=True))
    begins = {axis: given[f"{STARTS[axis]}_start"] for axis in lies.q}
    ends = {axis: given[f"{STARTS[axis]}_total"] for axis in lies.q}

    whole = {axis for axis in lies.q if begins[axis] == 0 and ends[axis] in (None, extents[axis])}
    captured = [indexed(spec, each) for each in spec.tensors]
    sharded = [
        sharded_dims(each, x, extents, along, whole, shares_heads=heads.are_shared)
        for each, x in zip(captured, tensors[3:], strict=False)
    ]
    # Where nothing else speaks of an axis, what a rank holds of the captured tensors is a call of its own.
    alone = {
        axis
        for axis in whole & {"b", "h"} & {each for dims in sharded for each in dims.values()}
        if is_told_by_tensors_alone(spec, axis) and not (axis == "h" and heads.are_shared)
    }
    for axis in lies.q:
        name = STARTS[axis]
        if axis in along:
            start = 0 if axis in alone else begins[axis] + own[axis].start
            total = begins[axis] + extents[axis] if ends[axis] is None else ends[axis]
            given[f"{name}_start"], given[f"{name}_total"] = start, len(own[axis]) if axis in alone else total

    def by(axes: Mapping[str, int], *, whole_along: str = "") -> Placements:
        return tuple(
            Replicate() if axis is None or axis in whole_along or axis not in axes else Shard(axes[axis])
            for axis in along
        )

    def added(placements: Placements) -> Placements:
        """Of a gradient: what a rank has of a tensor that is whole is a part of a sum where the call is sharded."""
        pairs = zip(placements, along, strict=True)
        return tuple(Partial() if axis is not None and each.is_replicate() else each for each, axis in pairs)

    at_q = by(lies.q)
    at_kv = by(lies.kv, whole_along="h" if heads.are_shared else "")
    cuts = (Cut(lies.kv["h"], range(extents["hkv"]), heads.own),) if heads.are_shared else ()
    operands: list[Operand | None] = [Operand(q.shape, at_q, at_q)]
    operands += [Operand(x.shape, at_kv, added(at_kv), cuts) for x in (k, v)]
    for each, x, dims in zip(captured, tensors[3:], sharded, strict=False):
        placed = tuple(
            next((Shard(dim) for dim, axis in dims.items() if axis == own_axis), Replicate()) for own_axis in along
        )
        parts = []
        for dim, name in each.items():
            axis = "h" if name == "hkv" else name
            if axis in along:
                everything, mine = range(x.shape[dim]), own[name]
                parts.append(Cut(dim, mine if dim in dims else everything, mine if axis in alone else everything))
        operands.append(Operand(x.shape, placed, added(placed), tuple(parts)))
    nowhere = (Replicate(),) * mesh.ndim
    for x in tensors[len(operands) :]:
        operands.append(Operand(x.shape, nowhere, added(nowhere)) if isinstance(x, Tensor) else None)
    at_lse = by(lies.lse)
    rows = tuple(kind.rows(q))
    shapes = ((at_q, (*q.shape[:-1], v.shape[-1])), (at_lse, rows), (at_lse, (*rows, 2)))
    o, lse, of_lse = (Operand(torch.Size(shape), where, where) for where, shape in shapes)
    idle = any(axis in along and not own[axis] for axis in lies.q)
    return Spread(
        mesh,
        tuple(operands),
        tuple(given[name] for name in kind.numbers),
        (o, lse, of_lse),
        idle,
    )


def _fitted(x: Tensor, dim: int, held: range, wanted: range) -> Tensor:
    """From what is held of a dimension to what is wanted: a part of it, or with zeros where nothing is held."""
    if held == wanted:
        return x
    if held.start <= wanted.start and wanted.stop <= held.stop:
        return x.narrow(dim, wanted.start - held.start, len(wanted))
    found = x.new_zeros([len(wanted) if axis == dim else extent for axis, extent in enumerate(x.shape)])
    found.narrow(dim, held.start - wanted.start, len(held)).copy_(x)
    return found
