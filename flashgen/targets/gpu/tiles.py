"""GpuPlan: how one variant runs on one GPU architecture, for every element type, and why; registers that tiles take."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any

from flashgen.analysis.selection import selected
from flashgen.analysis.variant import Variant
from flashgen.ir.types import ElementType
from flashgen.kinds.kind import PassName
from flashgen.plan.plan import Plan, Spill, Tiles
from flashgen.targets.gpu import model
from flashgen.targets.gpu.recipe import Recipe
from flashgen.targets.gpu.schedules import AnyBackward, AnyForward, AnyQueries, Forward, Schedule

# What reasons and rejections call the tiles of a pass, and which of them a kernel goes through.
TILES_OF: Mapping[PassName, tuple[str, ...]] = {"forward": ("forward",), "backward": ("backward", "queries")}
OF_KERNEL = {"forward": "forward", "backward": "backward", "keys": "backward", "queries": "queries"}


@dataclass(frozen=True)
class ElementPlan:
    """The tiles of every pass for one element type of q, k, v and o."""

    element: ElementType
    forward: AnyForward
    backward: AnyBackward
    queries: AnyQueries

    @property
    def passes(self) -> Mapping[str, Schedule]:
        """By what reasons call them."""
        return {"forward": self.forward, "backward": self.backward, "queries": self.queries}

    def of_kernel(self, kernel: str) -> Schedule | None:
        """The tiles that a kernel goes through; None for those that stream rows."""
        return self.passes[OF_KERNEL[kernel]] if kernel in OF_KERNEL else None


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
        """The backward pass's tile of the first element type."""
        return self.elements[0].backward

    @property
    def passes(self) -> Mapping[str, Tiles]:
        """The tiles by the names of the passes, which the names of element types follow."""
        return {f"{name}, {each.element}": tiles for each in self.elements for name, tiles in each.passes.items()}

    def reasons_of(self, passes: Collection[PassName]) -> tuple[str, ...]:
        """The reasons of these passes, and those that speak of none."""
        others = tuple(each for name, tiles in TILES_OF.items() if name not in passes for each in tiles)
        return tuple(each for each in self.reasons if not each.startswith(others))

    @property
    def by_element(self) -> Mapping[ElementType, ElementPlan]:
        """The plans by element type."""
        return {each.element: each for each in self.elements}

    @property
    def elements_apart(self) -> tuple[ElementType, ...]:
        return tuple(self.by_element)

    def of_element(self, element: ElementType) -> Mapping[str, Tiles]:
        each = self.by_element.get(element)
        return {} if each is None else each.passes  # none: no tile fits

    def joined(self, plans: Mapping[ElementType, tuple[GpuPlan, GpuPlan]]) -> GpuPlan:
        found = tuple(plan for both in plans.values() for plan in both)
        return replace(
            self,
            elements=tuple(
                replace(backward.by_element[each], forward=forward.by_element[each].forward)
                for each, (forward, backward) in plans.items()
            ),
            reasons=tuple(dict.fromkeys(reason for plan in found for reason in plan.reasons)),
            rejected=tuple(dict.fromkeys(lost for plan in (self, *found) for lost in plan.rejected)),
            decisions=tuple(dict.fromkeys(each for plan in found for each in plan.decisions)),
        )

    def to_json(self) -> dict[str, object]:
        """The plan as plain data, for ``--json`` and manifests. The recipe is none: it follows from the spec."""
        shared = Plan(**{each.name: getattr(self, each.name) for each in fields(Plan)})
        elements = [asdict(each) | {"element": str(each.element)} for each in self.elements]
        return asdict(shared) | {"target": self.target, "elements": elements}


# -- registers of a thread, before anything is compiled ----------------------------------------------------------------

# The compiler's own report decides in the end; a test holds the two against each other.
MOST_REGISTERS = 255  # of a thread, on every architecture
# Beside the accumulators. Compiled kernels for causal attention take 40 to 85 more in 16 bits, 42 to 103 in float32,
# whose operands are split in two.
_BESIDE, _SPLITTING = 64, 24
# Bytes of registers that a kernel may store and load again and still be taken: numbers that live across the loops, and
# are read once a tile at most.
HARMLESS_SPILL = 160
# Such bytes where warpgroups multiply: what comes next has no warpgroups, and was measured to take 1.6 times as long.
HARMLESS_WARPGROUP_SPILL = 320
# A register too many is stored once and loaded once. Measured: 128 × 128 spills 1,276 bytes and 64 × 128, whose warps
# keep 64 numbers less, 636.
_SPILLED_BYTES = 8
# Tiles that agree in these have as many registers a thread.
_LIMITS = ("warpgroups", "warps", "producers", "blocks", "cluster", "divides_keys", "s_columns")
_MORE = ("tensor_copies", "persistent", "prefetches_next", "overlaps_next", "q_places", "pairs_staged")


def harmless_spill(tiles: Schedule) -> int:
    """Bytes that a kernel may spill and still be taken."""
    return HARMLESS_WARPGROUP_SPILL if tiles.warpgroups else HARMLESS_SPILL


def still_spilled(variant: Variant, spill: Spill, tiles: Schedule) -> int:
    """Bytes that a tile will spill, from what another of the pass did with as many registers a thread; 0 of others."""
    other: Any = spill.tile
    if any(getattr(other, name, None) != getattr(tiles, name, None) for name in (*_LIMITS, *_MORE)):
        return 0
    saved: int = other.accumulators(variant, spill.element) - tiles.accumulators(variant, spill.element)
    return max(0, spill.bytes - _SPILLED_BYTES * saved)


def registers(variant: Variant, element: ElementType, tiles: Schedule) -> int:
    """The estimate; more than ``MOST_REGISTERS`` where a kernel will spill."""
    splitting = _SPLITTING if element is ElementType.F32 else 0
    return tiles.accumulators(variant, element) + _BESIDE + splitting


def finds_selected(tiles: Forward, variant: Variant, element: ElementType) -> bool:
    """Over caches: whether tiles with a selected key are found first. Their numbers take the place of K and V."""
    if selected(variant.keep, variant.spec.tensors) is None:
        return False
    of_keys, widths = model.element_of_keys(variant, element), (variant.head_dim.qk, variant.head_dim.v)
    room = sum(model.tile_bytes(tiles.Bc, model.padded(width), of_keys) for width in widths)
    return tiles.stages * room >= 2 * model.WINDOW


def merging_shares(tiles: Forward, variant: Variant) -> int:
    """Over caches: blocks that merge a tile's parts, each with so much of the columns: 32 or more, or a warp's."""
    width = variant.head_dim.v
    if tiles.split > 1:
        if width != model.padded(width):
            return 1
        counts = range(width // 32 // tiles.split * tiles.split, tiles.split, -tiles.split)
        return next((count for count in counts if width % (16 * count) == 0), tiles.split)
    return next(count for count in (4, 2, 1) if count == 1 or width % (32 * count) == 0)


def merging_warps(tiles: Forward, variant: Variant) -> int:
    """Over caches: warps of a team that has all rows of a tile, and a block's columns."""
    return tiles.warps // (tiles.split if merging_shares(tiles, variant) > 1 else 1)
