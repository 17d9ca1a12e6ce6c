"""The sharding rule of an op: what a rank computes of q, k and v that are DTensors.

In: the operator's arguments, DTensors among them. Out: DTensors. Below autograd, so that both passes, autocast and
compiled graphs come by. A mesh dimension that shards q by batch elements (b), by heads (h) or by queries (i) shards
the call along that axis, and every rank calls the operator with what it has, told where that lies in the whole: masks,
positions and random bits are those of one device. Nothing is gathered that is sharded along the axes of the call.

    q, o      by b, h or i; lse alike
    k, v      by b and h alike; whole where i is sharded, or where ranks share key/value heads
    captured  by the dimension that an axis indexes, or whole: then gradients are ``Partial``, a sum over ranks
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from flashgen.ir.expr import Expr, Load, Symbol, SymbolKind, literal, size, walk
from flashgen.ir.spec import AttentionSpec, CapturedTensor, HeadDim
from flashgen.ir.types import ScalarType
from flashgen.runtime import registration
from flashgen.runtime.registration import Registered
from flashgen.runtime.signature import CACHED, DENSE, F8_CALLS, Signature

Placements = tuple[Placement, ...]

# The axes that a mesh may shard, and the indices of the language that run along them.
_INDICES: Mapping[str, tuple[str, ...]] = {"b": ("b",), "h": ("h", "hkv"), "i": ("i",)}
_SIZES: Mapping[str, str] = {"b": "B", "h": "H", "hkv": "Hkv", "i": "Nq"}
_START: Mapping[str, str] = {"b": "b", "h": "h", "i": "q"}  # of the names of offsets
_WORDS: Mapping[str, str] = {"b": "batch elements", "h": "heads", "i": "queries"}


@dataclass(frozen=True)
class _Axes:
    """Where the axes lie in the tensors of a form of calls: dimensions of q and o, of k and v, of lse."""

    q: Mapping[str, int]
    kv: Mapping[str, int]
    lse: Mapping[str, int]
    keys: int  # the dimension of k and v that holds positions


_DENSE = _Axes({"b": 0, "h": 1, "i": 2}, {"b": 0, "h": 1}, {"b": 0, "h": 1, "i": 2}, 2)
_RAGGED = _Axes({"h": 1}, {"h": 1}, {"h": 0}, 0)


@dataclass(frozen=True)
class _Cut:
    """Of a dimension of a tensor a rank holds ``held``, and passes ``read``: a part of it, or more, which is zero."""

    dim: int
    held: range
    read: range


@dataclass(frozen=True)
class _Operand:
    """How a tensor is passed: placed so, then cut; its gradient is placed as ``gradient`` says."""

    shape: torch.Size
    placements: Placements
    gradient: Placements
    cuts: tuple[_Cut, ...] = ()

    def passed(self, x: Tensor) -> Tensor:
        """What this rank passes to the operator; tensors that are no DTensors are whole on every rank."""
        own = _local(x, self.placements) if isinstance(x, DTensor) else x
        for cut in self.cuts:
            own = _fitted(own, cut.dim, cut.held, cut.read)
        return own

    def gradient_of(self, x: Tensor, mesh: DeviceMesh) -> DTensor:
        """The gradient, from that of what was passed."""
        for cut in reversed(self.cuts):
            x = _fitted(x, cut.dim, cut.read, cut.held)
        return _made(x, mesh, self.gradient, self.shape)


@dataclass(frozen=True)
class _Spread:
    """A call over a mesh: how each of its tensors is passed and returned, and the numbers that say where that lies."""

    mesh: DeviceMesh
    operands: tuple[_Operand | None, ...]
    numbers: tuple[Any, ...]
    o: _Operand
    lse: _Operand
    is_idle: bool  # nothing of q lies on this rank

    def tensors(self, given: Sequence[Tensor | None]) -> list[Tensor | None]:
        """What this rank passes."""
        return [
            x if x is None or operand is None else operand.passed(x)
            for x, operand in zip(given, self.operands, strict=True)
        ]


@functools.cache
def _learn(name: str) -> None:
    op, qualified = registration.first_of(name), f"{registration.NAMESPACE}::{name}"

    def forward(_: type, operator: Any, types: object, args: Sequence[Any], kwargs: object) -> Any:  # noqa: ARG001
        with torch.no_grad():
            return _forward(op, operator, args)

    def backward(_: type, operator: Any, types: object, args: Sequence[Any], kwargs: object) -> Any:  # noqa: ARG001
        with torch.no_grad():
            return _backward(op, operator, args)

    torch.library.register_torch_dispatch(qualified, DTensor, forward)
    torch.library.register_torch_dispatch(f"{qualified}_backward", DTensor, backward)


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def learn(name: str) -> bool:
    """Register the rule of an op's two operators, once; while a graph is traced, too."""
    _learn(name)
    return True


