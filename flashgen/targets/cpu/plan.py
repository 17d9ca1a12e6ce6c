"""Stage 3, plan: choose B_r and B_c of both passes for one device, and say why.

In: a ``Variant`` and a ``Device``. Out: a ``Plan`` with its reasons and what it rejected. The paper (Algorithm 1) sets
B_c = ⌈M / 4d⌉ from the SRAM size M; here every buffer that the templates keep is counted, and among the tiles that fit
the one with the least work beside the matrix products is taken.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace

from flashgen.analysis.variant import Variant
from flashgen.diagnostics import SpecError
from flashgen.ir.shape import Shape
from flashgen.ir.types import ElementType
from flashgen.plan.measured import PASSES, PLANNERS_OWN, Pins
from flashgen.plan.plan import Plan, Rejection, Tiles, kib
from flashgen.targets.cpu.device import Cpu
from flashgen.targets.cpu.limits import limits, unused_pins
from flashgen.targets.cpu.model import buffers, overhead
from flashgen.targets.cpu.products import OF_TANGENTS, Products, products_of_call
from flashgen.targets.cpu.recipes import USABLE_SRAM, PassToPlan, decisions, pass_to_plan, usable_bytes


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
    tiles = each.candidates(variant, device)
    fitting = [
        (overhead(variant, each.products, each.name, tile.Br, tile.Bc, device.l1_bytes), tile)
        for tile in tiles
        if tile.sram_bytes <= budget
    ]
    rejected = [
        Rejection(each.title, tile.Br, tile.Bc, f"needs {kib(tile.sram_bytes)}, {kib(budget)} are usable")
        for tile in tiles
        if tile.sram_bytes > budget
    ]
    if not fitting:
        # Tiles that spill from L2 run from L3: slower, never wrong. A pinned tile is the user's choice.
        smallest = min(tiles, key=lambda tile: tile.sram_bytes)
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


# What passes are called in macros.
_MACROS = {"forward": "", "jvp": "", "backward": "BACKWARD_", "jvp_backward": "BACKWARD_"}


@dataclass(frozen=True, repr=False)
class CpuPlan(Plan):
    """The decisions for one head dimension on the CPU of this name: the ``tiles`` of each pass, by how it multiplies.

    Forward mode has a plan and a library of its own, whose macros are those of the forward pass. So has the backward
    pass of forward mode, whose macros are those of the backward pass.
    """

    device: str
    tiles: Mapping[Products, Mapping[str, Tiles]]

    @property
    def forward(self) -> Tiles:
        """The tile in vectors."""
        return self.tiles[Products.VECTORS]["forward"]

    @property
    def backward(self) -> Tiles:
        """The tile in vectors."""
        return self.tiles[Products.VECTORS]["backward"]

    @property
    def passes(self) -> Mapping[str, Tiles]:
        """The tiles by the names of the passes, and of how they multiply."""
        return {each.of_pass(name): tile for each, tiles in self.tiles.items() for name, tile in tiles.items()}

    def of_call(self, device: Cpu, element: ElementType, shape: Shape) -> Mapping[str, tuple[Products, Tiles]]:
        """How a call multiplies, the same in each pass, and its tiles."""
        lowest = min(split.Br for split in self.tiles[Products.SPLIT].values())
        products = products_of_call(device, element, shape, lowest, tuple(self.tiles))
        return {name: (products, tile) for name, tile in self.tiles[products].items()}

    @property
    def elements_apart(self) -> tuple[ElementType, ...]:
        return (ElementType.F32,)

    def of_element(self, element: ElementType) -> Mapping[str, Tiles]:  # noqa: ARG002 - inside all is float32
        return self.tiles[Products.VECTORS]

    def joined(self, plans: Mapping[ElementType, tuple[CpuPlan, CpuPlan]]) -> CpuPlan:
        ((found, _),) = plans.values()
        return found

    @property
    def defines(self) -> tuple[tuple[str, str], ...]:
        """The macros that carry the decisions into the generated source."""
        return tuple(
            (f"FLASHGEN_{each.prefix.upper()}{_MACROS[name]}{axis}", str(size))
            for each, tiles in self.tiles.items()
            for name, tile in tiles.items()
            for axis, size in (("BR", tile.Br), ("BC", tile.Bc))
        )

    def tiles_as_json(self) -> dict[str, dict[str, int]]:
        """The tiles as plain data: of ``forward``, ``pair_forward`` and so on."""
        return {f"{each.prefix}{name}": asdict(tile) for each, of in self.tiles.items() for name, tile in of.items()}

    def to_json(self) -> dict[str, object]:
        found = asdict(replace(self, tiles={}))
        del found["tiles"]
        return found | self.tiles_as_json()


def tiles_from_json(tiles: Mapping[str, Mapping[str, int]]) -> dict[Products, dict[str, Tiles]]:
    """The tiles of both passes."""
    names = ("forward", "backward")
    return {each: {name: Tiles(**tiles[f"{each.prefix}{name}"]) for name in names} for each in Products}
