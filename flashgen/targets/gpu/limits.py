"""What no kernel for GPUs can do, whatever its tiles: said of a spec before it is planned.

In: a ``Variant``, or its ``Recipe``. Out: diagnostics, each with the place in the spec. Shared memory, which decides
what fits, is the planner's to say.
"""

from __future__ import annotations

from flashgen.analysis.variant import Variant
from flashgen.diagnostics import Diagnostic
from flashgen.ir.types import ElementType
from flashgen.targets.gpu.architecture import Architecture
from flashgen.targets.gpu.model import padded
from flashgen.targets.gpu.recipe import Recipe
from flashgen.targets.gpu.recipes import candidates
from flashgen.targets.gpu.tables import WIDEST_JVP

# A tangent of a score, by which weights are multiplied, may be of any size: float16 ends at 65504.
ELEMENTS_OF_JVP = (ElementType.BF16, ElementType.F32)


def has_jvp(variant: Variant) -> bool:
    """Whether there are kernels of forward mode: registers hold the sums of O twice up to a head dimension."""
    is_narrow = max(variant.head_dim.qk, variant.head_dim.v) <= WIDEST_JVP
    dtypes = variant.spec.dtypes or ELEMENTS_OF_JVP
    return is_narrow and any(each in dtypes for each in ELEMENTS_OF_JVP)


def has_jvp_backward(variant: Variant) -> bool:
    """Whether there are kernels of its backward pass: those have no sums over the norms of rows."""
    return has_jvp(variant) and not variant.uses_sqdist


def limits(variant: Variant) -> tuple[Diagnostic, ...]:
    """A large head dimension, which warps divide among them, beside one that they cannot divide."""
    head_dim = variant.head_dim
    widths = (padded(head_dim.qk), padded(head_dim.v))
    multiple, warps = (64, "four") if max(widths) > 256 else (32, "two") if max(widths) > 128 else (16, "")
    if all(width % multiple == 0 for width in widths):
        return ()
    message = f"a GPU's kernels cannot divide head dimension {head_dim} among {warps} warps"
    least = 256 if multiple == 64 else 128
    what = f"where one is above {least} both have to be multiples of {multiple}"
    note = f"{what}: pad the smaller one of the tensors with zeros"
    return (Diagnostic("E406", message, variant.spec.place("head_dim"), notes=(note,)),)


def limits_of_schedule(recipe: Recipe) -> tuple[Diagnostic, ...]:
    """Pins with which no candidate works, whatever the memory."""
    problems = []
    anything = Architecture("", 80, 0, 0)
    if not candidates("forward", recipe, ElementType.F16, anything):
        problems.append("'Br', 'Bc' and 'warps' of the forward pass: a warp has 16 or more whole query rows")
    if not candidates("backward", recipe, ElementType.F16, anything):
        problems.append("'backward_Br', 'backward_Bc' and 'backward_warps': a warp has 16 or more whole keys")
    span = recipe.variant.spec.schedule.span
    return tuple(Diagnostic("E403", f"the schedule cannot work on a GPU: {problem}", span) for problem in problems)
