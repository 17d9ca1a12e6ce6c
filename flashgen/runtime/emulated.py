"""Kernels of the backend ``emulator``: generated CUDA source, executed on the host over the memory of CPU tensors.

In: programs of the emulator and the launches of their passes. Out: a ``Kernel``. Tensors are copied into memory of
their own for each pass, far apart and at the same place within 128 bytes, so that an access outside of one is seen and
an unaligned one stays so; what the kernels wrote is copied back. Lists of visits are made for calls of any size, so
that every call tests them. ``recording`` collects what the emulator counted.
"""

from __future__ import annotations

import contextlib
import contextvars
import ctypes
import dataclasses
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial

from flashgen.ir.spec import HeadDim
from flashgen.plan.arguments import tensor_field
from flashgen.runtime.emulator import DeviceMemory, Program, Report
from flashgen.runtime.extents import extents
from flashgen.runtime.kernel import ArgumentLayout, PassName, Prepared, Step, Values
from flashgen.runtime.lists import SharedLists, Shelf
from flashgen.runtime.schedule import MOST_ELEMENTS, ROW_ALIGNMENT, Compiled, DeviceSize, Part, is_readable, schedule
from flashgen.runtime.tensor_maps import PARAMETER_ALIGNMENT, emulated, map_bytes, tensor_map

# Small, so that blocks that stay take turns, and few heads make a group.
SIZE = DeviceSize(multiprocessors=2, cache_bytes=1 << 17)
_LINE = 128  # bytes: what alignment a kernel can depend on, and more
_NAN = b"\xff"  # in every float format
# What each pass writes whole; it adds to the gradients of captured values, and reads everything else.
_WRITTEN: Mapping[PassName, tuple[str, ...]] = {"forward": ("o", "lse"), "backward": ("dq", "dk", "dv")}

_RECORDS: contextvars.ContextVar[list[Counted] | None] = contextvars.ContextVar("flashgen_counted", default=None)


@dataclass(frozen=True)
class Counted:
    """What the emulator counted in one pass; the report is the sum over its launches.

    ``lists`` is what it took to make lists of visits that are kept, where this pass was the first to ask for them.
    ``values`` are those of the call, with where the lists were that it read.
    """

    name: PassName
    values: Mapping[str, float]
    report: Report
    lists: Report


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
class EmulatedKernel:
    """One head dimension under the emulator. ``compiled`` gives the kernels of an element type, by its code.

    ``most`` bounds the elements that a launch indexes.
    """

    layout: ArgumentLayout
    head_dim: HeadDim
    compiled: Callable[[int], Compiled[Program]]
    seed: int = 0
    most: int = MOST_ELEMENTS
    size: DeviceSize = SIZE
    row_alignment: int = ROW_ALIGNMENT
    shelf: Shelf[bytes] = dataclasses.field(default_factory=partial(Shelf, eager=True))
    reads = staticmethod(is_readable)

    def prepare(self, name: PassName, values: Values) -> Prepared:
        kernels = self.compiled(int(values[self.layout.slots["element"]]))
        launches = kernels.launches(name, self.layout.named(values))
        eager = self.shelf.eager
        found = schedule(launches, self.layout, self.head_dim, values, self.size, self.most, eager=eager)
        settled = tuple(values[self.layout.varying :])
        return Prepared(0, lambda varying: self._run(name, kernels.binary, found.parts, (*varying, *settled)))

    def _run(self, name: PassName, program: Program, parts: tuple[Part, ...], values: Values) -> None:
        found = [self._run_part(name, program, part, part.values(values)) for part in parts]
        records = _RECORDS.get()
        if records is not None:
            reports, made, places = zip(*found, strict=True)
            known = self.layout.named(values) | places[0]
            records.append(Counted(name, known, Report.total(reports), Report.total(made)))

    def _run_part(
        self, name: PassName, program: Program, part: Part, values: Values
    ) -> tuple[Report, Report, dict[str, float]]:
        """What its launches did, what making lists took, and where these were."""
        memory = DeviceMemory()
        own, written = list(values), []
        allocations: dict[str, tuple[int, int]] = {}
        for field, (address, size) in extents(self.layout, self.head_dim, values).items():
            shift = address % _LINE
            is_output = field in _WRITTEN[name]
            content = _NAN * size if is_output else ctypes.string_at(address, size)
            place = memory.put(field, bytes(shift) + content) + shift
            own[self.layout.slots[field]] = place
            allocations[field] = (place, size)
            if is_output or field.startswith("grad_"):
                written.append((address, place, size))
        workspace = memory.allocate("workspace", part.workspace_bytes)
        own[self.layout.slots["workspace"]] = workspace
        for buffer, (offset, size) in part.buffers.items():
            allocations[f"workspace.{buffer}"] = (workspace + offset, size)
        for offset, size in part.clear:
            ctypes.memset(workspace + offset, 0, size)
        made: list[Report] = []
        places: dict[str, float] = {}
        for lists in part.lists:
            held = self.shelf.find(lists, values, partial(self._make, lists, program, own, allocations, made))
            if held is not None:
                of_lists = self.layout.names[lists.slot]
                own[lists.slot] = places[of_lists] = place = memory.put(of_lists, held)
                allocations[of_lists] = (place, len(held))
        for slot, offset in part.places:
            own[slot] = places[self.layout.names[slot]] = workspace + offset
        arguments = self.layout.pack(*own)
        known = self.layout.named(own)
        reports = [
            self._launch(program, step, arguments + self._maps(step, known, len(arguments)), allocations)
            for step in part.steps
        ]
        for address, place, size in written:
            ctypes.memmove(address, place, size)
        return Report.total(reports), Report.total(made), places

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

    def _maps(self, step: Step, known: Mapping[str, float], behind: int) -> bytes:
        """The maps that a kernel takes, as its second parameter."""
        maps = (
            map_bytes(tensor_map(box, self.head_dim, known), int(known[box.tensor]), emulated) for box in step.boxes
        )
        return bytes(-behind % PARAMETER_ALIGNMENT) + b"".join(maps) if step.boxes else b""
