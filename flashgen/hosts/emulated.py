"""Kernels of the backend ``emulator``: generated CUDA source, executed on the host over the memory of CPU tensors.

In: programs of the emulator and the launches of their passes. Out: a ``Kernel``. Tensors are copied into memory of
their own for each pass, far apart and at the same place within 128 bytes, so that an access outside of one is seen and
an unaligned one stays so; what the kernels wrote is copied back. Lists of visits are made for calls of any size, so
that every call tests them. ``recording`` collects what the emulator counted. The emulator of a GPU is a ``Machine``.
"""

from __future__ import annotations

import contextlib
import contextvars
import ctypes
import dataclasses
import functools
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from flashgen.analysis.variant import Variant
from flashgen.compiler.compiled import CompiledKernel
from flashgen.compiler.tile_choices import TileChoices
from flashgen.hosts.emulator.program import DeviceMemory, Program, compile_program
from flashgen.hosts.emulator.report import EmulatorError, FaultKind, Report
from flashgen.hosts.gpu_calls import Find, GpuKernel, Machine, Made
from flashgen.hosts.gpu_provider import GpuProvider
from flashgen.hosts.kernel import ArgumentLayout, Prepared, Step, Values
from flashgen.hosts.schedule import CallPart, Compiled, DeviceSize, ListCache, SharedLists
from flashgen.hosts.tensor_maps import PARAMETER_ALIGNMENT, emulated, map_bytes, map_field, tensor_map
from flashgen.ir.shape import Shape
from flashgen.ir.spec import AttentionSpec, HeadDim
from flashgen.kinds.cached import FACTORS, PLACES, SPLITS
from flashgen.kinds.dense import OPERANDS
from flashgen.kinds.kind import PassName
from flashgen.kinds.operand import Field, Operand, span
from flashgen.kinds.ragged import STARTS
from flashgen.plan.arguments import (
    dimension_field,
    gradient_field,
    param_place_field,
    stored_field,
    stride_field,
    table_field,
    tensor_field,
)
from flashgen.plan.launches import PassLaunches
from flashgen.plan.plan import CallKind
from flashgen.store.cache import Cache
from flashgen.targets.device_table import product_of
from flashgen.targets.gpu.target import GpuTarget

# Small, so that persistent blocks take turns, and few heads make a group.
SIZE = DeviceSize(multiprocessors=2, cache_bytes=1 << 17)
_LINE = 128  # bytes: what alignment a kernel can depend on, and more
_WORDS: Mapping[str, Any] = {"uint32_t": ctypes.c_uint32, "int32_t": ctypes.c_int32, "float": ctypes.c_float}
_NAN = b"\xff"  # in every float format
# What each pass writes whole; it adds to the gradients of captured values, and reads everything else.
_WRITTEN: Mapping[PassName, tuple[str, ...]] = {
    "forward": ("o", "lse", "lse_parts", "t_o", "t_lse"),
    "backward": ("dq", "dk", "dv"),
}

_RECORDS: contextvars.ContextVar[list[Counted] | None] = contextvars.ContextVar("flashgen_counted", default=None)


@dataclass(frozen=True)
class Counted:
    """What the emulator counted in one pass; the report is the sum over its launches.

    ``lists`` is what it took to make lists of visits that are kept, where this pass was the first to ask for them.
    ``values`` are those of the call, with where the lists were that it read; ``ran`` is what it ran.
    ``sequences`` are the values that are others for each sequence of a ragged batch.
    """

    name: PassName
    values: Mapping[str, float]
    report: Report
    lists: Report
    ran: Compiled[Program]
    sequences: tuple[Mapping[str, float], ...] = ()

    @property
    def launches(self) -> PassLaunches:
        """What it was told to start."""
        return self.ran.launches

    @property
    def variant(self) -> Variant:
        """What the kernels compute."""
        return self.ran.plan.recipe.variant


@contextlib.contextmanager
def recording() -> Iterator[list[Counted]]:
    """Everything that runs on the emulator inside, in order."""
    found: list[Counted] = []
    token = _RECORDS.set(found)
    try:
        yield found
    finally:
        _RECORDS.reset(token)


