"""Plan: how one variant runs on one device, and why."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass


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


# What tensors hold that are multiplied in matrix registers, and of how many bfloat16 each number is the sum.
MATRIX_KINDS = {"bfloat16": 1, "float32 and float16": 3}


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

    @property
    def passes(self) -> Mapping[str, Tiles]:
        """The tiles by the names of the passes."""
        return {"forward": self.forward, "backward": self.backward}

    @property
    def matrix_passes(self) -> Mapping[str, Mapping[str, Tiles]]:
        """The same in matrix registers, by what the tensors hold."""
        of_bfloat16 = {"forward": self.matrix_forward, "backward": self.matrix_backward}
        of_others = {"forward": self.split_forward, "backward": self.split_backward}
        return dict(zip(MATRIX_KINDS, (of_bfloat16, of_others), strict=True))

    @property
    def defines(self) -> tuple[tuple[str, str], ...]:
        """The macros that carry the decisions into the generated source."""
        tiles = {
            "": self.forward,
            "BACKWARD_": self.backward,
            "MATRIX_": self.matrix_forward,
            "MATRIX_BACKWARD_": self.matrix_backward,
            "SPLIT_": self.split_forward,
            "SPLIT_BACKWARD_": self.split_backward,
        }
        return tuple(
            (f"FLASHGEN_{name}{axis}", str(size))
            for name, tile in tiles.items()
            for axis, size in (("BR", tile.Br), ("BC", tile.Bc))
        )

    def to_json(self) -> dict[str, object]:
        """The plan as plain data, for ``--json`` and manifests."""
        return asdict(self)

    def describe(self) -> str:
        """The plan for people: the choice, its reasons, and the runners-up."""
        lines = [f"{self.spec_name}, head dimension {self.head_dim}, on '{self.device}'"]
        for name, tile in (("forward", self.forward), ("backward", self.backward)):
            share = tile.sram_bytes / self.sram_bytes
            lines.append(
                f"  {name:<9} B_r {tile.Br:>4}  B_c {tile.Bc:>4}  {tile.sram_bytes / 1024:>7.0f} KiB, {share:.0%} of M"
            )
        for elements, passes in self.matrix_passes.items():
            for name, tile in passes.items():
                lines.append(f"  {name}, {elements} in matrix registers: B_r {tile.Br}, B_c {tile.Bc}")
        lines.append("why")
        lines += [f"  {reason}" for reason in self.reasons]
        for pass_name in ("forward", "backward"):
            lost = [each for each in self.rejected if each.pass_name == pass_name]
            if lost:
                lines.append(f"rejected, {pass_name}")
                lines += [f"  {each.Br:>4} × {each.Bc:<4} {each.reason}" for each in lost]
        return "\n".join(lines)
