"""Kernels of the backend ``emulator``: generated CUDA source, executed on the host over the memory of CPU tensors.

In: programs of the emulator and the launches of their passes. Out: a ``Kernel``. Tensors are copied into memory of
their own for each pass, far apart and at the same place within 128 bytes, so that an access outside of one is seen and
an unaligned one stays so; what the kernels wrote is copied back. ``recording`` collects what the emulator counted.
"""

from __future__ import annotations

import contextlib
import contextvars
import ctypes
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial

from flashgen.ir.spec import HeadDim
from flashgen.runtime.emulator import DeviceMemory, Program, Report
from flashgen.runtime.extents import extents
from flashgen.runtime.kernel import ArgumentLayout, PassName, Prepared, Values
from flashgen.runtime.schedule import MOST_ELEMENTS, ROW_ALIGNMENT, Compiled, Part, is_readable, schedule

_LINE = 128  # bytes: what alignment a kernel can depend on, and more
_NAN = b"\xff"  # in every float format
# What each pass writes whole; it adds to the gradients of captured values, and reads everything else.
_WRITTEN: Mapping[PassName, tuple[str, ...]] = {"forward": ("o", "lse"), "backward": ("dq", "dk", "dv")}

_RECORDS: contextvars.ContextVar[list[Counted] | None] = contextvars.ContextVar("flashgen_counted", default=None)


@dataclass(frozen=True)
class Counted:
    """What the emulator counted in one pass; the report is the sum over its launches."""

    name: PassName
    values: Mapping[str, float]
    report: Report


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
    row_alignment: int = ROW_ALIGNMENT
    reads = staticmethod(is_readable)

    def prepare(self, name: PassName, values: Values) -> Prepared:
        kernels = self.compiled(int(values[self.layout.slots["element"]]))
        launches = kernels.launches(name, self.layout.named(values))
        found = schedule(launches, self.layout, self.head_dim, values, self.most)
        return Prepared(0, partial(self._run, name, kernels.binary, found.parts))

    def _run(self, name: PassName, program: Program, parts: tuple[Part, ...], values: Values) -> None:
        report = Report.total(self._run_part(name, program, part, part.values(values)) for part in parts)
        records = _RECORDS.get()
        if records is not None:
            records.append(Counted(name, self.layout.named(values), report))

    def _run_part(self, name: PassName, program: Program, part: Part, values: Values) -> Report:
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
        whole = max((offset + size for offset, size in part.buffers.values()), default=0)
        workspace = memory.allocate("workspace", whole)
        own[self.layout.slots["workspace"]] = workspace
        for buffer, (offset, size) in part.buffers.items():
            allocations[f"workspace.{buffer}"] = (workspace + offset, size)
        for offset, size in part.clear:
            ctypes.memset(workspace + offset, 0, size)
        packed = self.layout.pack(*own)
        reports = [
            program.launch(
                step.kernel,
                (step.grid, 1, 1),
                (step.threads, 1, 1),
                step.shared_bytes,
                packed,
                allocations,
                seed=self.seed,
            )
            for step in part.steps
        ]
        for address, place, size in written:
            ctypes.memmove(address, place, size)
        return Report.total(reports)
