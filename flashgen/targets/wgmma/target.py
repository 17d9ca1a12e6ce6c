"""``WgmmaTarget``: an architecture of this family."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass

from flashgen.analysis.variant import Variant
from flashgen.targets.gpu.target import GpuTarget
from flashgen.targets.wgmma.limits import ARCHITECTURES
from flashgen.targets.wgmma.recipes import RECIPES, takes_f8


@dataclass(frozen=True)
class WgmmaTarget(GpuTarget):
    """One architecture."""

    family = "wgmma"
    recipes = RECIPES

    def takes_f8(self, variant: Variant) -> bool:
        return takes_f8(variant)


def targets() -> Mapping[str, WgmmaTarget]:
    """Those that there are, by name."""
    return {each.name: WgmmaTarget(**asdict(each)) for each in ARCHITECTURES}
