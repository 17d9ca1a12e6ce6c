"""The launches of calls on GPUs, real or emulated, the variants and tiles of their kernels, and ``op.explain`` of them.

In: a ``GpuPlan``, values of ``struct Arguments`` by name. Out: launches, the variant for each kind of call, the tiles
over a cache; of an ``ExplainedCall`` and its compiled kernels an ``Explanation``, from the very kernels and schedules
that the call takes: the model predicts bytes and times, for the mask at its offsets. ``gpu_provider.py`` stands on it.

A ``Machine`` is what kernels for GPUs are planned for, compiled by and started on: a GPU, or the emulator of one.
``GpuKernel`` is what kernels of both have in common: what they run for a call, and how they read tensors.
"""

from __future__ import annotations

import abc
import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Generic, TypeVar

from flashgen.analysis.by_blocks import objection_to_blocks, with_listed_blocks
from flashgen.analysis.selection import has_list_for_each_query
from flashgen.analysis.tangent import with_slopes, with_tangent
from flashgen.analysis.variant import Variant, analyse
from flashgen.compiler.compiled import CompiledKernel, compiled
from flashgen.compiler.tile_choices import TileChoices, tile_choices
from flashgen.emit.kernel_source import KernelSource
from flashgen.hosts.kernel import (
    ELEMENTS,
    ArgumentLayout,
    ExplainedCall,
    Kernel,
    Step,
    Values,
    with_mask_of_call,
    with_prediction,
)
from flashgen.hosts.schedule import (
    MOST_ELEMENTS,
    ROW_ALIGNMENT,
    Binary,
    Compiled,
    DeviceSize,
    ListCache,
    Schedule,
    is_readable,
    schedule,
    storing,
)
from flashgen.ir.shape import Shape
from flashgen.ir.spec import AttentionSpec, HeadDim
from flashgen.ir.types import ElementType
from flashgen.kinds.cached import CACHED, F8_CACHED
from flashgen.kinds.dense import DENSE
from flashgen.kinds.eight_bits import EIGHT_BITS
from flashgen.kinds.forward_mode import FORWARD_MODE, FORWARD_MODE_BACKWARD
from flashgen.kinds.kind import Kind, PassName
from flashgen.kinds.operand import F8_CODE
from flashgen.kinds.slices import BY_BLOCKS
from flashgen.plan.arguments import gradient_field, stored_field, summed_tensors
from flashgen.plan.explanation import ExplainedKernel, ExplainedPass, Explanation
from flashgen.plan.launches import PassLaunches, Splits
from flashgen.plan.measured import Pins
from flashgen.plan.plan import CallKind, Part, Rejection
from flashgen.targets.gpu.bytes import bytes_of_caches
from flashgen.targets.gpu.compile import GpuBinary
from flashgen.targets.gpu.cost import pass_time
from flashgen.targets.gpu.family import pins_of_rows
from flashgen.targets.gpu.launches import pass_launches
from flashgen.targets.gpu.layouts import fits_blocks
from flashgen.targets.gpu.limits import ELEMENTS_OF_JVP, has_jvp, has_jvp_backward
from flashgen.targets.gpu.product import Gpu
from flashgen.targets.gpu.schedules import Schedule as TileSchedule
from flashgen.targets.gpu.tables import WIDEST_JVP
from flashgen.targets.gpu.target import GpuTarget
from flashgen.targets.gpu.tiles import TILES_OF, GpuPlan
from flashgen.toolchains.nvrtc import Resources

Lists = TypeVar("Lists")
# Gives the kernels of a pass of a call, by values of fields by name.
Find = Callable[[PassName, Mapping[str, float]], Compiled[Any]]


