"""Everything that ``flashgen plan`` says of one head dimension: the choice, what it costs, and what it is measured by.

In: a ``Variant``, a ``Device`` or ``Gpu``, a shape. Out: ``PlanReport``: for each pass the tile with the bytes of its
buffers, predicted time, HBM bytes beside those of standard attention (Algorithms 0 and 3), of the paper's own algorithm
(1 and 4) and the least that any algorithm moves, the paper's block sizes and whether they fit, and the runners-up.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Literal as OneOf

from flashgen.analysis.variant import Variant
from flashgen.diagnostics import SpecError
from flashgen.ir.shape import Shape
from flashgen.ir.types import ElementType
from flashgen.plan import cpu_model, cpu_time, cuda_model, gpu_time, paper
from flashgen.plan.alternatives import RunnerUp, cpu_runners_up, gpu_runners_up
from flashgen.plan.cuda_launches import passes
from flashgen.plan.cuda_plan import BackwardTiles, CudaPlan, ElementPlan, ForwardTiles, QueryTiles
from flashgen.plan.cuda_planner import plan_cuda
from flashgen.plan.cuda_tables import BackwardChoice, ForwardChoice
from flashgen.plan.device_table import Gpu
from flashgen.plan.devices import Device
from flashgen.plan.paper import BlockSizes, Lengths
from flashgen.plan.plan import Plan, Tiles
from flashgen.plan.planner import plan
from flashgen.plan.prediction import LIMITS, PassTime
from flashgen.plan.products import Products
from flashgen.plan.tile_counts import TileCounts, tile_counts

DEFAULT_SHAPE = Shape(4, 16, 16, 4096, 4096)
KIB = 1024


@dataclass(frozen=True)
class PaperTile:
    """B_r and B_c of the paper's line 1 for M elements; bytes of its buffers, and of the kernel's at such a tile.

    The kernel's tile is the paper's in whole sixteens.
    """

    blocks: BlockSizes
    elements: int
    buffers: Mapping[str, int]
    kernel_blocks: BlockSizes
    kernel_bytes: int
    sram_bytes: int

    @property
    def needed(self) -> int:
        """Bytes of the paper's own buffers."""
        return sum(self.buffers.values())

    @property
    def fits(self) -> bool:
        """Whether they fit the SRAM."""
        return self.needed <= self.sram_bytes

    @property
    def kernel_fits(self) -> bool:
        """Whether the kernel's do."""
        return self.kernel_bytes <= self.sram_bytes


@dataclass(frozen=True)
class Moved:
    """HBM bytes of a pass: the kernels', standard attention's, those of Algorithm 1 or 4, the least; N²d²/M beside."""

    kernels: int
    standard: int
    paper: int
    least: int
    bound: float


@dataclass(frozen=True)
class PassReport:
    """One pass of one element type; ``buffers`` in bytes by kernel and name."""

    name: OneOf["forward", "backward"]
    element: ElementType
    tiles: tuple[Tiles, ...]
    buffers: Mapping[str, Mapping[str, int]]
    counts: TileCounts
    time: PassTime
    moved: Moved
    paper: PaperTile
    runners_up: tuple[RunnerUp, ...]

    def to_json(self) -> dict[str, object]:
        """The report as plain data."""
        main = self.time.main
        return {
            "pass": self.name,
            "element": str(self.element),
            "tiles": [asdict(tile) for tile in self.tiles],
            "buffers": {kernel: dict(sizes) for kernel, sizes in self.buffers.items()},
            "visited_fraction": self.counts.visited_fraction,
            "full_fraction": self.counts.full_fraction,
            "kept_fraction": self.counts.kept_fraction,
            "exact": self.counts.is_exact and not self.counts.unknown,
            "at_most": bool(self.counts.unknown),
            "unknown": list(self.counts.unknown),
            "predicted_seconds": self.time.seconds,
            "flops": self.time.flops,
            "special_functions": self.time.specials,
            "kernels": [
                {
                    "name": kernel.name,
                    "seconds": kernel.seconds,
                    "alone": dict(kernel.alone),
                    "blocks": kernel.blocks,
                    "resident": kernel.resident,
                    "resident_limit": kernel.resident_limit,
                    "waves": kernel.waves,
                    "idle": kernel.idle,
                    "registers": kernel.registers,
                }
                for kernel in self.time.kernels
            ],
            "bound": main.bound,
            "hbm_bytes": asdict(self.moved) | {"by_buffer": dict(self.time.hbm)},
            "paper": {
                "Br": self.paper.blocks.Br,
                "Bc": self.paper.blocks.Bc,
                "elements": self.paper.elements,
                "needed_bytes": self.paper.needed,
                "fits": self.paper.fits,
                "buffers": dict(self.paper.buffers),
                "kernel_bytes": self.paper.kernel_bytes,
                "kernel_fits": self.paper.kernel_fits,
            },
            "runners_up": [asdict(each) for each in self.runners_up],
        }


