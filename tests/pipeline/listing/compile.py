"""The binary: the text's digest. Of 32 rows it says that registers spill."""

from __future__ import annotations

import hashlib

from flashgen.emit.kernel_source import KernelSource
from flashgen.ir.types import ElementType
from flashgen.plan.plan import Spill
from tests.pipeline.listing.plan import ListingPlan


def compile_listing(source: KernelSource) -> str:
    return hashlib.sha256(source.text.encode()).hexdigest()


def spills(plan: ListingPlan) -> tuple[Spill, ...]:
    return (Spill(ElementType.F32, "forward", plan.tile, 8),) if plan.tile.Br == 32 else ()
