"""What runs an op: for each type of device, what gives the kernels of a head dimension.

In: an ``AttentionSpec``, its generated sources, a backend. Out: ``KernelProvider``s. Whatever takes time (compiling,
loading, asking for a GPU) is done when a kernel is first needed, but for the CPU's where there is no GPU: there the
first call is not the one to wait.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from flashgen.analysis.variant import Variant, analyse
from flashgen.diagnostics import SpecError
from flashgen.emit.kernel_source import KernelSource
from flashgen.ir.spec import AttentionSpec, HeadDim
from flashgen.ir.types import ElementType
from flashgen.plan.arguments import argument_fields, gradient_field
from flashgen.plan.cuda_devices import TARGETS, Target
from flashgen.plan.cuda_launches import backward_launches, forward_launches
from flashgen.plan.cuda_lists import cuda_fields
from flashgen.plan.cuda_plan import CudaPlan
from flashgen.plan.launches import PassLaunches
from flashgen.plan.manifest import Manifest
from flashgen.runtime import cuda
from flashgen.runtime.compiler import CompilerMissing, compile_sources, find_compiler
from flashgen.runtime.kernel import ArgumentLayout, Kernel, KernelProvider, LibraryKernel, PassName
from flashgen.runtime.schedule import Compiled
from flashgen.tuned import tuned_variant

if TYPE_CHECKING:
    from flashgen.runtime.emulated import EmulatedKernel
    from flashgen.runtime.emulator import Program
    from flashgen.targets import GpuKernel

ELEMENTS = (ElementType.F32, ElementType.BF16, ElementType.F16)  # by the codes of ``struct Arguments``
EMULATED = TARGETS["sm_80"]

# A generated package: its folder, and what it says of itself.
Package = tuple[Path, Manifest]
Providers = Mapping[str, KernelProvider | None]


def providers(
    spec: AttentionSpec,
    backend: str | None,
    cpu_sources: Sequence[KernelSource],
    package: Package | None = None,
) -> Providers:
    """The providers of a backend, by type of device."""
    match backend:
        case "reference":
            return {}
        case "emulator":
            return {"cpu": emulator_provider(spec)}
        case "cpu":
            return {"cpu": cpu_provider(spec, cpu_sources)}
        case "cuda":
            return {"cuda": cuda_provider(spec, package)}
    return {
        "cpu": cpu_provider(spec, cpu_sources, at_once=not cuda.is_there()),
        "cuda": cuda_provider(spec, package),
    }


def gpu_at_hand() -> Target:
    """What to generate for PyTorch's current GPU. Raises ``ValueError`` where the backend 'cuda' cannot work."""
    from flashgen.targets import UnsupportedGpu, target_of

    try:
        cuda.check()
        return target_of(*cuda.describe_device(cuda.current_device()))
    except (cuda.CudaMissing, UnsupportedGpu) as error:
        raise ValueError(f"backend 'cuda': {error}") from None


def cpu_provider(
    spec: AttentionSpec, sources: Sequence[KernelSource], *, at_once: bool = True
) -> KernelProvider | None:
    """Shared libraries; None, with a warning, where this machine has no compiler."""
    try:
        find_compiler()
    except CompilerMissing as error:
        if at_once:
            warnings.warn(f"'{spec.name}' runs on the tiled PyTorch reference, which is slow: {error}", stacklevel=6)
        return None

    @functools.cache
    def kernels() -> Mapping[HeadDim, LibraryKernel]:
        fields = argument_fields(spec)
        return {
            source.head_dim: LibraryKernel.load(binary.path, source.symbol, fields)
            for source, binary in zip(sources, compile_sources(sources), strict=True)
        }

    if at_once:
        kernels()
    return lambda head_dim, _: kernels()[head_dim]


def emulator_provider(spec: AttentionSpec, target: Target = EMULATED) -> KernelProvider:
    """The sources for a target, under the emulator, on CPU tensors."""
    from flashgen.runtime.emulated import EmulatedKernel
    from flashgen.runtime.emulator import compile_program
    from flashgen.targets import source_for

    @functools.cache
    def find(head_dim: HeadDim) -> EmulatedKernel:
        variant = analyse(spec, head_dim)
        layout = ArgumentLayout(cuda_fields(variant))

        @functools.cache
        def compiled(element: int) -> Compiled[Program]:
            plan, source = source_for(variant, target, ELEMENTS[element])
            program = compile_program(source.text, name=source.name)
            return Compiled(program, launches_of(variant, plan, source.symbol, ELEMENTS[element]))

        return EmulatedKernel(layout, head_dim, compiled)

    return lambda head_dim, _: find(head_dim)


def cuda_provider(spec: AttentionSpec, package: Package | None = None) -> KernelProvider:
    """The packaged binary that fits a GPU; else one that is compiled for it, each element type when it is needed.

    Calls raise ``CudaMissing``, ``NvrtcMissing``, ``UnsupportedGpu``, ``CompileFailed``.
    """

    @functools.cache
    def find(head_dim: HeadDim, index: int) -> Kernel:
        from flashgen.targets import compile_variant, packaged_kernel, target_of

        driver = cuda.CupyDriver(index)
        name, *figures = cuda.describe_device(index)
        target = target_of(name, *figures)
        ready = None if package is None else packaged_kernel(*package, spec, head_dim, target)
        variant = analyse(spec, head_dim) if ready is None else ready.variant

        @functools.cache
        def compiled(element: int) -> Compiled[Path]:
            kernel = _tuned_kernel(variant, target, name, ELEMENTS[element])
            if kernel is None and ready is not None and ELEMENTS[element] in ready.plan.by_element:
                kernel = ready
            kernel = kernel or compile_variant(variant, target, ELEMENTS[element])
            return Compiled(
                kernel.binary.path, launches_of(variant, kernel.plan, kernel.source.symbol, ELEMENTS[element])
            )

        return cuda.CudaKernel(ArgumentLayout(cuda_fields(variant)), head_dim, driver, compiled)

    return find


def _tuned_kernel(variant: Variant, target: Target, device: str, element: ElementType) -> GpuKernel | None:
    """With the tiles that were measured on this device; None where there are none, or the planner refuses them now."""
    from flashgen.targets import compile_variant

    own = tuned_variant(variant, device, element)
    if own is variant:
        return None
    try:
        return compile_variant(own, target, element)
    except SpecError:
        return None


def launches_of(
    variant: Variant, plan: CudaPlan, symbol: str, element: ElementType
) -> Callable[[PassName, Mapping[str, float]], PassLaunches]:
    """The launches of a pass for values of ``struct Arguments`` by name."""
    gradients = [gradient_field(each.name) for each in variant.gradients]

    def find(name: PassName, values: Mapping[str, float]) -> PassLaunches:
        dropped = values["dropout_threshold"] > 0
        if name == "forward":
            return forward_launches(symbol, variant, plan, element, dropped=dropped)
        return backward_launches(
            symbol,
            variant,
            plan,
            element,
            dropped=dropped,
            deterministic=bool(values["deterministic"]),
            captured=any(values[each] for each in gradients),
        )

    return find
