"""Stage 3, plan: choose B_r and B_c of both passes for one device, and say why.

In: a ``Variant`` and a ``Device``. Out: a ``Plan`` with its reasons and what it rejected. The paper (Algorithm 1) sets
B_c = ⌈M / 4d⌉ from the SRAM size M; here every buffer that the templates keep is counted, and among the tiles that fit
the one with the least work beside the matrix products is taken.
"""

from __future__ import annotations

import itertools
from dataclasses import replace

from flashgen.analysis.variant import Variant
from flashgen.diagnostics import SpecError
from flashgen.plan.measured import PASSES, PLANNERS_OWN, Pins
from flashgen.plan.plan import Rejection, Tiles, kib
from flashgen.targets.cpu.device import Cpu
from flashgen.targets.cpu.limits import limits, unused_pins
from flashgen.targets.cpu.model import buffers, overhead
from flashgen.targets.cpu.products import OF_TANGENTS, Products
from flashgen.targets.cpu.recipes import USABLE_SRAM, PassToPlan, decisions, pass_to_plan, usable_bytes
from flashgen.targets.cpu.tiles import CpuPlan


def plan_cpu(variant: Variant, device: Cpu, pins: Pins = PLANNERS_OWN) -> CpuPlan:
    """The plan, with tiles that were tuned in the place of the planner's own. Raises ``SpecError``.

    A variant with a tangent has the plan of forward mode, or that of the backward pass of forward mode.
    """
    chosen = _plan(variant, device)
    if pins.is_empty:
        return chosen
    found = _plan(replace(variant, spec=pins.pinned(variant.spec)), device)
    return replace(found, reasons=chosen.reasons, rejected=chosen.rejected)


def _plan(variant: Variant, device: Cpu) -> CpuPlan:
    refused = limits(variant)
    if refused:
        raise SpecError(refused, variant.spec.sources)
    kinds: tuple[Products, ...] = tuple(Products)
    names: tuple[str, ...] = PASSES
    if variant.tangent is not None:
        kinds, names = OF_TANGENTS, ("jvp_backward" if variant.kind.backward_only else "jvp",)
    tiles: dict[Products, dict[str, Tiles]] = {products: {} for products in kinds}
    memory = f"M = {kib(device.sram_bytes)} of L2 a core on '{device.name}' ({device.source})"
    reasons = [f"{memory}; a tile may use {USABLE_SRAM:.0%} of it"]
    rejected: list[Rejection] = []
    for products, name in itertools.product(kinds, names):
        tiles[products][name], why, lost = _choose(variant, device, pass_to_plan(variant, products, name))
        reasons.append(why)
        rejected += lost
    return CpuPlan(
        spec_name=variant.spec.name,
        head_dim=str(variant.head_dim),
        device=device.name,
        sram_bytes=device.sram_bytes,
        tiles=tiles,
        reasons=(*reasons, *(f"left out: {pin}" for pin in unused_pins(variant))),
        rejected=tuple(rejected),
        decisions=tuple(decisions(variant, device)),
    )


def _choose(variant: Variant, device: Cpu, each: PassToPlan) -> tuple[Tiles, str, list[Rejection]]:
    budget = usable_bytes(device)
    rows, columns = each.candidates(variant)
    fitting: list[tuple[float, Tiles]] = []
    rejected: list[Rejection] = []
    smallest: Tiles | None = None
    for Br in rows:
        for Bc in columns:
            tile = each.tile(variant, device, Br, Bc)
            if smallest is None or tile.sram_bytes < smallest.sram_bytes:
                smallest = tile
            if tile.sram_bytes <= budget:
                cost = overhead(variant, each.products, each.name, Br, Bc, device.l1_bytes)
                fitting.append((cost, tile))
            else:
                reason = f"needs {kib(tile.sram_bytes)}, {kib(budget)} are usable"
                rejected.append(Rejection(each.title, Br, Bc, reason))
    assert smallest is not None, "there is always a candidate"
    if not fitting:
        # Tiles that spill from L2 run from L3: slower, never wrong. A pinned tile is the user's choice.
        kept = buffers(variant, each.products, each.name, smallest.Br, smallest.Bc, device.lanes)
        parts = ", ".join(f"{name} {size / 1024:.1f}" for name, size in kept.items())
        why = f"{each.title}: no tile fits; {_describe(smallest)} spills least from L2: {parts}"
        return smallest, why, rejected
    fitting.sort(key=lambda found: (found[0], found[1].sram_bytes))
    cost, chosen = fitting[0]
    pins = "".join(f", {axis} pinned by the schedule" for axis, pin in (("B_r", each.Br), ("B_c", each.Bc)) if pin)
    least = f"{cost:.1%} of work beside the products, the least of {len(fitting)} that fit{pins}"
    why = f"{each.title}: {_describe(chosen)}: {least}"
    for other_cost, other in fitting[1:4]:
        rejected.append(Rejection(each.title, other.Br, other.Bc, f"{other_cost:.1%} of work beside the products"))
    return chosen, why, rejected


def _describe(tile: Tiles) -> str:
    return f"B_r × B_c = {tile.Br} × {tile.Bc} ({tile.sram_bytes / 1024:.0f} KiB)"
