"""GPU architectures as data: what the planner has to know of one. Products stand in ``devices.toml``.

In: nothing. Out: ``Target`` by its compiler's name. Shared memory is what one block may use (the paper's M) and what a
multiprocessor has for all of its blocks; figures are those of the CUDA programming guide.
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

    @property
    def has_warpgroups(self) -> bool:
        """Whether four warps can multiply together (wgmma): on Hopper's own target, and there only."""
        return self.name == "sm_90a"

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
