"""Predicted time of a pass on a GPU: a roofline for each tile, tiles to blocks, blocks to waves.

In: a ``Recipe``, the tiles of an element type, a ``Gpu``, a shape. Out: ``PassTime``. For each tile every unit of a
multiprocessor (tensor cores, special functions, float32 lanes, shared memory, its link to the L2 cache) has a number of
clocks to work. A warp goes through the phases of a tile one after the other: products, whose fragments are loaded
meanwhile; the weights; what it adds to dQ. Warps that share a scheduler hide each other's phases: the busiest unit
works all the time, and what is beside it is divided among them. Blocks have as many tiles as the mask leaves them, and
are dealt to multiprocessors as a GPU deals them; what the L2 cache and HBM need for the bytes that are moved bounds the
whole.

It is a model to rank tiles by. Its constants were fitted to times of an H200, in bfloat16: ``BARRIER``,
``L2_BYTES_PER_CLOCK``, ``ISSUE`` and ``SPILL_CLOCKS`` to 34 of causal attention (``tools/benchmarks/model.py`` at
2,16,16,8192,8192, both passes, D 64 and 128); ``INSTRUCTIONS``, ``PROLOGUE`` and ``NEXT_PROLOGUE`` to 380 of causal
and plain calls of 256 to 16,384 tokens at these head dimensions, so that what it calls the fastest is fast: what calls
take (``family.py``) is 1 % behind the fastest of the tiles that were timed, 14 % at most. Predictions are off by 13
% (root mean square). Clocks are the boost clock's. ``tools/benchmarks/README.md`` has the tables.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from flashgen.analysis.variant import Variant
from flashgen.ir.shape import Shape
from flashgen.ir.types import ElementType
from flashgen.plan.paper import Lengths, kernel_flops
from flashgen.plan.prediction import KernelTime, PassTime
from flashgen.plan.tile_counts import TileCounts, tile_counts
from flashgen.plan.work import PairWork, PassName, pair_work
from flashgen.targets.gpu.architecture import multiprocessor_of
from flashgen.targets.gpu.bytes import bytes_of_shape
from flashgen.targets.gpu.model import FLOAT, padded
from flashgen.targets.gpu.product import Gpu
from flashgen.targets.gpu.recipe import Recipe
from flashgen.targets.gpu.schedules import Backward, Forward, Queries, Schedule
from flashgen.targets.gpu.tiles import MOST_REGISTERS, ElementPlan, registers

BARRIER = 285  # clocks of a block at each barrier of a tile: warps wait for the last, and start with nothing under way
INSTRUCTIONS = 500  # of a warp for a tile of warpgroups, whatever its size: they wait at mbarriers, not for one another
PROLOGUE = 8000  # clocks before the first tile and after the last: launch, query tile, mask, first copies, output
NEXT_PROLOGUE = 4000  # the same, where a persistent block has asked for its next tile meanwhile
LAUNCH_SECONDS = 3e-6
RESERVED_SHARED = 1024  # bytes of a block's shared memory that CUDA keeps for itself
L2_BYTES_PER_CLOCK = 40  # a multiprocessor's share, where nobody has published the chip's; its link takes 64
ADDITION = 2  # times its bytes that an addition in the L2 cache takes: they are read and written there
REACHED_BANDWIDTH = 0.9  # of the memory's peak
ISSUE = 0.95  # of a unit's peak: address arithmetic and branches take turns with it
SPILL_CLOCKS = 21.0  # a tile for each register of a thread beyond the last, by a warp: stored and loaded again
_MOST_DEALT = 1 << 11  # blocks that are dealt one by one: the last ones, whose tail shows


@dataclass(frozen=True)
class _Tile:
    """Clocks of one tile by unit, of a multiprocessor that has nothing else to do; bytes of the L2 cache for it."""

    units: Mapping[str, float]
    mask: float  # more of ``other`` in a PARTIAL tile
    loaded: float
    added: float  # to the sums of dQ


def pass_time(recipe: Recipe, tiles: ElementPlan, gpu: Gpu, shape: Shape, name: str) -> PassTime:
    """Forward, or backward with gradients that atomic additions sum up; flops are of kept pairs."""
    moved, variant = bytes_of_shape(recipe, tiles, shape, name), recipe.variant
    streaming = [
        _streaming(kernel, by_buffer, gpu) for kernel, by_buffer in moved.items() if not tiles.of_kernel(kernel)
    ]
    main, buffers, kept = list[KernelTime](), Counter[str](), 0.0
    specials: float = 0
    for kernel, by_buffer in moved.items():
        buffers.update(by_buffer)
        used = tiles.of_kernel(kernel)
        if used is None:
            continue
        work = pair_work(recipe.computed, _WORK_OF[kernel])
        if kernel == "backward":
            work = replace(work, products=(*work.products, variant.head_dim.qk))
        counts = tile_counts(variant, shape, used.Br, used.Bc)
        main.append(_main_kernel(kernel, variant, tiles.element, used, gpu, shape, counts, work, by_buffer))
        specials += work.specials * counts.visited * used.Br * used.Bc
        kept = kept or counts.kept_fraction
    flops = kept * kernel_flops(Lengths.of(shape, variant.head_dim), name)
    return PassTime((*streaming, *main), flops, specials, buffers)


_WORK_OF: Mapping[str, PassName] = {"forward": "forward", "backward": "keys", "keys": "keys", "queries": "queries"}


# -- a kernel ----------------------------------------------------------------------------------------------------------


def _main_kernel(
    name: str,
    variant: Variant,
    element: ElementType,
    tiles: Schedule,
    gpu: Gpu,
    shape: Shape,
    counts: TileCounts,
    work: PairWork,
    moved: Mapping[str, int],
) -> KernelTime:
    wanted = registers(variant, element, tiles)
    resident, limit = _resident(tiles, wanted, gpu)
    heads = shape.batch * (shape.kv_heads if isinstance(tiles, Backward) else shape.heads)
    per_head = counts.column_tiles if isinstance(tiles, Backward) else counts.row_tiles
    if isinstance(tiles, Backward):
        per_head = per_head * (shape.heads // max(shape.kv_heads, 1))
    sharers = tiles.cluster
    per_head = np.repeat(per_head, sharers)  # each block of a cluster has the tiles of all
    blocks = heads * len(per_head)
    resident = max(1, min(resident, -(-blocks // gpu.sms)))
    tile = _tile(name, variant, element, tiles, gpu, work)
    partial = counts.partial / counts.visited if counts.visited else 0.0
    clocks = _clocks(tile, tiles, resident, partial, gpu)
    clocks += resident * max(0, wanted - _most_registers(tiles, gpu)) * SPILL_CLOCKS * tiles.warps / 4
    # The longest blocks of a causal mask come first, whichever way the tiles are numbered.
    is_next = isinstance(tiles, Forward) and tiles.tensor_copies
    lengths = np.sort(per_head)[::-1] * clocks + (NEXT_PROLOGUE if is_next else PROLOGUE)
    makespan, busy = _dealt(lengths, heads, gpu.sms * resident)
    slots = gpu.sms * resident
    alone = {
        each: sharers
        * counts.visited
        * (value + (partial * tile.mask if each == "other" else 0.0))
        / gpu.sms
        / gpu.clock_hz
        for each, value in tile.units.items()
    }
    total = sum(moved.values()) + (ADDITION - 1) * moved.get("workspace.dq", 0)
    alone["l2"] = total / (_l2_bytes_per_clock(gpu) * gpu.clock_hz)
    missed = _from_memory(name, variant, element, shape, gpu, moved, slots, len(per_head))
    alone["hbm"] = missed / (REACHED_BANDWIDTH * gpu.bandwidth)
    seconds = max(makespan / gpu.clock_hz, alone["l2"], alone["hbm"]) + LAUNCH_SECONDS
    idle = max(0.0, 1 - busy / (makespan * slots)) if makespan else 0.0
    used = min(wanted, _most_registers(tiles, gpu))
    return KernelTime(name, seconds, alone, blocks, resident, limit, blocks / slots, idle, used)


def _resident(tiles: Schedule, wanted: int, gpu: Gpu) -> tuple[int, str]:
    """Blocks that fit a multiprocessor at a time, and what they run out of first."""
    unit = multiprocessor_of(gpu.target)
    warps = tiles.threads // 32
    granule = -(-min(wanted, _most_registers(tiles, gpu)) // 8) * 8  # registers are given to a warp in units of 256
    limits = {
        "shared memory": gpu.target.sm_bytes // (tiles.sram_bytes + RESERVED_SHARED),
        "registers": unit.registers // (32 * granule * warps),
        "warps": unit.warps // warps,
        "blocks": unit.blocks,
    }
    name = min(limits, key=lambda each: limits[each])
    return max(1, limits[name]), name


def _most_registers(tiles: Schedule, gpu: Gpu) -> int:
    """Of a thread, where registers are left for further blocks, or for warps that copy, as the plan wants there."""
    if tiles.producers:
        return min(MOST_REGISTERS, tiles.registers[0])
    if tiles.blocks == 1:
        return MOST_REGISTERS
    return min(MOST_REGISTERS, multiprocessor_of(gpu.target).registers // (tiles.threads * tiles.blocks) // 8 * 8)


def _tile(name: str, variant: Variant, element: ElementType, tiles: Schedule, gpu: Gpu, work: PairWork) -> _Tile:
    unit = multiprocessor_of(gpu.target)
    columns = tiles.column_parts
    rows = tiles.cluster // columns  # parts of a tile that blocks have, and copy of what they all read
    pairs = tiles.Br * tiles.Bc // rows
    products = [padded(each) for each in work.products]
    rate = _product_rate(gpu, element, warpgroups=tiles.warpgroups)
    D, Dv = (padded(each) // columns * element.bytes for each in (variant.head_dim.qk, variant.head_dim.v))
    loaded = float(tiles.streamed * (D + Dv))
    # In which schedulers are busy with what no pair asks for.
    instructions = INSTRUCTIONS * tiles.warps / 4 if tiles.warpgroups and not isinstance(tiles, Queries) else 0.0
    return _Tile(
        units={
            "tensor": 2.0 * pairs * sum(products) / columns / rate / ISSUE,
            "special": pairs * work.specials / unit.specials / ISSUE,
            "other": pairs * work.others / unit.float_lanes / ISSUE + instructions,
            "shared": (_shared_bytes(name, tiles, element, D, Dv) + loaded) / unit.shared_bytes_per_clock / ISSUE,
        },
        mask=pairs * work.mask / unit.float_lanes / ISSUE,
        loaded=loaded / rows,
        added=float(FLOAT * tiles.Br * padded(variant.head_dim.qk) // (rows * columns)) if name == "backward" else 0.0,
    )


def _product_rate(gpu: Gpu, element: ElementType, *, warpgroups: bool) -> float:
    """Flops a clock of a multiprocessor. Float32 takes three TF32 products, or the float32 units without TF32.

    Of 8 bits there are twice as many as of 16.
    """
    share = 1.0 if warpgroups else multiprocessor_of(gpu.target).mma_share
    peak = gpu.tensor_16 * share
    if element is ElementType.F32:
        peak = gpu.fma if gpu.tensor_tf32 is None else gpu.tensor_tf32 * share / 3
    if element is ElementType.F8E4M3:
        peak *= 2
    return peak / gpu.sms / gpu.clock_hz


def _shared_bytes(name: str, tiles: Schedule, element: ElementType, D: int, Dv: int) -> float:
    """What fragments are loaded from and stored to shared memory for one tile; a warpgroup reads for four warps."""
    readers = tiles.warps / 4 if tiles.warpgroups else tiles.warps
    match tiles:
        case Forward():
            own = 0 if tiles.q_in_registers else _weighing(tiles) * tiles.rows * D
            return own + readers / tiles.split * tiles.Bc * (D + Dv) + _exchanged(tiles, element)
        case Backward():
            # Each warp has keys of its own, and reads Q and dO for two products each.
            pairs, own = tiles.Br * tiles.rows, tiles.split * tiles.rows * (D + Dv)
            streamed = 2 * readers / tiles.split * tiles.Br * (D + Dv)
            through = (2 if tiles.split > 1 else 0) * pairs * element.bytes
            dq = (3 * pairs * element.bytes + 2 * tiles.rows * D) if name == "backward" else 0
            sent = (tiles.column_parts > 1) * 4 * pairs * FLOAT  # S and dP come from the other block, and are read
            if tiles.divides_keys and name == "backward":
                sent = 4 * pairs * element.bytes  # so does dS, and each warpgroup reads both
            return own + streamed + through + dq + sent
    assert isinstance(tiles, Queries)
    own = _weighing(tiles) * tiles.Br * (D + Dv)
    return own + readers / tiles.split * tiles.Bc * (2 * D + Dv) + _exchanged(tiles, element)


def _weighing(tiles: Forward | Queries) -> int:
    """Warps that read a row's operands for its scores: those that share it, and have keys of a tile."""
    return min(tiles.split, tiles.Bc // tiles.s_columns) if tiles.split > 1 else 1


def _exchanged(tiles: Forward | Queries, element: ElementType) -> int:
    """P or dS of warps that share rows: stored, and read by each."""
    rows = tiles.Br // tiles.cluster
    return (1 + tiles.split) * rows * tiles.Bc * element.bytes if tiles.split > 1 else 0


def _clocks(tile: _Tile, tiles: Schedule, resident: int, partial: float, gpu: Gpu) -> float:
    """From one tile of a block to its next, when ``resident`` blocks share a multiprocessor."""
    link = _l2_bytes_per_clock(gpu) / gpu.sms
    added = ADDITION * tile.added / link
    other = tile.units["other"] + partial * tile.mask
    busiest = max(*tile.units.values(), other, added)
    phases = max(tile.units["tensor"], tile.units["shared"]) + tile.units["special"] + other + added
    # What a warp does beside the busiest unit is hidden by the warps that share its scheduler, one in ``sharing``.
    sharing = resident * tiles.warps / 4
    compute = resident * (busiest + (phases - busiest) / sharing)
    # With one stage a copy has the other blocks' tiles to arrive in; with more stages its own block's, too.
    ahead = tiles.stages > 1 or tiles.ping_pong
    hidden = compute if ahead else compute * (resident - 1) / resident
    return compute + max(0.0, resident * tile.loaded / link - hidden) + BARRIER * tiles.barriers


def _dealt(lengths: np.ndarray[tuple[int], np.dtype[np.float64]], heads: int, slots: int) -> tuple[float, float]:
    """When the last block ends, and the clocks of all; each block goes to the slot that is free first.

    Of many blocks only the last are dealt; those before them leave all slots free at about the same time.
    """
    busy = heads * float(lengths.sum())
    if heads * len(lengths) == 0:
        return 0.0, 0.0
    last = lengths[-_MOST_DEALT:].tolist() * max(1, min(heads, _MOST_DEALT // len(lengths)))
    free = [(busy - sum(last)) / slots] * slots
    for length in last:
        heapq.heapreplace(free, free[0] + length)
    return max(free), busy


def _l2_bytes_per_clock(gpu: Gpu) -> float:
    return gpu.l2_bytes_per_clock or float(L2_BYTES_PER_CLOCK * gpu.sms)


def _from_memory(
    name: str,
    variant: Variant,
    element: ElementType,
    shape: Shape,
    gpu: Gpu,
    moved: Mapping[str, int],
    slots: int,
    blocks_of_a_head: int,
) -> float:
    """Bytes that come from HBM: everything once, and again what the L2 cache does not hold until it is asked for again.

    Of the forward pass that is Q, K, V and O; the backward pass has a gradient beside each of them.
    Blocks that run at a time belong to neighbouring heads; their operands have to stay.
    """
    numbers = shape.batch * shape.kv_heads * shape.kv_len, shape.batch * shape.heads * shape.q_len
    total = float(sum(moved.values()))
    each = 1.0 if name == "forward" else 2.0
    once = min(element.bytes * each * sum(numbers) * (variant.head_dim.qk + variant.head_dim.v), total)
    heads = min(shape.batch * shape.heads, -(-slots // max(blocks_of_a_head, 1)))
    longest = max(shape.q_len, shape.kv_len)
    held = heads * longest * (variant.head_dim.qk + variant.head_dim.v) * element.bytes
    missed = 0.0 if held <= gpu.l2_bytes else 1 - gpu.l2_bytes / held
    return once + (total - once) * missed


def _streaming(name: str, moved: Mapping[str, int], gpu: Gpu) -> KernelTime:
    """A kernel that reads and writes once, and does little else."""
    seconds = sum(moved.values()) / (REACHED_BANDWIDTH * gpu.bandwidth)
    return KernelTime(name, seconds + LAUNCH_SECONDS, {"hbm": seconds}, 0, 0, "", 0.0, 0.0)
