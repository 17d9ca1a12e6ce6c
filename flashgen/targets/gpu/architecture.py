"""``Architecture``: what the planner has to know of a GPU. Families say which there are, ``devices.toml`` the products.

Shared memory is what one block may use (the paper's M) and what a multiprocessor has for all of its blocks; figures are
those of the CUDA programming guide. ``Multiprocessor`` has what predictions of time ask beside.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Self

KIB = 1024


@dataclass(frozen=True)
class Architecture:
    """One architecture, by its compiler's name.

    ``block_bytes``: shared memory of a block; ``sm_bytes``: of a multiprocessor.

    Plans are made for one that ``is_generated`` no kernels for, too: to compare.
    """

    name: str
    capability: int
    block_bytes: int
    sm_bytes: int
    is_generated: bool = True

    def with_sram(self, size: int) -> Self:
        """The same architecture with another limit to a block's shared memory."""
        return replace(self, block_bytes=size, sm_bytes=max(size, self.sm_bytes))


class UnsupportedGpu(RuntimeError):  # noqa: N818 - reads as what it says
    """Nothing can be generated for a GPU; the message says why."""


@dataclass(frozen=True)
class Multiprocessor:
    """One multiprocessor; rates count results a clock.

    ``registers`` of 32 bits; ``warps`` and ``blocks`` that may reside at a time; ``float_lanes`` float32 additions,
    ``specials`` results of the special function units (exp2, reciprocals), ``shared_bytes_per_clock`` of shared memory.
    ``mma_share`` of the tensor cores' peak is reached by the instruction of one warp (mma.sync).
    """

    warps: int
    blocks: int
    float_lanes: int
    mma_share: float = 1.0
    registers: int = 65536
    specials: int = 16
    shared_bytes_per_clock: int = 128


# CUDA C++ Programming Guide: table "Technical specifications per compute capability" for what may reside, table
# "Throughput of native arithmetic instructions" for the rates. Hopper's share is measured by Luo et al., "Benchmarking
# and Dissecting the Nvidia Hopper GPU Architecture via Microbenchmarking" (arXiv 2402.13499); nobody has published that
# of sm_100, whose tensor cores are twice as wide: the rate of Hopper's instruction is assumed.
_BY_CAPABILITY: Mapping[int, Multiprocessor] = MappingProxyType(
    {
        70: Multiprocessor(warps=64, blocks=32, float_lanes=64),
        75: Multiprocessor(warps=32, blocks=16, float_lanes=64),
        80: Multiprocessor(warps=64, blocks=32, float_lanes=64),
        86: Multiprocessor(warps=48, blocks=16, float_lanes=128),
        87: Multiprocessor(warps=48, blocks=16, float_lanes=128),
        89: Multiprocessor(warps=48, blocks=24, float_lanes=128),
        90: Multiprocessor(warps=64, blocks=32, float_lanes=128, mma_share=0.62),
        100: Multiprocessor(warps=64, blocks=32, float_lanes=128, mma_share=0.31),
        103: Multiprocessor(warps=64, blocks=32, float_lanes=128, mma_share=0.31),
        120: Multiprocessor(warps=48, blocks=24, float_lanes=128),
        121: Multiprocessor(warps=48, blocks=24, float_lanes=128),
    }
)


def multiprocessor_of(target: Architecture) -> Multiprocessor:
    """The figures of an architecture; of one that is not known yet those of the last before."""
    known = max(capability for capability in _BY_CAPABILITY if capability <= max(target.capability, 70))
    return _BY_CAPABILITY[known]
