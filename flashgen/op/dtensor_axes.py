"""Along which axes a mesh shards a call, and what a rank has of each.

In: a spec, the extents and placements of q, k and v. Out: an axis for each mesh dimension, ranges. Raises
``ValueError`` for what cannot be computed from shards.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Placement

from flashgen.ir.spec import AttentionSpec
from flashgen.op.checks import reads_key_heads

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
