"""``Target``: what kernels are made for. ``Device``: the figures of what runs them. ``Family``: what is known of both.

A family is a folder of this package. It plans, emits and compiles; nobody else asks what a target is. Its files have
the same names in each folder: ``limits`` (what is refused, whatever the tiles), ``rules`` (of thumb, by name),
``recipes`` (how a variant is computed, and which tiles are considered, best first), ``plan`` (their numbers), ``model``
(the bytes that they keep), ``emit``, ``compile``, ``cost`` (the time that is predicted), and ``target``, which is these
to others. What families of GPUs share is in ``gpu``.

A target is what is compiled for, an architecture perhaps; how fast that is depends on the product, so that a cost is
asked of a family with a device. A device is figures alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, Self, TypeVar

from flashgen.analysis.variant import Variant
from flashgen.diagnostics import Diagnostic
from flashgen.emit.kernel_source import KernelSource
from flashgen.ir.shape import Shape
from flashgen.ir.types import ElementType
from flashgen.plan.measured import Pins, ShapeClass, Tile
from flashgen.plan.packed import Packed
from flashgen.plan.plan import CallKind, Part, Plan, Spill
from flashgen.plan.report import PassReport

PlanT = TypeVar("PlanT", bound=Plan)
BinaryT = TypeVar("BinaryT")
DeviceT_contra = TypeVar("DeviceT_contra", bound="Device", contravariant=True)


class Target(Protocol[PlanT, BinaryT]):
    """What kernels are made for. Equal ones make the same kernels; they are keys of what is remembered."""

    def __hash__(self) -> int: ...

    @property
    def name(self) -> str:
        """What ``--target`` takes, and what files are named after: ``cpu``, ``sm_80``."""

    @property
    def family(self) -> str:
        """The folder that it comes from."""

    @property
    def ships_binaries(self) -> bool:
        """Whether a package holds binaries for it; else they are made on the machine that runs them."""

    @property
    def device(self) -> Device | None:
        """What it is compiled for in particular, whose tuned tiles it takes; None where several products share it."""

    def limits(self, variant: Variant) -> Sequence[Diagnostic]:
        """What of the spec is refused, whatever the tiles, each with its place; empty where nothing is."""

    def leaves_out(self, variant: Variant) -> Sequence[str]:
        """A sentence for each thing that the spec says and that has no meaning here."""

    def plan(self, variant: Variant, pins: Pins = ..., spills: Sequence[Spill] = ...) -> PlanT:
        """The numbers of the first recipe that works, and why. ``SpecError`` where none does, or something is refused.

        ``pins`` stand in the place of the planner's own tiles; tiles that ``spills`` name are passed over.
        """

    def parts(self, plan: PlanT) -> Sequence[Part]:
        """What a plan has sources of: everything in one, or a pass of an element type in each."""

    def emit(self, variant: Variant, plan: PlanT, part: Part = ...) -> KernelSource:
        """The generated text of a part."""

    def compile(self, sources: Sequence[KernelSource], calls: CallKind = ...) -> Sequence[BinaryT]:
        """A binary of each for such calls, side by side, or from the cache. ``CompilerMissing``, ``CompileFailed``."""

    def spills(self, plan: PlanT, binary: BinaryT) -> Sequence[Spill]:
        """Tiles of which compiling has shown that they were a bad choice."""

    def packed(self, variant: Variant, source: KernelSource, plan: PlanT, part: Part, binary: BinaryT | None) -> Packed:
        """What a generated package holds of a part."""


class ByLength(Protocol):
    """The tiles that calls of a class take instead of the planner's own, which are for long sequences."""

    def of_class(self, shape_class: ShapeClass, group: int) -> Pins:
        """Those of one class of shapes; ``group`` query heads share a key/value head."""


class Device(Protocol):
    """The figures of one product: what its kernels are compiled for, and what the model of time knows of it."""

    @property
    def name(self) -> str:
        """What ``--device`` takes."""

    @property
    def kind(self) -> str:
        """``cpu`` or ``gpu``."""

    @property
    def product(self) -> str:
        """Its name for people: whose clocks are taken."""

    @property
    def tiles_by_element(self) -> bool:
        """Whether element types have tiles of their own."""

    @property
    def remarks(self) -> Sequence[str]:
        """What has to be said with every plan for it."""

    def with_sram(self, size: int) -> Self:
        """A target like this one, with another memory for a tile."""


class Family(Protocol[DeviceT_contra, PlanT, BinaryT]):
    """What a family knows of one of its devices, beyond the figures of the device: it plans, and predicts times."""

    def target(self, device: DeviceT_contra) -> Target[PlanT, BinaryT]:
        """What is compiled for the device."""

    def identity(self, device: DeviceT_contra) -> str | None:
        """What tuned tiles are stored under; None where nobody can have measured."""

    def by_length(self, device: DeviceT_contra, variant: Variant, element: ElementType) -> ByLength | None:
        """The tiles that short calls choose from; None where all lengths share one plan. Raises ``SpecError``."""

    def cost(self, device: DeviceT_contra, variant: Variant, plan: PlanT, shape: Shape) -> tuple[PassReport, ...]:
        """Each pass of a plan at a shape: bytes, time, and what it is measured by."""

    def candidates(
        self, device: DeviceT_contra, variant: Variant, shape: Shape, element: ElementType, name: str
    ) -> dict[Tile, float]:
        """Predicted seconds of the tiles of a pass that are worth measuring, the planner's choice first."""


AnyTarget = Target[Any, Any]
