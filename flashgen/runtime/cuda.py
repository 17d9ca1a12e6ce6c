"""Kernels on GPUs: CuPy loads a binary and launches it on PyTorch's current stream.

In: cubins and the launches of their passes, the index of a device. Out: a ``Kernel``. All memory is PyTorch's,
nothing waits for the device, and what a launch needs is found once a shape, so that calls can be captured in graphs and
cost little. CuPy is imported when the first kernel is loaded, never before.
"""

from __future__ import annotations

import ctypes
import functools
import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch

from flashgen.ir.spec import HeadDim
from flashgen.runtime.kernel import ArgumentLayout, PassName, Prepared, Values
from flashgen.runtime.schedule import ROW_ALIGNMENT, Compiled, Part, is_readable, schedule

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
    """One head dimension on one device. ``compiled`` gives the cubin of an element type, by its code."""

    layout: ArgumentLayout
    head_dim: HeadDim
    driver: Driver
    compiled: Callable[[int], Compiled[Path]]
    row_alignment: int = ROW_ALIGNMENT
    reads = staticmethod(is_readable)

    def prepare(self, name: PassName, values: Values) -> Prepared:
        kernels = self.compiled(int(values[self.layout.slots["element"]]))
        launches = kernels.launches(name, self.layout.named(values))
        found = schedule(launches, self.layout, self.head_dim, values)
        steps = {
            step.kernel: self.driver.function(kernels.binary, step.kernel, step.shared_bytes)
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
            arguments = ctypes.addressof(packed)
            for offset, size in part.clear:
                driver.clear(workspace + offset, size, stream)
            for step in steps:
                driver.launch(*step, stream, arguments)
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
        self._kernels: dict[tuple[Path, str], Any] = {}  # a module lives as long as one of its kernels

    def function(self, path: Path, name: str, shared_bytes: int) -> int:
        with self.enter():
            kernel = self._kernels.get((path, name))
            if kernel is None:
                kernel = self._cupy.RawModule(path=str(path)).get_function(name)
                if shared_bytes > _PLAIN_SHARED_BYTES:
                    kernel.max_dynamic_shared_size_bytes = shared_bytes
                self._kernels[path, name] = kernel
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
        extra = "cuda12" if (torch.version.cuda or "13").startswith("12") else "cuda13"
        raise CudaMissing(
            f"kernels on GPUs are launched by CuPy, which cannot be imported ({error}); "
            f"pip install 'flashgen[{extra}]'. CPU tensors need nothing of this"
        ) from None


def is_there() -> bool:
    """Whether PyTorch sees a GPU of NVIDIA's."""
    return torch.version.cuda is not None and torch.cuda.is_available()


def check() -> None:
    """Raise ``CudaMissing`` where this process cannot launch kernels, with the reason."""
    if torch.version.cuda is None:
        raise CudaMissing(f"PyTorch {torch.__version__} is built without CUDA")
    try:
        torch.cuda.init()  # type: ignore[no-untyped-call]
    except (RuntimeError, AssertionError) as error:
        raise CudaMissing(f"PyTorch finds no GPU: {str(error).splitlines()[0]}") from None
    import_cupy()


def current_device() -> int:
    """The index of PyTorch's current device."""
    return torch.cuda.current_device()


def describe_device(index: int) -> tuple[str, int, int]:
    """The device's name, its compute capability (90 for 9.0), and the shared memory that a block may ask for."""
    properties = torch.cuda.get_device_properties(index)
    shared_bytes = getattr(properties, "shared_memory_per_block_optin", _PLAIN_SHARED_BYTES)
    return properties.name, 10 * properties.major + properties.minor, shared_bytes
