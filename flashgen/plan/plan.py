"""What the plans of all targets are made of: tiles, and those that were passed over."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, astuple, dataclass, field
from typing import Self

from flashgen.ir.types import ElementType
from flashgen.kinds.kind import PassName
from flashgen.plan.plans import summary
from flashgen.plan.recipe import Decision


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
class Spill:
    """A tile whose kernel was compiled and spilled registers: a plan that knows of it passes the tile over."""

    element: ElementType
    pass_name: str
    tile: object
    bytes: int


@dataclass(frozen=True)
class CallKind:
    """What decides which kernels of a pass a call starts: with dropout or without, repeatable or not, and of forward
    mode which of q, k and v have tangents, as ``qkv``. None: either.
    """

    dropped: bool | None = False
    repeatable: bool | None = False
    moving: str | None = None

    def covers(self, other: CallKind) -> bool:
        """Whether all kernels that other calls start are among those of these."""
        return all(x in (None, y) for x, y in zip(astuple(self), astuple(other), strict=True))

    @property
    def words(self) -> str:
        """``dropout, deterministic``; empty for the usual calls."""
        said = {"dropout": self.dropped, "deterministic": self.repeatable}
        if self.moving is not None:
            said[f"tangents of {' and '.join(self.moving) or 'captured values'}"] = True
        return ", ".join(word for word, holds in said.items() if holds)


ANY_CALLS = CallKind(dropped=None, repeatable=None)
# Of those that need not repeat bit by bit a package has the kernels, of those that have to where it is asked to.
USUAL_CALLS = CallKind(dropped=None)


@dataclass(frozen=True)
class Part:
    """What a source has of a plan: one element type, one pass; None stands for all."""

    element: ElementType | None = None
    pass_name: PassName | None = None


WHOLE = Part()


@dataclass(frozen=True, repr=False)
class Plan:
    """The numbers of one head dimension on one target, with the sentences that say where they come from.

    Every target's plan has these and its own. ``sram_bytes``: the memory that a tile lives in (the paper's M);
    ``decisions``: of the recipe that the numbers are of, empty in the plan of an opened package.
    """

    spec_name: str
    head_dim: str
    sram_bytes: int
    reasons: tuple[str, ...]
    rejected: tuple[Rejection, ...]
    decisions: tuple[Decision, ...] = field(default=(), kw_only=True)

    def __repr__(self) -> str:
        return summary(self)

    def decided(self, about: str) -> tuple[Decision, ...]:
        """The choices that are about this (``forward, bf16``); those that hold for all are about nothing."""
        return tuple(each for each in self.decisions if each.about == about)

    @property
    def passes(self) -> Mapping[str, Tiles]:
        """Every tile, by the pass and what it is for."""
        raise NotImplementedError

    @property
    def elements_apart(self) -> tuple[ElementType, ...]:
        """The element types that have tiles of their own; one stands for all where they share them."""
        raise NotImplementedError

    def of_element(self, element: ElementType) -> Mapping[str, Tiles]:
        """The tiles of an element type, by pass; nothing where no tile fits."""
        raise NotImplementedError

    def joined(self, plans: Mapping[ElementType, tuple[Self, Self]]) -> Self:
        """The plan that has for each element type the tiles of others: of one forward, of one backward."""
        raise NotImplementedError

    def to_json(self) -> dict[str, object]:
        """The plan as plain data, for ``--json`` and manifests."""
        return asdict(self)
