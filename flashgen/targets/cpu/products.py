"""How a CPU kernel multiplies: in vectors or, on CPUs that have them, in matrix registers (Intel's AMX).

Stage 3, plan. In: a ``Cpu``, an element type, a shape, rows of a tile. Out: ``Products``. A kernel holds all three
and chooses by the same rule (``with_products`` of ``templates/cpu/operands.h.jinja``).
"""

from __future__ import annotations

from enum import Enum

from flashgen.ir.shape import Shape
from flashgen.ir.types import ElementType
from flashgen.targets.cpu.device import Cpu

# FLASHGEN_FEWEST_ROWS of the template: query rows of a call, of which a tile has four fifths, that repay parts.
FEWEST_ROWS = 160


class Products(Enum):
    """The value: of how many bfloat16 a number is the sum, 0 where it is multiplied as it is."""

    VECTORS = 0
    BFLOAT16 = 1
    SPLIT = 3

    @property
    def parts(self) -> int:
        """Of a number in matrix registers."""
        return self.value

    @property
    def multiplications(self) -> int:
        """Products of parts for one of numbers: those that do not vanish beside the others."""
        return max(1, self.parts * (self.parts + 1) // 2)

    def of_pass(self, name: str) -> str:
        """A pass in words."""
        elements = {Products.BFLOAT16: "bfloat16", Products.SPLIT: "float32 and float16"}.get(self)
        return name if elements is None else f"{name}, {elements} in matrix registers"


def products_of_call(device: Cpu, element: ElementType, shape: Shape, split_rows: int) -> Products:
    """What a call of this shape takes; ``split_rows`` is B_r of the pass where numbers are split into parts.

    Few queries without a backward pass take vectors, whatever their type (``are_few`` of the template).
    """
    if not device.matrix_per_clock:
        return Products.VECTORS
    if element is ElementType.BF16:
        return Products.BFLOAT16
    return Products.SPLIT if shape.q_len >= FEWEST_ROWS and repays_parts(split_rows) else Products.VECTORS


def repays_parts(rows: int) -> bool:
    """Whether a tile of so many rows is worth laying K and V out for it; a lower one is multiplied in vectors."""
    return 5 * rows >= 4 * FEWEST_ROWS