@dataclass(frozen=True)
class GpuKernel(Kernel, Generic[Lists]):
    """One head dimension on one device. ``find`` gives the kernels of a pass, for values of fields by name.

    ``most`` bounds the elements that a launch indexes.
    """

    head_dim: HeadDim
    find: Find
    size: DeviceSize
    list_cache: ListCache[Lists] = field(default_factory=ListCache)
    most: int = MOST_ELEMENTS

    row_alignment = ROW_ALIGNMENT
    stores = needs_lse = shares_lists = True
    moves = False
    reads = staticmethod(is_readable)

    def stored_whole(self, fixed: Values) -> frozenset[str]:
        """None for a call in parts, as each part would store its own sums, nor for too many batch entries in turn."""
        values = storing(self.layout, fixed)
        found, parts = self.scheduled("backward", values)
        if len(parts.parts) > 1:
            return frozenset()
        batch, whole = self.layout.named(values)["batch"], found.launches.whole
        worth = (name for name, entries in whole.items() if entries is None or batch <= entries)
        return frozenset(name.removeprefix(stored_field("")) for name in worth)

    def scheduled(self, name: PassName, values: Values) -> tuple[Compiled[Any], Schedule]:
        """The kernels of a pass of a call, and their schedule."""
        found = self.find(name, self.layout.named(values))
        eager = self.list_cache.eager
        return found, schedule(found.launches, self.layout, self.head_dim, values, self.size, self.most, eager=eager)


