"""CpuPlan: how one variant runs on one CPU, and why."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace

from flashgen.ir.shape import Shape
from flashgen.ir.types import ElementType
from flashgen.plan.plan import Plan, Tiles
from flashgen.targets.cpu.device import Cpu
from flashgen.targets.cpu.products import Products, products_of_call

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
