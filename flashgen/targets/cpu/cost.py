"""Predicted time of a pass on a CPU: a roofline for each tile, tiles to tasks, tasks to cores.

In: a ``Variant``, a tile, a ``Cpu``, a shape, how numbers are multiplied. Out: ``PassTime``. In vectors everything
inside is float32, so that element types do not matter, but for pairs of bfloat16. Constants are instructions of the
templates' inner loops, and rough; ``tools/benchmarks/model.py`` says how far the model is off.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, replace

from flashgen.analysis.diagonals import over_diagonals
from flashgen.analysis.variant import Variant
from flashgen.ir.shape import Shape
from flashgen.kinds.dense import OPERANDS
from flashgen.kinds.operand import Elements
from flashgen.plan.paper import Lengths, kernel_flops
from flashgen.plan.plan import Tiles
from flashgen.plan.prediction import Access, KernelTime, PassTime, by_tile, moved, once
from flashgen.plan.tile_counts import TileCounts, tile_counts
from flashgen.plan.work import CPU_COSTS, pair_work
from flashgen.targets.cpu.device import Cpu
from flashgen.targets.cpu.model import BFLOAT16, FLOAT, MATRIX_DEPTH, VECTOR_ROWS, round_up, working_set
from flashgen.targets.cpu.products import Products
from flashgen.targets.cpu.recipes import usable_bytes

SPECIAL_INSTRUCTIONS = 14  # of an exp2 over one vector
INSTRUCTIONS_PER_CLOCK = 2.0  # vector instructions that are no multiply-adds
L2_BYTES_PER_CLOCK, L3_BYTES_PER_CLOCK = 32.0, 8.0  # of a core
REACHED_PRODUCTS = 0.72  # of the peak of multiply-adds, by the micro-kernel over many vectors of rows
LOST_VECTORS = 0.3  # by each of its passes over the rows of a tile, so that few rows are slow
TASK_CLOCKS, TILE_CLOCKS = 5000, 200  # to find and start one
L1_FOR_SCORES = 0.5  # of the L1 cache: larger tiles of S, P, dP and dS are read and written through L2
# Of the peak of matrix registers, by parts, fitted on a Xeon's times: in it is what loads, stores and turns of the loop
# take, and backward that sums of dK and dV come from L2 and go there. Of one part loads are as many as products.
REACHED_MATRIX = {"forward": {1: 0.32, 3: 0.75}, "backward": {1: 0.27, 3: 0.58}}
# Instructions for the parts of a weight and their pairs, by parts; backward of dS as well, and of their rows.
SPLIT_INSTRUCTIONS = {"forward": {1: 2, 3: 8}, "backward": {1: 8, 3: 32}}
TERMS_OF_PAIR = 2
# Clocks to lay a number of K or V out as images of registers; those that are transposed, too, count twice.
LAYOUT_CLOCKS = {1: 0.15, 3: 0.8}


def pass_time(variant: Variant, products: Products, name: str, tile: Tiles, device: Cpu, shape: Shape) -> PassTime:
    """A task is, forward, a tile of queries of one head, and backward a key/value head, or a share of its tiles."""
    D, Dv, is_forward = variant.head_dim.qk, variant.head_dim.v, name == "forward"
    counts = tile_counts(variant, shape, tile.Br, tile.Bc)
    visited = counts.visited
    pairs = _computed_pairs(variant, products, tile, shape, counts)  # of a tile, on average
    work = pair_work(over_diagonals(variant), "forward" if is_forward else "keys", CPU_COSTS)
    terms = work.products if is_forward else (*work.products, D)
    partial = counts.partial / visited if visited else 0.0
    vectors = pairs / device.lanes
    others = work.others + partial * work.mask
    # A tile of keys is copied, or converted; O, or dQ, is added to; dK and dV are read and written.
    copied: float = tile.Bc * (D + Dv) + tile.Br * (Dv if is_forward else D)
    if not is_forward:
        copied += 2 * tile.Bc * (D + Dv)
    if products.in_vectors:
        rows = tile.Br / device.lanes
        reached = REACHED_PRODUCTS * rows / (rows + LOST_VECTORS)
        if products is Products.PAIRS:
            steps = sum(round_up(term, TERMS_OF_PAIR) for term in terms) / TERMS_OF_PAIR
            tensor = steps * vectors / device.pairs_per_clock / reached
            others += SPLIT_INSTRUCTIONS[name][1]  # as of one part
            copied /= TERMS_OF_PAIR
        else:
            tensor = sum(terms) * vectors / device.fma_per_clock / reached
        if FLOAT * pairs > L1_FOR_SCORES * device.l1_bytes:
            copied += (3 if is_forward else 6) * pairs
    else:
        padded = pairs * round_up(tile.Bc, MATRIX_DEPTH) / tile.Bc
        multiplied = products.multiplications * sum(round_up(term, MATRIX_DEPTH) for term in terms) * padded
        laid_out = tile.Bc * (D + 2 * Dv if is_forward else 2 * D + Dv)
        tensor = multiplied / device.matrix_per_clock / REACHED_MATRIX[name][products.parts]
        tensor += LAYOUT_CLOCKS[products.parts] * laid_out
        others += SPLIT_INSTRUCTIONS[name][products.parts]
    needed = working_set(variant, products, name, tile.Br, tile.Bc, device.lanes)
    fits = needed <= usable_bytes(device)
    clocks = {
        "tensor": tensor,
        "special": work.specials * SPECIAL_INSTRUCTIONS * vectors / INSTRUCTIONS_PER_CLOCK,
        "other": others * vectors / INSTRUCTIONS_PER_CLOCK,
        "cache": FLOAT * copied / (L2_BYTES_PER_CLOCK if fits else L3_BYTES_PER_CLOCK),
    }
    tasks = max(1, shape.batch * shape.heads * len(counts.row_tiles))
    each = sum(clocks.values()) + TILE_CLOCKS
    total = visited * each + tasks * TASK_CLOCKS
    # The longest task ends last, half of it after the others.
    longest = float(counts.row_tiles.max()) * each if len(counts.row_tiles) else 0.0
    cores = min(device.cores, tasks)
    makespan = total / cores + (longest / 2 if cores > 1 else 0.0)
    alone = {limit: visited * value / cores / device.clock_hz for limit, value in clocks.items()}
    seconds = makespan / device.clock_hz
    flops = counts.kept_fraction * kernel_flops(Lengths.of(shape, variant.head_dim), name)
    idle = 1 - total / (makespan * cores) if makespan else 0.0
    kernel = KernelTime(name, seconds, alone, tasks, 1, "cores", tasks / device.cores, idle, add_up=True)
    through = _moved(variant, products, shape, counts, is_forward=is_forward)
    return PassTime((kernel,), flops, visited * pairs * work.specials, through)


def _computed_pairs(variant: Variant, products: Products, tile: Tiles, shape: Shape, counts: TileCounts) -> float:
    """Pairs of a visited tile, on average: groups of rows that keep nothing of it are left out."""
    group = VECTOR_ROWS if products.in_vectors else MATRIX_DEPTH
    if tile.Br <= group or not counts.visited:
        return tile.Br * tile.Bc
    return tile_counts(variant, shape, group, tile.Bc).visited * group * tile.Bc / counts.visited


def _moved(
    variant: Variant, products: Products, shape: Shape, counts: TileCounts, *, is_forward: bool
) -> Mapping[str, int]:
    """Bytes between a core's L2 and what lies behind it, if every element were float32, or else bfloat16.

    Rows come and go once; K and V once for each tile that visits them, backward dK and dV too, in float32, both ways.
    """
    accesses = (*once("q", "o"), *by_tile("k", "v"))
    if not is_forward:
        sums = (replace(OPERANDS[name], elements=Elements.FLOAT32) for name in ("dk", "dv"))
        accesses += (*once("d_o", "dq"), *(Access(each, by_tile=True, times=2) for each in sums))
    element = BFLOAT16 if products in (Products.PAIRS, Products.BFLOAT16) else FLOAT
    return moved(accesses, variant.head_dim, element, asdict(shape), counts)
