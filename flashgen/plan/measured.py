"""What tuning found: tiles, how long each took beside the planner's own choice, and what the model had said.

Stage 3, plan. In and out: plain data, for one spec and head dimension on one device, by pass and class of shapes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from flashgen.ir.shape import Shape
from flashgen.ir.spec import AttentionSpec
from flashgen.ir.types import ElementType

PASSES = ("forward", "backward")
_REACH = 2  # doublings of a size over which what was measured at one says something of another


def counted(number: int, what: str) -> str:
    """``1 stage``, ``2 stages``."""
    return f"{number} {what}{'s' if number > 1 else ''}"


@dataclass(frozen=True)
class Tile:
    """What a schedule pins of one pass; ``warps`` and ``stages`` are None on a CPU."""

    Br: int
    Bc: int
    warps: int | None = None
    stages: int | None = None

    def __str__(self) -> str:
        warps = f" by {counted(self.warps, 'warp')}" if self.warps else ""
        stages = f", {counted(self.stages, 'stage')}" if self.stages else ""
        return f"{self.Br} × {self.Bc}{warps}{stages}"


@dataclass(frozen=True)
class Measured:
    """One candidate: its time over the planner's choice, median and quartiles of rounds in which both took turns.

    ``predicted`` is the same ratio as the planner's model has it; ``rank`` is the candidate's in its order, 0 for the
    planner's choice.
    """

    tile: Tile
    rank: int
    predicted: float
    ratio: float
    low: float
    high: float


@dataclass(frozen=True)
class MeasuredPass:
    """One pass: the planner's choice, seconds of it, and every candidate that was measured beside it."""

    planner: Tile
    seconds: float
    candidates: tuple[Measured, ...]

    @property
    def winner(self) -> Measured | None:
        """The fastest, where it is faster than the planner's choice beyond what times scatter; else None."""
        faster = [each for each in self.candidates if each.high < 1]
        return min(faster, key=lambda each: each.ratio, default=None)

    @property
    def tile(self) -> Tile:
        """The tile to take."""
        return self.planner if self.winner is None else self.winner.tile

    @property
    def loss(self) -> float:
        """How much longer the planner's choice takes than the best, as a fraction."""
        return 0.0 if self.winner is None else 1 / self.winner.ratio - 1

    @property
    def rank_correlation(self) -> float | None:
        """Spearman's, of predicted and measured times, the planner's choice included; None below three."""
        predicted = [1.0, *(each.predicted for each in self.candidates)]
        measured = [1.0, *(each.ratio for each in self.candidates)]
        return spearman(predicted, measured) if len(measured) >= 3 else None

    @property
    def largest_error(self) -> float | None:
        """The largest factor between predicted and measured ratios; None without candidates."""
        factors = [max(each.predicted / each.ratio, each.ratio / each.predicted) for each in self.candidates]
        return max(factors, default=None)


@dataclass(frozen=True)
class ShapeClass:
    """Shapes that one tile is taken for: sizes rounded up to powers of two. ``heads`` counts over the whole batch."""

    element: ElementType
    heads: int
    q_len: int
    kv_len: int

    @classmethod
    def of(cls, shape: Shape, element: ElementType) -> ShapeClass:
        """The class that a shape is in."""
        sizes = (shape.batch * shape.heads, shape.q_len, shape.kv_len)
        return cls(element, *(1 << max(size - 1, 0).bit_length() for size in sizes))

    def distance(self, other: ShapeClass) -> int | None:
        """Doublings between two classes, over all sizes; None where one size is more than a factor of four away."""
        pairs = ((self.heads, other.heads), (self.q_len, other.q_len), (self.kv_len, other.kv_len))
        each = [abs(one.bit_length() - two.bit_length()) for one, two in pairs]
        return sum(each) if max(each) <= _REACH else None

    def __str__(self) -> str:
        return f"{self.element}, B·H ≤ {self.heads}, Nq ≤ {self.q_len}, Nk ≤ {self.kv_len}"