@dataclass(frozen=True)
class PlanReport:
    """A plan, and what is said of it for a shape. ``timed_on``: the product whose clocks were taken."""

    plan: Plan | CudaPlan
    device: str
    timed_on: str
    shape: Shape
    passes: tuple[PassReport, ...]
    remarks: tuple[str, ...]

    def to_json(self) -> dict[str, object]:
        """The plan's own data, and the report's."""
        return self.plan.to_json() | {
            "device": self.device,
            "timed_on": self.timed_on,
            "shape": asdict(self.shape),
            "passes": [each.to_json() for each in self.passes],
            "remarks": list(self.remarks),
        }


def report(variant: Variant, device: Device | Gpu, shape: Shape) -> PlanReport:
    """The report; ``SpecError`` where no plan fits, with how much is needed and for what."""
    if isinstance(device, Gpu):
        return _gpu_report(variant, device, shape)
    return _cpu_report(variant, device, shape)


# -- GPUs --------------------------------------------------------------------------------------------------------------


def _gpu_report(variant: Variant, gpu: Gpu, shape: Shape) -> PlanReport:
    try:
        decisions = plan_cuda(variant, gpu.target)
    except SpecError as error:
        raise _with_shortage(error, variant, gpu) from None
    reports = []
    for tiles in decisions.elements:
        element = tiles.element
        for name, time in (("forward", gpu_time.forward_time), ("backward", gpu_time.backward_time)):
            used = _used(variant, tiles, name)
            reports.append(
                PassReport(
                    name=name,  # type: ignore[arg-type]  # one of the two
                    element=element,
                    tiles=used,
                    buffers={_kernel_name(each): _buffers(variant, element, each) for each in used},
                    counts=tile_counts(variant, shape, used[0].Br, used[0].Bc),
                    time=(predicted := time(variant, tiles, gpu, shape)),
                    moved=_moved(variant, shape, element, name, gpu.target.block_bytes, predicted.hbm_bytes),
                    paper=_paper_tile_gpu(variant, element, name, gpu),
                    runners_up=gpu_runners_up(variant, tiles, gpu, shape, name),
                )
            )
    remarks = _remarks(reports)
    if not gpu.is_generated_for:
        remarks = (f"kernels are not generated for {gpu.target.name}: this is a plan for comparison only", *remarks)
    return PlanReport(decisions, gpu.name, gpu.product, shape, tuple(reports), remarks)


def _used(variant: Variant, tiles: ElementPlan, name: str) -> tuple[Tiles, ...]:
    if name == "forward":
        return (tiles.forward,)
    return (tiles.backward,) if passes(variant).one_pass else (tiles.backward, tiles.queries)


def _kernel_name(tiles: Tiles) -> str:
    return {ForwardTiles: "forward", BackwardTiles: "backward", QueryTiles: "queries"}[type(tiles)]


def _buffers(variant: Variant, element: ElementType, tiles: Tiles) -> Mapping[str, int]:
    match tiles:
        case ForwardTiles():
            return cuda_model.forward_buffers(variant, element, tiles)
        case BackwardTiles():
            return cuda_model.backward_buffers(variant, element, tiles, with_dq=passes(variant).one_pass)
        case QueryTiles():
            return cuda_model.query_buffers(variant, element, tiles)
    raise AssertionError(tiles)


