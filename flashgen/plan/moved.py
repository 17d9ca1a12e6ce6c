"""What kernels of a plan move, predicted: the account that every cost, report, explanation and test reads.

Stage 3, plan. In: what a kernel does with operands, the sizes of a call, counts of the tiles that it visits. Out: bytes
by operand. Operands say how many rows there are and what makes one; a family says what its kernels do with them. The
emulator counts the same while kernels run, and tests compare.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from flashgen.ir.spec import HeadDim
from flashgen.kinds.dense import OPERANDS
from flashgen.kinds.operand import Operand
from flashgen.plan.tile_counts import TileCounts


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
