"""``MmaTarget``: an architecture of this family."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass

from flashgen.targets.gpu.target import GpuTarget
from flashgen.targets.mma.limits import ARCHITECTURES
from flashgen.targets.mma.recipes import RECIPES


@dataclass(frozen=True)
class MmaTarget(GpuTarget):
    """One architecture."""

    family = "mma"
    recipes = RECIPES


def targets() -> Mapping[str, MmaTarget]:
    """Those that there are, by name."""
    return {each.name: MmaTarget(**asdict(each)) for each in ARCHITECTURES}
