"""Stage 4, emit for GPUs: the templates of ``templates/cuda`` filled with what one variant contributes.

In: a ``GpuPlan``. Out: a ``KernelSource``. The context below is all that a template sees; each part
of it is made by a module of ``printed/``.
"""

from __future__ import annotations

from dataclasses import dataclass

from flashgen.analysis.variant import Variant
from flashgen.emit.context import template_values, tidy
from flashgen.emit.environment import environment
from flashgen.emit.kernel_source import KernelSource
from flashgen.store.headers import headers_of
from flashgen.targets.gpu.printed.gradients import GradientCode, gradient_code
from flashgen.targets.gpu.printed.mask import MaskCode, mask_code
from flashgen.targets.gpu.printed.operands import OperandCode, operand_code
from flashgen.targets.gpu.printed.passes import (
    BackwardCode,
    ForwardCode,
    QueryCode,
    backward_code,
    forward_code,
    forward_ways,
    has_warpgroups,
    query_code,
)
from flashgen.targets.gpu.printed.source import SourceCode, source_code
from flashgen.targets.gpu.printed.spec import Places, SpecCode, place_formulas, spec_code
from flashgen.targets.gpu.recipe import Recipe
from flashgen.targets.gpu.tiles import GpuPlan


@dataclass(frozen=True)
class _Context:
    """Everything that ``kernel.cu.jinja`` and what it includes may refer to."""

    source: SourceCode
    plan: GpuPlan
    recipe: Recipe
    spec: SpecCode
    mask: MaskCode
    operands: OperandCode
    forward: ForwardCode  # of all element types
    forward_ways: tuple[ForwardCode, ...]  # by how their warps divide rows
    backward: BackwardCode
    queries: QueryCode
    gradients: GradientCode


def cuda_symbol(variant: Variant) -> str:
    """What every kernel's name begins with."""
    return f"{variant.spec.name}_d{str(variant.head_dim).replace('/', '_')}{variant.kind.mark}"


def emit_cuda(plan: GpuPlan) -> KernelSource:
    """The CUDA C++ source of one head dimension for one target."""
    variant, symbol = plan.recipe.variant, cuda_symbol(plan.recipe.variant)
    context = _context(plan, symbol)
    text = tidy(environment().get_template("cuda/kernel.cu.jinja").render(template_values(context)))
    return KernelSource(
        file_name=f"{symbol}{'_backward' if variant.kind.backward_only else ''}_{plan.target}.cu",
        target=plan.target,
        symbol=symbol,
        head_dim=variant.head_dim,
        text=text,
        defines=(),
        headers=headers_of(text),
    )


def _context(plan: GpuPlan, symbol: str) -> _Context:
    recipe = plan.recipe
    places = Places(recipe)  # hooks come in the order in which they are placed
    sinks = place_formulas(recipe, places)
    gradients = gradient_code(recipe, places)
    of_warpgroups = has_warpgroups(plan)
    mask = mask_code(recipe, places.placement, lines=of_warpgroups)
    return _Context(
        source=source_code(plan, symbol, lines=mask.asks_lines),
        plan=plan,
        recipe=recipe,
        spec=spec_code(recipe, places, sinks),
        mask=mask,
        operands=operand_code(plan),
        forward=forward_code(recipe, plan.elements, of_warpgroups=of_warpgroups),
        forward_ways=forward_ways(plan),
        backward=backward_code(plan),
        queries=query_code(plan),
        gradients=gradients,
    )
