"""CpuPlan: how one variant runs on one CPU, and why."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from flashgen.ir.shape import Shape
from flashgen.ir.types import ElementType
from flashgen.plan.plan import Plan, Tiles
from flashgen.targets.cpu.device import Cpu
from flashgen.targets.cpu.products import OF_TANGENTS, Products, products_of_call


def _macros(tiles: Mapping[tuple[Products, str], Tiles]) -> tuple[tuple[str, str], ...]:
    """Macros of tiles, by how they multiply and what their pass is called in a macro."""
    kinds = {Products.VECTORS: "", Products.PAIRS: "PAIR_", Products.BFLOAT16: "MATRIX_", Products.SPLIT: "SPLIT_"}
    return tuple(
        (f"FLASHGEN_{kinds[products]}{name}{axis}", str(size))
        for (products, name), tile in tiles.items()
        for axis, size in (("BR", tile.Br), ("BC", tile.Bc))
    )


@dataclass(frozen=True, repr=False)
class CpuPlan(Plan):
    """The decisions for one head dimension on the CPU of this name.

    Where vectors multiply pairs of bfloat16 ``pair_forward`` and ``pair_backward`` are the tiles of these. On CPUs
    that have matrix registers ``matrix_forward`` and ``matrix_backward`` are the tiles of bfloat16,
    ``split_forward`` and ``split_backward`` those of float32 and float16, which are multiplied in parts.
    """

    device: str
    forward: Tiles
    backward: Tiles
    pair_forward: Tiles
    pair_backward: Tiles
    matrix_forward: Tiles
    matrix_backward: Tiles
    split_forward: Tiles
    split_backward: Tiles

    @property
    def passes(self) -> Mapping[str, Tiles]:
        """The tiles by the names of the passes, and of how they multiply."""
        return {each.of_pass(name): tile for each in Products for name, tile in self.tiles(each).items()}

    def tiles(self, products: Products) -> Mapping[str, Tiles]:
        """The tiles of both passes, by name, where numbers are multiplied in this way."""
        forward, backward = {
            Products.VECTORS: (self.forward, self.backward),
            Products.PAIRS: (self.pair_forward, self.pair_backward),
            Products.BFLOAT16: (self.matrix_forward, self.matrix_backward),
            Products.SPLIT: (self.split_forward, self.split_backward),
        }[products]
        return {"forward": forward, "backward": backward}

    def of_call(self, device: Cpu, element: ElementType, shape: Shape) -> Mapping[str, tuple[Products, Tiles]]:
        """How a call multiplies in either pass, and its tiles."""
        products = {
            name: products_of_call(device, element, shape, split.Br)
            for name, split in self.tiles(Products.SPLIT).items()
        }
        return {name: (each, self.tiles(each)[name]) for name, each in products.items()}

    @property
    def elements_apart(self) -> tuple[ElementType, ...]:
        return (ElementType.F32,)

    def of_element(self, element: ElementType) -> Mapping[str, Tiles]:  # noqa: ARG002 - inside all is float32
        return self.tiles(Products.VECTORS)

    def joined(self, plans: Mapping[ElementType, CpuPlan]) -> CpuPlan:
        (found,) = plans.values()
        return found

    @property
    def defines(self) -> tuple[tuple[str, str], ...]:
        """The macros that carry the decisions into the generated source."""
        passes = {"forward": "", "backward": "BACKWARD_"}
        tiles = {(each, passes[name]): tile for each in Products for name, tile in self.tiles(each).items()}
        return _macros(tiles)

    def describe(self) -> str:
        """The plan for people: the choice, its reasons, and the runners-up."""
        lines = [f"{self.spec_name}, head dimension {self.head_dim}, on '{self.device}'"]
        for name, tile in self.tiles(Products.VECTORS).items():
            share = tile.sram_bytes / self.sram_bytes
            lines.append(
                f"  {name:<9} B_r {tile.Br:>4}  B_c {tile.Bc:>4}  {tile.sram_bytes / 1024:>7.0f} KiB, {share:.0%} of M"
            )
        for products in (each for each in Products if each is not Products.VECTORS):
            for name, tile in self.tiles(products).items():
                lines.append(f"  {products.of_pass(name)}: B_r {tile.Br}, B_c {tile.Bc}")
        lines.append("why")
        lines += [f"  {reason}" for reason in self.reasons]
        for pass_name in ("forward", "backward"):
            lost = [each for each in self.rejected if each.pass_name == pass_name]
            if lost:
                lines.append(f"rejected, {pass_name}")
                lines += [f"  {each.Br:>4} × {each.Bc:<4} {each.reason}" for each in lost]
        return "\n".join(lines)


@dataclass(frozen=True, repr=False)
class CpuJvpPlan(Plan):
    """The same of forward mode, or of its backward pass: ``name`` is "jvp" or "jvp_backward".

    Either is a library of its own; its macros are those of the forward pass, or of the backward pass.
    """

    device: str
    name: str
    jvp: Tiles
    split_jvp: Tiles

    @property
    def passes(self) -> Mapping[str, Tiles]:
        """The tiles by how they multiply."""
        return {each.of_pass(self.name): tile for each, tile in self.by_products.items()}

    @property
    def by_products(self) -> Mapping[Products, Tiles]:
        """The tiles where numbers are multiplied in this way."""
        return dict(zip(OF_TANGENTS, (self.jvp, self.split_jvp), strict=True))

    def of_call(self, device: Cpu, element: ElementType, shape: Shape) -> tuple[Products, Tiles]:
        """How a call multiplies, and its tiles."""
        products = products_of_call(device, element, shape, self.split_jvp.Br, OF_TANGENTS)
        return products, self.by_products[products]

    @property
    def elements_apart(self) -> tuple[ElementType, ...]:
        return (ElementType.F32,)

    def of_element(self, element: ElementType) -> Mapping[str, Tiles]:  # noqa: ARG002 - inside all is float32
        return {self.name: self.jvp}

    @property
    def defines(self) -> tuple[tuple[str, str], ...]:
        """The macros that carry the decisions into the generated source."""
        prefix = "BACKWARD_" if self.name == "jvp_backward" else ""
        return _macros({(each, prefix): tile for each, tile in self.by_products.items()})
