"""Which tiles are worth measuring, and what the model says of them.

In: a ``Variant``, a CPU or GPU, a shape, an element type. Out: ``Candidate``s by pass; the first is the planner's
choice, the others follow by predicted time. Everything that asks the model stands here.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from flashgen.analysis.variant import Variant
from flashgen.ir.shape import Shape
from flashgen.ir.types import ElementType
from flashgen.plan import cpu_time, gpu_time
from flashgen.plan.alternatives import gpu_candidates
from flashgen.plan.cpu_model import backward_working_set, forward_working_set
from flashgen.plan.cuda_plan import ElementPlan
from flashgen.plan.cuda_planner import plan_cuda
from flashgen.plan.device_table import Gpu
from flashgen.plan.devices import Device
from flashgen.plan.measured import PASSES, Tile
from flashgen.plan.plan import Tiles
from flashgen.plan.planner import COLUMNS, ROWS, USABLE_SRAM, plan


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
            seconds = _on_cpu(variant, device, shape, name)
        first, *others = seconds
        ordered = [first, *sorted(others, key=lambda tile: (seconds[tile], tile.Br, tile.Bc))]
        found[name] = tuple(
            Candidate(tile, ordered.index(tile), seconds[tile] / seconds[first]) for tile in _spread(ordered, most + 1)
        )
    return found


def _on_cpu(variant: Variant, device: Device, shape: Shape, name: str) -> dict[Tile, float]:
    """Predicted seconds of every size that fits; what the schedule pins stays."""
    forward = name == "forward"
    size = forward_working_set if forward else backward_working_set
    predict = cpu_time.forward_time if forward else cpu_time.backward_time
    schedule, chosen = variant.spec.schedule, plan(variant, device).passes[name]
    Br, Bc = (schedule.Br, schedule.Bc) if forward else (schedule.backward_Br, schedule.backward_Bc)
    tiles = [chosen]
    for rows in [Br] if Br else _suiting(variant, ROWS):
        for columns in [Bc] if Bc else _suiting(variant, COLUMNS):
            needed = size(variant, rows, columns, device.lanes)
            if needed <= USABLE_SRAM * device.sram_bytes:
                tiles.append(Tiles(rows, columns, needed))
    return {Tile(each.Br, each.Bc): predict(variant, each, device, shape).seconds for each in tiles}


def _suiting(variant: Variant, sizes: Iterable[int]) -> list[int]:
    """With a layout, sizes that divide its blocks or are divided by them; all others cut blocks in two."""
    layout = variant.spec.layout
    suiting = [size for size in sizes if layout is None or 0 in (layout.block % size, size % layout.block)]
    return suiting or list(sizes)


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
