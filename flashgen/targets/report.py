"""Everything that ``flashgen plan`` says of one head dimension on a device: the plan, and what its cost is."""

from __future__ import annotations

from flashgen.analysis.variant import Variant
from flashgen.ir.shape import Shape
from flashgen.plan.plan import Plan
from flashgen.plan.report import PlanReport, remarks_on
from flashgen.targets.families import family_of
from flashgen.targets.protocol import Device


def report(variant: Variant, device: Device, shape: Shape, plan: Plan | None = None) -> PlanReport:
    """The report on a plan, by default the planner's own.

    Raises ``SpecError`` where no plan fits, with how much is needed and for what.
    """
    family = family_of(device)
    decisions = family.target(device).plan(variant) if plan is None else plan
    passes = family.cost(device, variant, decisions, shape)
    remarks = (*device.remarks, *remarks_on(passes))
    return PlanReport(decisions, device.name, device.product, shape, passes, remarks)
