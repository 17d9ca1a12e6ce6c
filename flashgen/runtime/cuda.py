"""Kernels on GPUs: CuPy loads a binary and launches it on PyTorch's current stream.

In: the path of a cubin, the launches of its passes, the index of a device. Out: a ``Kernel``. All memory is PyTorch's,
nothing waits for the device, and what a launch needs is found once a shape, so that calls can be captured in graphs and
cost little. CuPy is imported when the first kernel is loaded, never before.
"""

from __future__ import annotations

import ctypes
import functools
import importlib
import importlib.util
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch

from flashgen.ir.spec import HeadDim
from flashgen.runtime.kernel import ArgumentLayout, PassName, Prepared, Values
from flashgen.runtime.schedule import ROW_ALIGNMENT, FindLaunches, Part, is_readable, schedule

# Without asking for it a block gets this much shared memory; more is granted up to the device's limit.
_PLAIN_SHARED_BYTES = 48 * 1024


class CudaMissing(RuntimeError):  # noqa: N818 - reads as what happened
    """Something that kernels on GPUs need is not there; the message says what to do about it."""


class Driver(Protocol):
    """What a kernel asks of one device."""

    def function(self, path: Path, name: str, shared_bytes: int) -> int:
        """A kernel of a binary, allowed this much shared memory."""

    def stream(self) -> int:
        """PyTorch's current stream on the device."""

    def clear(self, address: int, size: int, stream: int) -> None:
        """Zero memory, in the order of the stream."""

    def launch(self, function: int, grid: int, threads: int, shared_bytes: int, stream: int, arguments: int) -> None:
        """Start a kernel, in the order of the stream. ``arguments`` is the address of the address of the struct."""

    def enter(self) -> Any:
        """A context in which the device is the current one."""

    def is_current(self) -> bool:
        """Whether it is already."""


@dataclass(frozen=True)
class CudaKernel:
    """One head dimension on one device."""

    layout: ArgumentLayout
    head_dim: HeadDim
    driver: Driver
    binary: Path
    find_launches: FindLaunches
    row_alignment: int = ROW_ALIGNMENT
    reads = staticmethod(is_readable)

    def prepare(self, name: PassName, values: Values) -> Prepared:
        launches = self.find_launches(name, self.layout.named(values))
        found = schedule(launches, self.layout, self.head_dim, values)
        steps = {
            step.kernel: self.driver.function(self.binary, step.kernel, step.shared_bytes)
            for part in found.parts
            for step in part.steps
        }
        parts = [
            (part, [(steps[each.kernel], each.grid, each.threads, each.shared_bytes) for each in part.steps])
            for part in found.parts
        ]
        return Prepared(found.workspace_bytes, functools.partial(self._run, parts))

    def _run(self, parts: Sequence[tuple[Part, Sequence[tuple[int, int, int, int]]]], values: Values) -> None:
        driver = self.driver
        if not driver.is_current():
            with driver.enter():
                return self._run(parts, values)
        stream, workspace = driver.stream(), int(values[self.layout.slots["workspace"]])
        for part, steps in parts:
            # A kernel takes one argument, the struct, which a launch copies from the address that this object holds.
            packed = ctypes.c_char_p(self.layout.pack(*part.values(values)))
            for offset, size in part.clear:
                driver.clear(workspace + offset, size, stream)
            for function, grid, threads, shared_bytes in steps:
                driver.launch(function, grid, threads, shared_bytes, stream, ctypes.addressof(packed))
        return None


class CupyDriver:
    """One device through CuPy. Raises ``CudaMissing`` where there is none."""

    def __init__(self, index: int) -> None:
        self._index = index
        self._cupy = import_cupy()
        self._driver = importlib.import_module("cupy_backends.cuda.api.driver")
        self._runtime = importlib.import_module("cupy_backends.cuda.api.runtime")
        self._stream: Callable[[int], int] = torch._C._cuda_getCurrentRawStream
        self._current: Callable[[], int] = torch._C._cuda_getDevice
        self._kernels: list[Any] = []  # a kernel's module lives as long as it

    def function(self, path: Path, name: str, shared_bytes: int) -> int:
        with self.enter():
            kernel = self._cupy.RawModule(path=str(path)).get_function(name)
            if shared_bytes > _PLAIN_SHARED_BYTES:
                kernel.max_dynamic_shared_size_bytes = shared_bytes
            self._kernels.append(kernel)
            address: int = kernel.kernel.ptr
            return address

    def stream(self) -> int:
        return self._stream(self._index)

    def clear(self, address: int, size: int, stream: int) -> None:
        self._runtime.memsetAsync(address, 0, size, stream)

    def launch(self, function: int, grid: int, threads: int, shared_bytes: int, stream: int, arguments: int) -> None:
        self._driver.launchKernel(function, grid, 1, 1, threads, 1, 1, shared_bytes, stream, arguments, 0)

    def enter(self) -> Any:
        return torch.cuda.device(self._index)

    def is_current(self) -> bool:
        return self._current() == self._index


def import_cupy() -> Any:
    """CuPy. Raises ``CudaMissing`` that names the extra to install."""
    try:
        return importlib.import_module("cupy")
    except ImportError as error:
        raise CudaMissing(
            f"kernels on GPUs are launched by CuPy, which cannot be imported ({error}): "
            f"pip install 'flashgen[{cuda_extra()}]'"
        ) from None


def cuda_extra() -> str:
    """The extra that goes with this PyTorch: CUDA 12 or 13."""
    version = torch.version.cuda or "13"
    return "cuda12" if version.startswith("12") else "cuda13"