@dataclass(frozen=True)
class EmulatedKernel(GpuKernel[bytes]):
    """One head dimension under the emulator. What ``find`` gives is held by a ``Program``."""

    size: DeviceSize = SIZE
    list_cache: ListCache[bytes] = dataclasses.field(default_factory=partial(ListCache, eager=True))
    seed: int = 0

    def prepare(self, name: PassName, values: Values) -> Prepared:
        kernels, found = self.scheduled(name, values)
        fixed = tuple(values[self.layout.varying :])
        return Prepared(0, lambda varying: self._run(name, kernels, found.parts, (*varying, *fixed)))

    def _run(self, name: PassName, kernels: Compiled[Program], parts: tuple[CallPart, ...], values: Values) -> None:
        found = [self._run_part(name, kernels.binary, kernels.launches, part, part.values(values)) for part in parts]
        records = _RECORDS.get()
        if records is not None:
            reports, made, places = zip(*found, strict=True)
            known = self.layout.named(values) | places[0]
            sequences = tuple(self._sequences(known))
            records.append(Counted(name, known, Report.total(reports), Report.total(made), kernels, sequences))

    def _sequences(self, known: Mapping[str, Any]) -> Iterator[Mapping[str, float]]:
        """What a ragged call is for each of its sequences, as its kernels find it."""
        if PLACES.keys() <= known.keys():
            yield from self._sequences_of_cache(known)
        if any(name not in known for name in STARTS):
            return
        tables = self._tables(known)
        starts = [(ctypes.c_int32 * (known["batch"] + 1)).from_address(known[name]) for name in STARTS]
        for number in range(known["batch"]):
            q_len, kv_len = (each[number + 1] - each[number] for each in starts)
            own = {"batch": 1, "b_start": known["b_start"] + number}
            own |= {"q_len": q_len, "q_total": q_len, "kv_len": kv_len, "kv_total": kv_len}
            yield own | {name: table[number] for name, table in tables.items()}

    def _sequences_of_cache(self, known: Mapping[str, Any]) -> Iterator[Mapping[str, float]]:
        """What a call over a cache is for each of its sequences."""
        tables = self._tables(known)
        numbers = ctypes.c_int32 * known["batch"]
        lengths = numbers.from_address(known["cache_lengths"])
        padding = numbers.from_address(at) if (at := known["cache_padding"]) else numbers()
        for number in range(known["batch"]):
            length = min(max(lengths[number], 0), known["kv_len"])
            before = min(max(padding[number], 0), length)
            own = {"batch": 1, "b_start": known["b_start"] + number, "kv_len": length - before, "kv_start": before}
            own |= {"q_start": max(length - known["q_len"], 0), "q_total": max(length, known["q_len"])}
            yield own | {"kv_total": max(length, 1)} | {name: table[number] for name, table in tables.items()}

    def _tables(self, known: Mapping[str, Any]) -> Mapping[str, Any]:
        """What changes from sequence to sequence, by the names of fields."""
        return {
            each.name.removeprefix(table_field("")): (_WORDS[each.element] * known["batch"]).from_address(at)
            for each in self.layout.fields
            if each.name.startswith(table_field("")) and (at := known[each.name])
        }

    def _run_part(
        self, name: PassName, program: Program, launches: PassLaunches, part: CallPart, values: Values
    ) -> tuple[Report, Report, dict[str, float]]:
        """What its launches did, what making lists took, and where these were."""
        memory = DeviceMemory()
        own, written = list(values), []
        known = self.layout.ints(values)
        allocations: dict[str, tuple[int, int]] = {}
        for field, (address, size) in extents(self.layout, self.head_dim, values, launches.operands).items():
            shift = address % _LINE
            content = bytearray(ctypes.string_at(address, size))
            for first, count in self._written_whole(name, launches, field, known, size):
                content[first : first + count] = _NAN * count
            place = memory.put(field, bytes(shift) + bytes(content)) + shift
            own[self.layout.slots[field]] = place
            allocations[field] = (place, size)
            if field in _WRITTEN[name] or field.startswith((gradient_field(""), stored_field(""))):
                written.append((address, place, size))
        workspace = memory.allocate("workspace", part.workspace_bytes)
        own[self.layout.slots["workspace"]] = workspace
        for buffer, (offset, size) in part.buffers.items():
            allocations[f"workspace.{buffer}"] = (workspace + offset, size)
        for offset, size in part.clear:
            ctypes.memset(workspace + offset, 0, size)
        made: list[Report] = []
        places: dict[str, float] = {name: own[self.layout.slots[name]] for name in SPLITS if name in self.layout.slots}
        for lists in part.lists:
            held = self.list_cache.find(lists, values, partial(self._make, lists, program, own, allocations, made))
            if held is not None:
                of_lists = self.layout.names[lists.slot]
                own[lists.slot] = places[of_lists] = place = memory.put(of_lists, held)
                allocations[of_lists] = (place, len(held))
        for slot, offset in part.places:
            own[slot] = places[self.layout.names[slot]] = workspace + offset
        if part.counters:
            slot, count = part.counters
            own[slot] = memory.put(self.layout.names[slot], bytes(4 * count))
            allocations[self.layout.names[slot]] = (int(own[slot]), 4 * count)
        arguments = self.layout.pack(*own)
        placed = self.layout.named(own)
        reports = [
            self._launch(
                program, step, arguments + self._maps(step, launches.operands, placed, len(arguments)), allocations
            )
            for step in part.steps
        ]
        if part.counters and any(left := memory.bytes_of(self.layout.names[part.counters[0]])):
            words = [left[at : at + 4].hex() for at in range(0, len(left), 4)]
            message = f"counters of '{self.layout.names[part.counters[0]]}' are not 0 at the end: {words}"
            raise EmulatorError(FaultKind.GLOBAL_RACE, message, 0, 0, (), program.source)
        for address, place, size in written:
            ctypes.memmove(address, place, size)
        return Report.total(reports), Report.total(made), places

    def _written_whole(
        self, name: PassName, launches: PassLaunches, field: str, known: Mapping[str, int], size: int
    ) -> Iterable[tuple[int, int]]:
        """The bytes of a tensor that a pass writes, whatever lies there: where they begin, and how many."""
        lengths = {"b": "batch", "h": "heads", "q": "q_len", "kv": "kv_len"}
        whole = all(not known[f"{x}_start"] and known[f"{x}_total"] == known[of] for x, of in lengths.items())
        if whole and field in launches.whole:
            return ((0, size),)
        return launches.operands[field].runs(self.head_dim, known, size) if field in _WRITTEN[name] else ()

    def _make(
        self,
        lists: SharedLists,
        program: Program,
        values: Values,
        allocations: Mapping[str, tuple[int, int]],
        made: list[Report],
    ) -> bytes:
        """The content of lists; what it took is added to ``made``. Its kernels' hooks may read captured tensors."""
        memory, own, name = DeviceMemory(), list(values), self.layout.names[lists.slot]
        own[lists.slot] = memory.allocate(name, lists.size)
        captured = {field: place for field, place in allocations.items() if field.startswith(tensor_field(""))}
        seen = {**captured, **memory.allocations}
        made += [self._launch(program, each, self.layout.pack(*own), seen) for each in lists.steps]
        return memory.bytes_of(name)

    def _launch(
        self, program: Program, step: Step, parameters: bytes, allocations: Mapping[str, tuple[int, int]]
    ) -> Report:
        grid, threads = (step.grid, 1, 1), (step.threads, 1, 1)
        return program.launch(step.kernel, grid, threads, step.shared_bytes, parameters, allocations, seed=self.seed)

    def _maps(self, step: Step, operands: Mapping[str, Operand], known: Mapping[str, float], behind: int) -> bytes:
        """The maps that a kernel takes, as its second parameter."""
        maps = (
            map_bytes(tensor_map(box, self.head_dim, known, operands), int(known[map_field(box)]), emulated)
            for box in step.boxes
        )
        return bytes(-behind % PARAMETER_ALIGNMENT) + b"".join(maps) if step.boxes else b""


