"""What the families of GPUs know of a product: what is compiled for it, and what the model of time says.

Candidates are pinned through the schedule, so that each goes through the planner's own checks. The planner's tables
were ordered by times of long sequences with many heads; there they decide alone. Where queries are few, smaller tiles
make more blocks of them, and the model of time says how much that is worth. It is off by some 13 %, so that it is
asked for what shortness changes alone: a tile's time beside the planner's choice at the class's shape, over the same at
a long one. A tile is taken where that is a gain of ``MARGIN`` or more. The choice follows from its arguments alone, so
that a call takes the same plan each time and everywhere.

At most one tile beside the planner's comes from each of ``PROBES``, because each plan is another compilation. A call
over a cache goes by its rows instead: the query heads and queries of a key/value head.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from flashgen.analysis.variant import Variant
from flashgen.diagnostics import SpecError
from flashgen.ir.expr import literal
from flashgen.ir.shape import Shape
from flashgen.ir.spec import Schedule
from flashgen.ir.types import ElementType
from flashgen.plan.measured import PASSES, PLANNERS_OWN, Pins, ShapeClass, Tile, counted
from flashgen.plan.paper import BlockSizes
from flashgen.plan.report import MOST, PassReport, RunnerUp, pass_report, reason_of, runner_up
from flashgen.targets.gpu.bytes import kernels_of
from flashgen.targets.gpu.cost import pass_time
from flashgen.targets.gpu.layouts import layout_of
from flashgen.targets.gpu.plan import plan_gpu
from flashgen.targets.gpu.product import Gpu
from flashgen.targets.gpu.recipe import Recipe
from flashgen.targets.gpu.recipes import of_rows
from flashgen.targets.gpu.schedules import KeyWarps, Warps
from flashgen.targets.gpu.target import GpuTarget
from flashgen.targets.gpu.tiles import OF_KERNEL, ElementPlan, GpuPlan

GPU_ROWS, GPU_COLUMNS, GPU_WARPS = (64, 128, 192), (32, 64, 96, 128), (4, 8, 12)


def gpu_candidates(recipe: Recipe, gpu: Gpu, tiles: ElementPlan, name: str) -> Iterator[ElementPlan]:
    """Plans for other tiles of a pass, of this element type. What the spec pins stays pinned."""
    schedule, seen = recipe.variant.spec.schedule, {tiles.passes[name]}
    names = ("Br", "Bc", "warps") if name == "forward" else ("backward_Br", "backward_Bc", "backward_warps")
    for sizes in itertools.product(GPU_ROWS, GPU_COLUMNS, GPU_WARPS):
        pins: dict[str, Any] = {pin: getattr(schedule, pin) or size for pin, size in zip(names, sizes, strict=True)}
        found = pinned_plan(recipe, gpu, tiles.element, replace(schedule, **pins))
        if found is not None and found.passes[name] not in seen:
            seen.add(found.passes[name])
            yield found


def pinned_plan(recipe: Recipe, gpu: Gpu, element: ElementType, schedule: Schedule) -> ElementPlan | None:
    """The plan of this element type under another schedule, None where that cannot work."""
    spec = replace(recipe.variant.spec, schedule=schedule, dtypes=(element,))
    try:
        return plan_gpu(recipe.of(spec=spec), gpu.target, gpu.target.recipes).own
    except SpecError:
        return None


def gpu_runners_up(recipe: Recipe, tiles: ElementPlan, gpu: Gpu, shape: Shape, name: str) -> tuple[RunnerUp, ...]:
    """The best other tiles by the model, which may prefer some that come later in the planner's order."""
    chosen = pass_time(recipe, tiles, gpu, shape, name)
    dense = recipe.of(keep=literal(True))  # a mask's tiles take time to count
    candidates = gpu_candidates(recipe, gpu, tiles, name)
    others = sorted(candidates, key=lambda other: pass_time(dense, other, gpu, shape, name).seconds)
    found = []
    for other in others[:MOST]:
        tile = other.passes[name]
        what = f"{tile.multipliers}, {counted(tile.stages, 'stage')}, {tile.sram_bytes / 1024:.0f} KiB"
        found.append(runner_up(tile, what, pass_time(recipe, other, gpu, shape, name), chosen))
    return tuple(sorted(found, key=lambda each: each.seconds))


