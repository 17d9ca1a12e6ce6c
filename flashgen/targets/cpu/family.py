"""What the family of CPUs knows of one of them: what is compiled for it, and what the model of time says."""

from __future__ import annotations

import functools
from dataclasses import replace

from flashgen.analysis.variant import Variant
from flashgen.ir.expr import literal
from flashgen.ir.shape import Shape
from flashgen.ir.types import ElementType
from flashgen.plan.measured import Tile
from flashgen.plan.paper import BlockSizes
from flashgen.plan.plan import Tiles
from flashgen.plan.report import MOST, PassReport, RunnerUp, pass_report, reason_of, runner_up
from flashgen.targets.cpu.cost import pass_time
from flashgen.targets.cpu.device import LOCAL, Cpu, cpu_identity
from flashgen.targets.cpu.model import buffers, working_set
from flashgen.targets.cpu.plan import CpuPlan, plan_cpu
from flashgen.targets.cpu.products import Products, repays_parts
from flashgen.targets.cpu.recipes import pass_to_plan, usable_bytes
from flashgen.targets.cpu.target import CpuTarget


class CpuFamily:
    """``Family`` of CPUs; see there for what each method is."""

    def target(self, device: Cpu) -> CpuTarget:
        return CpuTarget(device)

    def identity(self, device: Cpu) -> str | None:
        """Nobody has measured on another CPU than the one at hand."""
        return cpu_identity() if device.name == LOCAL else None

    def by_length(self, device: Cpu, variant: Variant, element: ElementType) -> None:  # noqa: ARG002 - a Family's
        """One plan for all lengths: another one is another library, and gains in short calls alone."""
        return

    def cost(self, device: Cpu, variant: Variant, plan: CpuPlan, shape: Shape) -> tuple[PassReport, ...]:
        """Forward and backward of the element types that are multiplied in ways of their own."""
        # In vectors everything is float32 inside, but for pairs.
        apart = device.matrix_per_clock or device.pairs_per_clock
        elements = (ElementType.F32, ElementType.BF16) if apart else (ElementType.F32,)
        return tuple(
            pass_report(
                name,
                element,
                variant,
                shape,
                tiles=(tile,),
                buffers={name: buffers(variant, products, name, tile.Br, tile.Bc, device.lanes)},
                time=pass_time(variant, products, name, tile, device, shape),
                sram=device.sram_bytes,
                kernel_bytes=functools.partial(_tile_bytes, variant, products, name, device.lanes),
                runners_up=_runners_up(variant, products, name, tile, device, shape),
                reason=reason_of(plan.reasons, (products.of_pass(name), name), tile),
            )
            for element in elements
            for name, (products, tile) in plan.of_call(device, element, shape).items()
        )

    def candidates(
        self, device: Cpu, variant: Variant, shape: Shape, element: ElementType, name: str
    ) -> dict[Tile, float]:
        """Every tile that fits; what the schedule pins stays."""
        products, chosen = plan_cpu(variant, device).of_call(device, element, shape)[name]
        tiles = (chosen, *_fitting(variant, products, name, device))
        return {Tile(x.Br, x.Bc): pass_time(variant, products, name, x, device, shape).seconds for x in tiles}


def _runners_up(
    variant: Variant, products: Products, name: str, tile: Tiles, device: Cpu, shape: Shape
) -> tuple[RunnerUp, ...]:
    """The best other tiles by the model."""
    chosen = pass_time(variant, products, name, tile, device, shape)
    others = [other for other in _fitting(variant, products, name, device) if other != tile]
    dense = replace(variant, keep=literal(True))  # a mask's tiles take time to count
    others.sort(key=lambda other: pass_time(dense, products, name, other, device, shape).seconds)
    found = []
    for other in others[:MOST]:
        predicted = pass_time(variant, products, name, other, device, shape)
        found.append(runner_up(other, f"{other.sram_bytes / 1024:.0f} KiB", predicted, chosen))
    return tuple(sorted(found, key=lambda each: each.seconds))


def _fitting(variant: Variant, products: Products, name: str, device: Cpu) -> tuple[Tiles, ...]:
    """Tiles that fit a core's cache, and that kernels multiply in this way. What the spec pins stays pinned."""
    tiles = pass_to_plan(variant, products, name).candidates(variant, device)
    repaid = (tile for tile in tiles if products is not Products.SPLIT or repays_parts(tile.Br))
    return tuple(tile for tile in repaid if tile.sram_bytes <= usable_bytes(device))


def _tile_bytes(variant: Variant, products: Products, name: str, lanes: int, blocks: BlockSizes) -> int:
    """What a kernel keeps with tiles of this size."""
    return working_set(variant, products, name, blocks.Br, blocks.Bc, lanes)
