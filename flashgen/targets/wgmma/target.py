"""``WgmmaTarget``: an architecture of this family, and the shared memory of a block and of a multiprocessor."""

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
    """The one that there is, by its name."""
    return {"sm_90a": WgmmaTarget("sm_90a", 90, 227 * KIB, 228 * KIB)}
