"""What the architectures of this family may use: shared memory of a block and of a multiprocessor."""

from __future__ import annotations

from flashgen.targets.gpu.architecture import KIB, Architecture

ARCHITECTURES = (Architecture("sm_90a", 90, 227 * KIB, 228 * KIB),)
