"""``Architecture``: what the planner has to know of a GPU. Families say which there are, ``devices.toml`` the products.

Shared memory is what one block may use (the paper's M) and what a multiprocessor has for all of its blocks; figures are
those of the CUDA programming guide.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
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
