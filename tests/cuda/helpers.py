"""Sources for GPUs from the text of a spec, without a device."""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping

from flashgen.analysis.variant import Variant, analyse
from flashgen.emit.kernel_source import KernelSource
from flashgen.ir.types import ElementType
from flashgen.language import parse_text
from flashgen.plan.launches import Launch
from flashgen.targets.gpu.emit import cuda_symbol, emit_cuda
from flashgen.targets.gpu.started import started
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


@functools.cache
def emitted(text: str, target: str = "sm_80") -> KernelSource:
    """The source for a target."""
    return emit_cuda(planned(text, target)[1])


def launched(variant: Variant, plan: GpuPlan) -> Mapping[str, Launch]:
    """Every launch that a host may be told to start, by its kernel."""
    return started(cuda_symbol(variant), plan)


def kernels_in(source: KernelSource) -> set[str]:
    """The names of all kernels of a source."""
    return set(re.findall(r"__global__ void [^{]*?\b(\w+)\(\s*const __grid_constant__", source.text))
