"""What the architectures of this family may use: shared memory of a block and of a multiprocessor."""

from __future__ import annotations

from flashgen.targets.gpu.architecture import KIB, Architecture


def _architecture(name: str, capability: int, block_kib: int, sm_kib: int) -> Architecture:
    return Architecture(name, capability, block_kib * KIB, sm_kib * KIB)


ARCHITECTURES = (
    # Plans are made for it although no kernels are generated: bfloat16 and asynchronous copies are missing.
    Architecture("sm_70", 70, 96 * KIB, 96 * KIB, is_generated=False),
    _architecture("sm_75", 75, 64, 64),
    _architecture("sm_80", 80, 163, 164),
    _architecture("sm_86", 86, 99, 100),
    _architecture("sm_87", 87, 163, 164),
    _architecture("sm_89", 89, 99, 100),
    _architecture("sm_90", 90, 227, 228),
    _architecture("sm_100", 100, 227, 228),
    _architecture("sm_103", 103, 227, 228),
    _architecture("sm_120", 120, 99, 100),
    _architecture("sm_121", 121, 99, 100),
)
