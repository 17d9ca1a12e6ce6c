"""What plans for a device, and what ``flashgen plan`` says of one head dimension there: the plan, and its cost.

Only the family of the device is imported: who uses a CPU needs no planner for GPUs.
"""

from __future__ import annotations

from typing import Any

from flashgen.analysis.variant import Variant
from flashgen.ir.shape import Shape
from flashgen.plan.plan import Plan
from flashgen.plan.report import PlanReport, remarks_on
from flashgen.targets.protocol import Device, Family


def family_of(device: Device) -> Family[Any, Any, Any]:
    """What plans for a device, and predicts its times."""
    if device.kind == "cpu":
        from flashgen.targets.cpu.family import CpuFamily

        return CpuFamily()
    from flashgen.targets.gpu.family import GpuFamily

    return GpuFamily()


def report(variant: Variant, device: Device, shape: Shape, plan: Plan | None = None) -> PlanReport:
    """The report on a plan, by default the planner's own.

    Raises ``SpecError`` where no plan fits, with how much is needed and for what.
    """
    family = family_of(device)
    decisions = family.target(device).plan(variant) if plan is None else plan
    passes = family.cost(device, variant, decisions, shape)
    remarks = (*device.remarks, *remarks_on(passes))
    return PlanReport(decisions, device.name, device.product, shape, passes, remarks)
