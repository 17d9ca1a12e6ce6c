"""Runners-up on a GPU: tiles that the planner could have taken, and what the model says of them.

In: a ``Recipe``, the chosen tiles, a device, a shape. Out: ``RunnerUp``. Candidates are pinned through the schedule,
so that each goes through the planner's own checks.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace

from flashgen.analysis.variant import Variant
from flashgen.diagnostics import SpecError
from flashgen.ir.expr import literal
from flashgen.ir.shape import Shape
from flashgen.ir.spec import Schedule
from flashgen.ir.types import ElementType
from flashgen.plan.measured import Pins, Tile, counted
from flashgen.plan.report import MOST, RunnerUp, runner_up
from flashgen.targets.gpu.cost import pass_time
from flashgen.targets.gpu.plan import plan_gpu
from flashgen.targets.gpu.product import Gpu
from flashgen.targets.gpu.recipe import Recipe
from flashgen.targets.gpu.tiles import ElementPlan

GPU_ROWS, GPU_COLUMNS, GPU_WARPS = (64, 128, 192), (32, 64, 96, 128), (4, 8, 12)


def gpu_candidates(recipe: Recipe, gpu: Gpu, tiles: ElementPlan, name: str) -> Iterator[ElementPlan]:
    """Plans for other tiles of a pass, of this element type. What the spec pins stays pinned."""
    schedule, seen = recipe.variant.spec.schedule, {tiles.passes[name]}
    for Br, Bc, warps in itertools.product(GPU_ROWS, GPU_COLUMNS, GPU_WARPS):
        if name == "forward":
            pinned = replace(schedule, Br=schedule.Br or Br, Bc=schedule.Bc or Bc, warps=schedule.warps or warps)
        else:
            pinned = replace(
                schedule,
                backward_Br=schedule.backward_Br or Br,
                backward_Bc=schedule.backward_Bc or Bc,
                backward_warps=schedule.backward_warps or warps,
            )
        found = pinned_plan(recipe, gpu, tiles.element, pinned)
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


def predicted(variant: Variant, gpu: Gpu, shape: Shape, element: ElementType, name: str) -> dict[Tile, float]:
    """Predicted seconds of the planner's choice, which comes first, and of what the model compares it with."""
    plan = gpu.target.plan(variant, Pins(element=element))
    recipe, chosen = plan.recipe, plan.own
    found: dict[Tile, float] = {}
    for plans in (chosen, *gpu_candidates(recipe, gpu, chosen, name)):
        found.setdefault(tile_of(plans, name), pass_time(recipe, plans, gpu, shape, name).seconds)
    return found


def tile_of(plan: ElementPlan, name: str) -> Tile:
    """What a schedule would have to pin for this tile of a pass."""
    tiles = plan.passes[name]
    return Tile(tiles.Br, tiles.Bc, tiles.warps, tiles.stages)
