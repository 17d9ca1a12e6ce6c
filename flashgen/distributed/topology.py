"""The groups of ranks along which keys and heads travel.

In: a mesh of one or two dimensions, a process group, or None, and the methods of its dimensions. Out: a ``Topology``.
Ranks are counted over the whole mesh, its last dimension first, as ``Partition`` counts them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from flashgen.distributed.exchange import Group, check_member
from flashgen.distributed.needed_keys import Held, joined

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
