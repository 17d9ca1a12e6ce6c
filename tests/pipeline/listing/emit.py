"""The text: the formula, and the tile."""

from __future__ import annotations

from flashgen.analysis.variant import Variant
from flashgen.emit.context import formula
from flashgen.emit.kernel_source import KernelSource
from tests.pipeline.listing.plan import ListingPlan


def emit_listing(variant: Variant, plan: ListingPlan) -> KernelSource:
    symbol = f"{variant.spec.name}_d{variant.head_dim}"
    text = f"{formula(variant)}\n{plan.tile.Br} rows\n"
    return KernelSource(f"{symbol}_listing.txt", "listing", symbol, variant.head_dim, text, ())