def tile_of(plan: ElementPlan, name: str) -> Tile:
    """What a schedule would have to pin for this tile of a pass."""
    tiles = plan.passes[name]
    return Tile(tiles.Br, tiles.Bc, tiles.warps, tiles.stages)


MARGIN = 1.05  # over the planner's choice, by the model: half of what it is off by
LOOKING = 1.1  # times as long as the model says takes a tile that looks for maxima where the planner's need not
LONG = Shape(1, 64, 64, 8192, 8192)  # as where the tables were measured; longer and more is no other class
# Heads that leave multiprocessors without a block, and many short sequences.
PROBES = (Shape(1, 8, 8, 1024, 1024), Shape(1, 64, 64, 512, 512))


@dataclass(frozen=True)
class Rival:
    """A tile of one pass that some class may take. ``usual``: the planner's time over its time for long sequences.

    ``handicap``: what the model does not say of it.
    """

    tile: Tile
    plan: ElementPlan
    usual: float
    handicap: float


@dataclass(frozen=True)
class Rivals:
    """The planner's own tiles of an element type, and the few that short calls may take instead, by pass."""

    recipe: Recipe
    gpu: Gpu
    own: ElementPlan
    passes: Mapping[str, tuple[Rival, ...]]

    def of_class(self, shape_class: ShapeClass, group: int) -> Pins:
        """What calls of a class take; ``group`` query heads share a key/value head."""
        shape = typical(shape_class, group)
        tiles: dict[str, Tile] = {}
        reasons = []
        for name in PASSES:
            # The model calls 64 × 64 a tenth faster where heads share keys; it takes 1.2 to 1.75 times as long (H200).
            if name == "backward" and group > 1:
                continue
            best, gain = self._best(name, shape)
            if best is not None:
                tiles[name] = best.tile
                reasons.append(
                    f"{name}, {shape_class}: B_r × B_c = {best.tile}: by the model {gain - 1:.0%} faster there than "
                    f"{tile_of(self.own, name)}, which is chosen for long sequences"
                )
        element = self.own.element if tiles else None
        return Pins(tiles.get("forward"), tiles.get("backward"), element, tuple(reasons))

    def _best(self, name: str, shape: Shape) -> tuple[Rival | None, float]:
        """The rival that gains most, at least the margin; None where the planner's choice stays."""
        own = pass_time(self.recipe, self.own, self.gpu, shape, name).seconds
        best, most = None, MARGIN
        for each in self.passes[name]:
            seconds = pass_time(self.recipe, each.plan, self.gpu, shape, name).seconds
            gain = own / seconds / max(1.0, each.usual) / each.handicap
            if gain >= most:
                best, most = each, gain
        return best, most


@functools.lru_cache(maxsize=64)
def rivals(variant: Variant, gpu: Gpu, element: ElementType) -> Rivals:
    """The plans that calls choose from. Raises ``SpecError``."""
    plan = gpu.target.plan(variant, Pins(element=element))
    recipe, own = plan.recipe, plan.own
    return Rivals(recipe, gpu, own, {name: _rivals_of_pass(recipe, gpu, own, name) for name in PASSES})


def _rivals_of_pass(recipe: Recipe, gpu: Gpu, own: ElementPlan, name: str) -> tuple[Rival, ...]:
    def seconds(plan: ElementPlan, shape: Shape) -> float:
        return pass_time(recipe, plan, gpu, shape, name).seconds

    others = {tile_of(plan, name): plan for plan in gpu_candidates(recipe, gpu, own, name)}
    others.pop(tile_of(own, name), None)
    if recipe.variant.kind.ragged:  # each block finds its sequences: two others hide that, one does not
        others = {tile: plan for tile, plan in others.items() if getattr(plan, name).blocks > 2}
    found: dict[Tile, Rival] = {}
    for shape in PROBES if others else ():
        tile = min(others, key=lambda each: seconds(others[each], shape))
        if tile not in found:
            plan = others[tile]
            looks = name == "forward" and own.forward.maxima_by_sums(recipe) > plan.forward.maxima_by_sums(recipe)
            usual = seconds(own, LONG) / seconds(plan, LONG)
            found[tile] = Rival(tile, plan, usual, LOOKING if looks else 1.0)
    return tuple(found.values())


