"""Tiles by rows on GPUs: what a call over a cache takes, by the query heads and queries of a key/value head.

Stage 3, plan. In: the plan of a variant over caches, an element type, rows. Out: ``Pins``.
"""

from __future__ import annotations

from flashgen.ir.types import ElementType
from flashgen.plan.measured import PLANNERS_OWN, Pins, Tile
from flashgen.targets.gpu.recipes import of_rows
from flashgen.targets.gpu.tiles import GpuPlan


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
