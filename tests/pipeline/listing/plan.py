"""The numbers of the first recipe that fits."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from flashgen.analysis.variant import Variant
from flashgen.diagnostics import Diagnostic, SpecError
from flashgen.ir.types import ElementType
from flashgen.plan.plan import Plan, Rejection, Spill, Tiles
from tests.pipeline.listing.limits import limits
from tests.pipeline.listing.recipes import sizes


@dataclass(frozen=True)
class ListingPlan(Plan):
    tile: Tiles

    @property
    def elements_apart(self) -> tuple[ElementType, ...]:
        return (ElementType.F32,)

    def of_element(self, element: ElementType) -> Mapping[str, Tiles]:
        return {"forward": self.tile, "backward": self.tile}

    def joined(self, plans: Mapping[ElementType, tuple[ListingPlan, ListingPlan]]) -> ListingPlan:
        return plans[ElementType.F32][0]


def plan_listing(variant: Variant, spills: Collection[Spill]) -> ListingPlan:
    spec, sram = variant.spec, 64 * 1024
    refused = limits(variant)
    lost: list[Rejection] = []
    for size in sizes(variant) if not refused else ():
        tile = Tiles(size, size, 4 * size * (variant.head_dim.qk + size))
        if any(each.tile == tile for each in spills):
            lost.append(Rejection("forward", size, size, "spills"))
        elif tile.sram_bytes <= sram:
            return ListingPlan(spec.name, str(variant.head_dim), sram, (f"{size} rows",), tuple(lost), tile)
    nothing = Diagnostic("E406", f"no listing of '{spec.name}' fits", spec.schedule.span or spec.span)
    raise SpecError(refused or (nothing,), spec.sources)
