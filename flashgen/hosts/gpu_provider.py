"""The kernels of a spec on GPUs, real or emulated, and what they say of themselves.

In: an ``AttentionSpec``, machines, a package. Out: a ``KernelProvider`` that also answers ``op.plan``, ``op.sources``
and ``op.explain``, from the very kernels that calls run. Whatever takes time (compiling, loading, asking for a GPU) is
done when a kernel is first needed, for one pass and element type at a time.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any, ClassVar

from flashgen.analysis.variant import Variant
from flashgen.compiler.compiled import compiled
from flashgen.compiler.package.manifest import Packaged, packaged
from flashgen.compiler.tile_choices import TileChoices
from flashgen.emit.kernel_source import KernelSource
from flashgen.hosts.cpu_backend import Package
from flashgen.hosts.gpu_calls import (
    GPU_TANGENTS,
    GpuPass,
    Machine,
    Made,
    explain_cache,
    explain_gpu,
    has_kernels,
    kernel_variant,
    kind_of,
    kind_of_call,
    launches_of,
    pins_of_call,
    with_jvp,
)
from flashgen.hosts.kernel import ELEMENTS, ArgumentLayout, ExplainedCall, Kernel, call_of
from flashgen.hosts.schedule import Compiled, schedule
from flashgen.ir.shape import Shape
from flashgen.ir.spec import AttentionSpec, HeadDim
from flashgen.ir.types import ElementType
from flashgen.kinds.cached import F8_CACHED
from flashgen.kinds.dense import DENSE
from flashgen.kinds.kind import BOTH, Kind, PassName
from flashgen.kinds.ragged import RAGGED
from flashgen.plan.explanation import Explanation
from flashgen.plan.measured import Pins
from flashgen.plan.plan import CallKind, Part
from flashgen.targets.gpu.architecture import UnsupportedGpu
from flashgen.targets.gpu.compile import compile_calls
from flashgen.targets.gpu.family import tile_of
from flashgen.targets.gpu.lists import cuda_fields
from flashgen.targets.gpu.tiles import GpuPlan
from flashgen.toolchains.nvrtc import NvrtcMissing


class GpuProvider:
    """Kernels for one kind of calls: those that a call starts are compiled when it needs them, with its tiles.

    ``machines`` gives that of a device, by its index, and the current one for None. A package's source runs where a
    call takes the tiles that it was written with, by its binary if there is one; a source that was edited runs whatever
    the call. Kernels of dense calls lead to those of all other kinds, which packages do not have. Calls raise
    ``CudaMissing``, ``NvrtcMissing``, ``UnsupportedGpu``, ``CompileFailed``.
    """

    takes_tangents: ClassVar[tuple[str, str]] = GPU_TANGENTS

    def __init__(
        self,
        spec: AttentionSpec,
        machines: Callable[[int | None], Machine],
        *,
        kind: Kind = DENSE,
        package: Package | None = None,
    ) -> None:
        self.spec, self.machines, self.kind, self.package = spec, machines, kind, package
        self.kernel = functools.cache(self._kernel)
        self.choices = functools.cache(self._choices)
        self.brought = functools.cache(self._brought)
        self.made = functools.cache(self._made)
        self.other = functools.cache(lambda kind: GpuProvider(spec, machines, kind=kind))

    def __call__(self, head_dim: HeadDim, index: int) -> Kernel:
        return self.kernel(head_dim, self.machines(index))

    def of_spec(self, spec: AttentionSpec) -> GpuProvider:
        """A provider of another spec, dense, which no package has."""
        return GpuProvider(spec, self.machines)

    def of_call(
        self, head_dim: HeadDim, machine: Machine, name: PassName, values: Mapping[str, float]
    ) -> tuple[Made[Any], tuple[str, ...]]:
        """What a pass of a call runs, and why it has these tiles."""
        element, shape = call_of(values)
        if self.kind.cached:
            pins = pins_of_call(compiled(self.variant(head_dim), machine.target), element, values)
        else:
            pins = self.pins(head_dim, machine, element, shape.mean_sequences() if self.kind.ragged else shape)
        return self._of_pins(head_dim, machine, element, name, kind_of(name, values), pins)

    def pins(self, head_dim: HeadDim, machine: Machine, element: ElementType, shape: Shape | None = None) -> Pins:
        """The tiles of calls of a shape, but those over caches, which go by their rows."""
        at, choices = machine.shape_of(shape), self.choices(head_dim, machine)
        return choices.usual(element) if at is None else choices.of_call(element, at)

    def variant(self, head_dim: HeadDim) -> Variant:
        """What the kernels compute."""
        return kernel_variant(self.spec, head_dim, self.kind)

    def plans(self) -> Mapping[HeadDim, GpuPlan]:
        """By head dimension, for the current device: what runs where tiles do not go by a call's shape.

        It is said of calls without dropout that need not repeat. Registers are known when a kernel was compiled, so
        that for a GPU every element type is compiled.
        """
        return {each: self._plan(each) for each in self.spec.head_dims}

    def sources(self) -> tuple[KernelSource, ...]:
        """Every text that the plans' kernels are compiled from."""
        found = (made.source for each in self.spec.head_dims for made, _ in self._usual(each))
        return tuple({(source.name, source.text): replace(source, defines=()) for source in found}.values())

    def explain(self, name: str, call: ExplainedCall) -> Explanation:
        """One call."""
        kind, machine = kind_of_call(call.kind, call.values), self.machines(call.index)
        if kind is not self.kind:
            return self.other(kind).explain(name, call)
        passes = {each: self._explained(machine, each, call) for each in kind.passes}
        if kind.cached:
            return explain_cache(name, machine, call, passes["forward"])
        told = explain_gpu(name, machine, call, passes)
        return with_jvp(told, self.spec, call.head_dim, machine.target, call)

    def _explained(self, machine: Machine, name: PassName, call: ExplainedCall) -> GpuPass:
        """The launches of a pass in their order; those of a divided call one part after another."""
        made, reasons = self.of_call(call.head_dim, machine, name, call.values)
        launches = launches_of(made.plan, name, call.values)
        layout = ArgumentLayout(cuda_fields(made.plan.recipe))
        found = schedule(launches, layout, call.head_dim, layout.values(call.values), machine.size)
        steps = [step for part in found.parts for step in part.steps]
        return GpuPass(made.plan, steps, {said.name: said for said in made.resources}, reasons, launches.splits)

    def _of_pins(
        self, head_dim: HeadDim, machine: Machine, element: ElementType, name: PassName, calls: CallKind, pins: Pins
    ) -> tuple[Made[Any], tuple[str, ...]]:
        own = pins.of_pass(name)
        made = self.made(machine, self.variant(head_dim), own, element, name, calls)
        return made, made.why or own.reasons

    def _usual(self, head_dim: HeadDim) -> Iterator[tuple[Made[Any], tuple[str, ...]]]:
        """Forward and backward in each element type, and why."""
        machine = self.machines(None)
        for element in compiled(self.variant(head_dim), machine.target).plan.by_element:
            pins = self.pins(head_dim, machine, element)
            yield from (self._of_pins(head_dim, machine, element, name, CallKind(), pins) for name in BOTH)

    def _plan(self, head_dim: HeadDim) -> GpuPlan:
        """The tiles of each pass and element type, from the plans that they were compiled by."""
        plans = [replace(made.plan, reasons=(*made.plan.reasons, *why)) for made, why in self._usual(head_dim)]
        both = zip(plans[::2], plans[1::2], strict=True)
        return plans[0].joined({forward.own.element: (forward, backward) for forward, backward in both})

    def _kernel(self, head_dim: HeadDim, machine: Machine) -> Kernel:
        plan = compiled(self.variant(head_dim), machine.target).plan
        is_edited = any(each.edited for each in self.brought(head_dim, machine).values())

        def find(name: PassName, values: Mapping[str, float]) -> Compiled[Any]:
            own = self if kind_of_call(self.kind, values) is self.kind else self.other(F8_CACHED)
            made, _ = own.of_call(head_dim, machine, name, values)
            launches = launches_of(made.plan, name, values)
            return Compiled(made.binary(frozenset(launches.kernels)), launches, made.plan)

        @functools.cache
        def other(kind: Kind) -> Kernel | None:
            is_there = self.kind is DENSE and has_kernels(kind, self.spec, head_dim, machine.target)
            return (
                self.other(kind).kernel(head_dim, machine) if is_there and not (is_edited and kind.stands_in) else None
            )

        kernel = replace(machine.kernel(ArgumentLayout(cuda_fields(plan.recipe)), head_dim, find), other=other)
        if plan.recipe.variant.tangent is None:
            return kernel
        return replace(kernel, elements=tuple(map(ELEMENTS.index, plan.by_element)))

    def _choices(self, head_dim: HeadDim, machine: Machine) -> TileChoices[Any, Any]:
        """Parts and slices are dense calls but for what they write; what was measured of tiles is of these."""
        if not self.kind.by_lengths:
            return TileChoices(self.variant(head_dim), machine.gpu, by_length=False)
        return machine.choices(kernel_variant(self.spec, head_dim, RAGGED if self.kind.ragged else DENSE))

    def _brought(self, head_dim: HeadDim, machine: Machine) -> Mapping[tuple[ElementType, str], Packaged]:
        if self.package is None:
            return {}
        return packaged(*self.package, compiled(self.variant(head_dim), machine.target).plan, machine.target)

    def _made(
        self, machine: Machine, variant: Variant, pins: Pins, element: ElementType, name: PassName, calls: CallKind
    ) -> Made[Any]:
        brought = self.brought(variant.head_dim, machine).get((element, name))
        if brought is not None:
            if brought.edited:
                return _as_packaged(brought, calls, f"'{brought.edited}' was edited, and runs as it stands")
            wanted = getattr(pins, name)
            if wanted is None or wanted == tile_of(brought.plan.own, name):
                return _as_packaged(brought, calls)
        if element not in compiled(variant, machine.target).plan.by_element:
            raise UnsupportedGpu(
                f"'{self.spec.name}' at head dimension {variant.head_dim} is not generated in {element} for "
                f"{machine.target.name}: no tile fits its shared memory"
            )
        try:
            return machine.make(compiled(variant, machine.target, pins, Part(element, name)), calls)
        except NvrtcMissing as error:
            if brought is None or brought.image(calls) is None:
                raise
            why = f"{name}: the binary of the package, because other tiles cannot be compiled: {error}"
            return _as_packaged(brought, calls, why)


def _as_packaged(brought: Packaged, calls: CallKind, *why: str) -> Made[Any]:
    image = brought.image(calls)
    if image is not None:
        return Made(brought.plan, brought.source, lambda _: image, brought.resources, why)
    try:
        (made,) = compile_calls([brought.source], calls, brought.source.target)
    except NvrtcMissing as error:
        if not (brought.images and calls.repeatable):
            raise
        raise NvrtcMissing(
            f"{error}; the package has no binary for deterministic gradients, which flashgen build --deterministic adds"
        ) from None
    (binary,) = made.parts.values()
    return Made(brought.plan, brought.source, lambda _: binary.path, binary.kernels, why)
