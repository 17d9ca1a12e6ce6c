"""Everything that ``flashgen plan`` says of one head dimension: the choice, what it costs, and what it is measured by.

Stage 3, plan. In and out: data, which each family of targets fills in (its ``family.py``). Of each pass a
``PlanReport`` has the tile with the bytes of its buffers, predicted time, HBM bytes beside those of standard attention
(Algorithms 0 and 3), of the paper's own algorithm (1 and 4), of Rabe and Staats', and the least that any algorithm
moves, the paper's block sizes and whether they fit, and the runners-up.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Literal as OneOf

from flashgen.analysis.variant import Variant
from flashgen.ir.shape import Shape
from flashgen.ir.types import ElementType
from flashgen.plan import paper
from flashgen.plan.paper import BlockSizes, Lengths
from flashgen.plan.plan import Plan, Tiles
from flashgen.plan.prediction import LIMITS, PassTime
from flashgen.plan.tile_counts import TileCounts, tile_counts

MOST = 4  # that are shown
MODEL_ERROR = 0.03  # differences that mean nothing


@dataclass(frozen=True)
class RunnerUp:
    """A tile that was not chosen. ``slower``: predicted time over that of the choice, less 1."""

    Br: int
    Bc: int
    what: str
    seconds: float
    slower: float
    why: str


def runner_up(tile: Tiles, what: str, predicted: PassTime, chosen: PassTime) -> RunnerUp:
    """A tile beside the chosen one, with the reason that the model has for it."""
    slower = predicted.seconds / chosen.seconds - 1 if chosen.seconds else 0.0
    main, other = predicted.main, chosen.main
    why = f"limited by {LIMITS[main.bound]}"
    grown = {each: value - other.alone.get(each, 0.0) for each, value in main.alone.items()}
    most = max(grown, key=lambda each: grown[each], default=None)
    if most is not None and grown[most] > 0.02 * main.seconds:
        why = f"more time for {LIMITS[most]}"
    elif main.resident < other.resident:
        why = f"{main.resident} instead of {other.resident} blocks a multiprocessor: {main.resident_limit}"
    elif main.idle > other.idle + 0.02:
        why = f"{main.idle:.0%} of the multiprocessors' time is idle at the end"
    if abs(slower) <= MODEL_ERROR:
        why = "as good, as far as the model can tell; later in the planner's order"
    elif slower < 0:
        why = "the model prefers it; the planner's order, which comes first, does not"
    return RunnerUp(tile.Br, tile.Bc, what, predicted.seconds, slower, why)


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
    """HBM bytes of a pass: the kernels', standard attention's, those of Algorithm 1 or 4, the least; N²d²/M beside.

    ``rabe_staats``: of attention in chunks of √Nk keys, which B.5 of the paper compares with.
    """

    kernels: int
    standard: int
    paper: int
    rabe_staats: int
    least: int
    bound: float


@dataclass(frozen=True)
class PassReport:
    """One pass of one element type; ``buffers`` in bytes by kernel and name.

    ``reason`` is the sentence of the plan that decided the first tile, the pass left out.
    """

    name: OneOf["forward", "backward"]
    element: ElementType
    tiles: tuple[Tiles, ...]
    buffers: Mapping[str, Mapping[str, int]]
    counts: TileCounts
    time: PassTime
    moved: Moved
    paper: PaperTile
    runners_up: tuple[RunnerUp, ...]
    reason: str

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
                {name: x for name, x in vars(kernel).items() if name != "add_up"} for kernel in self.time.kernels
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

    plan: Plan
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


def reason_of(reasons: Sequence[str], titles: tuple[str, ...], tile: Tiles) -> str:
    """Of the sentences on a pass the last that speaks of its tile: those of measured ones, and of shapes, come last."""
    size = f"B_r × B_c = {tile.Br} × {tile.Bc}"
    for each in reversed(reasons):
        for title in titles:
            if each.startswith((f"{title}:", f"{title}, ")) and size in each:
                return each[each.index(size) :]
    return size


def pass_report(
    name: str,
    element: ElementType,
    variant: Variant,
    shape: Shape,
    *,
    tiles: tuple[Tiles, ...],
    buffers: Mapping[str, Mapping[str, int]],
    time: PassTime,
    sram: int,
    kernel_bytes: Callable[[BlockSizes], int],
    runners_up: tuple[RunnerUp, ...],
    reason: str,
) -> PassReport:
    """A pass beside the paper's algorithms in as much memory; ``kernel_bytes``: what a tile of ours would keep."""
    forward, size, (D, Dv) = name == "forward", element.bytes, (variant.head_dim.qk, variant.head_dim.v)
    lengths, elements = Lengths.of(shape, variant.head_dim), max(sram // size, 1)
    blocks, chunks = paper.paper_blocks(elements, max(D, Dv)), paper.rabe_staats_blocks(shape.q_len, shape.kv_len)
    kept = (paper.forward_buffers if forward else paper.backward_buffers)(blocks, D, Dv)
    rounded = BlockSizes(-(-blocks.Br // 16) * 16, -(-blocks.Bc // 16) * 16)  # as kernels have them
    return PassReport(
        name="forward" if forward else "backward",
        element=element,
        tiles=tiles,
        buffers=buffers,
        counts=tile_counts(variant, shape, tiles[0].Br, tiles[0].Bc),
        time=time,
        moved=Moved(
            kernels=time.hbm_bytes,
            standard=size * (paper.standard_forward if forward else paper.standard_backward)(lengths),
            paper=size * (paper.flash_forward if forward else paper.flash_backward)(lengths, blocks),
            rabe_staats=size * (paper.rabe_staats_forward if forward else paper.rabe_staats_backward)(lengths, chunks),
            least=size * (paper.lower_bound if forward else paper.backward_lower_bound)(lengths),
            bound=size * paper.io_bound(lengths, elements),
        ),
        paper=PaperTile(
            blocks=blocks,
            elements=elements,
            buffers={each: size * count for each, count in kept.items()},
            kernel_blocks=rounded,
            kernel_bytes=kernel_bytes(rounded),
            sram_bytes=sram,
        ),
        runners_up=runners_up,
        reason=reason,
    )


def remarks_on(reports: Sequence[PassReport]) -> tuple[str, ...]:
    """What limits the figures of these passes."""
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
