"""What the families of GPUs know of a product: what is compiled for it, and what the model of time says."""

from __future__ import annotations

from flashgen.analysis.variant import Variant
from flashgen.ir.shape import Shape
from flashgen.ir.types import ElementType
from flashgen.plan.measured import Tile
from flashgen.plan.report import PassReport
from flashgen.targets.gpu.alternatives import predicted
from flashgen.targets.gpu.by_shape import Rivals, rivals
from flashgen.targets.gpu.product import Gpu
from flashgen.targets.gpu.report import pass_reports
from flashgen.targets.gpu.target import GpuTarget
from flashgen.targets.gpu.tiles import GpuPlan


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
        return pass_reports(device, shape, plan)

    def candidates(
        self, device: Gpu, variant: Variant, shape: Shape, element: ElementType, name: str
    ) -> dict[Tile, float]:
        """What the model compares with the planner's choice."""
        return predicted(variant, device, shape, element, name)
