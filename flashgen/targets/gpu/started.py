"""Stage 3, plan for GPUs: the launches of a kind of call, and the kernels that calls start. A source holds these alone.

In: a ``GpuPlan`` of one element type, a pass. Out: ``PassLaunches``; the launch of each kernel by its name. Templates
leave out what is not among them, and a package says of each kernel of a binary what its launch says.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from itertools import product

from flashgen.kinds.kind import PassName
from flashgen.plan.launches import Launch, PassLaunches
from flashgen.targets.gpu.launches import backward_launches, block_launches, cached_launches, forward_launches
from flashgen.targets.gpu.tiles import GpuPlan


def pass_launches(
    plan: GpuPlan, name: PassName, *, dropped: bool, deterministic: bool, captured: bool = True, turns: bool = False
) -> PassLaunches:
    """The launches of a pass; see ``backward_launches``."""
    variant = plan.recipe.variant
    if variant.listed is not None:
        return block_launches(plan)
    if variant.kind.cached:
        return cached_launches(plan)
    if name == "forward":
        return forward_launches(plan, dropped=dropped)
    return backward_launches(plan, dropped=dropped, deterministic=deterministic, captured=captured, turns=turns)


def started(plan: GpuPlan, passes: Collection[PassName]) -> Mapping[str, Launch]:
    """Every launch of these passes, by its kernel."""
    both, found = (False, True), dict[str, Launch]()
    drops = both if plan.recipe.variant.spec.dropout is not None else both[:1]
    for name, dropped, deterministic, captured in product(passes, drops, both, both):
        found |= pass_launches(plan, name, dropped=dropped, deterministic=deterministic, captured=captured).kernels
    return found
