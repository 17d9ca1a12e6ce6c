"""``MmaTarget``: an architecture of this family, and the shared memory of a block and of a multiprocessor."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from flashgen.targets.gpu.architecture import KIB
from flashgen.targets.gpu.recipes import WARPS
from flashgen.targets.gpu.target import GpuTarget


@dataclass(frozen=True)
class MmaTarget(GpuTarget):
    """One architecture."""

    family = "mma"
    recipes = WARPS


def targets() -> Mapping[str, MmaTarget]:
    """Those that there are, by name."""

    def target(name: str, capability: int, block_kib: int, sm_kib: int, *, is_generated: bool = True) -> MmaTarget:
        return MmaTarget(name, capability, block_kib * KIB, sm_kib * KIB, is_generated)

    found = (
        # Plans are made for it although no kernels are generated: bfloat16 and asynchronous copies are missing.
        target("sm_70", 70, 96, 96, is_generated=False),
        target("sm_75", 75, 64, 64),
        target("sm_80", 80, 163, 164),
        target("sm_86", 86, 99, 100),
        target("sm_87", 87, 163, 164),
        target("sm_89", 89, 99, 100),
        target("sm_90", 90, 227, 228),
        target("sm_100", 100, 227, 228),
        target("sm_103", 103, 227, 228),
        target("sm_120", 120, 99, 100),
        target("sm_121", 121, 99, 100),
    )
    return {each.name: each for each in found}
