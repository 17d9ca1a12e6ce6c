"""``MmaTarget``: an architecture of this family, and which there are."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from flashgen.targets.gpu.architecture import KIB
from flashgen.targets.gpu.recipes import WARPS
from flashgen.targets.gpu.target import GpuTarget


@dataclass(frozen=True)
class MmaTarget(GpuTarget):
    """One architecture. The tiles that are considered are those of all GPUs."""

    family = "mma"
    recipes = WARPS


# Compute capability, KiB of shared memory that a block and a multiprocessor may use.
_LIMITS = (
    (75, 64, 64),
    (80, 163, 164),
    (86, 99, 100),
    (87, 163, 164),
    (89, 99, 100),
    (90, 227, 228),
    (100, 227, 228),
    (103, 227, 228),
    (120, 99, 100),
    (121, 99, 100),
)


def targets() -> Mapping[str, MmaTarget]:
    """Those that there are, by name."""
    generated = [MmaTarget(f"sm_{number}", number, block * KIB, of_all * KIB) for number, block, of_all in _LIMITS]
    # Plans are made for it although no kernels are generated: bfloat16 and asynchronous copies are missing.
    oldest = MmaTarget("sm_70", 70, 96 * KIB, 96 * KIB, is_generated=False)
    return {each.name: each for each in (oldest, *generated)}