def prepared(signature: Signature, tensors: Sequence[Any]) -> tuple[Any, ...]:
    """The tensors of a call that has DTensors among them: a seed is that of the mesh's first rank.

    Raises ``TypeError`` where one of q, k and v is none or a tensor that is none wants a gradient, and ``ValueError``
    where meshes differ.
    """
    if signature.form is CACHED:
        raise TypeError(
            "'decode' takes no DTensors: pass what each rank has (to_local()), with h_start and h_total, or b_start "
            "and b_total"
        )
    if signature.form is F8_CALLS:
        raise TypeError(
            "calls of 8 bits take no DTensors: pass what each rank has (to_local()), with h_start and h_total, or "
            "b_start and b_total"
        )
    mesh = next(x.device_mesh for x in tensors if isinstance(x, DTensor))
    names = signature.inputs_by_name
    for name, x in zip(names, tensors, strict=False):
        if isinstance(x, DTensor):
            if x.device_mesh != mesh:
                raise ValueError(f"'{name}' is on {x.device_mesh}; another tensor of this call is on {mesh}")
        elif name in names[:3]:
            raise TypeError(
                f"'{name}' is no DTensor, but others of q, k and v are: distribute it over the same mesh "
                "(torch.distributed.tensor.distribute_tensor, or DTensor.from_local)"
            )
        elif x is not None and x.requires_grad and torch.is_grad_enabled():
            raise TypeError(
                f"'{name}' requires a gradient and is no DTensor, while q, k and v are: each rank would have a part of "
                "its gradient; distribute it over the same mesh (torch.distributed.tensor.distribute_tensor)"
            )
    own = list(tensors)
    at = len(names)
    if signature.has_dropout and own[at] is not None and not isinstance(own[at], DTensor):
        whole = [Replicate()] * mesh.ndim
        own[at] = DTensor.from_local(own[at], mesh, whole, run_check=True)  # which sends the first rank's
    return tuple(own)


def _forward(op: Registered, operator: Any, args: Sequence[Any]) -> Any:
    signature = op.signature
    count = signature.tensor_arguments
    tensors = args[:count]
    spread = _spread(op, tensors, args[count:-1])
    own = spread.tensors(tensors)
    if spread.is_idle:
        _check_indices(op, tensors, args[count:-1])
    found = _nothing(op, own) if spread.is_idle else operator(*own, *spread.numbers, args[-1])
    if not signature.has_lse:
        return _made(found, spread.mesh, spread.o.placements, spread.o.shape)
    o, lse, parts = found
    rows = spread.lse.placements
    return (
        _made(o, spread.mesh, spread.o.placements, spread.o.shape),
        _made(lse, spread.mesh, rows, spread.lse.shape),
        _made(parts, spread.mesh, rows, torch.Size((*spread.lse.shape, 2))),
    )


def _backward(op: Registered, operator: Any, args: Sequence[Any]) -> list[Tensor]:
    signature = op.signature
    first = 5 if signature.has_lse else 1
    end = first + signature.tensor_arguments
    arriving, tensors, numbers = args[:first], args[first:end], args[end:-2]
    deterministic, needs = args[-2], args[-1]
    spread = _spread(op, tensors, numbers)
    own = spread.tensors(tensors)
    if spread.is_idle:
        found = [torch.zeros_like(x) for x, need in zip(own, needs, strict=False) if need and x is not None]
    else:
        places = (spread.o.placements, *((spread.lse.placements, spread.o.placements) if first > 1 else ()))
        places += (spread.lse.placements,) * (first - len(places))
        rows = [_local(x, where) if isinstance(x, DTensor) else x for x, where in zip(arriving, places, strict=True)]
        found = operator(*rows, *own, *spread.numbers, deterministic, needs)
    wanted = [operand for operand, need in zip(spread.operands, needs, strict=False) if need]
    return [
        x if operand is None else operand.gradient_of(x, spread.mesh) for x, operand in zip(found, wanted, strict=True)
    ]


