"""The emulator of a GPU as a ``Machine``: sources for GPUs, compiled for this CPU, over CPU tensors."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

from flashgen.analysis.variant import Variant
from flashgen.compiler.choice import TileChoices
from flashgen.compiler.compiled import CompiledKernel
from flashgen.hosts.emulated import SIZE, EmulatedKernel
from flashgen.hosts.emulator import Program, compile_program
from flashgen.hosts.gpu_kernel import Find
from flashgen.hosts.gpu_provider import GpuProvider
from flashgen.hosts.kernel import ArgumentLayout
from flashgen.hosts.machine import Machine, Made
from flashgen.ir.shape import Shape
from flashgen.ir.spec import AttentionSpec, HeadDim
from flashgen.plan.plan import CallKind
from flashgen.store.cache import Cache
from flashgen.targets.device_table import product_of
from flashgen.targets.gpu.target import GpuTarget


@dataclass(frozen=True, eq=False)
class EmulatorMachine(Machine):
    """A GPU of a target, imitated. Libraries go to ``cache`` (None: the user's).

    Calls there are short, and the kernels of long sequences are what has to be tested: every call takes the tiles of a
    call of the shape ``sized``, as a GPU does there; without one the planner's own.
    """

    cache: Cache | None
    sized: Shape | None
    backend = "emulator"

    def choices(self, variant: Variant) -> TileChoices[Any, Any]:
        return TileChoices(variant, self.gpu)

    def shape_of(self, shape: Shape | None) -> Shape | None:  # noqa: ARG002 - a Machine's
        return self.sized

    def make(self, kernel: CompiledKernel[Any, Any], calls: CallKind) -> Made[Program]:  # noqa: ARG002 - of any
        """The host's compiler takes a second for each kernel, so that it compiles those that are started."""
        source = kernel.source

        @functools.cache
        def program(kernels: frozenset[str]) -> Program:
            return compile_program(source.text, name=source.name, cache=self.cache, kernels=kernels)

        return Made(kernel.plan, source, program)

    def kernel(self, layout: ArgumentLayout, head_dim: HeadDim, find: Find) -> EmulatedKernel:
        return EmulatedKernel(layout, head_dim, find)


def emulator_provider(
    spec: AttentionSpec, target: GpuTarget, *, cache: Cache | None = None, sized: Shape | None = None
) -> GpuProvider:
    """The kernels of a spec under the emulator of a target."""
    gpu = product_of(target)
    machine = EmulatorMachine(f"emulated {gpu.product}", target, gpu, SIZE, cache, sized)
    return GpuProvider(spec, lambda _: machine)
