"""Stage 3, plan for GPUs: the kernels that calls start. A source holds these and no other.

In: a ``GpuPlan`` of one element type, passes. Out: the launch of each kernel by its name. Templates
leave out what is not among them, and a package says of each kernel of a binary what its launch says.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from itertools import product

from flashgen.kinds.kind import PassName
from flashgen.plan.launches import Launch, PassLaunches
from flashgen.targets.gpu.launches import backward_launches, block_launches, cached_launches, forward_launches
from flashgen.targets.gpu.tiles import GpuPlan


def started(plan: GpuPlan, passes: Collection[PassName]) -> Mapping[str, Launch]:
    """Every launch of these passes, by its kernel."""
    found: dict[str, Launch] = {}
    for each in _launches(plan, passes):
        found |= each.kernels
    return found


def _launches(plan: GpuPlan, passes: Collection[PassName]) -> Iterator[PassLaunches]:
    """A pass for each kind of call."""
    variant = plan.recipe.variant
    if variant.listed is not None:
        yield block_launches(plan)
        return
    if variant.kind.cached:
        yield cached_launches(plan)
        return
    both = (False, True)
    for dropped in both if variant.spec.dropout is not None else both[:1]:
        if "forward" in passes:
            yield forward_launches(plan, dropped=dropped)
        for deterministic, captured in product(both, both) if "backward" in passes else ():
            yield backward_launches(plan, dropped=dropped, deterministic=deterministic, captured=captured)
