"""``WgmmaTarget``: an architecture of this family, and which there are."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from flashgen.analysis.variant import Variant
from flashgen.targets.gpu.architecture import KIB
from flashgen.targets.gpu.target import GpuTarget
from flashgen.targets.wgmma.recipes import RECIPES, takes_f8


@dataclass(frozen=True)
class WgmmaTarget(GpuTarget):
    """One architecture."""

    family = "wgmma"
    recipes = RECIPES

    def takes_f8(self, variant: Variant) -> bool:
        return takes_f8(variant)


def targets() -> Mapping[str, WgmmaTarget]:
    """Those that there are, by name, with the shared memory that a block and a multiprocessor may use."""
    return {"sm_90a": WgmmaTarget("sm_90a", 90, 227 * KIB, 228 * KIB)}
