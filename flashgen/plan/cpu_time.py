"""Predicted time of a pass on a CPU: a roofline for each tile, tiles to tasks, tasks to cores.

In: a ``Variant``, a tile, a ``Device``, a shape. Out: ``PassTime``. Everything inside is float32, so that element types
do not matter; matrix registers, which are faster than this says, are left out. Constants are
instructions of the templates' inner loops, and rough; ``benchmarks/model.py`` says how far the model is off.
"""

from __future__ import annotations

from flashgen.analysis.diagonals import over_diagonals
from flashgen.analysis.variant import Variant
from flashgen.ir.shape import Shape
from flashgen.plan.cpu_model import FLOAT, backward_working_set, forward_working_set
from flashgen.plan.devices import Device
from flashgen.plan.plan import Tiles
from flashgen.plan.planner import USABLE_SRAM
from flashgen.plan.prediction import KernelTime, PassTime
from flashgen.plan.tile_counts import TileCounts, tile_counts
from flashgen.plan.work import pair_work

SPECIAL_INSTRUCTIONS = 14  # of an exp2 over one vector
INSTRUCTIONS_PER_CLOCK = 2.0  # vector instructions that are no multiply-adds
L2_BYTES_PER_CLOCK, L3_BYTES_PER_CLOCK = 32.0, 8.0  # of a core
REACHED_PRODUCTS = 0.72  # of the peak of multiply-adds, by the micro-kernel over many vectors of rows
LOST_VECTORS = 0.3  # by each of its passes over the rows of a tile, so that few rows are slow
TASK_CLOCKS, TILE_CLOCKS = 5000, 200  # to find and start one
L1_FOR_SCORES = 0.5  # of the L1 cache: larger tiles of S, P, dP and dS are read and written through L2


def forward_time(variant: Variant, tile: Tiles, device: Device, shape: Shape) -> PassTime:
    """The forward pass: a task is a tile of queries of one head."""
    return _time("forward", variant, tile, device, shape)


def backward_time(variant: Variant, tile: Tiles, device: Device, shape: Shape) -> PassTime:
    """The backward pass: a task is a key/value head, or a share of its tiles of queries where heads are few."""
    return _time("backward", variant, tile, device, shape)


def _time(name: str, variant: Variant, tile: Tiles, device: Device, shape: Shape) -> PassTime:
    D, Dv, forward = variant.head_dim.qk, variant.head_dim.v, name == "forward"
    counts = tile_counts(variant, shape, tile.Br, tile.Bc)
    pairs, visited = tile.Br * tile.Bc, counts.visited
    work = pair_work(over_diagonals(variant), "forward" if forward else "keys")
    products = work.products if forward else (*work.products, D)
    partial = counts.partial / visited if visited else 0.0
    vectors = pairs / device.lanes
    instructions = work.specials * SPECIAL_INSTRUCTIONS + work.others + partial * work.mask
    rows = tile.Br / device.lanes
    reached = REACHED_PRODUCTS * rows / (rows + LOST_VECTORS)
    # A tile of keys is copied, or converted; O, or dQ, is added to; dK and dV are read and written.
    copied = tile.Bc * (D + Dv) + tile.Br * (Dv if forward else D) + (0 if forward else 2 * tile.Bc * (D + Dv))
    scores = (3 if forward else 6) * pairs if FLOAT * pairs > L1_FOR_SCORES * device.l1_bytes else 0
    working_set = (forward_working_set if forward else backward_working_set)(variant, tile.Br, tile.Bc, device.lanes)
    fits = working_set <= USABLE_SRAM * device.sram_bytes
    clocks = {
        "tensor": sum(products) * vectors / device.fma_per_clock / reached,
        "special": work.specials * SPECIAL_INSTRUCTIONS * vectors / INSTRUCTIONS_PER_CLOCK,
        "other": (instructions - work.specials * SPECIAL_INSTRUCTIONS) * vectors / INSTRUCTIONS_PER_CLOCK,
        "cache": FLOAT * (copied + scores) / (L2_BYTES_PER_CLOCK if fits else L3_BYTES_PER_CLOCK),
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
    kept = counts.kept_fraction * shape.batch * shape.heads * shape.q_len * shape.kv_len
    flops = 2.0 * kept * (D + Dv if forward else 3 * D + 2 * Dv)
    idle = 1 - total / (makespan * cores) if makespan else 0.0
    kernel = KernelTime(name, seconds, alone, tasks, 1, "cores", tasks / device.cores, idle)
    return PassTime((kernel,), flops, visited * pairs * work.specials, _moved(variant, shape, counts, forward=forward))


def _moved(variant: Variant, shape: Shape, counts: TileCounts, *, forward: bool) -> dict[str, int]:
    """Bytes between a core's L2 and what lies behind it, if every element were float32.

    Rows come and go once; K and V once for each tile that visits them, backward dK and dV too, both ways.
    """
    rows, keys = FLOAT * shape.batch * shape.heads * shape.q_len, FLOAT * counts.keys
    D, Dv = variant.head_dim.qk, variant.head_dim.v
    found = {"q": rows * D, "o": rows * Dv, "k": keys * D, "v": keys * Dv}
    return found if forward else found | {"d_o": rows * Dv, "dq": rows * D, "dk": 2 * keys * D, "dv": 2 * keys * Dv}
