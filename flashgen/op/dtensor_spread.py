"""How a call over a mesh is spread: along which axes, what a rank passes to the operator and makes of the results.

In: the operator's arguments, DTensors among them. Out: a ``Spread``. Of captured tensors a rank reads its own part
alone in dimensions that lie along the axes of the call, by what the spec reads. Raises ``ValueError`` for what cannot
be computed from shards.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from flashgen.ir.expr import Expr, Load, Symbol, SymbolKind, literal, rewrite, size, walk
from flashgen.ir.spec import AttentionSpec, CapturedTensor
from flashgen.ir.types import ScalarType
from flashgen.kinds.dense import DENSE
from flashgen.op.checks import reads_key_heads
from flashgen.op.registered import Registered
from flashgen.op.tensor_kinds import layout_like

STARTS: Mapping[str, str] = {"b": "b", "h": "h", "i": "q"}  # of the names of offsets
_WORDS: Mapping[str, str] = {"b": "batch elements", "h": "heads", "i": "queries"}


@dataclass(frozen=True)
class Axes:
    """Where the axes lie in the tensors of a form of calls: dimensions of q and o, of k and v, of lse."""

    q: Mapping[str, int]
    kv: Mapping[str, int]
    lse: Mapping[str, int]
    keys: int  # the dimension of k and v that holds positions


DENSE_AXES = Axes({"b": 0, "h": 1, "i": 2}, {"b": 0, "h": 1}, {"b": 0, "h": 1, "i": 2}, 2)
RAGGED_AXES = Axes({"h": 1}, {"h": 1}, {"h": 0}, 0)


def axis_of(lies: Axes, mesh: DeviceMesh, dim: int, tensors: Sequence[Any]) -> str | None:
    """The axis of a call that a mesh dimension shards: that of q, else that of k and v."""
    found: list[str | None] = []
    for name, x, axes in zip("qkv", tensors, (lies.q, lies.kv, lies.kv), strict=True):
        placement = x.placements[dim]
        sharded: int | None = getattr(placement, "dim", None)
        axis = next((axis for axis, at in axes.items() if at == sharded), None)
        if sharded is not None and axis is None:
            raise ValueError(_refused(name, placement, mesh, dim, is_sequence=sharded == lies.keys))
        found.append(axis)
    if found[0] == "i":
        for name, x, axis in zip("kv", tensors[1:], found[1:], strict=True):
            if axis is not None:
                raise ValueError(
                    f"q is sharded by queries along {_dimension(mesh, dim)}, and '{name}' by {_WORDS[axis]} "
                    f"({x.placements[dim]!r}): '{name}' has to be whole there (Replicate()), or q sharded alike"
                )
    return next((axis for axis in found if axis is not None), None)


def _refused(name: str, placement: Placement, mesh: DeviceMesh, dim: int, *, is_sequence: bool) -> str:
    where = f"'{name}' is sharded along {_dimension(mesh, dim)} by {placement!r}"
    if is_sequence:
        return (
            f"{where}, which is its sequence: flashgen.distributed.context_parallel(op, mesh) computes sequences that "
            f"are spread over ranks, from to_local() of each; or redistribute '{name}' to Shard of its batch or heads"
        )
    return f"{where}; q, k and v may be sharded by their batch (dimension 0) or their heads: redistribute '{name}'"


def _dimension(mesh: DeviceMesh, dim: int) -> str:
    names = mesh.mesh_dim_names
    return f"mesh dimension '{names[dim]}'" if names else f"mesh dimension {dim}"


@dataclass(frozen=True)
class Heads:
    """The key/value heads that a rank's query heads read; ``are_shared``: k and v are whole, and each takes its own."""

    own: range
    are_shared: bool


