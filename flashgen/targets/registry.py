"""The targets that there are. A family is registered by one line here.

In: nothing. Out: ``Target`` by the name that ``--target`` takes. Nothing is meant where none is named: who asks says
which, or asks all.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

from flashgen.targets.cpu import target as cpu
from flashgen.targets.gpu.architecture import UnsupportedGpu
from flashgen.targets.gpu.target import GpuTarget
from flashgen.targets.mma import target as mma
from flashgen.targets.protocol import AnyTarget
from flashgen.targets.wgmma import target as wgmma

GPU_FAMILIES: tuple[Callable[[], Mapping[str, GpuTarget]], ...] = (
    mma.targets,
    wgmma.targets,
)
FAMILIES: tuple[Callable[[], Mapping[str, AnyTarget]], ...] = (
    cpu.targets,
    *GPU_FAMILIES,
)

# Every architecture of GPUs, from the oldest on, and those that kernels are generated for.
ARCHITECTURES: Mapping[str, GpuTarget] = MappingProxyType(
    {
        each.name: each
        for each in sorted(
            (each for family in GPU_FAMILIES for each in family().values()),
            key=lambda each: (each.capability, each.name),
        )
    }
)
GPUS: Mapping[str, GpuTarget] = MappingProxyType(
    {name: each for name, each in ARCHITECTURES.items() if each.is_generated}
)


def targets() -> Mapping[str, AnyTarget]:
    """Everything that kernels are generated for, by name."""
    found = {name: each for family in FAMILIES for name, each in family().items()}
    return {name: each for name, each in found.items() if name in GPUS or name not in ARCHITECTURES}


def target_of(device: str, capability: int, block_bytes: int) -> GpuTarget:
    """What to compile for a GPU: its own architecture; one that is not known yet gets the tiles of the last before."""
    known = [target for target in GPUS.values() if target.capability <= capability]
    if not known:
        oldest = min(GPUS.values(), key=lambda target: target.capability)
        raise UnsupportedGpu(
            f"'{device}' has compute capability {capability / 10}; the oldest that kernels are generated for is "
            f"{oldest.capability / 10}. backend='reference' runs on any GPU"
        )
    last = max(known, key=lambda target: (target.capability, target.name))
    if last.capability == capability:
        return last
    # What only one architecture has, such as products of warpgroups, nobody can promise of a later one.
    return mma.MmaTarget(f"sm_{capability}", capability, min(last.block_bytes, block_bytes), last.sm_bytes)
