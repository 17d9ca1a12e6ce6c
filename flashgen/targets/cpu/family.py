"""What the family of CPUs knows of one of them: what is compiled for it, and what the model of time says."""

from __future__ import annotations

from flashgen.analysis.variant import Variant
from flashgen.ir.shape import Shape
from flashgen.ir.types import ElementType
from flashgen.plan.measured import Tile
from flashgen.plan.report import PassReport
from flashgen.targets.cpu.alternatives import predicted
from flashgen.targets.cpu.device import LOCAL, Cpu
from flashgen.targets.cpu.machine import cpu_identity
from flashgen.targets.cpu.report import pass_reports
from flashgen.targets.cpu.target import CpuTarget
from flashgen.targets.cpu.tiles import CpuPlan


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
        return pass_reports(variant, device, shape, plan)

    def candidates(
        self, device: Cpu, variant: Variant, shape: Shape, element: ElementType, name: str
    ) -> dict[Tile, float]:
        """Every tile that fits."""
        return predicted(variant, device, shape, element, name)