_CAPTURED_BYTES = {"float": 4, "fg::f16": 2, "fg::bf16": 2, "int32_t": 4, "int64_t": 8, "bool": 1}


def extents(
    layout: ArgumentLayout, head_dim: HeadDim, values: Values, operands: Mapping[str, Operand] = OPERANDS
) -> Mapping[str, tuple[int, int]]:
    """Address and bytes of every tensor of the call."""
    known = layout.ints(values)
    found = {}
    for field in layout.fields:
        if "pointer" in field.kind and field.name != "workspace" and known[field.name]:
            found[field.name] = (known[field.name], _bytes(field, head_dim, known, operands))
    return found


def _bytes(field: Field, head_dim: HeadDim, known: Mapping[str, int], operands: Mapping[str, Operand]) -> int:
    operand = operands.get(field.name)
    if operand is not None:
        return operand.known_bytes(known) * operand.reach(head_dim, known)
    match field.name:
        case "seed_at":
            return 8
        case name if name in STARTS:
            return 4 * (known["batch"] + 1)
        case "block_table":
            return 4 * known["batch"] * known["table_columns"]
        case name if name in PLACES or name.startswith(table_field("")):
            return 4 * known["batch"]
        case name if name in FACTORS:
            return 4 * known["batch"] * known["kv_heads"]
        case name if name.startswith(param_place_field("")):
            return 4
        case name if name.startswith(gradient_field("")):
            return 4 * math.prod(_dimensions(name.removeprefix(gradient_field("")), known))
        case name if name.startswith(stored_field("")):
            return _CAPTURED_BYTES[field.element] * math.prod(_dimensions(name.removeprefix(stored_field("")), known))
        case name:
            captured = name.removeprefix(tensor_field(""))
            dimensions = _dimensions(captured, known)
            strides = tuple(known[stride_field(captured, axis)] for axis in range(len(dimensions)))
            # A zero stands for what has no elements.
            return _CAPTURED_BYTES[field.element] * max(span(dimensions, strides, 1), 1)


def _dimensions(captured: str, known: Mapping[str, int]) -> tuple[int, ...]:
    """The dimensions of a captured tensor; none for a param."""
    found: list[int] = []
    while dimension_field(captured, len(found)) in known:
        found.append(known[dimension_field(captured, len(found))])
    return tuple(found)


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
