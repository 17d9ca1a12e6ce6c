"""Predicted time of a pass on a GPU: a roofline for each tile, tiles to blocks, blocks to waves.

In: a ``Variant``, the tiles of an element type, a ``Gpu``, a shape. Out: ``PassTime``. For each tile every unit of a
multiprocessor (tensor cores, special functions, float32 lanes, shared memory) has a number of clocks to work. Warps
that share a scheduler hide each other's clocks: a tile takes no less than its busiest unit, and no less than one warp
needs from end to end. Blocks have as many tiles as the mask leaves them, and are dealt to multiprocessors as a GPU
deals them; what the L2 cache and HBM need for the bytes that are moved bounds the whole.

It is a model to rank tiles by: clocks are the boost clock's, and constants below are rough. ``benchmarks/model.py``
says how far it is off.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from flashgen.analysis.variant import Variant
from flashgen.ir.shape import Shape
from flashgen.ir.types import ElementType
from flashgen.plan.cuda_bytes import backward_traffic, forward_traffic
from flashgen.plan.cuda_launches import passes
from flashgen.plan.cuda_model import padded
from flashgen.plan.cuda_plan import BackwardTiles, ElementPlan, ForwardTiles, QueryTiles
from flashgen.plan.cuda_registers import MOST, registers
from flashgen.plan.device_table import Gpu
from flashgen.plan.gpu_architecture import multiprocessor_of
from flashgen.plan.prediction import KernelTime, PassTime
from flashgen.plan.tile_counts import TileCounts, tile_counts
from flashgen.plan.work import PairWork, pair_work

MainTiles = ForwardTiles | BackwardTiles | QueryTiles

LATENCY = 700  # clocks from asking for a line to having it in shared memory, when it lies in the L2 cache
BARRIER = 40  # clocks for all warps of a block to meet
PROLOGUE = 2500  # clocks before the first tile and after the last: launch, query tile, mask, output
LAUNCH_SECONDS = 3e-6
RESERVED_SHARED = 1024  # bytes of a block's shared memory that CUDA keeps for itself
L2_BYTES_PER_CLOCK = 32  # a multiprocessor's share, where nobody has published the chip's; half of its link
REACHED_BANDWIDTH = 0.9  # of the memory's peak
ISSUE = 0.85  # of a unit's peak: address arithmetic and branches take turns with it
SPILL_CLOCKS = 2.0  # a tile for each register of a thread beyond the last, by a warp: stored and loaded again
_MOST_DEALT = 1 << 17  # blocks that are dealt one by one


@dataclass(frozen=True)
class _Tile:
    """Clocks of one tile by unit, of a multiprocessor that has nothing else to do; bytes that are loaded for it."""

    units: Mapping[str, float]
    mask: float  # more of ``other`` in a PARTIAL tile
    loaded: float
    stages: int


def forward_time(variant: Variant, tiles: ElementPlan, gpu: Gpu, shape: Shape) -> PassTime:
    """The forward pass."""
    moved = forward_traffic(variant, tiles, shape)
    work = pair_work(variant, "forward")
    counts = tile_counts(variant, shape, tiles.forward.Br, tiles.forward.Bc)
    kernel = _main_kernel("forward", variant, tiles.element, tiles.forward, gpu, shape, counts, work, moved["forward"])
    return _pass(variant, shape, (kernel,), moved, (work,), (counts,), (tiles.forward,))


def backward_time(variant: Variant, tiles: ElementPlan, gpu: Gpu, shape: Shape) -> PassTime:
    """The backward pass, with gradients that atomic additions sum up."""
    moved = backward_traffic(variant, tiles, shape)
    one_pass = passes(variant).one_pass
    keys = pair_work(variant, "keys")
    if one_pass:
        keys = PairWork((*keys.products, variant.head_dim.qk), keys.specials, keys.others, keys.mask)
    by_keys = tile_counts(variant, shape, tiles.backward.Br, tiles.backward.Bc)
    name = "backward" if one_pass else "keys"
    kernels = [_streaming(each, moved[each], gpu) for each in ("rows", "convert") if each in moved]
    kernels.append(_main_kernel(name, variant, tiles.element, tiles.backward, gpu, shape, by_keys, keys, moved[name]))
    if one_pass:
        return _pass(variant, shape, tuple(kernels), moved, (keys,), (by_keys,), (tiles.backward,))
    queries = pair_work(variant, "queries")
    by_queries = tile_counts(variant, shape, tiles.queries.Br, tiles.queries.Bc)
    kernels.append(
        _main_kernel(
            "queries", variant, tiles.element, tiles.queries, gpu, shape, by_queries, queries, moved["queries"]
        )
    )
    both = (tiles.backward, tiles.queries)
    return _pass(variant, shape, tuple(kernels), moved, (keys, queries), (by_keys, by_queries), both)


def _pass(
    variant: Variant,
    shape: Shape,
    kernels: tuple[KernelTime, ...],
    moved: Mapping[str, Mapping[str, int]],
    works: Sequence[PairWork],
    counts: Sequence[TileCounts],
    tiles: Sequence[MainTiles],
) -> PassTime:
    """Work as the formula needs it: of the pairs that are kept, each product once."""
    buffers: dict[str, int] = {}
    for by_buffer in moved.values():
        for name, size in by_buffer.items():
            buffers[name] = buffers.get(name, 0) + size
    kept = counts[0].kept_fraction * shape.batch * shape.heads * shape.q_len * shape.kv_len
    D, Dv = variant.head_dim.qk, variant.head_dim.v
    flops = 2.0 * kept * (D + Dv) if isinstance(tiles[0], ForwardTiles) else 2.0 * kept * (3 * D + 2 * Dv)
    specials = sum(
        work.specials * each.visited * tile.Br * tile.Bc for work, each, tile in zip(works, counts, tiles, strict=True)
    )
    return PassTime(kernels, flops, specials, buffers)


# -- a kernel ----------------------------------------------------------------------------------------------------------


def _main_kernel(
    name: str,
    variant: Variant,
    element: ElementType,
    tiles: MainTiles,
    gpu: Gpu,
    shape: Shape,
    counts: TileCounts,
    work: PairWork,
    moved: Mapping[str, int],
) -> KernelTime:
    wanted = registers(variant, element, tiles)
    resident, limit = _resident(tiles, wanted, gpu)
    heads = shape.batch * (shape.kv_heads if isinstance(tiles, BackwardTiles) else shape.heads)
    per_head = counts.column_tiles if isinstance(tiles, BackwardTiles) else counts.row_tiles
    if isinstance(tiles, BackwardTiles):
        per_head = per_head * (shape.heads // max(shape.kv_heads, 1))
    blocks = heads * len(per_head)
    resident = max(1, min(resident, -(-blocks // gpu.sms)))
    tile = _tile(name, variant, element, tiles, gpu, work)
    partial = counts.partial / counts.visited if counts.visited else 0.0
    clocks = _clocks(tile, tiles, resident, partial, gpu)
    clocks += resident * max(0, wanted - MOST) * SPILL_CLOCKS * tiles.warps / 4
    # The longest blocks of a causal mask come first, whichever way the tiles are numbered.
    lengths = np.sort(per_head)[::-1] * clocks + PROLOGUE
    makespan, busy = _dealt(lengths, heads, gpu.sms * resident)
    slots = gpu.sms * resident
    alone = {
        each: counts.visited * (value + (partial * tile.mask if each == "other" else 0.0)) / gpu.sms / gpu.clock_hz
        for each, value in tile.units.items()
    }
    total = sum(moved.values()) + moved.get("workspace.dq", 0)  # additions in the cache take twice their bytes
    alone["l2"] = total / (_l2_bytes_per_clock(gpu) * gpu.clock_hz)
    alone["hbm"] = _from_memory(variant, element, shape, gpu, moved, slots, len(per_head)) / (
        REACHED_BANDWIDTH * gpu.bandwidth
    )
    seconds = max(makespan / gpu.clock_hz, alone["l2"], alone["hbm"]) + LAUNCH_SECONDS
    idle = 1 - busy / (makespan * slots) if makespan else 0.0
    return KernelTime(name, seconds, alone, blocks, resident, limit, blocks / slots, idle, min(wanted, MOST))


def _resident(tiles: MainTiles, wanted: int, gpu: Gpu) -> tuple[int, str]:
    """Blocks that fit a multiprocessor at a time, and what they run out of first."""
    unit = multiprocessor_of(gpu.target)
    warps = tiles.warps + (0 if isinstance(tiles, QueryTiles) else tiles.loaders)
    granule = -(-min(wanted, MOST) // 8) * 8  # registers are given to a warp in units of 256
    limits = {
        "shared memory": gpu.target.sm_bytes // (tiles.sram_bytes + RESERVED_SHARED),
        "registers": unit.registers // (32 * granule * warps),
        "warps": unit.warps // warps,
        "blocks": unit.blocks,
    }
    name = min(limits, key=lambda each: limits[each])
    return max(1, limits[name]), name


def _tile(name: str, variant: Variant, element: ElementType, tiles: MainTiles, gpu: Gpu, work: PairWork) -> _Tile:
    unit = multiprocessor_of(gpu.target)
    pairs = tiles.Br * tiles.Bc
    products = [padded(each) for each in work.products]
    rate = _product_rate(gpu, element, warpgroups=tiles.warpgroups)
    D, Dv = padded(variant.head_dim.qk) * element.bytes, padded(variant.head_dim.v) * element.bytes
    moved = tiles.Br if isinstance(tiles, BackwardTiles) else tiles.Bc
    loaded = float(moved * (D + Dv))
    return _Tile(
        units={
            "tensor": 2.0 * pairs * sum(products) / rate / ISSUE,
            "special": pairs * work.specials / unit.specials / ISSUE,
            "other": pairs * work.others / unit.float_lanes / ISSUE,
            "shared": (_shared_bytes(name, tiles, element, D, Dv) + loaded) / unit.shared_bytes_per_clock / ISSUE,
        },
        mask=pairs * work.mask / unit.float_lanes / ISSUE,
        loaded=loaded,
        stages=tiles.stages,
    )


def _product_rate(gpu: Gpu, element: ElementType, *, warpgroups: bool) -> float:
    """Flops a clock of a multiprocessor. Float32 takes three TF32 products, or the float32 units without TF32."""
    share = 1.0 if warpgroups else multiprocessor_of(gpu.target).mma_share
    peak = gpu.tensor_16 * share
    if element is ElementType.F32:
        peak = gpu.fma if gpu.tensor_tf32 is None else gpu.tensor_tf32 * share / 3
    return peak / gpu.sms / gpu.clock_hz


def _shared_bytes(name: str, tiles: MainTiles, element: ElementType, D: int, Dv: int) -> float:
    """What fragments are loaded from and stored to shared memory for one tile; a warpgroup reads for four warps."""
    readers = tiles.warps / 4 if tiles.warpgroups else tiles.warps
    match tiles:
        case ForwardTiles():
            own = 0 if tiles.q_in_registers else tiles.Br * D
            return own + readers * tiles.Bc * (D + Dv)
        case BackwardTiles():
            # Each warp has keys of its own, and reads Q and dO for two products each.
            own = tiles.split * tiles.Bc * (D + Dv)
            streamed = 2 * readers / tiles.split * tiles.Br * (D + Dv)
            through = (2 if tiles.split > 1 else 0) * tiles.Br * tiles.Bc * element.bytes
            dq = (3 * tiles.Br * tiles.Bc * element.bytes + 2 * tiles.Bc * D) if name == "backward" else 0
            return own + streamed + through + dq
        case QueryTiles():
            return tiles.Br * (D + Dv) + readers * tiles.Bc * (2 * D + Dv)


def _clocks(tile: _Tile, tiles: MainTiles, resident: int, partial: float, gpu: Gpu) -> float:
    """From one tile of a block to its next, when ``resident`` blocks share a multiprocessor."""
    units = {**tile.units, "other": tile.units["other"] + partial * tile.mask}
    own = sum(units.values()) * 4 / tiles.warps  # one warp from end to end: a block has warps / 4 on each scheduler
    rate = _l2_bytes_per_clock(gpu) / gpu.sms
    arrives = LATENCY + tile.loaded * resident / rate
    # With one stage a copy has half a tile to arrive in, and the other blocks' tiles; with more stages a whole one.
    compute = max(resident * max(units.values()), own)
    hidden = compute if tile.stages > 1 else compute * (resident - 1) / resident + own / 2
    return compute + max(0.0, arrives - hidden) + 2 * BARRIER


def _dealt(lengths: np.ndarray[tuple[int], np.dtype[np.float64]], heads: int, slots: int) -> tuple[float, float]:
    """When the last block ends, and the clocks of all; each block goes to the slot that is free first."""
    busy = heads * float(lengths.sum())
    if heads * len(lengths) == 0:
        return 0.0, 0.0
    if heads * len(lengths) > _MOST_DEALT:
        return busy / slots + float(lengths.max()) / 2, busy
    free = [0.0] * slots
    for _ in range(heads):
        for length in lengths:
            heapq.heapreplace(free, free[0] + float(length))
    return max(free), busy


def _l2_bytes_per_clock(gpu: Gpu) -> float:
    return gpu.l2_bytes_per_clock or float(L2_BYTES_PER_CLOCK * gpu.sms)


def _from_memory(
    variant: Variant,
    element: ElementType,
    shape: Shape,
    gpu: Gpu,
    moved: Mapping[str, int],
    slots: int,
    blocks_of_a_head: int,
) -> float:
    """Bytes that come from HBM: everything once, and again what the L2 cache does not hold until it is asked for again.

    Blocks that run at a time belong to neighbouring heads; their operands have to stay.
    """
    numbers = shape.batch * shape.kv_heads * shape.kv_len, shape.batch * shape.heads * shape.q_len
    total = float(sum(moved.values()))
    once = min(element.bytes * 2.0 * sum(numbers) * (variant.head_dim.qk + variant.head_dim.v), total)
    heads = min(shape.batch * shape.heads, -(-slots // max(blocks_of_a_head, 1)))
    longest = max(shape.q_len, shape.kv_len)
    held = heads * longest * (variant.head_dim.qk + variant.head_dim.v) * element.bytes
    missed = 0.0 if held <= gpu.l2_bytes else 1 - gpu.l2_bytes / held
    return once + (total - once) * missed


def _streaming(name: str, moved: Mapping[str, int], gpu: Gpu) -> KernelTime:
    """A kernel that reads and writes once, and does little else."""
    seconds = sum(moved.values()) / (REACHED_BANDWIDTH * gpu.bandwidth)
    return KernelTime(name, seconds + LAUNCH_SECONDS, {"hbm": seconds}, 0, 0, "", 0.0, 0.0)
