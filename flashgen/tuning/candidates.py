"""Which tiles are worth measuring, and what the model says of them.

In: a ``Variant``, a CPU or GPU, a shape, an element type. Out: ``Candidate``s by pass; the first is the planner's
choice, the others follow by predicted time. Everything that asks the model stands here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from flashgen.analysis.variant import Variant
from flashgen.ir.shape import Shape
from flashgen.ir.types import ElementType
from flashgen.plan import cpu_time, gpu_time
from flashgen.plan.alternatives import cpu_candidates, gpu_candidates
from flashgen.plan.cuda_plan import ElementPlan
from flashgen.plan.cuda_planner import plan_cuda
from flashgen.plan.device_table import Gpu
from flashgen.plan.devices import Device
from flashgen.plan.measured import PASSES, Tile
from flashgen.plan.planner import plan


@dataclass(frozen=True)
class Candidate:
    """A tile of one pass. ``rank`` is its place in the model's order, 0 for the planner's choice.

    ``predicted`` is its time over that choice's.
    """

    tile: Tile
    rank: int
    predicted: float


def candidates(
    variant: Variant, device: Device | Gpu, shape: Shape, element: ElementType, most: int
) -> Mapping[str, tuple[Candidate, ...]]:
    """At most ``most`` beside the planner's choice, for each pass. Raises ``SpecError`` where no tile fits."""
    found = {}
    for name in PASSES:
        if isinstance(device, Gpu):
            seconds = _on_gpu(variant, device, shape, element, name)
        else:
            seconds = _on_cpu(variant, device, shape, element, name)
        first, *others = seconds
        ordered = [first, *sorted(others, key=lambda tile: (seconds[tile], tile.Br, tile.Bc))]
        found[name] = tuple(
            Candidate(tile, ordered.index(tile), seconds[tile] / seconds[first]) for tile in _spread(ordered, most + 1)
        )
    return found


def _on_cpu(variant: Variant, device: Device, shape: Shape, element: ElementType, name: str) -> dict[Tile, float]:
    """Predicted seconds of every size that fits; what the schedule pins stays."""
    products, chosen = plan(variant, device).of_call(device, element, shape)[name]
    tiles = (chosen, *cpu_candidates(variant, products, name, device))
    return {
        Tile(each.Br, each.Bc): cpu_time.pass_time(variant, products, name, each, device, shape).seconds
        for each in tiles
    }


def _on_gpu(variant: Variant, gpu: Gpu, shape: Shape, element: ElementType, name: str) -> dict[Tile, float]:
    """Predicted seconds of the planner's choice and of what the model compares it with."""
    own = replace(variant, spec=replace(variant.spec, dtypes=(element,)))
    chosen = plan_cuda(own, gpu.target).by_element[element]
    predict = gpu_time.forward_time if name == "forward" else gpu_time.backward_time
    found: dict[Tile, float] = {}
    for plans in (chosen, *gpu_candidates(own, gpu, chosen, name)):
        found.setdefault(_tile(plans, name), predict(own, plans, gpu, shape).seconds)
    return found


def _tile(plans: ElementPlan, name: str) -> Tile:
    tiles = plans.forward if name == "forward" else plans.backward
    return Tile(tiles.Br, tiles.Bc, tiles.warps, tiles.stages)


def _spread(ordered: Sequence[Tile], most: int) -> list[Tile]:
    """The best half of what may be measured, and others at even distances, so that the model is tested, too."""
    if len(ordered) <= most:
        return list(ordered)
    best = (most + 1) // 2
    rest, others = ordered[best:], most - best
    return [*ordered[:best], *(rest[(n + 1) * len(rest) // others - 1] for n in range(others))]
