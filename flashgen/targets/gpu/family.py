"""What the families of GPUs know of a product: what is compiled for it, and what the model of time says."""

from __future__ import annotations

import functools

from flashgen.analysis.variant import Variant
from flashgen.ir.shape import Shape
from flashgen.ir.types import ElementType
from flashgen.plan.measured import PASSES, Pins, Tile
from flashgen.plan.paper import BlockSizes
from flashgen.plan.report import PassReport, pass_report, reason_of
from flashgen.targets.gpu.by_shape import Rivals, gpu_candidates, gpu_runners_up, rivals, tile_of
from flashgen.targets.gpu.bytes import kernels_of
from flashgen.targets.gpu.cost import pass_time
from flashgen.targets.gpu.layouts import layout_of
from flashgen.targets.gpu.product import Gpu
from flashgen.targets.gpu.recipe import Recipe
from flashgen.targets.gpu.schedules import KeyWarps, Warps
from flashgen.targets.gpu.target import GpuTarget
from flashgen.targets.gpu.tiles import OF_KERNEL, GpuPlan


class GpuFamily:
    """``Family`` of GPUs; see there for what each method is."""

    def target(self, device: Gpu) -> GpuTarget:
        return device.target

    def identity(self, device: Gpu) -> None:  # noqa: ARG002 - a Family's
        """The name that a board gives, which a row of the table does not know."""
        return

    def by_length(self, device: Gpu, variant: Variant, element: ElementType) -> Rivals:
        return rivals(variant, device, element)

    def cost(self, device: Gpu, variant: Variant, plan: GpuPlan, shape: Shape) -> tuple[PassReport, ...]:  # noqa: ARG002
        """Forward and backward of every element type."""
        reports, recipe = [], plan.recipe
        for tiles in plan.elements:
            element = tiles.element
            for name in PASSES:
                found = ((kernel, tiles.of_kernel(kernel)) for kernel in kernels_of(recipe, name))
                used = {OF_KERNEL[kernel]: each for kernel, each in found if each is not None}
                first = next(iter(used.values()))
                reports.append(
                    pass_report(
                        name,
                        element,
                        recipe.variant,
                        shape,
                        tiles=tuple(used.values()),
                        buffers={
                            kernel: layout_of(recipe, element, each, with_dq=recipe.one_pass).buffers
                            for kernel, each in used.items()
                        },
                        time=pass_time(recipe, tiles, device, shape, name),
                        sram=device.target.block_bytes,
                        kernel_bytes=functools.partial(_tile_bytes, recipe, element, name),
                        runners_up=gpu_runners_up(recipe, tiles, device, shape, name),
                        reason=reason_of(plan.reasons, (f"{name}, {element}", name), first),
                    )
                )
        return tuple(reports)

    def candidates(
        self, device: Gpu, variant: Variant, shape: Shape, element: ElementType, name: str
    ) -> dict[Tile, float]:
        """The planner's choice comes first, then what the model compares with it."""
        plan = device.target.plan(variant, Pins(element=element))
        recipe, chosen = plan.recipe, plan.own
        found: dict[Tile, float] = {}
        for plans in (chosen, *gpu_candidates(recipe, device, chosen, name)):
            found.setdefault(tile_of(plans, name), pass_time(recipe, plans, device, shape, name).seconds)
        return found


def _tile_bytes(recipe: Recipe, element: ElementType, name: str, blocks: BlockSizes) -> int:
    """What a kernel keeps with tiles of this size."""
    forward, keys = Warps(blocks.Br, blocks.Bc, 1), KeyWarps(blocks.Br, blocks.Bc, blocks.Bc // 16)
    return layout_of(recipe, element, forward if name == "forward" else keys).bytes