def heads_of(spec: AttentionSpec, extents: Mapping[str, int], mesh: DeviceMesh, along: Sequence[str | None]) -> Heads:
    """Raises ``ValueError`` where some rank would get a part of a group of query heads and more."""
    heads, kv_heads = extents["h"], extents["hkv"]
    if "h" not in along or not heads or not kv_heads or heads % kv_heads:  # the last is told by the op itself
        return Heads(part_of(kv_heads, mesh, along, "h"), are_shared=False)
    group = heads // kv_heads
    # Of coordinates that differ in what shards heads.
    places = itertools.product(*(range(n if axis == "h" else 1) for n, axis in zip(mesh.shape, along, strict=True)))
    parts = [(_chunk(heads, mesh.shape, along, at), _chunk(kv_heads, mesh.shape, along, at)) for at in places]
    mine = part_of(heads, mesh, along, "h")
    own = range(mine.start // group, -(-mine.stop // group))
    if all((len(q), q.start) == (group * len(kv), group * kv.start) or not q for q, kv in parts):
        return Heads(part_of(kv_heads, mesh, along, "h"), are_shared=False)
    ranks = f"{heads} query heads of {kv_heads} key/value heads, over {len(parts)} ranks"
    # A rank has whole groups, or lies in one.
    if not all(
        q.start % group == q.stop % group == 0 or q.start // group == (q.stop - 1) // group for q, _ in parts if q
    ):
        raise ValueError(
            f"{ranks}: a rank would get a part of a group of {group} query heads beside another group; take a number "
            f"of ranks that divides {kv_heads}, or one that {kv_heads} divides and that divides {heads}"
        )
    if reads_key_heads(spec):
        raise ValueError(f"{ranks}: ranks share key/value heads, and '{spec.name}' reads hkv or Hkv; k, v must not be")
    return Heads(own if mine else range(0), are_shared=True)


def part_of(extent: int, mesh: DeviceMesh, along: Sequence[str | None], axis: str) -> range:
    """What this rank has of an axis."""
    at = mesh.get_coordinate()
    if at is None:
        return range(0)
    only = [each if each == axis else None for each in along]
    return _chunk(extent, mesh.shape, only, at)


def _chunk(extent: int, mesh: Sequence[int], along: Sequence[str | None], at: Sequence[int]) -> range:
    """What ``Shard`` gives a place of the mesh: chunks, as those of ``torch.chunk``, of chunks."""
    found = range(extent)
    for ranks, axis, number in zip(mesh, along, at, strict=True):
        if axis is not None:
            each = -(-len(found) // ranks)
            found = found[min(number * each, len(found)) : (number + 1) * each]
    return found


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
            x = x.detach()  # gradients are the operator's own; PyTorch before 2.13 moves no leaf here
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


# The axes that a mesh may shard, and the indices of the language that run along them.
INDICES: Mapping[str, tuple[str, ...]] = {"b": ("b",), "h": ("h", "hkv"), "i": ("i",)}
SIZES: Mapping[str, str] = {"b": "B", "h": "H", "hkv": "Hkv", "i": "Nq"}


def indexed(spec: AttentionSpec, tensor: CapturedTensor) -> dict[int, str]:
    """Of a captured tensor the dimensions that every load indexes by an index of the language alone, and its name."""
    loads = [node for node in walk(*_roots(spec)) if isinstance(node, Load) and node.tensor == tensor.name]
    return {
        dim: name
        for dim, extent in enumerate(tensor.shape)
        for name, letters in SIZES.items()
        if extent == size(letters) and all(_is_index(load.indices[dim], name) for load in loads)
    }


def sharded_dims(
    names: Mapping[int, str],
    x: Any,
    extents: Mapping[str, int],
    along: Sequence[str | None],
    whole: set[str],
    *,
    shares_heads: bool,
) -> dict[int, str]:
    """The dimensions of a captured tensor that a rank holds its own part of, with their axes.

    ``names`` are those of ``indexed``; ``shares_heads``: ranks share key/value heads.
    """
    if not isinstance(x, DTensor):
        return {}
    found: dict[int, str] = {}
    for placement, axis in zip(x.placements, along, strict=True):
        dim: int | None = getattr(placement, "dim", None)
        name = names.get(-1 if dim is None else dim)
        if dim is None or name is None or axis not in whole or name not in INDICES[axis or ""]:
            continue
        if x.shape[dim] == extents[name] and not (name == "hkv" and shares_heads) and axis not in found.values():
            found[dim] = axis or ""
    return found


def is_told_by_tensors_alone(spec: AttentionSpec, axis: str) -> bool:
    """Whether an axis means nothing but which part of captured tensors is read: no random bits, no arithmetic."""
    if spec.dropout is not None:
        return False
    names = INDICES[axis]
    letters = {SIZES[name] for name in names}
    shapes = {tensor.name: tensor.shape for tensor in spec.tensors}

    def without_parts(node: Expr) -> Expr:
        if not isinstance(node, Load):
            return node
        pairs = zip(node.indices, shapes[node.tensor], strict=True)
        is_part = [any(_is_index(x, name) and extent == size(SIZES[name]) for name in names) for x, extent in pairs]
        return replace(node, indices=tuple(literal(0) if n else x for n, x in zip(is_part, node.indices, strict=True)))

    own = {size(each) for each in letters}
    extents = [extent for shape in shapes.values() for extent in shape if extent not in own]
    defaults = [param.default for param in spec.params if param.default is not None]
    read = [rewrite(root, without_parts) for root in _roots(spec)]
    return not _mentions((*read, *extents, *defaults), set(names), letters)


def _roots(spec: AttentionSpec) -> tuple[Expr, ...]:
    """Everything that a spec evaluates for a pair or a row; a list is read where its first number stands."""
    select = spec.select
    lists = (
        () if select is None else (Load(ScalarType.INT, tensor=select.tensor, indices=(*select.indices, literal(0))),)
    )
    return (*spec.expressions, *(() if spec.dropout is None else (spec.dropout,)), *lists)


def _mentions(roots: Iterable[Expr], indices: set[str], letters: set[str]) -> bool:
    names = {SymbolKind.INDEX: indices, SymbolKind.SIZE: letters}
    return any(isinstance(node, Symbol) and node.name in names.get(node.kind, ()) for node in walk(*roots))


def _is_index(expr: Expr, name: str) -> bool:
    return isinstance(expr, Symbol) and expr.kind is SymbolKind.INDEX and expr.name == name