@dataclass(frozen=True)
class Made(Generic[Binary]):
    """What a kernel became: its plan, its text, and a function from names of kernels to the binary that holds them.

    ``resources`` are those of the kernels, as the assembler said. ``why`` explains, where other tiles run than were
    asked for.
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
        """The shape whose tiles a call of this shape takes; None: the tiles that are used without a shape."""
        return shape

    @abc.abstractmethod
    def make(self, kernel: CompiledKernel[Any, Any], calls: CallKind) -> Made[Any]:
        """Compile a pass in one element type for such calls. Raises ``NvrtcMissing``, ``CompileFailed``."""

    @abc.abstractmethod
    def kernel(self, layout: ArgumentLayout, head_dim: HeadDim, find: Find) -> GpuKernel[Any]:
        """The kernel that starts the launches that ``find`` gives."""


_UNPREDICTED = "of a deterministic backward pass bytes and time are not predicted: the model knows that of atomic sums"


@dataclass(frozen=True)
class GpuPass:
    """One pass on a GPU, real or emulated: its plan, its launches, what the assembler said of its kernels.

    ``reasons`` are those of its tiles; ``splits`` say in how many parts keys over a cache are.
    """

    plan: GpuPlan
    steps: Sequence[Step]
    resources: Mapping[str, Resources]
    reasons: tuple[str, ...] = ()
    splits: Splits | None = None


def explain_gpu(name: str, machine: Machine, call: ExplainedCall, passes: Mapping[PassName, GpuPass]) -> Explanation:
    """The call on a GPU, or on one that is emulated."""
    plan = next(iter(passes.values())).plan
    own, found = with_mask_of_call(plan.recipe.variant, call), []
    reasons: dict[str, None] = {}
    rejected: dict[Rejection, None] = {}
    for each_name, each in passes.items():
        tiles = each.plan.own
        made = _gpu_pass(each_name, tiles.forward if each_name == "forward" else tiles.backward, each)
        if each_name == "forward" or not call.values["deterministic"]:
            predicted = pass_time(each.plan.recipe.of(keep=own.keep), tiles, machine.gpu, call.shape, each_name)
            made = with_prediction(made, own, call, predicted)
        found.append(made)
        reasons |= dict.fromkeys((*each.plan.reasons_of((each_name,)), *each.reasons))
        rejected |= dict.fromkeys(lost for lost in each.plan.rejected if lost.pass_name in TILES_OF[each_name])
    if call.values["deterministic"]:
        reasons[_UNPREDICTED] = None
    told = call.explanation(name, machine.backend, machine.name, plan.target, found, tuple(reasons))
    return replace(told, rejected=tuple(rejected))


def explain_jvp(plan: GpuPlan, call: ExplainedCall) -> ExplainedPass:
    """The kernels of forward mode, were its tangents asked for, or those of its backward pass, which need not repeat.

    They are told by the planner's tiles for the type of the call: of persistent blocks no more run than there is room
    for.
    """
    (name,) = plan.recipe.variant.kind.passes
    known = {field: int(value) for field, value in call.values.items()}
    launches = pass_launches(plan, name, dropped=bool(call.values["dropout_threshold"]), deterministic=False)
    kernels = tuple(
        ExplainedKernel(each.kernel, each.threads, each.grid.value(known), each.shared_bytes)
        for each in launches.launches
    )
    title, tile = ("jvp", plan.own.forward) if name == "forward" else ("jvp_backward", plan.own.backward)
    return replace(_gpu_pass(title, tile, GpuPass(plan, (), {})), kernels=kernels)


def explain_cache(name: str, machine: Machine, call: ExplainedCall, forward: GpuPass) -> Explanation:
    """A call over a full cache, on a GPU or on one that is emulated: it takes at least as long as its bytes."""
    variant = forward.plan.recipe.variant
    assert forward.splits is not None, "keys over a cache may be split"
    known = {name: int(value) for name, value in call.values.items()}
    found = forward.splits.values(known, machine.size.multiprocessors)
    tiles, values = forward.plan.own, {**call.values, **found}
    q_len, room = int(values["q_len"]), int(values["kv_len"])
    own = {"batch": 1, "kv_start": 0, "q_start": max(room - q_len, 0), "q_total": max(room, q_len), "kv_total": room}
    sequences = [own | {"b_start": int(values["b_start"]) + n} for n in range(int(values["batch"]))]
    moved = sum(bytes_of_caches(sequences, variant, tiles, values, {}).values())
    made = replace(
        _gpu_pass("forward", tiles.forward, forward),
        hbm_bytes=moved,
        seconds=moved / machine.gpu.bandwidth,
        limited_by="memory, if nothing else holds it up; a sequence that does not fill the cache takes less",
        at_most=True,
    )
    who = "a second kernel" if found["merges_apart"] else "the last block of a tile to come to its end"
    several = f"the keys of a sequence in {found['splits']} parts, merged by {who}"
    parts = several if found["merges"] else "keys in one part"
    reasons = (
        *forward.plan.reasons,
        f"{int(values['group_rows'])} rows of queries for a key/value head",
        parts,
        *(
            f"{each.question}: {each.choice}: {each.reason}"
            for each in dict.fromkeys(forward.plan.decisions)
            if each.question != "tiles"
        ),
    )
    told = call.explanation(name, machine.backend, machine.name, forward.plan.target, (made,), reasons)
    return replace(told, rejected=forward.plan.rejected)


def _gpu_pass(name: str, tile: TileSchedule, each: GpuPass) -> ExplainedPass:
    kernels = []
    for step in each.steps:
        said = each.resources.get(step.kernel)
        registers, spilled = (None, None) if said is None else (said.registers, said.spill_bytes)
        kernels.append(ExplainedKernel(step.kernel, step.threads, step.grid, step.shared_bytes, registers, spilled))
    return ExplainedPass(
        name=name,
        Br=tile.Br,
        Bc=tile.Bc,
        sram_bytes=tile.sram_bytes,
        multiplies=tile.multipliers,
        warps=tile.warps,
        stages=tile.stages,
        kernels=tuple(kernels),
    )


# The calls that kernels of forward mode take, and those of its backward pass, in words.
_NARROW = f"{' and '.join(map(str, ELEMENTS_OF_JVP))}, head dimensions up to {WIDEST_JVP}"
GPU_TANGENTS = (_NARROW, f"{_NARROW}, scores without sqdist")


@functools.lru_cache(maxsize=64)
def kernel_variant(spec: AttentionSpec, head_dim: HeadDim, kind: Kind = DENSE) -> Variant:
    """The variant that kernels of a kind compute. It is remembered, as each pass of a call asks for it."""
    if kind is BY_BLOCKS:
        return with_listed_blocks(spec, head_dim)
    variant = analyse(spec, head_dim)
    if kind is FORWARD_MODE:
        return with_tangent(variant)
    if kind is FORWARD_MODE_BACKWARD:
        return with_slopes(variant, moves=False)
    return replace(variant, kind=kind, gradients=variant.gradients if kind.learns else ())


def has_kernels(kind: Kind, spec: AttentionSpec, head_dim: HeadDim, target: GpuTarget) -> bool:
    """Whether a target has kernels of a kind of call of a spec."""
    if kind is BY_BLOCKS:  # of all element types
        elements = () if objection_to_blocks(spec, head_dim) else spec.dtypes or ELEMENTS[:3]
        fits = [fits_blocks(kernel_variant(spec, head_dim, kind), each, target.block_bytes) for each in elements]
        return bool(fits) and all(fits)
    dense = kernel_variant(spec, head_dim)
    if kind is FORWARD_MODE:
        return has_jvp(dense)
    if kind is FORWARD_MODE_BACKWARD:
        return has_jvp_backward(dense)
    return kind is not EIGHT_BITS or (spec.takes_f8 and target.takes_f8(dense))


def launches_of(plan: GpuPlan, name: PassName, values: Mapping[str, float]) -> PassLaunches:
    """The launches of a pass for values of ``struct Arguments`` by name."""
    variant, calls = plan.recipe.variant, kind_of(name, values)
    return pass_launches(
        plan,
        name,
        dropped=bool(calls.dropped),
        deterministic=bool(calls.repeatable),
        captured=any(values[gradient_field(each.name)] for each in variant.gradients),
        turns=any(values.get(stored_field(each.name)) for each in summed_tensors(variant.spec)),
    )


def kind_of(name: PassName, values: Mapping[str, float]) -> CallKind:
    """Which kernels of a pass a call starts; those of the forward pass always repeat."""
    repeats = name == "backward" and bool(values["deterministic"])
    moving = "".join(each for each in "qkv" if values.get(f"t_{each}"))
    is_forward_mode = name == "forward" and "t_q" in values
    return CallKind(values["dropout_threshold"] > 0, repeats, moving if is_forward_mode else None)


def with_jvp(
    told: Explanation, spec: AttentionSpec, head_dim: HeadDim, target: GpuTarget, call: ExplainedCall
) -> Explanation:
    """The explanation of a call with the kernels of its tangents, if there are some."""
    found = {}
    for kind in (FORWARD_MODE, FORWARD_MODE_BACKWARD):
        if has_kernels(kind, spec, head_dim, target):
            variant = kernel_variant(spec, head_dim, kind)
            if call.element in compiled(variant, target).plan.by_element:
                found[kind] = explain_jvp(compiled(variant, target, part=Part(call.element)).plan, call)
    return replace(told, jvp=found.get(FORWARD_MODE), jvp_backward=found.get(FORWARD_MODE_BACKWARD))


def pins_of_call(kernel: CompiledKernel[GpuPlan, GpuBinary], element: ElementType, values: Mapping[str, float]) -> Pins:
    """The tiles of a call over a cache, by its rows."""
    rows = int(values["group_rows"])
    if has_list_for_each_query(kernel.variant.spec.tensors):  # no two queries read the same keys
        rows = int(values["heads"]) // max(int(values["kv_heads"]), 1)
    return pins_of_rows(kernel.plan, element, rows)


def kind_of_call(kind: Kind, values: Mapping[str, float]) -> Kind:
    """The kind of a call whose kernels are of a ``kind``: a call over a cache says if the cache is of 8 bits."""
    return F8_CACHED if kind is CACHED and values["key_element"] == F8_CODE else kind
