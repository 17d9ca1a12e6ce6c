"""What no kernel for GPUs can do, whatever its tiles: said of a spec before it is planned.

In: a ``Variant``. Out: diagnostics, each with the place in the spec. Shared memory, which decides what fits, is the
planner's to say.
"""

from __future__ import annotations

from flashgen.analysis.variant import Variant
from flashgen.diagnostics import Diagnostic
from flashgen.ir.types import ElementType
from flashgen.targets.gpu.architecture import Architecture
from flashgen.targets.gpu.model import padded
from flashgen.targets.gpu.recipes import candidates

# What the tables of tiles reach.
MOST_COLUMNS = 256


def limits(variant: Variant) -> tuple[Diagnostic, ...]:
    """Everything of a spec that is refused."""
    return _head_dim(variant) or _schedule(variant)


def _head_dim(variant: Variant) -> tuple[Diagnostic, ...]:
    """Head dimensions that are too large, or of which one is large, so that warps divide it, and the other is odd."""
    widths = (padded(variant.head_dim.qk), padded(variant.head_dim.v))
    place = variant.spec.place("head_dim")
    if max(widths) > MOST_COLUMNS:
        message = f"kernels for GPUs reach head dimension {MOST_COLUMNS}; '{variant.spec.name}' has {variant.head_dim}"
        note = "the CPU's kernels have no such limit: build with --target cpu, or load with backend='cpu'"
        return (Diagnostic("E406", message, place, notes=(note,)),)
    if max(widths) > 128 and any(width % 32 for width in widths):
        message = f"a GPU's kernels cannot divide head dimension {variant.head_dim} among two warps"
        note = "where one is above 128 both have to be multiples of 32: pad the smaller one of the tensors with zeros"
        return (Diagnostic("E406", message, place, notes=(note,)),)
    return ()


def _schedule(variant: Variant) -> tuple[Diagnostic, ...]:
    """Pins with which no candidate works, whatever the memory."""
    problems = []
    anything = Architecture("", 80, 0, 0)
    if not candidates("forward", variant, ElementType.F16, anything):
        problems.append("'Br', 'Bc' and 'warps' of the forward pass: a warp has 16 or more whole query rows")
    if not candidates("backward", variant, ElementType.F16, anything):
        problems.append("'backward_Br', 'backward_Bc' and 'backward_warps': a warp has 16 or more whole keys")
    span = variant.spec.schedule.span
    return tuple(Diagnostic("E403", f"the schedule cannot work on a GPU: {problem}", span) for problem in problems)
