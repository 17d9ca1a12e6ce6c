"""What runs an op on a GPU, real or emulated: the compiled kernels of each call, and what they say of themselves.

In: an ``AttentionSpec``, a target, a package. Out: ``KernelProvider``s that also answer ``op.plan``, ``op.sources`` and
``op.explain``, from the very kernels that calls run. Whatever takes time (compiling, loading, asking for a GPU) is done
when a kernel is first needed, for one pass and element type at a time.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from flashgen.analysis.tangent import with_tangent
from flashgen.analysis.variant import Variant, analyse
from flashgen.choice import TileChoices, tile_choices
from flashgen.compiled import CompiledKernel, assembled, compiled
from flashgen.emit.kernel_source import KernelSource
from flashgen.ir.shape import Shape
from flashgen.ir.spec import AttentionSpec, HeadDim
from flashgen.ir.types import ElementType
from flashgen.package.gpu import Packaged, packaged
from flashgen.package.manifest import Manifest
from flashgen.plan.arguments import gradient_field
from flashgen.plan.explanation import Explanation
from flashgen.plan.launches import PassLaunches
from flashgen.plan.measured import PLANNERS_OWN, Pins
from flashgen.plan.operands import F8_CODE
from flashgen.plan.plan import CallKind, Part
from flashgen.runtime import cuda
from flashgen.runtime.asked import Asked
from flashgen.runtime.kernel import ArgumentLayout, JvpKernel, PassName, Step
from flashgen.runtime.nvrtc import NvrtcMissing, Resources
from flashgen.runtime.schedule import Compiled, DeviceSize, schedule
from flashgen.targets.device_table import product_of
from flashgen.targets.gpu.alternatives import tile_of
from flashgen.targets.gpu.architecture import UnsupportedGpu
from flashgen.targets.gpu.by_rows import pins_of_rows
from flashgen.targets.gpu.compile import GpuBinary, compile_parts
from flashgen.targets.gpu.explain import GpuPass, explain_cache, explain_gpu, explain_jvp
from flashgen.targets.gpu.launches import backward_launches, cached_launches, forward_launches
from flashgen.targets.gpu.limits import ELEMENTS_OF_JVP, has_jvp
from flashgen.targets.gpu.lists import cuda_fields
from flashgen.targets.gpu.product import Gpu
from flashgen.targets.gpu.tables import WIDEST_JVP
from flashgen.targets.gpu.target import GpuTarget
from flashgen.targets.gpu.tiles import ElementPlan, GpuPlan
from flashgen.targets.registry import GPUS, target_of

if TYPE_CHECKING:
    from flashgen.cache import Cache
    from flashgen.runtime.emulated import EmulatedKernel
    from flashgen.runtime.emulator import Program

# By the codes of ``struct Arguments``.
ELEMENTS = (ElementType.F32, ElementType.BF16, ElementType.F16, ElementType.F8E4M3)


class RowsOf(Enum):
    """What kernels take the rows of."""

    DENSE = "dense"
    RAGGED = "ragged"
    CACHED = "cached"
    PARTS = "parts"
    F8 = "of 8 bits"
    MOVING = "dense, with their tangents"


BOTH: tuple[PassName, PassName] = ("forward", "backward")
# What kernels of forward mode take.
GPU_TANGENTS = f"{' and '.join(map(str, ELEMENTS_OF_JVP))}, head dimensions up to {WIDEST_JVP}"

# A generated package: its folder, and what it says of itself.
Package = tuple[Path, Manifest]


def launches_of(
    variant: Variant, plan: GpuPlan, symbol: str, element: ElementType
) -> Callable[[PassName, Mapping[str, float]], PassLaunches]:
    """The launches of a pass for values of ``struct Arguments`` by name."""
    if variant.tangent is not None:
        return lambda name, values: forward_launches(
            symbol, variant, plan, element, dropped=kind_of(name, values).dropped
        )
    if variant.cached:
        return lambda _name, values: cached_launches(symbol, variant, plan, element, f8=has_f8_cache(values))
    gradients = [gradient_field(each.name) for each in variant.gradients]

    def find(name: PassName, values: Mapping[str, float]) -> PassLaunches:
        kind = kind_of(name, values)
        if name == "forward":
            return forward_launches(symbol, variant, plan, element, dropped=kind.dropped)
        return backward_launches(
            symbol,
            variant,
            plan,
            element,
            dropped=kind.dropped,
            deterministic=kind.repeatable,
            captured=any(values[each] for each in gradients),
        )

    return find


def kind_of(name: PassName, values: Mapping[str, float]) -> CallKind:
    """Which kernels of a pass a call starts; those of the forward pass always repeat."""
    repeats = name == "backward" and bool(values["deterministic"])
    return CallKind(values["dropout_threshold"] > 0, repeats, has_f8_cache(values))


def has_f8_cache(values: Mapping[str, float]) -> bool:
    """Whether a call is one over a cache of 8 bits."""
    return values.get("key_element") == F8_CODE


def call_of(values: Mapping[str, float]) -> tuple[ElementType, Shape]:
    """The element type and the sizes of a call, from values of ``struct Arguments`` by name."""
    names = ("batch", "heads", "kv_heads", "q_len", "kv_len")
    return ELEMENTS[int(values["element"])], Shape(*(int(values[name]) for name in names))


def _passes(variant: Variant) -> Sequence[PassName]:
    """Those that there are kernels for."""
    return BOTH[:1] if variant.forward_only else BOTH


def _steps(
    launches: PassLaunches, layout: ArgumentLayout, head_dim: HeadDim, asked: Asked, size: DeviceSize
) -> Sequence[Step]:
    """The launches of a call in their order; those of a divided call one part after another."""
    found = schedule(launches, layout, head_dim, layout.values(asked.values), size)
    return [step for part in found.parts for step in part.steps]


def _over_cache(
    variant: Variant,
    plan: GpuPlan,
    symbol: str,
    layout: ArgumentLayout,
    asked: Asked,
    size: DeviceSize,
    resources: Mapping[str, Resources],
) -> tuple[GpuPass, int]:
    """The launches of a call over a cache, and in how many parts keys are."""
    launches = cached_launches(symbol, variant, plan, asked.element, f8=has_f8_cache(asked.values))
    assert launches.splits is not None, "keys over a cache may be split"
    known = {name: int(value) for name, value in asked.values.items()}
    splits = launches.splits.values(known, size.multiprocessors)["splits"]
    steps = _steps(launches, layout, asked.call.head_dim, asked, size)
    return GpuPass(plan, steps, resources), splits


def _with_jvp(
    told: Explanation, spec: AttentionSpec, head_dim: HeadDim, target: GpuTarget, asked: Asked
) -> Explanation:
    """What is told of a call, with the kernel of its tangents, if there is one."""
    if not has_jvp(kernel_variant(spec, head_dim)):
        return told
    moving = compiled(kernel_variant(spec, head_dim, RowsOf.MOVING), target)
    return replace(told, jvp=explain_jvp(moving.source.symbol, moving.plan, asked))


def jvp_kernel(kernel: EmulatedKernel | cuda.CudaKernel, plan: GpuPlan) -> JvpKernel:
    """The forward pass of kernels with tangents."""
    elements = tuple(ELEMENTS.index(each) for each in plan.by_element)
    prepare = functools.partial(kernel.prepare, "forward")
    return JvpKernel(kernel.layout, prepare, elements, kernel.row_alignment, kernel.reads)


# -- the emulator ------------------------------------------------------------------------------------------------------


class EmulatorProvider:
    """The sources for a target, under the emulator, on CPU tensors.

    Calls there are short, and the kernels of long sequences are what has to be tested: the tiles are the planner's own
    for every shape. Those of short calls are emulated by pinning them. Libraries go to ``cache`` (none: the user's).
    ``rows``: those for ragged batches, for caches or for parts, which the kernels of the others lead to.
    """

    def __init__(
        self, spec: AttentionSpec, target: GpuTarget, *, cache: Cache | None = None, rows: RowsOf = RowsOf.DENSE
    ) -> None:
        self.spec, self.target, self.rows, self._cache = spec, target, rows, cache
        self.kernel = functools.cache(self._kernel)

    takes_tangents: ClassVar[str] = GPU_TANGENTS

    def __call__(self, head_dim: HeadDim, index: int) -> EmulatedKernel:  # noqa: ARG002 - there is one emulator
        return self.kernel(head_dim)

    def compiled(self, head_dim: HeadDim, pins: Pins = PLANNERS_OWN) -> CompiledKernel[GpuPlan, GpuBinary]:
        """What runs."""
        return compiled(kernel_variant(self.spec, head_dim, self.rows), self.target, pins)

    def plans(self) -> Mapping[HeadDim, GpuPlan]:
        """By head dimension."""
        return {each: self.compiled(each).plan for each in self.spec.head_dims}

    def sources(self) -> tuple[KernelSource, ...]:
        """One a head dimension."""
        return tuple(self.compiled(each).source for each in self.spec.head_dims)

    def explain(self, name: str, asked: Asked) -> Explanation:
        """One call."""
        if is_f8(asked.values) and self.rows is not RowsOf.F8:
            return self._other(RowsOf.F8).explain(name, asked)
        head_dim = asked.call.head_dim
        kernel, emulated = self.compiled(head_dim), self(head_dim, 0)
        plan = kernel.plan
        _check_element(kernel.variant, plan, asked.element, self.target)
        launches = launches_of(kernel.variant, plan, kernel.source.symbol, asked.element)
        passes: dict[str, GpuPass] = {
            each: GpuPass(
                plan, _steps(launches(each, asked.values), emulated.layout, head_dim, asked, emulated.size), {}
            )
            for each in _passes(kernel.variant)
        }
        gpu = product_of(self.target)
        told = explain_gpu(name, "emulator", f"emulated {gpu.product}", kernel.variant, gpu, asked, passes)
        return _with_jvp(told, self.spec, head_dim, self.target, asked)

    def explain_cached(self, name: str, asked: Asked) -> Explanation:
        """One call over a cache."""
        cached, head_dim, gpu = self._other(RowsOf.CACHED), asked.call.head_dim, product_of(self.target)
        kernel = cached.compiled(head_dim, _pins(cached.compiled(head_dim), asked.element, asked.values))
        _check_element(kernel.variant, kernel.plan, asked.element, self.target)
        emulated = cached(head_dim, 0)
        own = (kernel.variant, kernel.plan, kernel.source.symbol)
        forward, splits = _over_cache(*own, emulated.layout, asked, emulated.size, {})
        device = f"emulated {gpu.product}"
        return explain_cache(name, "emulator", device, kernel.variant, gpu, asked, forward, splits)

    def _other(self, rows: RowsOf) -> EmulatorProvider:
        return EmulatorProvider(self.spec, self.target, cache=self._cache, rows=rows)

    def _kernel(self, head_dim: HeadDim) -> EmulatedKernel:
        from flashgen.runtime.emulated import EmulatedKernel
        from flashgen.runtime.emulator import compile_program

        variant = kernel_variant(self.spec, head_dim, self.rows)

        @functools.cache
        def launches(element: ElementType, pins: Pins) -> Callable[[PassName, Mapping[str, float]], PassLaunches]:
            kernel = self.compiled(head_dim, pins)
            plan = kernel.plan
            _check_element(variant, plan, element, self.target)
            return launches_of(variant, plan, kernel.source.symbol, element)

        @functools.cache
        def program(kernels: frozenset[str], pins: Pins) -> Program:
            source = self.compiled(head_dim, pins).source
            return compile_program(source.text, name=source.name, cache=self._cache, kernels=kernels)

        def find(name: PassName, values: Mapping[str, float]) -> Compiled[Program]:
            """What the call's pass starts: the host's compiler takes a second for each kernel."""
            element = call_of(values)[0]
            pins = _pins(self.compiled(head_dim), element, values)
            own = launches(element, pins)
            return Compiled(program(frozenset(own(name, values).kernels), pins), own)

        def other(rows: RowsOf) -> Callable[[], EmulatedKernel] | None:
            return functools.partial(self._other(rows), head_dim, 0) if self.rows is RowsOf.DENSE else None

        layout = ArgumentLayout(cuda_fields(variant))
        varlen, cached, parts = (other(each) for each in (RowsOf.RAGGED, RowsOf.CACHED, RowsOf.PARTS))
        f8 = other(RowsOf.F8) if takes_f8(variant, self.target) else None
        jvp = self._forward_mode(head_dim)
        return EmulatedKernel(layout, head_dim, find, varlen=varlen, cached=cached, parts=parts, f8=f8, jvp=jvp)

    def _forward_mode(self, head_dim: HeadDim) -> Callable[[], JvpKernel] | None:
        if self.rows is not RowsOf.DENSE or not has_jvp(kernel_variant(self.spec, head_dim)):
            return None
        moving = self._other(RowsOf.MOVING)
        return functools.cache(lambda: jvp_kernel(moving(head_dim, 0), moving.compiled(head_dim).plan))


def _check_element(variant: Variant, plan: GpuPlan, element: ElementType, target: GpuTarget) -> None:
    if element not in plan.by_element:
        raise UnsupportedGpu(
            f"'{variant.spec.name}' at head dimension {variant.head_dim} is not generated in {element} for "
            f"{target.name}: no tile fits its shared memory"
        )


# -- GPUs --------------------------------------------------------------------------------------------------------------


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
    source that was edited runs whatever the call. ``rows``: kernels for ragged batches, for caches or for parts, which
    the others lead to, and packages do not have; tiles of the former two are the planner's own. Calls raise
    ``CudaMissing``, ``NvrtcMissing``, ``UnsupportedGpu``, ``CompileFailed``.
    """

    def __init__(self, spec: AttentionSpec, package: Package | None = None, *, rows: RowsOf = RowsOf.DENSE) -> None:
        self.spec, self.package, self.rows = spec, package, rows
        self.board = functools.cache(self._board)
        self.kernel = functools.cache(self._kernel)
        self.choices = functools.cache(self._choices)
        self.brought = functools.cache(self._brought)
        self.ready = functools.cache(self._ready)

    takes_tangents: ClassVar[str] = GPU_TANGENTS

    def __call__(self, head_dim: HeadDim, index: int) -> cuda.CudaKernel:
        return self.kernel(head_dim, index)

    def of_call(
        self, head_dim: HeadDim, index: int, name: PassName, values: Mapping[str, float]
    ) -> tuple[Ready, tuple[str, ...]]:
        """What a pass of a call runs, and why it has these tiles."""
        element, shape = call_of(values)
        if self.rows is RowsOf.CACHED:
            pins = _pins(compiled(self._variant(head_dim), self.board(index).target), element, values)
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

    def explain(self, name: str, asked: Asked) -> Explanation:
        """One call."""
        if is_f8(asked.values) and self.rows is not RowsOf.F8:
            return self._other(RowsOf.F8).explain(name, asked)
        head_dim, index = asked.call.head_dim, asked.call.device.index or 0
        board, kernel = self.board(index), self(head_dim, index)
        variant = self._variant(head_dim)
        passes: dict[str, GpuPass] = {}
        for each in _passes(variant):
            ready, reasons = self.of_call(head_dim, index, each, asked.values)
            launches = launches_of(variant, ready.plan, ready.source.symbol, asked.element)
            steps = _steps(launches(each, asked.values), kernel.layout, head_dim, asked, board.driver.size)
            resources = {said.name: said for said in ready.resources}
            passes[each] = GpuPass(ready.plan, steps, resources, reasons)
        told = explain_gpu(name, "cuda", board.name, variant, board.gpu, asked, passes)
        return _with_jvp(told, self.spec, head_dim, board.target, asked)

    def explain_cached(self, name: str, asked: Asked) -> Explanation:
        """One call over a cache."""
        cached, head_dim, index = self._other(RowsOf.CACHED), asked.call.head_dim, asked.call.device.index or 0
        ready, _ = cached.of_call(head_dim, index, "forward", asked.values)
        board, variant = self.board(index), kernel_variant(self.spec, head_dim, RowsOf.CACHED)
        resources = {said.name: said for said in ready.resources}
        own = (variant, ready.plan, ready.source.symbol)
        forward, splits = _over_cache(*own, cached(head_dim, index).layout, asked, board.driver.size, resources)
        return explain_cache(name, "cuda", board.name, variant, board.gpu, asked, forward, splits)

    def _other(self, rows: RowsOf) -> CudaProvider:
        provider = CudaProvider(self.spec, rows=rows)
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
        return kernel_variant(self.spec, head_dim, self.rows)

    def _board(self, index: int) -> Board:
        driver = cuda.CupyDriver(index)
        name, *figures = cuda.describe_device(index)
        target, size = target_of(name, *figures), driver.size
        gpu = replace(product_of(target), product=name, sms=size.multiprocessors, l2_bytes=size.cache_bytes)
        return Board(driver, name, target, gpu)

    def _kernel(self, head_dim: HeadDim, index: int) -> cuda.CudaKernel:
        board, variant = self.board(index), self._variant(head_dim)

        def find(name: PassName, values: Mapping[str, float]) -> Compiled[Path]:
            element, _ = call_of(values)
            ready, _ = self.of_call(head_dim, index, name, values)
            return Compiled(ready.path, launches_of(variant, ready.plan, ready.source.symbol, element))

        def other(rows: RowsOf) -> Callable[[], cuda.CudaKernel] | None:
            return functools.partial(self._other(rows), head_dim, index) if self.rows is RowsOf.DENSE else None

        layout = ArgumentLayout(cuda_fields(variant))
        brought = self.brought(head_dim, index)
        is_edited = brought is not None and brought.is_edited  # what a text says that was edited, no other kernel does
        varlen, cached = other(RowsOf.RAGGED), other(RowsOf.CACHED)
        parts = None if is_edited else other(RowsOf.PARTS)
        f8 = other(RowsOf.F8) if takes_f8(variant, board.target) else None
        jvp = self._forward_mode(head_dim, index)
        return cuda.CudaKernel(
            layout, head_dim, board.driver, find, varlen=varlen, cached=cached, parts=parts, f8=f8, jvp=jvp
        )

    def _forward_mode(self, head_dim: HeadDim, index: int) -> Callable[[], JvpKernel] | None:
        if self.rows is not RowsOf.DENSE or not has_jvp(kernel_variant(self.spec, head_dim)):
            return None
        moving, target = self._other(RowsOf.MOVING), self.board(index).target
        plan = functools.cache(lambda: compiled(moving._variant(head_dim), target).plan)
        return functools.cache(lambda: jvp_kernel(moving(head_dim, index), plan()))

    def _choices(self, head_dim: HeadDim, index: int) -> TileChoices[GpuPlan, GpuBinary]:
        board, variant = self.board(index), self._variant(head_dim)
        if self.rows is RowsOf.PARTS:  # which are dense calls but for what they write
            return tile_choices(kernel_variant(self.spec, head_dim), board.gpu, board.name)
        if self.rows is not RowsOf.DENSE:  # what was measured is of dense calls
            return TileChoices(variant, board.gpu, by_length=False)
        return tile_choices(variant, board.gpu, board.name)

    def _brought(self, head_dim: HeadDim, index: int) -> Packaged | None:
        if self.package is None:
            return None
        return packaged(*self.package, self.spec, head_dim, self.board(index).target)

    def _ready(
        self, head_dim: HeadDim, index: int, element: ElementType, name: PassName, kind: CallKind, pins: Pins
    ) -> Ready:
        target, brought, part = self.board(index).target, self.brought(head_dim, index), Part(element, name, kind)
        if brought is not None and element in brought.plan.by_element:
            if brought.is_edited:
                why = f"'{brought.source.file_name}' was edited, and runs as it stands"
                return _as_packaged(brought, part, why)
            wanted = getattr(pins, name)
            if wanted is None or wanted == tile_of(brought.plan.by_element[element], name):
                return _as_packaged(brought, part)
        variant = self._variant(head_dim)
        _check_element(variant, compiled(variant, target, pins).plan, element, target)
        try:
            made = assembled(variant, target, pins, part)
        except NvrtcMissing as error:
            if brought is None or replace(part, calls=None) not in brought.images:
                raise
            why = f"{name}: the binary of the package, because other tiles cannot be compiled: {error}"
            return _as_packaged(brought, part, why)
        source = made.kernel.source
        return Ready(made.kernel.plan, source, made.binary.parts[part].path, made.binary.kernels)


@functools.lru_cache(maxsize=64)
def kernel_variant(spec: AttentionSpec, head_dim: HeadDim, rows: RowsOf = RowsOf.DENSE) -> Variant:
    """The spec at a head dimension, over caches and of 8 bits without gradients.

    It is remembered, as each pass of a call asks for it.
    """
    variant = analyse(spec, head_dim)
    if rows is RowsOf.MOVING:
        return with_tangent(variant)
    if rows in (RowsOf.CACHED, RowsOf.F8):
        return replace(variant, cached=rows is RowsOf.CACHED, f8=rows is RowsOf.F8, gradients=())
    return replace(variant, ragged=rows is RowsOf.RAGGED, parts=rows is RowsOf.PARTS)


def takes_f8(variant: Variant, target: GpuTarget) -> bool:
    """Whether a target has kernels for q, k and v of 8 bits of a spec that takes them."""
    return variant.spec.takes_f8 and target.takes_f8(variant)


def ragged_kernel(spec: AttentionSpec, head_dim: HeadDim, target: str) -> CompiledKernel[GpuPlan, GpuBinary]:
    """What ragged batches run on the emulator of a target."""
    return compiled(kernel_variant(spec, head_dim, RowsOf.RAGGED), GPUS[target])


def cached_kernel(
    spec: AttentionSpec, head_dim: HeadDim, target: str, values: Mapping[str, float]
) -> CompiledKernel[GpuPlan, GpuBinary]:
    """What a call over a cache runs on the emulator of a target, by the values of its arguments."""
    variant, element = kernel_variant(spec, head_dim, RowsOf.CACHED), call_of(values)[0]
    return compiled(variant, GPUS[target], _pins(compiled(variant, GPUS[target]), element, values))


def f8_kernel(spec: AttentionSpec, head_dim: HeadDim, target: str) -> CompiledKernel[GpuPlan, GpuBinary]:
    """What calls of 8 bits run on the emulator of a target that has kernels for them."""
    return compiled(kernel_variant(spec, head_dim, RowsOf.F8), GPUS[target])


def is_f8(values: Mapping[str, float]) -> bool:
    """Whether a call is one whose q, k and v are of 8 bits, by the values of its arguments."""
    return values["element"] == F8_CODE


def is_cached(values: Mapping[str, float]) -> bool:
    """Whether a call is one over a cache, by the values of its arguments."""
    return "cache_lengths" in values


def _pins(kernel: CompiledKernel[GpuPlan, GpuBinary], element: ElementType, values: Mapping[str, float]) -> Pins:
    """What a call takes where nothing was tuned: the planner's own tiles, but over a cache those for its rows."""
    if not kernel.variant.cached:
        return PLANNERS_OWN
    return pins_of_rows(kernel.variant, kernel.plan, element, int(values["group_rows"]))


def _as_packaged(brought: Packaged, part: Part, *why: str) -> Ready:
    image = brought.images.get(replace(part, calls=None))  # a package's binaries are for every kind of call
    if image is not None:
        return Ready(brought.plan, brought.source, image, brought.resources, why)
    binary = compile_parts(brought.source, brought.plan, part, brought.source.target)
    return Ready(brought.plan, brought.source, binary.parts[part].path, binary.kernels, why)
