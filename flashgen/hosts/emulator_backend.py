"""What runs an op on the emulator: sources for GPUs, compiled for this CPU.

In: an ``AttentionSpec`` and a target. Out: a ``KernelProvider`` that also answers ``op.plan``, ``op.sources`` and
``op.explain``. Sources are compiled when a kernel is first needed, for the kernels that a call starts.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, ClassVar

from flashgen.compiler.choice import TileChoices
from flashgen.compiler.compiled import CompiledKernel, compiled
from flashgen.emit.kernel_source import KernelSource
from flashgen.hosts.asked import AskedCall
from flashgen.hosts.explain_gpu import GpuPass, explain_cache, explain_gpu
from flashgen.hosts.gpu_calls import (
    GPU_TANGENTS,
    GPU_TANGENTS_BACKWARD,
    check_element,
    codes_of,
    has_kernels,
    is_f8,
    kernel_variant,
    kind_of_call,
    launches_of,
    over_cache,
    pins_of_call,
    sized_as,
    steps_of,
    with_jvp,
)
from flashgen.hosts.kernel import ArgumentLayout, call_of
from flashgen.hosts.schedule import Compiled
from flashgen.ir.shape import Shape
from flashgen.ir.spec import AttentionSpec, HeadDim
from flashgen.ir.types import ElementType
from flashgen.kinds.by_blocks import BY_BLOCKS
from flashgen.kinds.cached import CACHED, F8_CACHED
from flashgen.kinds.dense import DENSE
from flashgen.kinds.eight_bits import EIGHT_BITS
from flashgen.kinds.kind import BOTH, Kind, PassName
from flashgen.kinds.ragged import RAGGED
from flashgen.plan.explanation import Explanation
from flashgen.plan.launches import PassLaunches
from flashgen.plan.measured import PLANNERS_OWN, Pins
from flashgen.targets.device_table import product_of
from flashgen.targets.gpu.compile import GpuBinary
from flashgen.targets.gpu.lists import cuda_fields
from flashgen.targets.gpu.target import GpuTarget
from flashgen.targets.gpu.tiles import GpuPlan
from flashgen.targets.registry import GPUS

if TYPE_CHECKING:
    from flashgen.hosts.emulated import EmulatedKernel
    from flashgen.hosts.emulator import Program
    from flashgen.store.cache import Cache


class EmulatorProvider:
    """The sources for a target, under the emulator, on CPU tensors.

    Calls there are short, and the kernels of long sequences are what has to be tested: every call takes the tiles of a
    call of the shape ``sized``, as a GPU does there; without one the planner's own. Libraries go to ``cache`` (none:
    the user's). ``kind``: that of the calls, of which the kernels of dense ones lead to all others.
    """

    def __init__(
        self,
        spec: AttentionSpec,
        target: GpuTarget,
        *,
        cache: Cache | None = None,
        kind: Kind = DENSE,
        sized: Shape | None = None,
    ) -> None:
        self.spec, self.target, self.kind, self.sized, self._cache = spec, target, kind, sized, cache
        self.kernel = functools.cache(self._kernel)
        self.choices = functools.cache(self._choices)

    takes_tangents: ClassVar[str] = GPU_TANGENTS
    takes_tangents_backward: ClassVar[str] = GPU_TANGENTS_BACKWARD

    def __call__(self, head_dim: HeadDim, index: int) -> EmulatedKernel:  # noqa: ARG002 - there is one emulator
        return self.kernel(head_dim)

    def of_spec(self, spec: AttentionSpec) -> EmulatorProvider:
        """The same of another spec, dense, with the planner's own tiles."""
        return EmulatorProvider(spec, self.target, cache=self._cache)

    def compiled(self, head_dim: HeadDim, pins: Pins = PLANNERS_OWN) -> CompiledKernel[GpuPlan, GpuBinary]:
        """What runs."""
        return compiled(kernel_variant(self.spec, head_dim, self.kind), self.target, pins)

    def plans(self) -> Mapping[HeadDim, GpuPlan]:
        """By head dimension."""
        return {each: self._plan(each) for each in self.spec.head_dims}

    def sources(self) -> tuple[KernelSource, ...]:
        """Every text that kernels of dense calls are compiled from: one a head dimension, of a shape's tiles more."""
        if self.sized is None:
            return tuple(self.compiled(each).source for each in self.spec.head_dims)
        ran = (
            self.compiled(head_dim, self.pins(head_dim, element, name)).source
            for head_dim in self.spec.head_dims
            for element in self.compiled(head_dim).plan.by_element
            for name in BOTH
        )
        return tuple({each.text: each for each in ran}.values())

    def explain(self, name: str, asked: AskedCall) -> Explanation:
        """One call."""
        if is_f8(asked.values) and self.kind is not EIGHT_BITS:
            return self._other(EIGHT_BITS).explain(name, asked)
        head_dim = asked.head_dim
        variant, emulated = kernel_variant(self.spec, head_dim, self.kind), self(head_dim, 0)
        passes: dict[str, GpuPass] = {}
        for each in self.kind.passes:
            pins = self.pins(head_dim, asked.element, each)
            kernel = self.compiled(head_dim, pins)
            check_element(variant, kernel.plan, asked.element, self.target)
            launches = launches_of(variant, kernel.plan, kernel.source.symbol, asked.element)
            steps = steps_of(launches(each, asked.values), emulated.layout, head_dim, asked, emulated.size)
            passes[each] = GpuPass(kernel.plan, steps, {}, pins.reasons)
        gpu = product_of(self.target)
        told = explain_gpu(name, "emulator", f"emulated {gpu.product}", variant, gpu, asked, passes)
        return with_jvp(told, self.spec, head_dim, self.target, asked)

    def explain_cached(self, name: str, asked: AskedCall) -> Explanation:
        """One call over a cache."""
        cached, head_dim = self._other(kind_of_call(CACHED, asked.values)), asked.head_dim
        gpu = product_of(self.target)
        kernel = cached.compiled(head_dim, pins_of_call(cached.compiled(head_dim), asked.element, asked.values))
        check_element(kernel.variant, kernel.plan, asked.element, self.target)
        emulated = cached(head_dim, 0)
        own = (kernel.plan, kernel.source.symbol)
        forward, parts = over_cache(*own, emulated.layout, asked, emulated.size, {})
        device = f"emulated {gpu.product}"
        return explain_cache(name, "emulator", device, kernel.variant, gpu, asked, forward, parts)

    def _other(self, kind: Kind) -> EmulatorProvider:
        return EmulatorProvider(self.spec, self.target, cache=self._cache, kind=kind, sized=self.sized)

    def pins(self, head_dim: HeadDim, element: ElementType, name: PassName) -> Pins:
        """The tiles of a pass, but those over caches, which go by their rows."""
        if self.sized is None:
            return PLANNERS_OWN
        return self.choices(head_dim).of_call(element, self.sized).of_pass(name)

    def _choices(self, head_dim: HeadDim) -> TileChoices[GpuPlan, GpuBinary]:
        variant, gpu = sized_as(self.spec, head_dim, self.kind), product_of(self.target)
        if variant is None:
            return TileChoices(kernel_variant(self.spec, head_dim, self.kind), gpu, by_length=False)
        return TileChoices(variant, gpu)

    def _plan(self, head_dim: HeadDim) -> GpuPlan:
        own = self.compiled(head_dim).plan
        if self.sized is None:
            return own
        pins = {each: self.choices(head_dim).of_call(each, self.sized) for each in own.by_element}
        return own.joined({each: self.compiled(head_dim, pinned).plan for each, pinned in pins.items()})

    def _kernel(self, head_dim: HeadDim) -> EmulatedKernel:
        from flashgen.hosts.emulated import EmulatedKernel
        from flashgen.hosts.emulator import compile_program

        variant = kernel_variant(self.spec, head_dim, self.kind)

        @functools.cache
        def of_8_bits() -> EmulatedKernel:
            return self._other(F8_CACHED).kernel(head_dim)

        @functools.cache
        def launches(element: ElementType, pins: Pins) -> Callable[[PassName, Mapping[str, float]], PassLaunches]:
            kernel = self.compiled(head_dim, pins)
            plan = kernel.plan
            check_element(variant, plan, element, self.target)
            return launches_of(variant, plan, kernel.source.symbol, element)

        @functools.cache
        def program(kernels: frozenset[str], pins: Pins) -> Program:
            source = self.compiled(head_dim, pins).source
            return compile_program(source.text, name=source.name, cache=self._cache, kernels=kernels)

        def find(name: PassName, values: Mapping[str, float]) -> Compiled[Program]:
            """What the call's pass starts: the host's compiler takes a second for each kernel."""
            if kind_of_call(self.kind, values) is not self.kind:
                return of_8_bits().compiled(name, values)
            element = call_of(values)[0]
            pins = (
                pins_of_call(self.compiled(head_dim), element, values)
                if variant.kind.cached
                else self.pins(head_dim, element, name)
            )
            own = launches(element, pins)
            return Compiled(program(frozenset(own(name, values).kernels), pins), own)

        @functools.cache
        def other(kind: Kind) -> EmulatedKernel | None:
            if self.kind is not DENSE or not has_kernels(kind, self.spec, head_dim, self.target):
                return None
            return self._other(kind).kernel(head_dim)

        layout = ArgumentLayout(cuda_fields(self.compiled(head_dim).plan.recipe))
        kernel = EmulatedKernel(layout, head_dim, find, other=other)
        if variant.tangent is None:
            return kernel
        return replace(kernel, elements=codes_of(self.compiled(head_dim).plan))


