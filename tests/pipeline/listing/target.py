"""The target, and those that there are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from flashgen.analysis.variant import Variant
from flashgen.diagnostics import Diagnostic
from flashgen.emit.kernel_source import KernelSource
from flashgen.plan.measured import PLANNERS_OWN, Pins
from flashgen.plan.packed import ManifestKernel, Packed
from flashgen.plan.plan import ANY_CALLS, WHOLE, CallKind, Part, Spill
from tests.pipeline.listing import limits
from tests.pipeline.listing.compile import compile_listing, spills
from tests.pipeline.listing.emit import emit_listing
from tests.pipeline.listing.plan import ListingPlan, plan_listing


@dataclass(frozen=True)
class ListingTarget:
    name: ClassVar[str] = "listing"
    family: ClassVar[str] = "listing"
    ships_binaries: ClassVar[bool] = False
    device: ClassVar[None] = None

    def limits(self, variant: Variant) -> tuple[Diagnostic, ...]:
        return limits.limits(variant)

    def leaves_out(self, variant: Variant) -> tuple[str, ...]:
        return ("'warps' of the schedule: a listing has none",) if variant.spec.schedule.warps else ()

    def plan(self, variant: Variant, pins: Pins = PLANNERS_OWN, spills: Sequence[Spill] = ()) -> ListingPlan:
        return plan_listing(variant, spills)

    def parts(self, plan: ListingPlan) -> tuple[Part, ...]:
        return (WHOLE,)

    def emit(self, variant: Variant, plan: ListingPlan, part: Part = WHOLE) -> KernelSource:
        return emit_listing(variant, plan)

    def compile(self, sources: Sequence[KernelSource], calls: CallKind = ANY_CALLS) -> tuple[str, ...]:
        return tuple(map(compile_listing, sources))

    def spills(self, plan: ListingPlan, binary: str) -> tuple[Spill, ...]:
        return spills(plan)

    def packed(
        self, variant: Variant, source: KernelSource, plan: ListingPlan, part: Part, binary: str | None
    ) -> Packed:
        head_dim = str(source.head_dim)
        return Packed(ManifestKernel(source.file_name, self.name, source.symbol, head_dim, plan.tile, plan.tile))


def targets() -> Mapping[str, ListingTarget]:
    return {"listing": ListingTarget()}
