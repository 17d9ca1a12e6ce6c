"""Which tiles are worth measuring, and what the model says of them.

In: a ``Variant``, a device, a shape, an element type. Out: ``Candidate``s by pass; the first is the planner's
choice, the others follow by predicted time. Everything that asks the model stands here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from flashgen.analysis.variant import Variant
from flashgen.ir.shape import Shape
from flashgen.ir.types import ElementType
from flashgen.plan.measured import PASSES, Tile
from flashgen.targets.families import family_of
from flashgen.targets.protocol import Device


@dataclass(frozen=True)
class Candidate:
    """A tile of one pass. ``rank`` is its place in the model's order, 0 for the planner's choice.

    ``predicted`` is its time over that choice's.
    """

    tile: Tile
    rank: int
    predicted: float


def candidates(
    variant: Variant, device: Device, shape: Shape, element: ElementType, most: int
) -> Mapping[str, tuple[Candidate, ...]]:
    """At most ``most`` beside the planner's choice, for each pass. Raises ``SpecError`` where no tile fits."""
    found = {}
    for name in PASSES:
        seconds = family_of(device).candidates(device, variant, shape, element, name)
        first, *others = seconds
        ordered = [first, *sorted(others, key=lambda tile: (seconds[tile], tile.Br, tile.Bc))]
        found[name] = tuple(
            Candidate(tile, ordered.index(tile), seconds[tile] / seconds[first]) for tile in _spread(ordered, most + 1)
        )
    return found


def _spread(ordered: Sequence[Tile], most: int) -> list[Tile]:
    """The best half of what may be measured, and others at even distances, so that the model is tested, too."""
    if len(ordered) <= most:
        return list(ordered)
    best = (most + 1) // 2
    rest, others = ordered[best:], most - best
    return [*ordered[:best], *(rest[(n + 1) * len(rest) // others - 1] for n in range(others))]
