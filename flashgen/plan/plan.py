"""Plan: how one variant runs on one device, and why."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass

from flashgen.ir.shape import Shape
from flashgen.ir.types import ElementType
from flashgen.plan.devices import Device
from flashgen.plan.products import Products, products_of_call


def kib(size: int) -> str:
    """Bytes in words: whole KiB, with a decimal where there are few."""
    if size < 10 * 1024 and size % 1024:
        return f"{size / 1024:.1f} KiB"
    return f"{size / 1024:.0f} KiB"


@dataclass(frozen=True)
class Tiles:
    """The tile of one pass: B_r query rows by B_c keys, and the bytes that it keeps in the device's SRAM."""

    Br: int
    Bc: int
    sram_bytes: int


@dataclass(frozen=True)
class Rejection:
    """A tile that was considered and not chosen."""

    pass_name: str
    Br: int
    Bc: int
    reason: str


@dataclass(frozen=True)
class Plan:
    """The decisions for one head dimension on one device; ``reasons`` are sentences in the order of the decisions.

    On CPUs that have matrix registers ``matrix_forward`` and ``matrix_backward`` are the tiles of bfloat16,
    ``split_forward`` and ``split_backward`` those of float32 and float16, which are multiplied in parts.
    """

    spec_name: str
    head_dim: str
    device: str
    sram_bytes: int
    forward: Tiles
    backward: Tiles
    matrix_forward: Tiles
    matrix_backward: Tiles
    split_forward: Tiles
    split_backward: Tiles
    reasons: tuple[str, ...]
    rejected: tuple[Rejection, ...]

    def tiles(self, products: Products) -> Mapping[str, Tiles]:
        """The tiles of both passes, by name, where numbers are multiplied in this way."""
        forward, backward = {
            Products.VECTORS: (self.forward, self.backward),
            Products.BFLOAT16: (self.matrix_forward, self.matrix_backward),
            Products.SPLIT: (self.split_forward, self.split_backward),
        }[products]
        return {"forward": forward, "backward": backward}

    def of_call(self, device: Device, element: ElementType, shape: Shape) -> Mapping[str, tuple[Products, Tiles]]:
        """How a call multiplies in either pass, and its tiles."""
        products = {
            name: products_of_call(device, element, shape, split.Br)
            for name, split in self.tiles(Products.SPLIT).items()
        }
        return {name: (each, self.tiles(each)[name]) for name, each in products.items()}

    @property
    def defines(self) -> tuple[tuple[str, str], ...]:
        """The macros that carry the decisions into the generated source."""
        kinds = {Products.VECTORS: "", Products.BFLOAT16: "MATRIX_", Products.SPLIT: "SPLIT_"}
        passes = {"forward": "", "backward": "BACKWARD_"}
        return tuple(
            (f"FLASHGEN_{kind}{passes[name]}{axis}", str(size))
            for products, kind in kinds.items()
            for name, tile in self.tiles(products).items()
            for axis, size in (("BR", tile.Br), ("BC", tile.Bc))
        )

    def to_json(self) -> dict[str, object]:
        """The plan as plain data, for ``--json`` and manifests."""
        return asdict(self)

    def describe(self) -> str:
        """The plan for people: the choice, its reasons, and the runners-up."""
        lines = [f"{self.spec_name}, head dimension {self.head_dim}, on '{self.device}'"]
        for name, tile in self.tiles(Products.VECTORS).items():
            share = tile.sram_bytes / self.sram_bytes
            lines.append(
                f"  {name:<9} B_r {tile.Br:>4}  B_c {tile.Bc:>4}  {tile.sram_bytes / 1024:>7.0f} KiB, {share:.0%} of M"
            )
        for products in (Products.BFLOAT16, Products.SPLIT):
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
