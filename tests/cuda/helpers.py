"""Sources for GPUs from the text of a spec, without a device."""

from __future__ import annotations

import functools

from flashgen.analysis.variant import Variant, analyse
from flashgen.emit.kernel_source import KernelSource
from flashgen.ir.types import ElementType
from flashgen.language import parse_text
from flashgen.plan.launches import Launch
from flashgen.targets.gpu.emit import cuda_symbol, emit_cuda
from flashgen.targets.gpu.launches import backward_launches, forward_launches
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
    return emit_cuda(*planned(text, target))


def launched(variant: Variant, plan: GpuPlan) -> dict[str, Launch]:
    """Every launch that a host may be told to start, by its kernel."""
    symbol = cuda_symbol(variant)
    found: dict[str, Launch] = {}
    for element in plan.by_element:
        for dropped in (False, True) if variant.spec.dropout is not None else (False,):
            passes = [forward_launches(symbol, variant, plan, element, dropped=dropped)]
            passes += [
                backward_launches(
                    symbol, variant, plan, element, dropped=dropped, deterministic=deterministic, captured=captured
                )
                for deterministic in (False, True)
                for captured in (False, True)
            ]
            for each in passes:
                found |= each.kernels
    return found
