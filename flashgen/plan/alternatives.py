"""Runners-up: tiles that the planner could have taken, what the model says of them, and why they lost.

In: a ``Variant``, the chosen tiles, a device, a shape. Out: ``RunnerUp``. Candidates are pinned through the schedule,
so that each goes through the planner's own checks.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace

from flashgen.analysis.variant import Variant
from flashgen.diagnostics import SpecError
from flashgen.ir.expr import literal
from flashgen.ir.shape import Shape
from flashgen.ir.spec import Schedule
from flashgen.plan import cpu_time, gpu_time
from flashgen.plan.cuda_plan import BackwardTiles, ElementPlan, ForwardTiles, QueryTiles
from flashgen.plan.cuda_planner import plan_cuda
from flashgen.plan.device_table import Gpu
from flashgen.plan.devices import Device
from flashgen.plan.plan import Tiles
from flashgen.plan.planner import pass_to_plan, usable_bytes
from flashgen.plan.prediction import LIMITS, PassTime
from flashgen.plan.products import Products, repays_parts

MOST = 4  # that are shown
MODEL_ERROR = 0.03  # differences that mean nothing
GPU_ROWS, GPU_COLUMNS, GPU_WARPS = (64, 128, 192), (32, 64, 96, 128), (4, 8, 12)


@dataclass(frozen=True)
class RunnerUp:
    """A tile that was not chosen. ``slower``: predicted time over that of the choice, less 1."""

    Br: int
    Bc: int
    what: str
    seconds: float
    slower: float
    why: str


def gpu_candidates(variant: Variant, gpu: Gpu, tiles: ElementPlan, name: str) -> Iterator[ElementPlan]:
    """Plans for other tiles of a pass, of this element type. What the spec pins stays pinned."""
    schedule, seen = variant.spec.schedule, {_signature(tiles, name)}
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
        found = pinned_plan(variant, gpu, tiles, pinned)
        if found is not None and _signature(found, name) not in seen:
            seen.add(_signature(found, name))
            yield found


def pinned_plan(variant: Variant, gpu: Gpu, tiles: ElementPlan, schedule: Schedule) -> ElementPlan | None:
    """The plan of this element type under another schedule, None where that cannot work."""
    spec = replace(variant.spec, schedule=schedule, dtypes=(tiles.element,))
    try:
        return plan_cuda(replace(variant, spec=spec), gpu.target).by_element.get(tiles.element)
    except SpecError:
        return None


def gpu_runners_up(variant: Variant, tiles: ElementPlan, gpu: Gpu, shape: Shape, name: str) -> tuple[RunnerUp, ...]:
    """The best other tiles by the model, which may prefer some that come later in the planner's order."""
    time = gpu_time.forward_time if name == "forward" else gpu_time.backward_time
    chosen, dense = time(variant, tiles, gpu, shape), without_mask(variant)
    others = sorted(gpu_candidates(variant, gpu, tiles, name), key=lambda other: time(dense, other, gpu, shape).seconds)
    found = []
    for other in others[:MOST]:
        tile = other.forward if name == "forward" else other.backward
        found.append(_runner_up(tile, _what(tile), time(variant, other, gpu, shape), chosen))
    return _in_order(found)


def cpu_runners_up(
    variant: Variant, products: Products, name: str, tile: Tiles, device: Device, shape: Shape
) -> tuple[RunnerUp, ...]:
    """The same on a CPU."""
    chosen = cpu_time.pass_time(variant, products, name, tile, device, shape)
    others = [other for other in cpu_candidates(variant, products, name, device) if other != tile]
    dense = without_mask(variant)
    others.sort(key=lambda other: cpu_time.pass_time(dense, products, name, other, device, shape).seconds)
    found = []
    for other in others[:MOST]:
        predicted = cpu_time.pass_time(variant, products, name, other, device, shape)
        found.append(_runner_up(other, f"{other.sram_bytes / 1024:.0f} KiB", predicted, chosen))
    return _in_order(found)


def cpu_candidates(variant: Variant, products: Products, name: str, device: Device) -> tuple[Tiles, ...]:
    """Tiles that fit a core's cache, and that kernels multiply in this way. What the spec pins stays pinned."""
    this = pass_to_plan(variant, products, name)
    rows, columns = this.candidates(variant)
    if products is Products.SPLIT:
        rows = tuple(Br for Br in rows if repays_parts(Br))
    tiles = (this.tile(variant, device, Br, Bc) for Br, Bc in itertools.product(rows, columns))
    return tuple(tile for tile in tiles if tile.sram_bytes <= usable_bytes(device))


def without_mask(variant: Variant) -> Variant:
    """The same without a mask, whose tiles take time to count: enough to see which candidates are worth it."""
    return replace(variant, keep=literal(True))


def _in_order(found: list[RunnerUp]) -> tuple[RunnerUp, ...]:
    return tuple(sorted(found, key=lambda each: each.seconds))


def _runner_up(tile: Tiles, what: str, predicted: PassTime, chosen: PassTime) -> RunnerUp:
    slower = predicted.seconds / chosen.seconds - 1 if chosen.seconds else 0.0
    main, other = predicted.main, chosen.main
    why = f"limited by {LIMITS[main.bound]}"
    grown = {each: value - other.alone.get(each, 0.0) for each, value in main.alone.items()}
    most = max(grown, key=lambda each: grown[each], default=None)
    if most is not None and grown[most] > 0.02 * main.seconds:
        why = f"more time for {LIMITS[most]}"
    elif main.resident < other.resident:
        why = f"{main.resident} instead of {other.resident} blocks a multiprocessor: {main.resident_limit}"
    elif main.idle > other.idle + 0.02:
        why = f"{main.idle:.0%} of the multiprocessors' time is idle at the end"
    if abs(slower) <= MODEL_ERROR:
        why = "as good, as far as the model can tell; later in the planner's order"
    elif slower < 0:
        why = "the model prefers it; the planner's order, which comes first, does not"
    return RunnerUp(tile.Br, tile.Bc, what, predicted.seconds, slower, why)


def _signature(tiles: ElementPlan, name: str) -> object:
    return tiles.forward if name == "forward" else tiles.backward


def _what(tile: ForwardTiles | BackwardTiles | QueryTiles) -> str:
    count, what = (tile.warps // 4, "warpgroup") if tile.warpgroups else (tile.warps, "warp")
    parts = (f"{count} {what}{'s' * (count > 1)}", f"{tile.stages} stage{'s' * (tile.stages > 1)}")
    return f"{', '.join(parts)}, {tile.sram_bytes / 1024:.0f} KiB"
