"""Stage 2, decide for CPUs: how a variant is computed, and which tiles are considered, for each way to multiply.

In: a ``Variant``, a ``Cpu``, a pass. Out: ``Decision``s; rows and columns; of a tile, the bytes that it keeps.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator
from dataclasses import dataclass

from flashgen.analysis.pieces import is_irregular
from flashgen.analysis.variant import Variant
from flashgen.plan.plan import Tiles
from flashgen.plan.recipe import FORCED, Decision
from flashgen.targets.cpu import rules
from flashgen.targets.cpu.device import Cpu
from flashgen.targets.cpu.limits import ROW_MULTIPLE
from flashgen.targets.cpu.model import working_set
from flashgen.targets.cpu.products import Products

# A tile shares its cache with the next rows of K and V on their way in, and with the stack.
USABLE_SRAM = 0.75
# Measured, 256 rows run 1 % faster than 128 where nothing is masked; 128 leave more tasks to share out.
ROWS = (16, 32, 48, 64, 96, 128)
COLUMNS = (16, 32, 64, 96, 128)
# Of pairs products take half as long, so that what is done once a tile shows more. Backward 192 rows run as fast as
# 256, which nearly fill the cache, or faster.
PAIR_ROWS = (*ROWS, 192)
# Matrix registers take 32 rows at a time, and what they multiply is laid out for them once a tile.
MATRIX_ROWS = (32, 64, 96, 128, 192, 256)
MATRIX_COLUMNS = (32, 64, 96, 128)


def keeps_lists(variant: Variant) -> bool:
    """Whether the library keeps lists of visits, for later calls of the same shape."""
    return is_irregular(variant.keep)


def decisions(variant: Variant, device: Cpu) -> Iterator[Decision]:
    """How a variant is computed, and why."""
    if device.matrix_per_clock:
        yield Decision.by("products", "in matrix registers", rules.MATRIX_REGISTERS)
    elif device.pairs_per_clock:
        yield Decision.by("products", "in vectors, bfloat16 in pairs", rules.PAIRS)
    else:
        yield Decision.by("products", "in vectors", rules.VECTORS)
    if variant.keep_everything:
        yield Decision("tiles to visit", "all", "nothing is masked", FORCED)
    elif keeps_lists(variant):
        yield Decision.by("tiles to visit", "lists that the library keeps", rules.KEPT_LISTS)
    else:
        yield Decision.by("tiles to visit", "found by each query tile", rules.QUARTERED)
    yield Decision.by("dK and dV", "sums of each task", rules.BY_TASKS)
    pins = variant.spec.schedule
    if any((pins.Br, pins.Bc, pins.backward_Br, pins.backward_Bc)):
        yield Decision("tiles", "the spec's", "the schedule pins them", FORCED)
    else:
        yield Decision.by("tiles", rules.LEAST_BESIDE.name, rules.LEAST_BESIDE)


@dataclass(frozen=True)
class PassToPlan:
    """One pass with one kind of products; ``Br`` and ``Bc`` are what the schedule pins."""

    name: str
    products: Products
    Br: int | None
    Bc: int | None

    @property
    def title(self) -> str:
        """In words."""
        return self.products.of_pass(self.name)

    @property
    def _sizes(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        is_forward = self.name == "forward"
        match self.products:
            case Products.VECTORS:
                return ROWS, COLUMNS
            case Products.PAIRS:
                return (*PAIR_ROWS, 256) if is_forward else PAIR_ROWS, COLUMNS
            case _:
                return (*MATRIX_ROWS, 384, 512) if is_forward else MATRIX_ROWS, MATRIX_COLUMNS

    def candidates(self, variant: Variant, device: Cpu) -> list[Tiles]:
        """Tiles to consider: what the schedule pins, else of sizes that go with the layout's blocks."""
        rows, columns = self._sizes
        block = variant.spec.layout.block if variant.spec.layout else None
        rows = (self.Br,) if self.Br else _dividing(rows, block, ROW_MULTIPLE)
        columns = (self.Bc,) if self.Bc else _dividing(columns, block, 1)
        kept = functools.partial(working_set, variant, self.products, self.name, lanes=device.lanes)
        return [Tiles(Br, Bc, kept(Br, Bc)) for Br, Bc in itertools.product(rows, columns)]


def pass_to_plan(variant: Variant, products: Products, name: str) -> PassToPlan:
    """The pass of this name, with what the schedule pins of it."""
    schedule = variant.spec.schedule
    pins = (schedule.Br, schedule.Bc) if name == "forward" else (schedule.backward_Br, schedule.backward_Bc)
    return PassToPlan(name, products, *pins)


def usable_bytes(device: Cpu) -> int:
    """What a tile may use of a core's cache."""
    return int(USABLE_SRAM * device.sram_bytes)


def _dividing(sizes: tuple[int, ...], block: int | None, multiple: int) -> tuple[int, ...]:
    """Sizes that divide the block, so that a tile is all in or all out; else multiples of it; else all."""
    if block is None:
        return sizes
    inside = {size for size in (*sizes, block) if block % size == 0 and size % multiple == 0 and size <= max(sizes)}
    around = {size for size in sizes if size % block == 0}
    return tuple(sorted(inside)) or tuple(sorted(around)) or sizes
