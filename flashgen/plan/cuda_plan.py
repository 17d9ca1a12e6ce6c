"""CudaPlan: how one variant runs on one GPU architecture, for every element type, and why."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass

from flashgen.ir.types import ElementType
from flashgen.plan.plan import Rejection, Tiles


@dataclass(frozen=True)
class ForwardTiles(Tiles):
    """B_r query rows over ``warps``; K and V in rings of ``stages`` tiles. ``sram_bytes``: shared memory of a block.

    ``warpgroups``: products are Hopper's, of four warps at a time, with operands in shared memory, which ``loaders``
    more warps fill. The compiler leaves registers for ``blocks`` blocks a multiprocessor. ``tensor_copies``: these
    bring K and V, and one thread starts them.
    """

    warps: int
    stages: int
    q_in_registers: bool
    warpgroups: bool = False
    loaders: int = 0
    blocks: int = 1
    tensor_copies: bool = False


@dataclass(frozen=True)
class BackwardTiles(Tiles):
    """B_c keys over ``warps`` for dK and dV, B_r queries a step.

    ``split`` warps share 16 keys, each with its part of the head dimension; P and dS then go through shared memory.
    ``sram_bytes`` is what the kernel needs that also adds up dQ, ``keys_sram_bytes`` what it needs without. With
    ``warpgroups`` dO and dS have as many stages as Q, ``loaders`` more warps copy, and ``dq_column_groups`` warpgroups
    share a tile of dQ. The compiler leaves registers for ``blocks`` blocks a multiprocessor. ``tensor_copies``: these
    bring Q and dO, and one thread starts them. Blocks that add up dQ, too, and where one ``stays``, take one key tile
    after another.
    """

    warps: int
    stages: int
    split: int
    keys_sram_bytes: int
    warpgroups: bool = False
    loaders: int = 0
    dq_column_groups: int = 1
    blocks: int = 1
    tensor_copies: bool = False
    stays: bool = False


@dataclass(frozen=True)
class QueryTiles(Tiles):
    """B_r query rows over ``warps`` for dQ, where it has a kernel of its own; B_c keys a step."""

    warps: int
    stages: int
    warpgroups: bool = False


@dataclass(frozen=True)
class ElementPlan:
    """The tiles of every pass for one element type of q, k, v and o."""

    element: ElementType
    forward: ForwardTiles
    backward: BackwardTiles
    queries: QueryTiles


@dataclass(frozen=True)
class CudaPlan:
    """The decisions for one head dimension and one target; ``reasons`` are sentences in the order of the decisions."""

    spec_name: str
    head_dim: str
    target: str
    sram_bytes: int
    elements: tuple[ElementPlan, ...]
    reasons: tuple[str, ...]
    rejected: tuple[Rejection, ...]

    @property
    def device(self) -> str:
        """What the plan is for."""
        return self.target

    @property
    def forward(self) -> Tiles:
        """The tile of the first element type, for tables that show one."""
        return self.elements[0].forward

    @property
    def backward(self) -> Tiles:
        """The same for the backward pass."""
        return self.elements[0].backward

    @property
    def passes(self) -> Mapping[str, Tiles]:
        """The tiles by the names of the passes, which the names of element types follow."""
        return {
            f"{name}, {each.element}": tiles
            for each in self.elements
            for name, tiles in (("forward", each.forward), ("backward", each.backward), ("queries", each.queries))
        }

    @property
    def by_element(self) -> Mapping[ElementType, ElementPlan]:
        """The plans by element type."""
        return {each.element: each for each in self.elements}

    def to_json(self) -> dict[str, object]:
        """The plan as plain data, for ``--json`` and manifests."""
        return asdict(self) | {"elements": [asdict(each) | {"element": str(each.element)} for each in self.elements]}
