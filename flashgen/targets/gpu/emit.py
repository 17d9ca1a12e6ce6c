"""Stage 4, emit for GPUs: the templates of ``templates/cuda`` filled with what one variant contributes.

In: a ``GpuPlan`` of one element type, passes. Out: a ``KernelSource``. The context below is all that a template sees;
each part of it is made by a module of ``printed/``.
"""

from __future__ import annotations

from collections.abc import Collection

from flashgen.emit.context import tidy
from flashgen.emit.environment import environment
from flashgen.emit.kernel_source import KernelSource
from flashgen.kinds.kind import PassName
from flashgen.plan import by_blocks, launches
from flashgen.store.headers import headers_of
from flashgen.targets.gpu import diagonals, model
from flashgen.targets.gpu.printed.gradients import gradient_code
from flashgen.targets.gpu.printed.mask import mask_code
from flashgen.targets.gpu.printed.operands import operand_code
from flashgen.targets.gpu.printed.passes import backward_code, forward_code, has_warpgroups, query_code
from flashgen.targets.gpu.printed.source import source_code
from flashgen.targets.gpu.printed.spec import Places, place_formulas, spec_code
from flashgen.targets.gpu.tiles import GpuPlan

# Whose constants templates share with the planner.
_MODULES = {"by_blocks": by_blocks, "diagonals": diagonals, "launches": launches, "model": model}


def emit_cuda(plan: GpuPlan, name: PassName | None = None) -> KernelSource:
    """The CUDA C++ source of one head dimension, element type and target, for a pass, or for all that there are."""
    variant = plan.recipe.variant
    passes = variant.kind.passes if name is None else (name,)
    text = tidy(environment().get_template("cuda/kernel.cu.jinja").render(_context(plan, passes)))
    return KernelSource(
        file_name="_".join((plan.symbol, *passes, str(plan.own.element), plan.target)) + ".cu",
        target=plan.target,
        symbol=plan.symbol,
        head_dim=variant.head_dim,
        text=text,
        defines=(),
        headers=headers_of(text),
    )


def _context(plan: GpuPlan, passes: Collection[PassName]) -> dict[str, object]:
    """Everything that ``kernel.cu.jinja`` and what it includes may refer to."""
    recipe = plan.recipe
    places = Places(recipe)  # hooks come in the order in which they are placed
    place_formulas(recipe, places)
    gradients = gradient_code(recipe, places)
    mask = mask_code(recipe, places.placement, lines=has_warpgroups(plan))
    forward, backward, queries = forward_code(plan), backward_code(plan), query_code(plan)
    plans = (*((forward,) if "forward" in passes else ()), *((backward, queries) if "backward" in passes else ()))
    return {
        **_MODULES,
        "source": source_code(plan, passes, plans, lines=mask.asks_lines),
        "plan": plan,
        "recipe": recipe,
        "kind": recipe.variant.kind,
        "spec": spec_code(recipe, places),
        "mask": mask,
        "operands": operand_code(plan, passes),
        "forward": forward,
        "backward": backward,
        "queries": queries,
        "gradients": gradients,
    }