def typical(shape_class: ShapeClass, group: int) -> Shape:
    """The shape that stands for a class: its largest, where that has no longer rows, and no more, than a long one."""
    q_len, kv_len = min(shape_class.q_len, LONG.q_len), min(shape_class.kv_len, LONG.kv_len)
    kv_heads = max(1, min(shape_class.heads, LONG.heads * LONG.q_len // max(q_len, 1)) // group)
    return Shape(1, kv_heads * group, kv_heads, q_len, kv_len)


def pins_of_rows(plan: GpuPlan, element: ElementType, rows: int) -> Pins:
    """The pins of a call whose key/value heads have so many rows; none where it takes the planner's own tiles."""
    own = plan.by_element.get(element)
    if own is None:
        return PLANNERS_OWN
    tiles = of_rows(plan.recipe, element, own.forward, plan.sram_bytes, rows)
    if tiles == own.forward:
        return PLANNERS_OWN
    reason = f"forward, {element}: B_r = {tiles.Br}: {rows} rows of queries for a key/value head"
    return Pins(Tile(tiles.Br, tiles.Bc, tiles.warps, tiles.stages), element=element, reasons=(reason,))


class GpuFamily:
    """``Family`` of GPUs; see there for what each method is."""

    def target(self, device: Gpu) -> GpuTarget:
        return device.target

    def identity(self, device: Gpu) -> None:  # noqa: ARG002 - a Family's
        """The name that a board gives, which a row of the table does not know."""
        return

    def by_length(self, device: Gpu, variant: Variant, element: ElementType) -> Rivals:
        return rivals(variant, device, element)

    def cost(self, device: Gpu, variant: Variant, plan: GpuPlan, shape: Shape) -> tuple[PassReport, ...]:  # noqa: ARG002
        """Forward and backward of every element type."""
        reports, recipe = [], plan.recipe
        for tiles in plan.elements:
            element = tiles.element
            for name in PASSES:
                found = ((kernel, tiles.of_kernel(kernel)) for kernel in kernels_of(recipe, name))
                used = {OF_KERNEL[kernel]: each for kernel, each in found if each is not None}
                first = next(iter(used.values()))
                reports.append(
                    pass_report(
                        name,
                        element,
                        recipe.variant,
                        shape,
                        tiles=tuple(used.values()),
                        buffers={
                            kernel: layout_of(recipe, element, each, with_dq=recipe.one_pass).buffers
                            for kernel, each in used.items()
                        },
                        time=pass_time(recipe, tiles, device, shape, name),
                        sram=device.target.block_bytes,
                        kernel_bytes=functools.partial(_tile_bytes, recipe, element, name),
                        runners_up=gpu_runners_up(recipe, tiles, device, shape, name),
                        reason=reason_of(plan.reasons, (f"{name}, {element}", name), first),
                    )
                )
        return tuple(reports)

    def candidates(
        self, device: Gpu, variant: Variant, shape: Shape, element: ElementType, name: str
    ) -> dict[Tile, float]:
        """The planner's choice comes first, then what the model compares with it."""
        plan = device.target.plan(variant, Pins(element=element))
        recipe, chosen = plan.recipe, plan.own
        found: dict[Tile, float] = {}
        for plans in (chosen, *gpu_candidates(recipe, device, chosen, name)):
            found.setdefault(tile_of(plans, name), pass_time(recipe, plans, device, shape, name).seconds)
        return found


def _tile_bytes(recipe: Recipe, element: ElementType, name: str, blocks: BlockSizes) -> int:
    """What a kernel keeps with tiles of this size."""
    forward, keys = Warps(blocks.Br, blocks.Bc, 1), KeyWarps(blocks.Br, blocks.Bc, blocks.Bc // 16)
    return layout_of(recipe, element, forward if name == "forward" else keys).bytes
