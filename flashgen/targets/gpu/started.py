"""Stage 3, plan for GPUs: the kernels that calls start. A source holds these and no other.

In: a ``GpuPlan`` and the symbol of its source. Out: the launch of each kernel by its name. Templates
leave out what is not among them, and a package says of each kernel of a binary what its launch says.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import product

from flashgen.ir.types import ElementType
from flashgen.plan.launches import Launch, PassLaunches
from flashgen.targets.gpu.launches import backward_launches, block_launches, cached_launches, forward_launches
from flashgen.targets.gpu.tiles import GpuPlan


def started(symbol: str, plan: GpuPlan) -> Mapping[str, Launch]:
    """Every launch of every pass, by its kernel."""
    found: dict[str, Launch] = {}
    for element in plan.by_element:
        for each in _passes(symbol, plan, element):
            found |= each.kernels
    return found


def _passes(symbol: str, plan: GpuPlan, element: ElementType) -> Iterator[PassLaunches]:
    """A pass for each kind of call."""
    variant = plan.recipe.variant
    if variant.listed is not None:
        yield block_launches(symbol, plan, element)
        return
    if variant.kind.cached:
        yield cached_launches(symbol, plan, element)
        return
    both = (False, True)
    for dropped in both if variant.spec.dropout is not None else both[:1]:
        if not variant.kind.backward_only:
            yield forward_launches(symbol, plan, element, dropped=dropped)
        for deterministic, captured in product(both, both) if not variant.kind.forward_only else ():
            yield backward_launches(
                symbol, plan, element, dropped=dropped, deterministic=deterministic, captured=captured
            )
