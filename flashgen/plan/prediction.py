"""Predicted time and bytes: what the model says of one pass, and which of the device's limits it runs into."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from flashgen.ir.spec import HeadDim
from flashgen.kinds.dense import OPERANDS
from flashgen.kinds.operand import Operand
from flashgen.plan.tile_counts import TileCounts

# The limits in words, for reasons.
LIMITS: Mapping[str, str] = {
    "tensor": "matrix products",
    "special": "special functions",
    "other": "everything else of a pair",
    "shared": "shared memory",
    "l2": "the L2 cache",
    "hbm": "HBM",
    "cache": "the L2 cache of a core",
    "latency": "warps that wait for one another",
}


@dataclass(frozen=True)
class KernelTime:
    """One kernel. ``alone`` are the seconds that each limit would take if nothing else were in the way.

    ``resident`` blocks share a multiprocessor, held there by ``resident_limit``; ``waves`` of them run one after
    another, and ``idle`` is the share of the time in which multiprocessors have no block left (tails). On a CPU a block
    is a task, and a multiprocessor a core, whose limits ``add_up`` instead of hiding behind one another. ``registers``
    of a thread, 0 where that means nothing.
    """

    name: str
    seconds: float
    alone: Mapping[str, float]
    blocks: int
    resident: int
    resident_limit: str
    waves: float
    idle: float
    registers: int = 0
    add_up: bool = False

    @property
    def bound(self) -> str:
        """The limit that takes longest; ``latency`` where each explains less than half of the time behind others."""
        name = max(self.alone, key=lambda each: self.alone[each], default="latency")
        return name if self.add_up or (self.alone and 2 * self.alone[name] > self.seconds) else "latency"


@dataclass(frozen=True)
class PassTime:
    """Every kernel of a pass, and its work: flops that the formula needs, special functions, HBM bytes by buffer."""

    kernels: tuple[KernelTime, ...]
    flops: float
    specials: float
    hbm: Mapping[str, int]

    @property
    def seconds(self) -> float:
        """All kernels, one after another."""
        return sum(kernel.seconds for kernel in self.kernels)

    @property
    def hbm_bytes(self) -> int:
        """Bytes moved to and from memory, caches left out."""
        return sum(self.hbm.values())

    @property
    def main(self) -> KernelTime:
        """The kernel that takes longest."""
        return max(self.kernels, key=lambda kernel: kernel.seconds)

    @property
    def flops_per_second(self) -> float:
        """Of the flops that the formula needs."""
        return self.flops / self.seconds if self.seconds else 0.0


@dataclass(frozen=True)
class Access:
    """A kernel reads or writes rows of an operand, each row so many ``times``.

    ``by_tile``: the rows of each tile that it visits; else all rows of the operand.
    """

    operand: Operand
    by_tile: bool = False
    times: int = 1


def once(*names: str, of: Mapping[str, Operand] = OPERANDS) -> tuple[Access, ...]:
    """All rows of these operands, one time."""
    return tuple(Access(of[name]) for name in names)


def by_tile(*names: str) -> tuple[Access, ...]:
    """The rows of these operands in every tile that is visited."""
    return tuple(Access(OPERANDS[name], by_tile=True) for name in names)


def moved(
    accesses: Iterable[Access], head_dim: HeadDim, element: int, sizes: Mapping[str, int], counts: TileCounts | None
) -> Counter[str]:
    """Bytes by operand, where an element of q has ``element`` of them; ``counts`` of what is visited, if anything."""
    found: Counter[str] = Counter()
    for each in accesses:
        operand = each.operand
        if each.by_tile:
            assert counts is not None
            rows = counts.rows if operand.of_queries else counts.keys
        else:
            rows = math.prod(operand.lengths(sizes))
        found[operand.name] += each.times * rows * operand.columns(head_dim) * operand.element_bytes(element)
    return found