def _check_indices(op: Registered, tensors: Sequence[Any], numbers: Sequence[Any]) -> None:
    """Raises ``ValueError`` on a rank that holds nothing for indices that others refuse, so that nobody waits."""
    if op.signature.form is not DENSE:
        return
    q, k, v = tensors[:3]
    given = dict(zip(op.signature.form.numbers, numbers, strict=True))
    sizes = {"D": q.shape[3], "Dv": v.shape[3]}
    for name, axis, extent in zip(("B", "H", "Nq", "Nk"), "bhqk", (*q.shape[:3], k.shape[2]), strict=True):
        letter = "kv" if axis == "k" else axis
        total = given[f"{letter}_total"]
        sizes[name] = given[f"{letter}_start"] + extent if total is None else total
    sizes["Hkv"] = sizes["H"] // max(q.shape[1] // max(k.shape[1], 1), 1)
    op.engine.checker.check_indices(HeadDim(q.shape[3], v.shape[3]), sizes)


def _nothing(op: Registered, own: Sequence[Any]) -> Any:
    """The results of no row at all."""
    q, v = own[0], own[2]
    o = q.new_empty((*q.shape[:-1], v.shape[-1]))
    if not op.signature.has_lse:
        return o
    rows = op.signature.form.rows(q)
    lse = q.new_empty(rows, dtype=torch.float64 if q.dtype is torch.float64 else torch.float32)
    return o, lse, q.new_empty((*rows, 2), dtype=torch.float32)


# -- how a call is spread ----------------------------------------------------------------------------------------------


def _spread(op: Registered, tensors: Sequence[Any], numbers: Sequence[Any]) -> _Spread:
    """How this rank takes part. Raises ``ValueError`` for what cannot be computed from shards."""
    spec, form = op.engine.spec, op.signature.form
    lies = _DENSE if form is DENSE else _RAGGED
    q, k, v = tensors[:3]
    mesh: DeviceMesh = q.device_mesh
    along = tuple(_axis(lies, mesh, dim, tensors[:3]) for dim in range(mesh.ndim))
    extents = {axis: q.shape[dim] for axis, dim in lies.q.items()} | {"hkv": k.shape[lies.kv["h"]]}
    heads = _heads(spec, extents, mesh, along)
    own = {axis: _part(extents[axis], mesh, along, axis) for axis in lies.q} | {"hkv": heads.own}
    given = dict(zip(form.numbers, numbers, strict=True))
    begins = {axis: given[f"{_START[axis]}_start"] for axis in lies.q}
    ends = {axis: given[f"{_START[axis]}_total"] for axis in lies.q}

    whole = {axis for axis in lies.q if begins[axis] == 0 and ends[axis] in (None, extents[axis])}
    captured = [Indexed.of(spec, each) for each in spec.tensors]
    sharded = [
        _sharded_dims(each, x, extents, along, whole, heads) for each, x in zip(captured, tensors[3:], strict=False)
    ]
    # Where nothing else speaks of an axis, what a rank holds of the captured tensors is a call of its own.
    alone = {
        axis
        for axis in whole & {"b", "h"} & {each for dims in sharded for each in dims.values()}
        if _is_told_by_tensors_alone(spec, axis) and not (axis == "h" and heads.are_shared)
    }
    for axis in lies.q:
        name = _START[axis]
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
    cuts = (_Cut(lies.kv["h"], range(extents["hkv"]), heads.own),) if heads.are_shared else ()
    operands: list[_Operand | None] = [_Operand(q.shape, at_q, at_q)]
    operands += [_Operand(x.shape, at_kv, added(at_kv), cuts) for x in (k, v)]
    for each, x, dims in zip(captured, tensors[3:], sharded, strict=False):
        placed = tuple(
            next((Shard(dim) for dim, axis in dims.items() if axis == own_axis), Replicate()) for own_axis in along
        )
        parts = []
        for dim, name in each.exact.items():
            axis = "h" if name == "hkv" else name
            if axis in along:
                everything, mine = range(x.shape[dim]), own[name]
                parts.append(_Cut(dim, mine if dim in dims else everything, mine if axis in alone else everything))
        operands.append(_Operand(x.shape, placed, added(placed), tuple(parts)))
    nowhere = (Replicate(),) * mesh.ndim
    for x in tensors[len(operands) :]:
        operands.append(_Operand(x.shape, nowhere, added(nowhere)) if isinstance(x, Tensor) else None)
    at_lse = by(lies.lse)
    o_shape = torch.Size((*q.shape[:-1], v.shape[-1]))
    lse_shape = torch.Size(form.rows(q))
    idle = any(axis in along and not own[axis] for axis in lies.q)
    return _Spread(
        mesh,
        tuple(operands),
        tuple(given[name] for name in form.numbers),
        _Operand(o_shape, at_q, at_q),
        _Operand(lse_shape, at_lse, at_lse),
        idle,
    )


