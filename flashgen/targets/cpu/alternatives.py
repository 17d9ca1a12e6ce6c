"""Runners-up on a CPU: other tiles that fit, by the model.

In: a ``Variant``, a chosen tile, a device, a shape. Out: ``RunnerUp``.
"""

from __future__ import annotations

import itertools

from flashgen.analysis.variant import Variant
from flashgen.ir.shape import Shape
from flashgen.ir.types import ElementType
from flashgen.plan.alternatives import MOST, RunnerUp, in_order, runner_up, without_mask
from flashgen.plan.measured import Tile
from flashgen.plan.plan import Tiles
from flashgen.targets.cpu import cost as cpu_cost
from flashgen.targets.cpu.device import Cpu
from flashgen.targets.cpu.plan import plan_cpu
from flashgen.targets.cpu.products import Products, repays_parts
from flashgen.targets.cpu.recipes import pass_to_plan, usable_bytes


def cpu_runners_up(
    variant: Variant, products: Products, name: str, tile: Tiles, device: Cpu, shape: Shape
) -> tuple[RunnerUp, ...]:
    """The best other tiles by the model."""
    chosen = cpu_cost.pass_time(variant, products, name, tile, device, shape)
    others = [other for other in cpu_candidates(variant, products, name, device) if other != tile]
    dense = without_mask(variant)
    others.sort(key=lambda other: cpu_cost.pass_time(dense, products, name, other, device, shape).seconds)
    found = []
    for other in others[:MOST]:
        predicted = cpu_cost.pass_time(variant, products, name, other, device, shape)
        found.append(runner_up(other, f"{other.sram_bytes / 1024:.0f} KiB", predicted, chosen))
    return in_order(found)


def cpu_candidates(variant: Variant, products: Products, name: str, device: Cpu) -> tuple[Tiles, ...]:
    """Tiles that fit a core's cache, and that kernels multiply in this way. What the spec pins stays pinned."""
    this = pass_to_plan(variant, products, name)
    rows, columns = this.candidates(variant)
    if products is Products.SPLIT:
        rows = tuple(Br for Br in rows if repays_parts(Br))
    tiles = (this.tile(variant, device, Br, Bc) for Br, Bc in itertools.product(rows, columns))
    return tuple(tile for tile in tiles if tile.sram_bytes <= usable_bytes(device))


def predicted(variant: Variant, device: Cpu, shape: Shape, element: ElementType, name: str) -> dict[Tile, float]:
    """Predicted seconds of every size that fits, the planner's choice first; what the schedule pins stays."""
    products, chosen = plan_cpu(variant, device).of_call(device, element, shape)[name]
    tiles = (chosen, *cpu_candidates(variant, products, name, device))
    return {
        Tile(each.Br, each.Bc): cpu_cost.pass_time(variant, products, name, each, device, shape).seconds
        for each in tiles
    }
