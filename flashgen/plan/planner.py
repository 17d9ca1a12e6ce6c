"""Stage 3, plan: choose B_r and B_c of both passes for one device, and say why.

In: a ``Variant`` and a ``Device``. Out: a ``Plan`` with its reasons and what it rejected. The paper (Algorithm 1) sets
B_c = ⌈M / 4d⌉ from the SRAM size M; here every buffer that the templates keep is counted, and among the tiles that fit
the one with the least work beside the matrix products is taken.
"""

from __future__ import annotations

from dataclasses import dataclass

from flashgen.analysis.variant import Variant
from flashgen.diagnostics import Diagnostic, SpecError
from flashgen.plan.cpu_model import buffers, overhead, working_set
from flashgen.plan.devices import Device
from flashgen.plan.plan import Plan, Rejection, Tiles, kib
from flashgen.plan.products import Products

# A tile shares its cache with the next rows of K and V on their way in, and with the stack.
USABLE_SRAM = 0.75
# Measured, 256 rows run 1 % faster than 128 where nothing is masked; 128 leave more tasks to share out.
ROWS = (16, 32, 48, 64, 96, 128)
COLUMNS = (16, 32, 64, 96, 128)
# Matrix registers take 32 rows at a time, and what they multiply is laid out for them once a tile.
MATRIX_ROWS_OF_PASS = {"forward": (32, 64, 96, 128, 192, 256, 384, 512), "backward": (32, 64, 96, 128, 192, 256)}
MATRIX_COLUMNS = (32, 64, 96, 128)
# Query rows come in whole vectors, of 16 lanes at most, so that one tile works on every machine.
ROW_MULTIPLE = 16
MOST_ROWS_OR_COLUMNS = 1024


@dataclass(frozen=True)
class PassToPlan:
    """One pass with one kind of products; ``Br`` and ``Bc`` are what the schedule pins."""

    name: str
    products: Products
    Br: int | None
    Bc: int | None

    def tile(self, variant: Variant, device: Device, Br: int, Bc: int) -> Tiles:
        """A tile with the bytes that it keeps."""
        return Tiles(Br, Bc, working_set(variant, self.products, self.name, Br, Bc, device.lanes))

    @property
    def title(self) -> str:
        """In words."""
        return self.products.of_pass(self.name)

    def candidates(self, variant: Variant) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Rows and columns to consider: what the schedule pins, else sizes that go with the layout's blocks."""
        in_vectors, of_matrices = self.products is Products.VECTORS, MATRIX_ROWS_OF_PASS[self.name]
        rows, columns = (ROWS, COLUMNS) if in_vectors else (of_matrices, MATRIX_COLUMNS)
        block = variant.spec.layout.block if variant.spec.layout else None
        return (
            (self.Br,) if self.Br else _dividing(rows, block, ROW_MULTIPLE),
            (self.Bc,) if self.Bc else _dividing(columns, block, 1),
        )


def pass_to_plan(variant: Variant, products: Products, name: str) -> PassToPlan:
    """The pass of this name, with what the schedule pins of it."""
    schedule = variant.spec.schedule
    pins = (schedule.Br, schedule.Bc) if name == "forward" else (schedule.backward_Br, schedule.backward_Bc)
    return PassToPlan(name, products, *pins)


def usable_bytes(device: Device) -> int:
    """What a tile may use of a core's cache."""
    return int(USABLE_SRAM * device.sram_bytes)


def plan(variant: Variant, device: Device) -> Plan:
    """The tiles for ``variant`` on ``device``; ``SpecError`` where the spec pins tiles that cannot work."""
    _check_schedule(variant)
    passes = [pass_to_plan(variant, products, name) for products in Products for name in ("forward", "backward")]
    tiles: list[Tiles] = []
    memory = f"M = {kib(device.sram_bytes)} of L2 a core on '{device.name}' ({device.source})"
    reasons: list[str] = [f"{memory}; a tile may use {USABLE_SRAM:.0%} of it"]
    rejected: list[Rejection] = []
    for each in passes:
        chosen, why, lost = _choose(variant, device, each)
        tiles.append(chosen)
        reasons.append(why)
        rejected += lost
    return Plan(
        spec_name=variant.spec.name,
        head_dim=str(variant.head_dim),
        device=device.name,
        sram_bytes=device.sram_bytes,
        forward=tiles[0],
        backward=tiles[1],
        matrix_forward=tiles[2],
        matrix_backward=tiles[3],
        split_forward=tiles[4],
        split_backward=tiles[5],
        reasons=tuple(reasons),
        rejected=tuple(rejected),
    )


def _choose(variant: Variant, device: Device, each: PassToPlan) -> tuple[Tiles, str, list[Rejection]]:
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
                fitting.append((overhead(variant, each.products, each.name, Br, Bc), tile))
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


def _dividing(sizes: tuple[int, ...], block: int | None, multiple: int) -> tuple[int, ...]:
    """Sizes that divide the block, so that a tile is all in or all out; else multiples of it; else all."""
    if block is None:
        return sizes
    inside = {size for size in (*sizes, block) if block % size == 0 and size % multiple == 0 and size <= max(sizes)}
    around = {size for size in sizes if size % block == 0}
    return tuple(sorted(inside)) or tuple(sorted(around)) or sizes


def _check_schedule(variant: Variant) -> None:
    """Refuse pins that no template can work with."""
    schedule = variant.spec.schedule
    problems: list[str] = []
    for name in ("Br", "backward_Br"):
        value = getattr(schedule, name)
        if value is not None and (value % ROW_MULTIPLE or not ROW_MULTIPLE <= value <= MOST_ROWS_OR_COLUMNS):
            legal = f"a multiple of {ROW_MULTIPLE} up to {MOST_ROWS_OR_COLUMNS}"
            problems.append(f"'{name} = {value}': query rows are vector lanes; write {legal}")
    for name in ("Bc", "backward_Bc"):
        value = getattr(schedule, name)
        if value is not None and not 1 <= value <= MOST_ROWS_OR_COLUMNS:
            problems.append(f"'{name} = {value}': write 1 to {MOST_ROWS_OR_COLUMNS} keys")
    if problems:
        diagnostics = tuple(
            Diagnostic("E403", f"the schedule cannot work on a CPU: {problem}", schedule.span) for problem in problems
        )
        raise SpecError(diagnostics, variant.spec.sources)


def schedule_warnings(variant: Variant) -> tuple[Diagnostic, ...]:
    """A warning for each pin that a CPU kernel has no use for."""
    schedule = variant.spec.schedule
    names = ("warps", "stages", "backward_warps", "backward_stages")
    return tuple(
        Diagnostic(
            "W503", f"'{name}' has no effect on a CPU, whose kernels have no {name.split('_')[-1]}", schedule.span
        )
        for name in names
        if getattr(schedule, name) is not None
    )
