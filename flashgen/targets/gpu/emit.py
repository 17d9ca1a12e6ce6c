"""Stage 4, emit for GPUs: the templates of ``templates/cuda`` filled with what one variant contributes.

In: a ``GpuPlan`` of one element type, passes. Out: a ``KernelSource``. The context below is all that a template sees;
each part of it is made by a module of ``printed/``.
"""

from __future__ import annotations

from collections.abc import Collection

from flashgen.emit.context import tidy
from flashgen.emit.environment import environment
from flashgen.emit.kernel_source import KernelSource
from flashgen.emit.text import spec_digest, spec_lines
from flashgen.kinds.kind import PassName
from flashgen.plan import by_blocks, launches
from flashgen.plan.arguments import stored_tensors
from flashgen.store.headers import headers_of
from flashgen.targets.gpu import diagonals, model
from flashgen.targets.gpu.launches import started
from flashgen.targets.gpu.model import padded
from flashgen.targets.gpu.primitives import C_TYPES, primitives
from flashgen.targets.gpu.printed.gradients import gradient_code
from flashgen.targets.gpu.printed.mask import mask_code
from flashgen.targets.gpu.printed.operands import operand_code
from flashgen.targets.gpu.printed.passes import (
    PassCode,
    backward_code,
    forward_code,
    has_warpgroups,
    query_code,
    warpgroup_products,
)
from flashgen.targets.gpu.printed.spec import Places, has_dropout, place_formulas, spec_code
from flashgen.targets.gpu.tiles import GpuPlan
from flashgen.version import __version__

# Calls whose kernels a compiler may be asked to leave out. Those of ADDITIONS add up gradients in any order.
_REPEATING = ("ADDITIONS", "REPEATABLE")
_DROPOUT = ("WITHOUT_DROPOUT", "WITH_DROPOUT")
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
    asks_lines = any(mask[each] is not None for each in ("keys_of_row", "queries_of_column"))
    forward, backward, queries = forward_code(plan), backward_code(plan), query_code(plan)
    plans = (*((forward,) if "forward" in passes else ()), *((backward, queries) if "backward" in passes else ()))
    return {
        **_MODULES,
        "source": _source(plan, passes, plans, lines=asks_lines),
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


def _source(
    plan: GpuPlan, passes: Collection[PassName], plans: tuple[PassCode, ...], *, lines: bool
) -> dict[str, object]:
    """What the source of a variant says of itself; ``lines``: its mask is asked once a line."""
    recipe, variant, warpgroups = plan.recipe, plan.recipe.computed, warpgroup_products(plan)
    spec, element = variant.spec, plan.own.element
    reads_words = recipe.prefetch is not None or bool(stored_tensors(spec) or recipe.in_turn) or variant.uses_sqdist
    used = {
        "eight_bits": variant.kind.f8,
        "lane_bits": lines,
        "norms": variant.uses_sqdist,
        "pairs": warpgroups is not None and reads_words,
        "parts": variant.kind.parts or variant.kind.slices or variant.kind.cached,
        "philox": has_dropout(variant),
        "pieces": recipe.cuts,
        "products_of_both": variant.tangent is not None,
        "sequence_copies": warpgroups is not None and variant.kind.ragged,
        "units": variant.listed is not None,
        "warpgroup_sums": warpgroups is not None and variant.tangent is not None,
    }
    return {
        "name": spec.name,
        "symbol": plan.symbol,
        "target": plan.target,
        "version": __version__,
        "digest": spec_digest(spec)[:16],
        "spec_lines": spec_lines(spec),
        "reasons": plan.reasons_of(passes),
        "head_dim": variant.head_dim,
        "padded_dims": (padded(variant.head_dim.qk), padded(variant.head_dim.v)),
        "element": {"name": str(element), "c_type": C_TYPES[element]},
        # Macros that leave out kernels of some calls.
        "options": (*(_REPEATING if "backward" in passes else ()), *(_DROPOUT if has_dropout(variant) else ())),
        "plans": plans,  # what it prints of the tiles
        "kernels": frozenset(started(plan, passes)),  # of all that calls start: no other is written
        "primitives": primitives(*(name for name in used if used[name]), warpgroups=warpgroups),
        "warpgroups": warpgroups is not None,  # it has products of these
        "has_forward": "forward" in passes,
        "has_backward": "backward" in passes,
    }
