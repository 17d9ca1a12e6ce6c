"""How a CPU kernel multiplies: in vectors, of numbers or pairs of bfloat16, or in matrix registers (Intel's AMX).

Stage 3, plan. In: a ``Cpu``, an element type, a shape, rows of a tile. Out: ``Products``. A kernel holds those that
its compiler has instructions for, and chooses by the same rule: ``with_products`` of
``templates/include/flashgen/cpu/products.h``.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum

from flashgen.ir.shape import Shape
from flashgen.ir.types import ElementType
from flashgen.targets.cpu.device import Cpu

# FLASHGEN_FEWEST_ROWS of the template: query rows of a call, of which a tile has four fifths, that repay parts.
FEWEST_ROWS = 160


class Products(Enum):
    """Vectors take float32 or, of bfloat16 tensors, pairs; matrix registers bfloat16, or numbers split into parts."""

    VECTORS = "vectors"
    PAIRS = "pairs"
    BFLOAT16 = "bfloat16"
    SPLIT = "split"

    @property
    def prefix(self) -> str:
        """What names of tiles begin with."""
        return {Products.VECTORS: "", Products.PAIRS: "pair_", Products.BFLOAT16: "matrix_"}.get(self, "split_")

    @property
    def in_vectors(self) -> bool:
        """Whether by the units that do all other work, too."""
        return self in (Products.VECTORS, Products.PAIRS)

    @property
    def parts(self) -> int:
        """Of how many bfloat16 a number in matrix registers is the sum; 0 in vectors."""
        return {Products.BFLOAT16: 1, Products.SPLIT: 3}.get(self, 0)

    @property
    def multiplications(self) -> int:
        """Products of parts for one of numbers: those that do not vanish beside the others."""
        return max(1, self.parts * (self.parts + 1) // 2)

    @property
    def library(self) -> int:
        """What FLASHGEN_PRODUCTS is where a library is for calls that multiply so: also for others of their type."""
        return {Products.VECTORS: 1, Products.SPLIT: 3}.get(self, 2)

    def of_pass(self, name: str) -> str:
        """A pass in words."""
        numbers = {
            Products.PAIRS: "bfloat16 in pairs",
            Products.BFLOAT16: "bfloat16 in matrix registers",
            Products.SPLIT: "numbers in three parts in matrix registers",
        }.get(self)
        return name if numbers is None else f"{name}, {numbers}"


# Those of forward mode, for every type. What tangents change weights by cancels in a row: rounded to bfloat16 it leaves
# an error of 0.02, where slopes move, and of 0.002 as it is.
OF_TANGENTS = (Products.VECTORS, Products.SPLIT)


def products_of_call(
    device: Cpu, element: ElementType, shape: Shape, split_rows: int, among: Sequence[Products] = tuple(Products)
) -> Products:
    """What a call of this shape takes; ``split_rows`` is the lower B_r of its passes in parts.

    Few queries without a backward pass take vectors, whatever their type (``are_few`` of the template).
    """
    if not device.matrix_per_clock:
        in_pairs = device.pairs_per_clock and element is ElementType.BF16 and Products.PAIRS in among
        return Products.PAIRS if in_pairs else Products.VECTORS
    if element is ElementType.BF16 and Products.BFLOAT16 in among:
        return Products.BFLOAT16
    is_repaid = among == OF_TANGENTS or repays_parts(split_rows)
    return Products.SPLIT if is_repaid and shape.q_len >= FEWEST_ROWS else Products.VECTORS


def repays_parts(rows: int) -> bool:
    """Whether a tile of so many rows is worth laying K and V out for it; a lower one is multiplied in vectors."""
    return 5 * rows >= 4 * FEWEST_ROWS
