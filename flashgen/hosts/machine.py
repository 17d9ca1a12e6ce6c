"""``Machine``: what kernels for GPUs are planned for, compiled by and started on: a GPU, or the emulator of one."""

from __future__ import annotations

import abc
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, Generic

from flashgen.analysis.variant import Variant
from flashgen.compiler.choice import TileChoices, tile_choices
from flashgen.compiler.compiled import CompiledKernel
from flashgen.emit.kernel_source import KernelSource
from flashgen.hosts.gpu_kernel import Find, GpuKernel
from flashgen.hosts.kernel import ArgumentLayout
from flashgen.hosts.schedule import Binary, DeviceSize
from flashgen.ir.shape import Shape
from flashgen.ir.spec import HeadDim
from flashgen.plan.plan import CallKind
from flashgen.targets.gpu.product import Gpu
from flashgen.targets.gpu.target import GpuTarget
from flashgen.targets.gpu.tiles import GpuPlan
from flashgen.toolchains.nvrtc import Resources


@dataclass(frozen=True)
class Made(Generic[Binary]):
    """What a kernel became: its plan, its text, and what holds the kernels of these names.

    ``resources`` are what the assembler said of them. ``why`` is said instead of the reasons of the tiles that were
    asked for, where others run.
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
        """The shape whose tiles a call of this shape takes; None: those that are taken where no shape is given."""
        return shape

    @abc.abstractmethod
    def make(self, kernel: CompiledKernel[Any, Any], calls: CallKind) -> Made[Any]:
        """Compile a pass in one element type for such calls. Raises ``NvrtcMissing``, ``CompileFailed``."""

    @abc.abstractmethod
    def kernel(self, layout: ArgumentLayout, head_dim: HeadDim, find: Find) -> GpuKernel[Any]:
        """What starts what ``find`` gives."""
