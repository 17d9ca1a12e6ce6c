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


@dataclass(frozen=True)
class Plan:
    """The decisions for one head dimension on one device; ``reasons`` are sentences in the order of the decisions."""

    spec_name: str
    head_dim: str
    device: str
    sram_bytes: int
    forward: Tiles
    backward: Tiles
    reasons: tuple[str, ...]
    rejected: tuple[Rejection, ...]

    @property
    def passes(self) -> Mapping[str, Tiles]:
        """The tiles by the names of the passes."""
        return {"forward": self.forward, "backward": self.backward}

    @property
    def defines(self) -> tuple[tuple[str, str], ...]:
        """The macros that carry the decisions into the generated source."""
        return (
            ("FLASHGEN_BR", str(self.forward.Br)),
            ("FLASHGEN_BC", str(self.forward.Bc)),
            ("FLASHGEN_BACKWARD_BR", str(self.backward.Br)),
            ("FLASHGEN_BACKWARD_BC", str(self.backward.Bc)),
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
        lines.append("why")
        lines += [f"  {reason}" for reason in self.reasons]
        for pass_name in ("forward", "backward"):
            lost = [each for each in self.rejected if each.pass_name == pass_name]
            if lost:
                lines.append(f"rejected, {pass_name}")
                lines += [f"  {each.Br:>4} × {each.Bc:<4} {each.reason}" for each in lost]
        return "\n".join(lines)
