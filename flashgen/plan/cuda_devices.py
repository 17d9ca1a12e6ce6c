"""GPUs as data: what the planner has to know of an architecture, and a table of known devices.

In: nothing. Out: ``Target`` by its compiler's name, ``Gpu`` by name. Shared memory is what one block may use (the
paper's M) and what a multiprocessor has for all of its blocks; figures are those of the CUDA programming guide.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

KIB = 1024


@dataclass(frozen=True)
class Target:
    """One architecture. ``block_bytes``: shared memory of a block; ``sm_bytes``: of a multiprocessor."""

    name: str
    capability: int
    block_bytes: int
    sm_bytes: int

    def with_sram(self, size: int) -> Target:
        """The same architecture with another limit to a block's shared memory."""
        return replace(self, block_bytes=size, sm_bytes=max(size, self.sm_bytes))


def _target(name: str, capability: int, block_kib: int, sm_kib: int) -> Target:
    return Target(name, capability, block_kib * KIB, sm_kib * KIB)


TARGETS: Mapping[str, Target] = MappingProxyType(
    {
        target.name: target
        for target in (
            _target("sm_75", 75, 64, 64),
            _target("sm_80", 80, 163, 164),
            _target("sm_86", 86, 99, 100),
            _target("sm_87", 87, 163, 164),
            _target("sm_89", 89, 99, 100),
            _target("sm_90", 90, 227, 228),
            _target("sm_90a", 90, 227, 228),
            _target("sm_100", 100, 227, 228),
            _target("sm_103", 103, 227, 228),
            _target("sm_120", 120, 99, 100),
            _target("sm_121", 121, 99, 100),
        )
    }
)


@dataclass(frozen=True)
class Gpu:
    """One product. ``sms``: multiprocessors; ``l2_bytes``: the cache that all of them share."""

    name: str
    target: str
    sms: int
    l2_bytes: int
    source: str


def _gpu(name: str, target: str, sms: int, l2_mib: int, source: str) -> Gpu:
    return Gpu(name, target, sms, l2_mib * KIB * KIB, source)


GPUS: Mapping[str, Gpu] = MappingProxyType(
    {
        gpu.name: gpu
        for gpu in (
            _gpu("t4", "sm_75", 40, 4, "NVIDIA T4"),
            _gpu("a100", "sm_80", 108, 40, "NVIDIA A100"),
            _gpu("a10", "sm_86", 72, 6, "NVIDIA A10"),
            _gpu("rtx3090", "sm_86", 82, 6, "NVIDIA GeForce RTX 3090"),
            _gpu("l4", "sm_89", 58, 48, "NVIDIA L4"),
            _gpu("l40s", "sm_89", 142, 96, "NVIDIA L40S"),
            _gpu("rtx4090", "sm_89", 128, 72, "NVIDIA GeForce RTX 4090"),
            _gpu("h100", "sm_90a", 132, 50, "NVIDIA H100 SXM"),
            _gpu("h200", "sm_90a", 132, 50, "NVIDIA H200 SXM"),
            _gpu("b200", "sm_100", 148, 126, "NVIDIA B200"),
            _gpu("rtx5090", "sm_120", 170, 96, "NVIDIA GeForce RTX 5090"),
        )
    }
)