def _paper_tile_gpu(variant: Variant, element: ElementType, name: str, gpu: Gpu) -> PaperTile:
    blocks, buffers, elements = _paper_buffers(variant, element, name, gpu.target.block_bytes)
    rounded = _rounded(blocks)
    if name == "forward":
        needed = cuda_model.forward_bytes(variant, element, ForwardChoice(rounded.Br, rounded.Bc, 1))
    else:
        tiles = BackwardChoice(rounded.Br, rounded.Bc, rounded.Bc // 16)
        needed = cuda_model.backward_bytes(variant, element, tiles, with_dq=True)
    return PaperTile(blocks, elements, buffers, rounded, needed, gpu.target.block_bytes)


def _with_shortage(error: SpecError, variant: Variant, gpu: Gpu) -> SpecError:
    """The same error, with what the smallest tiles need and for what."""
    wanted = variant.spec.dtypes or (ElementType.F16,)
    hints = []
    for element in wanted:
        parts = {
            "forward": cuda_model.forward_buffers(variant, element, ForwardChoice(16, 16, 1)),
            "backward": cuda_model.backward_buffers(
                variant, element, BackwardChoice(16, 16, 1), with_dq=passes(variant).one_pass
            ),
        }
        hints += [f"{name}, {element}: {_shortage(sizes, gpu.target.block_bytes)}" for name, sizes in parts.items()]
    changed = [
        replace(each, notes=(*each.notes, *hints)) if each.code == "E406" else each for each in error.diagnostics
    ]
    return SpecError(changed, error.sources)


def _shortage(buffers: Mapping[str, int], sram: int) -> str:
    total = sum(buffers.values())
    parts = "; ".join(f"{name} {size}" for name, size in buffers.items())
    return f"even a tile of 16 × 16 needs {total} bytes ({parts}); {sram} are there"


# -- CPUs --------------------------------------------------------------------------------------------------------------


def _cpu_report(variant: Variant, device: Device, shape: Shape) -> PlanReport:
    decisions = plan(variant, device)
    # In vectors everything is float32 inside.
    elements = (ElementType.F32, ElementType.BF16) if device.matrix_per_clock else (ElementType.F32,)
    reports = []
    for element in elements:
        for name, (products, tile) in decisions.of_call(device, element, shape).items():
            predicted = cpu_time.pass_time(variant, products, name, tile, device, shape)
            reports.append(
                PassReport(
                    name="forward" if name == "forward" else "backward",
                    element=element,
                    tiles=(tile,),
                    buffers={name: cpu_model.buffers(variant, products, name, tile.Br, tile.Bc, device.lanes)},
                    counts=tile_counts(variant, shape, tile.Br, tile.Bc),
                    time=predicted,
                    moved=_moved(variant, shape, element, name, device.sram_bytes, predicted.hbm_bytes),
                    paper=_paper_tile_cpu(variant, element, products, name, device),
                    runners_up=cpu_runners_up(variant, products, name, tile, device, shape),
                )
            )
    return PlanReport(decisions, device.name, device.name, shape, tuple(reports), _remarks(reports))


def _paper_tile_cpu(variant: Variant, element: ElementType, products: Products, name: str, device: Device) -> PaperTile:
    blocks, buffers, elements = _paper_buffers(variant, element, name, device.sram_bytes)
    rounded = _rounded(blocks)
    kernel_bytes = cpu_model.working_set(variant, products, name, rounded.Br, rounded.Bc, device.lanes)
    return PaperTile(blocks, elements, buffers, rounded, kernel_bytes, device.sram_bytes)


# -- both --------------------------------------------------------------------------------------------------------------


def _paper_buffers(
    variant: Variant, element: ElementType, name: str, sram: int
) -> tuple[BlockSizes, Mapping[str, int], int]:
    D, Dv = variant.head_dim.qk, variant.head_dim.v
    elements = max(sram // element.bytes, 1)
    blocks = paper.paper_blocks(elements, max(D, Dv))
    buffers = (paper.forward_buffers if name == "forward" else paper.backward_buffers)(blocks, D, Dv)
    return blocks, {each: element.bytes * count for each, count in buffers.items()}, elements


def _rounded(blocks: BlockSizes) -> BlockSizes:
    return BlockSizes(-(-blocks.Br // 16) * 16, -(-blocks.Bc // 16) * 16)


def lengths_of(variant: Variant, shape: Shape) -> Lengths:
    """The sizes that the paper's closed forms take."""
    heads, kv_heads = shape.batch * shape.heads, shape.batch * shape.kv_heads
    return Lengths(heads, kv_heads, shape.q_len, shape.kv_len, variant.head_dim.qk, variant.head_dim.v)


def _moved(variant: Variant, shape: Shape, element: ElementType, name: str, sram: int, kernels: int) -> Moved:
    lengths, size = lengths_of(variant, shape), element.bytes
    blocks = paper.paper_blocks(max(sram // size, 1), max(lengths.qk, lengths.v))
    forward = name == "forward"
    return Moved(
        kernels=kernels,
        standard=size * (paper.standard_forward if forward else paper.standard_backward)(lengths),
        paper=size * (paper.flash_forward if forward else paper.flash_backward)(lengths, blocks),
        least=size * (paper.lower_bound if forward else paper.backward_lower_bound)(lengths),
        bound=size * paper.io_bound(lengths, max(sram // size, 1)),
    )


def _remarks(reports: list[PassReport]) -> tuple[str, ...]:
    found: dict[str, None] = {}
    for each in reports:
        if each.counts.unknown:
            names = ", ".join(f"'{name}'" for name in each.counts.unknown)
            found[
                f"the mask reads {names}, known only to a call: tiles that depend on it count as visited, so that "
                "times and HBM bytes are the most that a call can take"
            ] = None
        elif not each.counts.is_exact:
            found["of this many tiles some rows were looked at, and stand for all"] = None
    return tuple(found)


def describe_bound(time: PassTime) -> str:
    """Why a pass takes what it takes, in words."""
    main = time.main
    if main.bound == "latency":
        return LIMITS["latency"]
    return f"{LIMITS[main.bound]}, {main.alone[main.bound] / main.seconds:.0%} of the time"
