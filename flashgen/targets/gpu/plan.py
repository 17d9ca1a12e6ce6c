"""Stage 3, plan for GPUs: the tiles of every pass and element type for one architecture, and why.

In: a ``Recipe``, an architecture, its family's recipes. Out: a ``GpuPlan`` with its reasons and what it rejected. Of
the candidates of ``recipes.py``, in their order, every buffer that the templates keep is counted, and the first that
fits the shared memory of a block is taken. Kernels that turned out to spill registers are passed over.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from typing import Any

from flashgen.analysis.variant import Variant
from flashgen.diagnostics import Diagnostic, Span, SpecError
from flashgen.ir.types import ElementType
from flashgen.plan.measured import counted
from flashgen.plan.plan import Rejection, Spill, kib
from flashgen.plan.recipe import Decision
from flashgen.targets.gpu.architecture import Architecture
from flashgen.targets.gpu.layouts import layout_of
from flashgen.targets.gpu.limits import ELEMENTS_OF_JVP, limits, limits_of_schedule
from flashgen.targets.gpu.recipe import Recipe
from flashgen.targets.gpu.recipes import Recipes, candidates
from flashgen.targets.gpu.schedules import Forward, KeyWarps, Schedule, Warps
from flashgen.targets.gpu.tiles import ElementPlan, GpuPlan, harmless_spill, still_spilled


def plan_gpu(recipe: Recipe, target: Architecture, recipes: Recipes, spills: Collection[Spill] = ()) -> GpuPlan:
    """The plan; ``SpecError`` where the spec pins tiles that cannot work, or nothing fits a type that it asks for."""
    variant, spec = recipe.variant, recipe.variant.spec
    refused = limits(variant) or limits_of_schedule(recipe)
    if refused:
        raise SpecError(refused, spec.sources)
    wanted = spec.dtypes or (ElementType.F16, ElementType.BF16, ElementType.F32)
    wanted = (ElementType.F8E4M3,) if variant.kind.f8 else wanted
    if variant.tangent is not None:
        wanted = tuple(each for each in wanted if each in ELEMENTS_OF_JVP)
    plans: list[ElementPlan] = []
    block, multiprocessor = kib(target.block_bytes), kib(target.sm_bytes)
    reasons = [f"{block} of shared memory a block on {target.name}, {multiprocessor} a multiprocessor"]
    rejected: list[Rejection] = []
    decisions = list(recipe.decisions)
    for element in wanted:
        found = _plan_element(recipe, target, recipes, element, spills, reasons, rejected, decisions)
        if found is not None:
            plans.append(found)
        elif spec.dtypes is not None or element is not ElementType.F32:
            memory = f"a block's shared memory at head dimension {variant.head_dim}"
            message = f"no tile of '{spec.name}' in {element} fits {memory}"
            notes = (*reasons, *_shortage(recipe, element, target.block_bytes, reasons, rejected))
            place = _pinned(variant) or spec.place("head_dim")
            raise SpecError([Diagnostic("E406", message, place, notes=notes)], spec.sources)
    return GpuPlan(
        spec_name=spec.name,
        head_dim=str(variant.head_dim),
        target=target.name,
        sram_bytes=target.block_bytes,
        recipe=recipe,
        elements=tuple(plans),
        reasons=tuple(reasons),
        rejected=tuple(rejected),
        decisions=tuple(decisions),
    )


def _plan_element(
    recipe: Recipe,
    target: Architecture,
    recipes: Recipes,
    element: ElementType,
    spills: Collection[Spill],
    reasons: list[str],
    rejected: list[Rejection],
    decisions: list[Decision],
) -> ElementPlan | None:
    """The tiles of one element type; None, with a reason, where a pass has none that fits."""
    variant = recipe.variant

    def size(choice: Schedule) -> int:
        return layout_of(recipe, element, choice).bytes

    def choose(pass_name: str) -> Any:
        found = candidates(pass_name, recipe, element, target, recipes)
        is_forward = bool(found) and isinstance(found[-1].row, Forward)
        if found and (variant.kind.backward_only if is_forward else variant.kind.forward_only):
            return found[-1].row  # there are no such kernels: any will do
        for candidate in found:
            choice = candidate.row
            needed = size(choice)
            known = [each for each in spills if (each.element, each.pass_name) == (element, pass_name)]
            spilled = [each.bytes for each in known if each.tile == choice]
            guessed = max((still_spilled(variant, each, choice) for each in known), default=0)
            if needed > target.block_bytes:
                why = f"{element}: needs {needed / 1024:.1f} KiB, {kib(target.block_bytes)} are there"
            elif spilled and candidate is not found[-1]:
                why = f"{element}: {_describe(choice)} spills {max(spilled)} bytes of registers"
            elif guessed > harmless_spill(choice) and candidate is not found[-1]:
                why = f"{element}: {_describe(choice)} would spill about {guessed} bytes of registers"
            else:
                blocks = target.sm_bytes // (needed + 1024)
                reasons.append(
                    f"{pass_name}, {element}: B_r × B_c = {_describe(choice)}, {needed / 1024:.1f} KiB: "
                    f"{blocks} {'block fits' if blocks == 1 else 'blocks fit'} a multiprocessor's shared memory"
                )
                decisions.extend(each.of(f"{pass_name}, {element}") for each in candidate.decisions)
                return choice
            rejected.append(Rejection(pass_name, choice.Br, choice.Bc, why))
        reasons.append(f"{pass_name}, {element}: left out, because no tile fits")
        return None

    forward, backward, queries = choose("forward"), choose("backward"), choose("queries")
    if forward is None or backward is None or queries is None:
        return None
    keys_bytes = layout_of(recipe, element, backward, with_dq=False).bytes
    return ElementPlan(
        element,
        replace(forward, sram_bytes=size(forward)),
        replace(backward, sram_bytes=size(backward), keys_sram_bytes=keys_bytes),
        replace(queries, sram_bytes=size(queries)),
    )


def _describe(choice: Schedule) -> str:
    return f"{choice.Br} × {choice.Bc} by {choice.multipliers}, {counted(choice.stages, 'stage')}"


def _pinned(variant: Variant) -> Span | None:
    """Where the schedule stands that leaves no other tiles; None where it pins nothing."""
    return variant.spec.schedule.span if variant.spec.schedule.pins else None


def _shortage(
    recipe: Recipe, element: ElementType, sram: int, reasons: Sequence[str], rejected: Sequence[Rejection]
) -> Iterator[str]:
    """What the smallest tiles need and for what, and what was considered for the passes that were left out."""
    kept = {
        name: layout_of(recipe, element, each, with_dq=recipe.one_pass).buffers
        for name, each in (("forward", Warps(16, 16, 1)), ("backward", KeyWarps(16, 16, 1)))
    }
    for name, sizes in kept.items():
        if sum(sizes.values()) > sram:
            parts = "; ".join(f"{buffer} {size}" for buffer, size in sizes.items())
            needed = f"even a tile of 16 × 16 needs {sum(sizes.values())} bytes ({parts}); {sram} are there"
            yield f"{name}, {element}: {needed}"
    if _pinned(recipe.variant) is None:
        elsewhere = "build with --target cpu, or load with backend='cpu'; or take a smaller head dimension"
        yield f"the CPU's kernels have no such limit: {elsewhere}"
    for lost in rejected:
        title = f"{lost.pass_name}, {element}: "
        if lost.reason.startswith(f"{element}: ") and any(each.startswith(f"{title}left out") for each in reasons):
            yield f"{title}{lost.Br} × {lost.Bc} {lost.reason.removeprefix(f'{element}: ')}"
