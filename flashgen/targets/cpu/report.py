"""What ``flashgen plan`` says of each pass on a CPU."""

from __future__ import annotations

import functools

from flashgen.analysis.variant import Variant
from flashgen.ir.shape import Shape
from flashgen.ir.types import ElementType
from flashgen.plan.paper import BlockSizes
from flashgen.plan.report import PassReport, pass_report, reason_of
from flashgen.targets.cpu import cost as cpu_cost
from flashgen.targets.cpu import model as cpu_model
from flashgen.targets.cpu.alternatives import cpu_runners_up
from flashgen.targets.cpu.device import Cpu
from flashgen.targets.cpu.products import Products
from flashgen.targets.cpu.tiles import CpuPlan


def pass_reports(variant: Variant, device: Cpu, shape: Shape, decisions: CpuPlan) -> tuple[PassReport, ...]:
    """Forward and backward of the element types that are multiplied in ways of their own."""
    # In vectors everything is float32 inside, but for pairs.
    apart = device.matrix_per_clock or device.pairs_per_clock
    elements = (ElementType.F32, ElementType.BF16) if apart else (ElementType.F32,)
    reports = []
    for element in elements:
        for name, (products, tile) in decisions.of_call(device, element, shape).items():
            reports.append(
                pass_report(
                    name,
                    element,
                    variant,
                    shape,
                    tiles=(tile,),
                    buffers={name: cpu_model.buffers(variant, products, name, tile.Br, tile.Bc, device.lanes)},
                    time=cpu_cost.pass_time(variant, products, name, tile, device, shape),
                    sram=device.sram_bytes,
                    kernel_bytes=functools.partial(_tile_bytes, variant, products, name, device.lanes),
                    runners_up=cpu_runners_up(variant, products, name, tile, device, shape),
                    reason=reason_of(decisions.reasons, (products.of_pass(name), name), tile),
                )
            )
    return tuple(reports)


def _tile_bytes(variant: Variant, products: Products, name: str, lanes: int, blocks: BlockSizes) -> int:
    """What a kernel keeps with tiles of this size."""
    return cpu_model.working_set(variant, products, name, blocks.Br, blocks.Bc, lanes)