def dense_kernel(spec: AttentionSpec, head_dim: HeadDim, target: str) -> CompiledKernel[GpuPlan, GpuBinary]:
    """What dense calls run on the emulator of a target."""
    return compiled(kernel_variant(spec, head_dim), GPUS[target])


def ragged_kernel(spec: AttentionSpec, head_dim: HeadDim, target: str) -> CompiledKernel[GpuPlan, GpuBinary]:
    """What ragged batches run on the emulator of a target."""
    return compiled(kernel_variant(spec, head_dim, RAGGED), GPUS[target])


def cached_kernel(
    spec: AttentionSpec, head_dim: HeadDim, target: str, values: Mapping[str, float]
) -> CompiledKernel[GpuPlan, GpuBinary]:
    """What a call over a cache runs on the emulator of a target, by the values of its arguments."""
    variant, element = kernel_variant(spec, head_dim, kind_of_call(CACHED, values)), call_of(values)[0]
    return compiled(variant, GPUS[target], pins_of_call(compiled(variant, GPUS[target]), element, values))


def block_kernel(spec: AttentionSpec, head_dim: HeadDim, target: str) -> CompiledKernel[GpuPlan, GpuBinary]:
    """What calls by blocks of keys run on the emulator of a target."""
    return compiled(kernel_variant(spec, head_dim, BY_BLOCKS), GPUS[target])


def f8_kernel(spec: AttentionSpec, head_dim: HeadDim, target: str) -> CompiledKernel[GpuPlan, GpuBinary]:
    """What calls of 8 bits run on the emulator of a target that has kernels for them."""
    return compiled(kernel_variant(spec, head_dim, EIGHT_BITS), GPUS[target])
