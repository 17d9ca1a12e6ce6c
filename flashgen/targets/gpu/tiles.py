"""GpuPlan: how one variant runs on one GPU architecture, for every element type, and why."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Protocol, TypeAlias

from flashgen.ir.types import ElementType
from flashgen.plan.plan import Plan, Tiles
from flashgen.targets.gpu.recipe import Recipe
from flashgen.targets.gpu.tables import KeysOfBlock, RowsOfBlock


class Row(Protocol):
    """What tiles say of who works on them, and those that are considered."""

    @property
    def warps(self) -> int: ...
    @property
    def stages(self) -> int: ...
    @property
    def warpgroups(self) -> bool: ...


def multiplying(tiles: Row) -> str:
    """What multiplies: ``3 warpgroups``, ``4 warps``."""
    count, what = (tiles.warps // 4, "warpgroup") if tiles.warpgroups else (tiles.warps, "warp")
    return f"{count} {what}{'s' * (count > 1)}"


def staged(tiles: Row) -> str:
    """``2 stages``."""
    return f"{tiles.stages} stage{'s' * (tiles.stages > 1)}"


def _of_warpgroups(warps: int, producers: int, *, tensor_copies: bool) -> tuple[str, ...]:
    copies = "producer warps" if producers else "warpgroup copies for itself"
    return (f"{warps // 4} warpgroup{'s' * (warps > 4)}", copies, *(("tensor copies",) if tensor_copies else ()))


@dataclass(frozen=True)
class ForwardTiles(RowsOfBlock, Tiles):
    """B_r query rows over ``warps``; K and V in rings of ``stages`` tiles. ``sram_bytes``: shared memory of a block.

    ``warpgroups``: products are Hopper's, of four warps at a time, with operands in shared memory, which ``producers``
    more warps fill. The compiler leaves registers for ``blocks`` blocks a multiprocessor. ``tensor_copies``: these
    bring K and V, one thread starts them, and blocks take one query tile after another; ``begins_next``: Q, for which
    there are ``q_places``, the list and the first K of the next one come while this one is worked on; ``pairs_staged``:
    what pairs read of a captured tensor comes by way of shared memory, a warp's rows for that warp. ``registers`` of a
    thread that multiplies, ``producer_registers`` of one of the producers, where there are some. ``split`` warps share
    rows, each with its part of O's columns and scores of ``weighed`` keys at a time; P then goes through shared memory.
    Two warpgroups for which others copy weigh key tiles in turns instead. ``cluster`` blocks have a part of the rows
    each, of so many warps, and share their copies of K and V.
    """

    warps: int
    stages: int
    q_in_registers: bool
    warpgroups: bool = False
    producers: int = 0
    blocks: int = 1
    tensor_copies: bool = False
    begins_next: bool = False
    q_places: int = 1
    pairs_staged: bool = False
    registers: int = 0
    producer_registers: int = 0
    split: int = 1
    weighed: int = 0
    cluster: int = 1

    @property
    def kind(self) -> tuple[str, ...]:
        split = ("split head dimension",) if self.split > 1 else ()
        if self.warpgroups:
            turns = ("turns",) if self.takes_turns else ()
            cluster = (f"{self.cluster} blocks a cluster",) if self.cluster > 1 else ()
            roles = _of_warpgroups(self.warps, self.producers, tensor_copies=self.tensor_copies)
            return (*roles, *split, *turns, *cluster)
        q = ("Q in registers",) if self.q_in_registers else ()
        return ("warps", f"{min(self.stages, 2)} stage{'s' * (self.stages > 1)}", *q, *split)


@dataclass(frozen=True)
class BackwardTiles(KeysOfBlock, Tiles):
    """B_c keys over ``warps`` for dK and dV, B_r queries a step.

    ``split`` warps share 16 keys, each with its part of the head dimension; P and dS then go through shared memory.
    ``sram_bytes`` is what the kernel needs that also adds up dQ, ``keys_sram_bytes`` what it needs without. With
    ``warpgroups`` dO and dS have as many stages as Q, ``producers`` more warps copy, and ``dq_column_groups``
    warpgroups share a tile of dQ. The compiler leaves registers for ``blocks`` blocks a multiprocessor.
    ``tensor_copies``: these bring Q and dO, and one thread starts them. Blocks that add up dQ, too, may be
    ``persistent``: they take one key tile after another; ``begins_next``: the list of the next one comes while this one
    is worked on; ``pairs_staged``: as forward, all by a warp that copies. ``weighed``: queries whose scores a warp has
    in registers at a time. Where two warpgroups have half of dQ's columns each, there is one stage of dO and dS, and
    ``dq_sent`` of these columns leave by way of shared memory; None where all of dQ does. ``cluster`` blocks have a
    part of the columns each, and exchange what they sum up of S and dP; where a cluster ``divides_keys`` they have a
    part of a tile's keys each, and exchange dS.
    """

    warps: int
    stages: int
    split: int
    keys_sram_bytes: int
    warpgroups: bool = False
    producers: int = 0
    dq_column_groups: int = 1
    blocks: int = 1
    tensor_copies: bool = False
    persistent: bool = False
    begins_next: bool = False
    pairs_staged: bool = False
    weighed: int = 0
    dq_sent: int | None = None
    registers: int = 0
    producer_registers: int = 0
    cluster: int = 1
    divides_keys: bool = False

    @property
    def kind(self) -> tuple[str, ...]:
        if self.warpgroups:
            shared: tuple[str, ...] = ("split head dimension",) if self.shares_keys else ()
            shared += (f"{self.cluster} blocks a cluster",) if self.cluster > 1 else ()
            return (*_of_warpgroups(self.warps, self.producers, tensor_copies=self.tensor_copies), *shared)
        split = ("split head dimension",) if self.split > 1 else ()
        return ("warps", f"{self.stages} stage{'s' * (self.stages > 1)}", *split)

    @property
    def kind_of_one_pass(self) -> tuple[str, ...]:
        return ("dQ added up", *(("persistent",) if self.persistent else ()))


@dataclass(frozen=True)
class QueryTiles(Tiles):
    """B_r query rows over ``warps`` for dQ, where it has a kernel of its own; B_c keys a step.

    ``split`` warps share rows as in the forward pass; dS then goes through shared memory.
    """

    warps: int
    stages: int
    warpgroups: bool = False
    split: int = 1
    weighed: int = 0

    @property
    def kind(self) -> tuple[str, ...]:
        split = ("split head dimension",) if self.split > 1 else ()
        return ("warpgroups" if self.warpgroups else "warps", *split)


AnyTiles: TypeAlias = ForwardTiles | BackwardTiles | QueryTiles


@dataclass(frozen=True)
class ElementPlan:
    """The tiles of every pass for one element type of q, k, v and o."""

    element: ElementType
    forward: ForwardTiles
    backward: BackwardTiles
    queries: QueryTiles

    def of_kernel(self, kernel: str) -> AnyTiles | None:
        """The tiles that a kernel goes through; None for those that stream rows."""
        match kernel:
            case "forward":
                return self.forward
            case "backward" | "keys":
                return self.backward
            case "queries":
                return self.queries
        return None


@dataclass(frozen=True, repr=False)
class GpuPlan(Plan):
    """The decisions for one head dimension on the architecture of this name, by element type.

    ``recipe``: that of the spec, before pins, which says what the kernels with these tiles do.
    """

    target: str
    recipe: Recipe = field(compare=False)
    elements: tuple[ElementPlan, ...]

    @property
    def device(self) -> str:
        """What the plan is for."""
        return self.target

    @property
    def symbol(self) -> str:
        """What the name of every kernel begins with."""
        variant = self.recipe.variant
        return f"{variant.spec.name}_d{str(variant.head_dim).replace('/', '_')}{variant.kind.mark}"

    @property
    def own(self) -> ElementPlan:
        """The tiles of a plan of one element type, as those of kernels are."""
        (found,) = self.elements
        return found

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

    @property
    def elements_apart(self) -> tuple[ElementType, ...]:
        return tuple(self.by_element)

    def of_element(self, element: ElementType) -> Mapping[str, Tiles]:
        each = self.by_element.get(element)
        if each is None:  # no tile fits
            return {}
        return {"forward": each.forward, "backward": each.backward, "queries": each.queries}

    def joined(self, plans: Mapping[ElementType, GpuPlan]) -> GpuPlan:
        found = plans.values()
        return replace(
            self,
            elements=tuple(plan.by_element[element] for element, plan in plans.items()),
            reasons=tuple(dict.fromkeys(reason for plan in found for reason in plan.reasons)),
            rejected=tuple(dict.fromkeys(lost for plan in (self, *found) for lost in plan.rejected)),
            decisions=tuple(dict.fromkeys(each for plan in found for each in plan.decisions)),
        )

    def to_json(self) -> dict[str, object]:
        """The plan as plain data, for ``--json`` and manifests. The recipe is none: it follows from the spec."""
        shared = Plan(**{each.name: getattr(self, each.name) for each in fields(Plan)})
        elements = [asdict(each) | {"element": str(each.element)} for each in self.elements]
        return asdict(shared) | {"target": self.target, "elements": elements}
