"""``Machine``: what kernels for GPUs are planned for, compiled by and started on: a GPU, or the emulator of one.

``GpuKernel`` is what kernels of both have in common: what they run for a call, and how they read tensors.
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Generic, TypeVar

from flashgen.analysis.variant import Variant
from flashgen.compiler.compiled import CompiledKernel
from flashgen.compiler.tile_choices import TileChoices, tile_choices
from flashgen.emit.kernel_source import KernelSource
from flashgen.hosts.kernel import ArgumentLayout, Kernel, Values
from flashgen.hosts.lists import ListCache
from flashgen.hosts.schedule import (
    MOST_ELEMENTS,
    ROW_ALIGNMENT,
    Binary,
    Compiled,
    DeviceSize,
    Schedule,
    is_readable,
    schedule,
    storing,
)
from flashgen.ir.shape import Shape
from flashgen.ir.spec import HeadDim
from flashgen.kinds.kind import PassName
from flashgen.plan.arguments import stored_field
from flashgen.plan.plan import CallKind
from flashgen.targets.gpu.product import Gpu
from flashgen.targets.gpu.target import GpuTarget
from flashgen.targets.gpu.tiles import GpuPlan
from flashgen.toolchains.nvrtc import Resources

Lists = TypeVar("Lists")
# Gives the kernels of a pass of a call, by values of fields by name.
Find = Callable[[PassName, Mapping[str, float]], Compiled[Any]]


@dataclass(frozen=True)
class GpuKernel(Kernel, Generic[Lists]):
    """One head dimension on one device. ``find`` gives the kernels of a pass, for values of fields by name.

    ``most`` bounds the elements that a launch indexes.
    """

    head_dim: HeadDim
    find: Find
    size: DeviceSize
    list_cache: ListCache[Lists] = field(default_factory=ListCache)
    most: int = MOST_ELEMENTS

    row_alignment = ROW_ALIGNMENT
    stores = needs_lse = shares_lists = True
    moves = False
    reads = staticmethod(is_readable)

    def stored_whole(self, fixed: Values) -> frozenset[str]:
        """None for a call in parts, as each part would store its own sums, nor for too many batch entries in turn."""
        values = storing(self.layout, fixed)
        found, parts = self.scheduled("backward", values)
        if len(parts.parts) > 1:
            return frozenset()
        batch, whole = self.layout.named(values)["batch"], found.launches.whole
        worth = (name for name, entries in whole.items() if entries is None or batch <= entries)
        return frozenset(name.removeprefix(stored_field("")) for name in worth)

    def scheduled(self, name: PassName, values: Values) -> tuple[Compiled[Any], Schedule]:
        """The kernels of a pass of a call, and their schedule."""
        found = self.find(name, self.layout.named(values))
        eager = self.list_cache.eager
        return found, schedule(found.launches, self.layout, self.head_dim, values, self.size, self.most, eager=eager)


@dataclass(frozen=True)
class Made(Generic[Binary]):
    """What a kernel became: its plan, its text, and a function from names of kernels to the binary that holds them.

    ``resources`` are those of the kernels, as the assembler said. ``why`` explains, where other tiles run than were
    asked for.
    """

    plan: GpuPlan
    source: KernelSource
    binary: Callable[[frozenset[str]], Binary]
    resources: tuple[Resources, ...] = ()
    why: tuple[str, ...] = ()


@dataclass(frozen=True, eq=False)
class Machine(abc.ABC):
    """One device. ``op.explain`` calls it by ``backend`` and ``name``; the model of time knows it as ``gpu``."""

    name: str
    target: GpuTarget
    gpu: Gpu
    size: DeviceSize
    backend: ClassVar[str]

    def choices(self, variant: Variant) -> TileChoices[Any, Any]:
        """The tiles that calls may take."""
        return tile_choices(variant, self.gpu, self.name)

    def shape_of(self, shape: Shape | None) -> Shape | None:
        """The shape whose tiles a call of this shape takes; None: the tiles that are used without a shape."""
        return shape

    @abc.abstractmethod
    def make(self, kernel: CompiledKernel[Any, Any], calls: CallKind) -> Made[Any]:
        """Compile a pass in one element type for such calls. Raises ``NvrtcMissing``, ``CompileFailed``."""

    @abc.abstractmethod
    def kernel(self, layout: ArgumentLayout, head_dim: HeadDim, find: Find) -> GpuKernel[Any]:
        """The kernel that starts the launches that ``find`` gives."""