def _axis(lies: _Axes, mesh: DeviceMesh, dim: int, tensors: Sequence[Any]) -> str | None:
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
class _Heads:
    """The key/value heads that a rank's query heads read; ``are_shared``: k and v are whole, and each takes its own."""

    own: range
    are_shared: bool


def _heads(spec: AttentionSpec, extents: Mapping[str, int], mesh: DeviceMesh, along: Sequence[str | None]) -> _Heads:
    """Raises ``ValueError`` where some rank would get a part of a group of query heads and more."""
    heads, kv_heads = extents["h"], extents["hkv"]
    if "h" not in along or not heads or not kv_heads or heads % kv_heads:  # the last is told by the op itself
        return _Heads(_part(kv_heads, mesh, along, "h"), are_shared=False)
    group = heads // kv_heads
    parts = [
        (_chunk(heads, mesh.shape, along, at), _chunk(kv_heads, mesh.shape, along, at)) for at in _places(mesh, along)
    ]
    mine = _part(heads, mesh, along, "h")
    own = range(mine.start // group, -(-mine.stop // group))
    if all((len(q), q.start) == (group * len(kv), group * kv.start) or not q for q, kv in parts):
        return _Heads(_part(kv_heads, mesh, along, "h"), are_shared=False)
    ranks = f"{heads} query heads of {kv_heads} key/value heads, over {len(parts)} ranks"
    if not all(_is_grouped(q, group) for q, _ in parts):
        raise ValueError(
            f"{ranks}: a rank would get a part of a group of {group} query heads beside another group; take a number "
            f"of ranks that divides {kv_heads}, or one that {kv_heads} divides and that divides {heads}"
        )
    if _reads(spec, {"hkv"}, {"Hkv"}):
        raise ValueError(f"{ranks}: ranks share key/value heads, and '{spec.name}' reads hkv or Hkv; k, v must not be")
    return _Heads(own if mine else range(0), are_shared=True)


def _is_grouped(heads: range, group: int) -> bool:
    """Whether these heads are whole groups, or lie in one."""
    if not heads:
        return True
    if heads.start % group == 0 and heads.stop % group == 0:
        return True
    return heads.start // group == (heads.stop - 1) // group


def _places(mesh: DeviceMesh, along: Sequence[str | None]) -> Iterator[tuple[int, ...]]:
    """Coordinates that differ in what shards heads."""
    return itertools.product(
        *(range(extent) if axis == "h" else (0,) for extent, axis in zip(mesh.shape, along, strict=True))
    )


def _part(extent: int, mesh: DeviceMesh, along: Sequence[str | None], axis: str) -> range:
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


# -- captured tensors --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Indexed:
    """Of a captured tensor the dimensions that every load indexes by an index of the language alone, by its name."""

    exact: Mapping[int, str]

    @classmethod
    def of(cls, spec: AttentionSpec, tensor: CapturedTensor) -> Indexed:
        """What the loads of a spec say."""
        loads = [node for node in walk(*_roots(spec)) if isinstance(node, Load) and node.tensor == tensor.name]
        exact = {}
        for dim, extent in enumerate(tensor.shape):
            for name, letters in _SIZES.items():
                if extent == size(letters) and all(_is_index(load.indices[dim], name) for load in loads):
                    exact[dim] = name
        return cls(exact)


def _sharded_dims(
    indexed: Indexed,
    x: Any,
    extents: Mapping[str, int],
    along: Sequence[str | None],
    whole: set[str],
    heads: _Heads,
) -> dict[int, str]:
    """The dimensions of a captured tensor that a rank holds its own part of, with their axes."""
    if not isinstance(x, DTensor):
        return {}
    found: dict[int, str] = {}
    for placement, axis in zip(x.placements, along, strict=True):
        dim: int | None = getattr(placement, "dim", None)
        name = indexed.exact.get(-1 if dim is None else dim)
        if dim is None or name is None or axis not in whole or name not in _INDICES[axis or ""]:
            continue
        if x.shape[dim] == extents[name] and not (name == "hkv" and heads.are_shared) and axis not in found.values():
            found[dim] = axis or ""
    return found


def _is_told_by_tensors_alone(spec: AttentionSpec, axis: str) -> bool:
    """Whether an axis means nothing but which part of captured tensors is read: no random bits, no arithmetic."""
    if spec.dropout is not None:
        return False
    names = _INDICES[axis]
    letters = {_SIZES[name] for name in names}
    declared = {tensor.name: tensor for tensor in spec.tensors}
    for tensor in spec.tensors:
        for extent in tensor.shape:
            if extent not in {size(each) for each in letters} and _mentions([extent], set(), letters):
                return False
    bare: list[Expr] = [param.default for param in spec.params if param.default is not None]
    todo: list[Expr] = list(_roots(spec))
    seen: set[Expr] = set()
    while todo:
        node = todo.pop()
        if node in seen:
            continue
        seen.add(node)
        if isinstance(node, Load):
            shape = declared[node.tensor].shape
            for index, extent in zip(node.indices, shape, strict=True):
                if not any(_is_index(index, name) and extent == size(_SIZES[name]) for name in names):
                    todo.append(index)
        elif isinstance(node, Symbol):
            bare.append(node)
        else:
            todo.extend(node.children)
    return not _mentions(bare, set(names), letters)


def _roots(spec: AttentionSpec) -> tuple[Expr, ...]:
    """Everything that a spec evaluates for a pair or a row."""
    layout = None if spec.layout is None else spec.layout.keep
    parts = [spec.scale, spec.score, spec.mask, layout, spec.weights.expression, spec.dropout]
    if spec.select is not None:  # a list is read where its first number stands
        parts.append(Load(ScalarType.INT, tensor=spec.select.tensor, indices=(*spec.select.indices, literal(0))))
    return tuple(each for each in parts if each is not None)


def _reads(spec: AttentionSpec, indices: set[str], letters: set[str]) -> bool:
    """Whether a spec speaks of these indices or sizes anywhere."""
    shapes = (extent for tensor in spec.tensors for extent in tensor.shape)
    defaults = (param.default for param in spec.params if param.default is not None)
    return _mentions((*_roots(spec), *shapes, *defaults), indices, letters)


def _mentions(roots: Iterable[Expr], indices: set[str], letters: set[str]) -> bool:
    names = {SymbolKind.INDEX: indices, SymbolKind.SIZE: letters}
    return any(isinstance(node, Symbol) and node.name in names.get(node.kind, ()) for node in walk(*roots))


def _is_index(expr: Expr, name: str) -> bool:
    return isinstance(expr, Symbol) and expr.kind is SymbolKind.INDEX and expr.name == name


# -- tensors -----------------------------------------------------------------------------------------------------------


def _local(x: DTensor, placements: Placements) -> Tensor:
    placed = x if x.placements == placements else x.redistribute(placements=placements)
    return placed.to_local()


def _made(x: Tensor, mesh: DeviceMesh, placements: Placements, shape: torch.Size) -> DTensor:
    strides = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(x, mesh, placements, run_check=False, shape=shape, stride=strides)


def _fitted(x: Tensor, dim: int, held: range, wanted: range) -> Tensor:
    """From what is held of a dimension to what is wanted: a part of it, or with zeros where nothing is held."""
    if held == wanted:
        return x
    if held.start <= wanted.start and wanted.stop <= held.stop:
        return x.narrow(dim, wanted.start - held.start, len(wanted))
    found = x.new_zeros([len(wanted) if axis == dim else extent for axis, extent in enumerate(x.shape)])
    found.narrow(dim, held.start - wanted.start, len(held)).copy_(x)
    return found
