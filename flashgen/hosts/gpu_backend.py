"""What runs an op on a GPU: the compiled kernels of each call, and what they say of themselves.

In: an ``AttentionSpec``, a package. Out: a ``KernelProvider`` that also answers ``op.plan``, ``op.sources`` and
``op.explain``, from the very kernels that calls run. Whatever takes time (compiling, loading, asking for a GPU) is done
when a kernel is first needed, for one pass and element type at a time.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar

from flashgen.analysis.variant import Variant
from flashgen.compiler.choice import TileChoices, tile_choices
from flashgen.compiler.compiled import assembled, compiled
from flashgen.compiler.package.gpu import Packaged, packaged
from flashgen.emit.kernel_source import KernelSource
from flashgen.hosts import cuda
from flashgen.hosts.asked import AskedCall
from flashgen.hosts.cpu_backend import Package
from flashgen.hosts.explain_gpu import GpuPass, explain_cache, explain_gpu
from flashgen.hosts.gpu_calls import (
    GPU_TANGENTS,
    GPU_TANGENTS_BACKWARD,
    check_element,
    codes_of,
    has_kernels,
    is_f8,
    kernel_variant,
    kind_of,
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
from flashgen.ir.spec import AttentionSpec, HeadDim
from flashgen.ir.types import ElementType
from flashgen.kinds.cached import CACHED, F8_CACHED
from flashgen.kinds.dense import DENSE
from flashgen.kinds.eight_bits import EIGHT_BITS
from flashgen.kinds.kind import BOTH, Kind, PassName
from flashgen.plan.explanation import Explanation
from flashgen.plan.measured import Pins
from flashgen.plan.plan import CallKind, Part
from flashgen.targets.device_table import board_of
from flashgen.targets.gpu.alternatives import tile_of
from flashgen.targets.gpu.compile import GpuBinary, compile_parts
from flashgen.targets.gpu.lists import cuda_fields
from flashgen.targets.gpu.product import Gpu
from flashgen.targets.gpu.target import GpuTarget
from flashgen.targets.gpu.tiles import ElementPlan, GpuPlan
from flashgen.targets.registry import target_of
from flashgen.toolchains.nvrtc import NvrtcMissing, Resources


@dataclass(frozen=True)
class Board:
    """One GPU of this machine: its driver, its name, what is compiled for it, what the model of time knows of it."""

    driver: cuda.Driver
    name: str
    target: GpuTarget
    gpu: Gpu


@dataclass(frozen=True)
class Ready:
    """One pass in one element type, compiled: its plan, the text, the binary.

    ``why`` is said instead of the reasons of the pins where it is not what these ask for.
    """

    plan: GpuPlan
    source: KernelSource
    path: Path
    resources: tuple[Resources, ...]
    why: tuple[str, ...] = ()


class CudaProvider:
    """Kernels for CUDA tensors: those that a call starts are compiled when it needs them, with the tiles of the call.

    A package's source runs where a call takes the tiles that it was written with, by its binary if there is one; a
    source that was edited runs whatever the call. ``kind``: that of the calls; kernels of dense ones lead to all
    others, which packages do not have. Calls raise ``CudaMissing``, ``NvrtcMissing``, ``UnsupportedGpu``,
    ``CompileFailed``.
    """

    def __init__(self, spec: AttentionSpec, package: Package | None = None, *, kind: Kind = DENSE) -> None:
        self.spec, self.package, self.kind = spec, package, kind
        self.board = functools.cache(self._board)
        self.kernel = functools.cache(self._kernel)
        self.choices = functools.cache(self._choices)
        self.brought = functools.cache(self._brought)
        self.ready = functools.cache(self._ready)
        self.of_8_bits = functools.cache(lambda: self._other(F8_CACHED))

    takes_tangents: ClassVar[str] = GPU_TANGENTS
    takes_tangents_backward: ClassVar[str] = GPU_TANGENTS_BACKWARD

    def __call__(self, head_dim: HeadDim, index: int) -> cuda.CudaKernel:
        return self.kernel(head_dim, index)

    def of_spec(self, spec: AttentionSpec) -> CudaProvider:
        """The same of another spec, dense, which no package has."""
        provider = CudaProvider(spec)
        provider.board = self.board
        return provider

    def of_call(
        self, head_dim: HeadDim, index: int, name: PassName, values: Mapping[str, float]
    ) -> tuple[Ready, tuple[str, ...]]:
        """What a pass of a call runs, and why it has these tiles."""
        element, shape = call_of(values)
        if self.kind.cached:
            pins = pins_of_call(compiled(self._variant(head_dim), self.board(index).target), element, values)
        else:
            pins = self.choices(head_dim, index).of_call(element, shape)
        return self._of_pins(head_dim, index, element, name, kind_of(name, values), pins)

    def plans(self) -> Mapping[HeadDim, GpuPlan]:
        """By head dimension, for the current device: what runs where tiles do not go by a call's shape.

        It is said of calls without dropout that need not repeat. Registers are known when a kernel was compiled, so
        that this compiles every element type.
        """
        return {each: self._plan(each) for each in self.spec.head_dims}

    def sources(self) -> tuple[KernelSource, ...]:
        """Every text that the plans' kernels are compiled from."""
        found = (ready.source for each in self.spec.head_dims for _, _, ready, _ in self._usual(each))
        return tuple({(source.name, source.text): replace(source, defines=()) for source in found}.values())

    def explain(self, name: str, asked: AskedCall) -> Explanation:
        """One call."""
        if is_f8(asked.values) and self.kind is not EIGHT_BITS:
            return self._other(EIGHT_BITS).explain(name, asked)
        head_dim, index = asked.head_dim, asked.index
        board, kernel = self.board(index), self(head_dim, index)
        variant = self._variant(head_dim)
        passes: dict[str, GpuPass] = {}
        for each in self.kind.passes:
            ready, reasons = self.of_call(head_dim, index, each, asked.values)
            launches = launches_of(variant, ready.plan, ready.source.symbol, asked.element)
            steps = steps_of(launches(each, asked.values), kernel.layout, head_dim, asked, board.driver.size)
            resources = {said.name: said for said in ready.resources}
            passes[each] = GpuPass(ready.plan, steps, resources, reasons)
        told = explain_gpu(name, "cuda", board.name, variant, board.gpu, asked, passes)
        return with_jvp(told, self.spec, head_dim, board.target, asked)

    def explain_cached(self, name: str, asked: AskedCall) -> Explanation:
        """One call over a cache."""
        cached, head_dim = self._other(kind_of_call(CACHED, asked.values)), asked.head_dim
        index = asked.index
        ready, _ = cached.of_call(head_dim, index, "forward", asked.values)
        board, variant = self.board(index), cached._variant(head_dim)
        resources = {said.name: said for said in ready.resources}
        own = (ready.plan, ready.source.symbol)
        forward, parts = over_cache(*own, cached(head_dim, index).layout, asked, board.driver.size, resources)
        return explain_cache(name, "cuda", board.name, variant, board.gpu, asked, forward, parts)

    def _other(self, kind: Kind) -> CudaProvider:
        provider = CudaProvider(self.spec, kind=kind)
        provider.board = self.board
        return provider

    def _of_pins(
        self, head_dim: HeadDim, index: int, element: ElementType, name: PassName, kind: CallKind, pins: Pins
    ) -> tuple[Ready, tuple[str, ...]]:
        own = pins.of_pass(name)
        ready = self.ready(head_dim, index, element, name, kind, own)
        return ready, ready.why or own.reasons

    def _usual(self, head_dim: HeadDim) -> Iterator[tuple[ElementType, PassName, Ready, tuple[str, ...]]]:
        index = cuda.current_device()
        own = compiled(kernel_variant(self.spec, head_dim), self.board(index).target)
        for element in own.plan.by_element:
            pins = self.choices(head_dim, index).usual(element)
            for name in BOTH:
                yield element, name, *self._of_pins(head_dim, index, element, name, CallKind(), pins)

    def _plan(self, head_dim: HeadDim) -> GpuPlan:
        """The tiles of each pass and element type, from the plans that they were compiled by."""
        plans: dict[ElementType, dict[PassName, GpuPlan]] = {}
        said: dict[str, None] = {}
        for element, name, ready, reasons in self._usual(head_dim):
            plans.setdefault(element, {})[name] = ready.plan
            said |= dict.fromkeys((*ready.plan.reasons, *reasons))
        elements = []
        for element, passes in plans.items():
            forward, backward = (passes[name].by_element[element] for name in BOTH)
            elements.append(ElementPlan(element, forward.forward, backward.backward, backward.queries))
        every = [plan for passes in plans.values() for plan in passes.values()]
        rejected = dict.fromkeys(lost for plan in every for lost in plan.rejected)
        return replace(every[0], elements=tuple(elements), reasons=tuple(said), rejected=tuple(rejected))

    def _variant(self, head_dim: HeadDim) -> Variant:
        return kernel_variant(self.spec, head_dim, self.kind)

    def _board(self, index: int) -> Board:
        driver = cuda.CupyDriver(index)
        name, *figures = cuda.describe_device(index)
        target, size = target_of(name, *figures), driver.size
        gpu = replace(board_of(target, name), product=name, sms=size.multiprocessors, l2_bytes=size.cache_bytes)
        return Board(driver, name, target, gpu)

    def _kernel(self, head_dim: HeadDim, index: int) -> cuda.CudaKernel:
        board, variant = self.board(index), self._variant(head_dim)

        def find(name: PassName, values: Mapping[str, float]) -> Compiled[Path]:
            element, _ = call_of(values)
            own = self if kind_of_call(self.kind, values) is self.kind else self.of_8_bits()
            ready, _ = own.of_call(head_dim, index, name, values)
            return Compiled(ready.path, launches_of(own._variant(head_dim), ready.plan, ready.source.symbol, element))

        brought = self.brought(head_dim, index)
        plan = compiled(variant, board.target).plan if brought is None else brought.plan
        is_edited = brought is not None and brought.edited != ""

        @functools.cache
        def other(kind: Kind) -> cuda.CudaKernel | None:
            is_there = self.kind is DENSE and has_kernels(kind, self.spec, head_dim, board.target)
            return self._other(kind)(head_dim, index) if is_there and not (is_edited and kind.stands_in) else None

        kernel = cuda.CudaKernel(ArgumentLayout(cuda_fields(plan.recipe)), head_dim, board.driver, find, other=other)
        if variant.tangent is None:
            return kernel
        return replace(kernel, elements=codes_of(plan))

    def _choices(self, head_dim: HeadDim, index: int) -> TileChoices[GpuPlan, GpuBinary]:
        board, variant = self.board(index), sized_as(self.spec, head_dim, self.kind)
        if variant is None:
            return TileChoices(self._variant(head_dim), board.gpu, by_length=False)
        return tile_choices(variant, board.gpu, board.name)

    def _brought(self, head_dim: HeadDim, index: int) -> Packaged | None:
        if self.package is None:
            return None
        return packaged(*self.package, self._variant(head_dim), self.board(index).target)

    def _ready(
        self, head_dim: HeadDim, index: int, element: ElementType, name: PassName, kind: CallKind, pins: Pins
    ) -> Ready:
        target, brought, part = self.board(index).target, self.brought(head_dim, index), Part(element, name, kind)
        if brought is not None and element in brought.plan.by_element:
            if brought.edited:
                why = f"'{brought.edited}' was edited, and runs as it stands"
                return _as_packaged(brought, part, why)
            wanted = getattr(pins, name)
            if wanted is None or wanted == tile_of(brought.plan.by_element[element], name):
                return _as_packaged(brought, part)
        variant = self._variant(head_dim)
        check_element(variant, compiled(variant, target, pins).plan, element, target)
        try:
            made = assembled(variant, target, pins, part)
        except NvrtcMissing as error:
            if brought is None or brought.image(part) is None:
                raise
            why = f"{name}: the binary of the package, because other tiles cannot be compiled: {error}"
            return _as_packaged(brought, part, why)
        source = made.kernel.source
        return Ready(made.kernel.plan, source, made.binary.parts[part].path, made.binary.kernels)


def _as_packaged(brought: Packaged, part: Part, *why: str) -> Ready:
    image = brought.image(part)
    if image is not None:
        return Ready(brought.plan, brought.source, image, brought.resources, why)
    try:
        binary = compile_parts(brought.source, brought.plan, part, brought.source.target)
    except NvrtcMissing as error:
        if not (brought.images and part.calls.repeatable):
            raise
        raise NvrtcMissing(
            f"{error}; the package has no binary for deterministic gradients, which flashgen build --deterministic adds"
        ) from None
    return Ready(brought.plan, brought.source, binary.parts[part].path, binary.kernels, why)
