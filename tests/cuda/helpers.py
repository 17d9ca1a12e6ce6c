"""Sources for GPUs from the text of a spec, without a device."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Mapping
from dataclasses import replace

from flashgen.analysis.variant import Variant, analyse
from flashgen.emit.kernel_source import KernelSource
from flashgen.hosts.emulated import EmulatedKernel
from flashgen.hosts.emulator.program import Program
from flashgen.hosts.gpu_calls import launches_of
from flashgen.hosts.kernel import ArgumentLayout
from flashgen.hosts.schedule import Compiled
from flashgen.ir.types import ElementType
from flashgen.kinds.kind import PassName
from flashgen.language import parse_text
from flashgen.plan.launches import Launch, PassLaunches
from flashgen.targets.gpu.emit import emit_cuda
from flashgen.targets.gpu.launches import started
from flashgen.targets.gpu.lists import cuda_fields
from flashgen.targets.gpu.tiles import GpuPlan
from flashgen.targets.registry import GPUS

ELEMENTS = (ElementType.F16, ElementType.BF16, ElementType.F32)


def variant_of(text: str) -> Variant:
    """The first head dimension of the only spec of a text."""
    spec = parse_text(text).specs[0]
    return analyse(spec, spec.head_dims[0])


def planned(text: str, target: str = "sm_80") -> tuple[Variant, GpuPlan]:
    """The plan for a target."""
    variant = variant_of(text)
    return variant, GPUS[target].plan(variant)


def of_type(plan: GpuPlan, element: ElementType | None = None) -> GpuPlan:
    """The plan of one element type, or of its first."""
    return replace(plan, elements=(plan.elements[0] if element is None else plan.by_element[element],))


@functools.cache
def emitted(text: str, target: str = "sm_80", name: PassName | None = None) -> KernelSource:
    """The source of a pass, or of all, for a target, in the first element type."""
    return emit_cuda(of_type(planned(text, target)[1]), name)


def emitted_types(plan: GpuPlan) -> str:
    """The texts of all element types of a plan."""
    return "".join(emit_cuda(of_type(plan, element)).text for element in plan.by_element)


def planted_kernel(
    plan: GpuPlan,
    program: Callable[[PassName, frozenset[str]], Program],
    changed: Callable[[PassLaunches], PassLaunches] = lambda launches: launches,
) -> EmulatedKernel:
    """What a plan starts, of other programs: ``program`` gives that of a pass, for the names of its kernels."""

    def find(name: PassName, values: Mapping[str, float]) -> Compiled[Program]:
        launches = launches_of(plan, name, values)
        return Compiled(program(name, frozenset(launches.kernels)), changed(launches), plan)

    return EmulatedKernel(ArgumentLayout(cuda_fields(plan.recipe)), plan.recipe.variant.head_dim, find)


def launched(plan: GpuPlan) -> Mapping[str, Launch]:
    """Every launch that a host may be told to start, by its kernel."""
    each = (started(of_type(plan, element), plan.recipe.variant.kind.passes) for element in plan.by_element)
    return dict(item for launches in each for item in launches.items())


def kernels_in(source: KernelSource) -> set[str]:
    """The names of all kernels of a source."""
    return set(re.findall(r"__global__ void [^{]*?\b(\w+)\(\s*const __grid_constant__", source.text))