@dataclass(frozen=True)
class Tuning:
    """What is known of one class: the shape that was measured, the passes, when, and whether all candidates were."""

    shape_class: ShapeClass
    shape: Shape
    passes: Mapping[str, MeasuredPass]
    time: float
    complete: bool

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        shape_class = dataclasses.asdict(self.shape_class) | {"element": self.shape_class.element.value}
        return dataclasses.asdict(self) | {"shape_class": shape_class}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Tuning:
        """From plain data. Raises ``KeyError``, ``TypeError`` or ``ValueError`` for any other."""
        shape_class = {**data["shape_class"], "element": ElementType(data["shape_class"]["element"])}
        return cls(
            shape_class=ShapeClass(**shape_class),
            shape=Shape(**data["shape"]),
            passes={name: _pass(entry) for name, entry in data["passes"].items()},
            time=float(data["time"]),
            complete=bool(data["complete"]),
        )


def _pass(data: Mapping[str, Any]) -> MeasuredPass:
    return MeasuredPass(
        planner=Tile(**data["planner"]),
        seconds=float(data["seconds"]),
        candidates=tuple(Measured(**{**each, "tile": Tile(**each["tile"])}) for each in data["candidates"]),
    )


@dataclass(frozen=True)
class Pins:
    """Tiles that a call takes instead of the planner's own, for one element type; None leaves a pass to the planner.

    ``element`` None: for every type, as a CPU's tiles are. ``reasons`` say where they come from; pins without are the
    same.
    """

    forward: Tile | None = None
    backward: Tile | None = None
    element: ElementType | None = None
    reasons: tuple[str, ...] = dataclasses.field(default=(), compare=False)

    @classmethod
    def of(cls, tuning: Tuning) -> Pins:
        """What a tuning measured; nothing where no pass has a winner."""
        if all(each.winner is None for each in tuning.passes.values()):
            return cls()
        tiles = {name: each.tile for name, each in tuning.passes.items()}
        return cls(tiles.get("forward"), tiles.get("backward"), tuning.shape_class.element)

    def of_pass(self, name: str) -> Pins:
        """Those of one pass: kernels of the other are the planner's own."""
        reasons = tuple(each for each in self.reasons if each.startswith(name) or not each.startswith(PASSES))
        forward, backward = (self.forward, None) if name == "forward" else (None, self.backward)
        empty = forward is None and backward is None
        return Pins(forward, backward, None if empty else self.element, reasons)

    @property
    def is_empty(self) -> bool:
        """Whether both passes are the planner's own."""
        return self.forward is None and self.backward is None

    def pinned(self, spec: AttentionSpec) -> AttentionSpec:
        """The spec with these tiles in its schedule; a pass without one keeps what the spec says of it."""
        schedule = spec.schedule
        if self.forward is not None:
            schedule = replace(schedule, **_schedule("", self.forward))
        if self.backward is not None:
            schedule = replace(schedule, **_schedule("backward_", self.backward))
        return replace(spec, schedule=schedule)


PLANNERS_OWN = Pins()


def _schedule(prefix: str, tile: Tile) -> dict[str, Any]:
    """A tile as fields of ``Schedule``."""
    return {f"{prefix}{field.name}": getattr(tile, field.name) for field in dataclasses.fields(tile)}


def spearman(first: Sequence[float], second: Sequence[float]) -> float:
    """Spearman's rank correlation; ties share the mean of their ranks. 0 where all of one are equal."""
    one, two = _ranks(first), _ranks(second)
    middle = (len(one) - 1) / 2
    covariance = sum((a - middle) * (b - middle) for a, b in zip(one, two, strict=True))
    spread = sum((a - middle) ** 2 for a in one) * sum((b - middle) ** 2 for b in two)
    return covariance / spread**0.5 if spread else 0.0


def _ranks(values: Sequence[float]) -> list[float]:
    ordered = sorted(values)
    return [(ordered.index(value) + len(ordered) - 1 - ordered[::-1].index(value)) / 2 for value in values]
