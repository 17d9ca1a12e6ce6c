"""Kernels on GPUs: CuPy loads a binary and launches it on PyTorch's current stream.

In: cubins and the launches of their passes, the index of a device. Out: a ``Kernel``, and a ``Machine`` for which NVRTC
compiles kernels. All memory is PyTorch's, nothing waits for the device, and what a launch needs is found once a shape,
so that calls can be captured in graphs and cost little. CuPy is imported when the first kernel is loaded, never before.
"""

from __future__ import annotations

import ctypes
import functools
import importlib
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from threading import Lock
from typing import Any, NamedTuple

import torch

from flashgen.compiler.compiled import CompiledKernel, assembled
from flashgen.hosts.cpu_backend import Package
from flashgen.hosts.gpu_calls import Find, GpuKernel, Machine, Made
from flashgen.hosts.gpu_provider import GpuProvider
from flashgen.hosts.kernel import ArgumentLayout, Native, Prepared, Step, Values
from flashgen.hosts.schedule import CallPart, DeviceSize, SharedLists
from flashgen.hosts.tensor_maps import LaunchMaps, TensorMap, encode, entry_points, map_field, tensor_map
from flashgen.ir.spec import AttentionSpec, HeadDim
from flashgen.kinds.dense import DENSE
from flashgen.kinds.kind import Kind, PassName
from flashgen.kinds.operand import Operand
from flashgen.plan.plan import CallKind
from flashgen.targets.device_table import board_of
from flashgen.targets.registry import target_of

# Without asking for it a block gets this much shared memory; more is granted up to the device's limit.
_PLAIN_SHARED_BYTES = 48 * 1024


class CudaMissing(RuntimeError):  # noqa: N818 - reads as what happened
    """Something that kernels on GPUs need is not there; the message says what to do about it."""


class Written:
    """Memory that is written once, and then read on any stream: a stream of its own fills it until an event."""

    def __init__(self, memory: torch.Tensor, event: Any) -> None:
        self.address = memory.data_ptr()
        self._memory, self._event = memory, event
        self._joined: set[int] = set()

    def join(self, stream: int) -> None:
        """What the current stream, which is this one, does from now on sees it.

        What was started there when this object goes is done before the memory is used for anything else.
        """
        if stream in self._joined:
            return
        current = torch.cuda.current_stream(self._memory.device)
        current.wait_event(self._event)
        self._memory.record_stream(current)  # when it is freed PyTorch waits for what was started there before
        self._joined.add(stream)


_Launch = tuple[int, int, int, int]  # function, grid, threads, bytes of shared memory
_Steps = Sequence[tuple[_Launch, LaunchMaps | None]]
_Parameters = ctypes.c_char_p * 2


@dataclass(frozen=True)
class CudaKernel(GpuKernel[Written]):
    """One head dimension on one GPU. What ``find`` gives is held by a cubin."""

    driver: CupyDriver = field(kw_only=True)

    def prepare(self, name: PassName, values: Values) -> Prepared:
        kernels, found = self.scheduled(name, values)
        operands = kernels.launches.operands
        function = functools.partial(self.driver.function, kernels.binary)

        def launch(step: Step) -> _Launch:
            return function(step.kernel, step.shared_bytes), step.grid, step.threads, step.shared_bytes

        parts = [
            (
                part,
                [(launch(step), self._maps(step, part.values(values), operands)) for step in part.steps],
                [(each, [launch(step) for step in each.steps]) for each in part.lists],
            )
            for part in found.parts
        ]
        fixed = tuple(values[self.layout.varying :])
        native = None
        is_alone = len(parts) == 1 and not (parts[0][0].moves or parts[0][0].lists or parts[0][0].places)
        if is_alone and self.layout.params is not None:
            own = (*(0,) * self.layout.varying, *fixed)
            native = functools.partial(self._native, found.workspace_bytes, *parts[0][:2], own)
        return Prepared(found.workspace_bytes, lambda varying: self._run(parts, (*varying, *fixed)), native)

    def _native(self, size: int, part: CallPart, steps: _Steps, values: Values) -> Native | None:
        driver = self.driver.entry_points()
        if driver is None:
            return None
        launches = tuple((*launch, *(maps.words if maps else (0,))) for launch, maps in steps)
        return Native(size, self.layout.pack(*part.values(values)), 0, part.clear, launches, driver)

    def _maps(self, step: Step, values: Values, operands: Mapping[str, Operand]) -> LaunchMaps | None:
        """The maps that a kernel takes, as its second parameter."""
        known, slots = self.layout.named(values), self.layout.slots
        maps = [(slots[map_field(box)], tensor_map(box, self.head_dim, known, operands)) for box in step.boxes]
        return LaunchMaps(maps, self.driver.encode) if maps else None

    def _run(
        self,
        parts: Sequence[tuple[CallPart, _Steps, Sequence[tuple[SharedLists, Sequence[_Launch]]]]],
        values: Values,
    ) -> None:
        driver = self.driver
        if not driver.is_current():
            with driver.enter():
                return self._run(parts, values)
        stream, workspace = driver.stream(), int(values[self.layout.slots["workspace"]])
        for part, steps, lists in parts:
            own = part.values(values)
            # A graph may be replayed when the lists are gone: there blocks find what they visit.
            held = [] if not lists or driver.is_capturing() else self._find(lists, own)
            if held or part.places:
                own = list(own)
                for slot, written in held:
                    written.join(stream)
                    own[slot] = written.address
                for slot, offset in part.places:
                    own[slot] = workspace + offset
            counters: Counters | None = None
            if part.counters:
                slot, count = part.counters
                own, counters = list(own), driver.counters(4 * count, stream)
                own[slot] = counters.address
            # A launch copies parameters from the addresses that an object holds: the struct's, and the maps'.
            packed = self.layout.pack(*own)
            alone = ctypes.c_char_p(packed)
            arguments = ctypes.addressof(alone)
            for offset, size in part.clear:
                driver.clear(workspace + offset, size, stream)
            for step, maps in steps:
                if maps is None:
                    driver.launch(*step, stream, arguments)
                else:
                    both = _Parameters(packed, maps(own))
                    driver.launch(*step, stream, ctypes.addressof(both))
        return None

    def _find(
        self, lists: Sequence[tuple[SharedLists, Sequence[_Launch]]], values: Values
    ) -> list[tuple[int, Written]]:
        """The lists of a call that are kept, by the slots of their pointers."""
        found = [
            (each.slot, self.list_cache.find(each, values, functools.partial(self._make, each, launches, values)))
            for each, launches in lists
        ]
        return [(slot, written) for slot, written in found if written is not None]

    def _make(self, lists: SharedLists, launches: Sequence[_Launch], values: Values) -> Written | None:
        def write(address: int, stream: int) -> None:
            own = list(values)
            own[lists.slot] = address
            packed = ctypes.c_char_p(self.layout.pack(*own))
            for launch in launches:
                self.driver.launch(*launch, stream, ctypes.addressof(packed))

        return self.driver.write_once(lists.size, write)


class CupyDriver:
    """One device through CuPy. Raises ``CudaMissing`` where there is none."""

    def __init__(self, index: int) -> None:
        self._index = index
        self._cupy = import_cupy()
        known = torch.cuda.get_device_properties(index)
        self.size = DeviceSize(known.multi_processor_count, known.L2_cache_size)
        self._driver = importlib.import_module("cupy_backends.cuda.api.driver")
        self._runtime = importlib.import_module("cupy_backends.cuda.api.runtime")
        self._stream: Callable[[int], int] = torch._C._cuda_getCurrentRawStream
        self._current: Callable[[], int] = torch._C._cuda_getDevice
        self._kernels: dict[tuple[Path, str], Any] = {}  # a module lives as long as one of its kernels
        self._beside: Any = None  # a stream
        self._counters = CounterPool(index)

    def function(self, path: Path, name: str, shared_bytes: int) -> int:
        """A kernel of a binary, allowed this much shared memory."""
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
        """PyTorch's current stream on the device."""
        return self._stream(self._index)

    def clear(self, address: int, size: int, stream: int) -> None:
        """Zero memory, in the order of the stream."""
        self._runtime.memsetAsync(address, 0, size, stream)

    def launch(self, function: int, grid: int, threads: int, shared_bytes: int, stream: int, arguments: int) -> None:
        """Start a kernel, in the order of the stream. ``arguments`` points to the addresses of its parameters."""
        self._driver.launchKernel(function, grid, 1, 1, threads, 1, 1, shared_bytes, stream, arguments, 0)

    def counters(self, size: int, stream: int) -> Counters:
        """Memory of zeros for a launch on the current stream, which is this one, and leaves zeros. Nothing else that
        may run at the same time has it.
        """
        return self._counters.find(size, stream, captures=self.is_capturing())

    def encode(self, tensor: TensorMap, address: int) -> bytes:
        """What tensor copies are told of a tensor: 128 bytes."""
        return encode(tensor, address)

    def is_capturing(self) -> bool:
        """Whether the current stream's work goes into a graph, to be replayed later."""
        return torch.cuda.is_current_stream_capturing()

    def write_once(self, size: int, write: Callable[[int, int], None]) -> Written | None:
        """Memory of this many bytes; ``write``, given its address and a stream, starts what fills it.

        None where so much is not there.
        """
        stream = self._beside = self._beside or torch.cuda.Stream(self._index)  # type: ignore[no-untyped-call]
        try:
            memory = lasting(size, stream)
        except torch.OutOfMemoryError:
            return None
        write(memory.data_ptr(), stream.cuda_stream)
        return Written(memory, stream.record_event())

    def enter(self) -> Any:
        """A context in which the device is the current one."""
        return torch.cuda.device(self._index)

    def is_current(self) -> bool:
        """Whether it is already."""
        return self._current() == self._index

    def entry_points(self) -> tuple[int, int, int, int] | None:
        """The addresses of functions in C that launch, clear, encode, and tell the current stream; None: not known."""
        return entry_points()


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


def is_usable() -> bool:
    """Whether this process can launch kernels."""
    if not is_there():
        return False
    try:
        check()
    except CudaMissing:
        return False
    return True


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


_CHUNK_BYTES = 1 << 20  # of zeros that are made at a time
_ALIGNMENT = 256


class Counters(NamedTuple):
    """Zeros on a device; ``memory`` is held until the launch has been started."""

    address: int
    bytes: int
    memory: torch.Tensor


class CounterPool:
    """The counters of a device: zeros before each launch and after it, so that none has to be cleared.

    Launches of one stream run one after another, and share counters. A launch in a graph keeps its own counters for
    good: the graph may be replayed beside any other launch.
    """

    def __init__(self, index: int) -> None:
        self._index = index
        self._lock = Lock()
        self._chunk: torch.Tensor | None = None
        self._chunks: list[torch.Tensor] = []  # graphs may be replayed as long as the process lives
        self._taken = 0  # bytes of the chunk
        self._of_streams: dict[int, Counters] = {}

    def find(self, size: int, stream: int, *, captures: bool) -> Counters:
        """Zeros for a launch on the current stream, given as ``stream``; ``captures``: the launch goes into a graph."""
        found = None if captures else self._of_streams.get(stream)
        if found is not None and found.bytes >= size:
            return found
        with self._lock:
            found = self._take(-(-size // _ALIGNMENT) * _ALIGNMENT, captures=captures)
            if not captures:
                self._of_streams[stream] = found
            return found

    def _take(self, size: int, *, captures: bool) -> Counters:
        if captures and (self._chunk is None or self._taken + size > self._chunk.numel()):
            zeros = torch.zeros(size, dtype=torch.uint8, device=f"cuda:{self._index}")  # by the graph, at each replay
            return Counters(zeros.data_ptr(), size, zeros)
        # Graphs take what is left of a chunk while nothing can be made: half of it is kept for them.
        if self._chunk is None or (not captures and self._taken + size > self._chunk.numel() // 2):
            stream = torch.cuda.Stream(self._index)  # type: ignore[no-untyped-call]
            memory = lasting(max(_CHUNK_BYTES, 2 * size), stream)
            with torch.cuda.stream(stream):
                memory.zero_()
            stream.synchronize()  # once in thousands of calls
            self._chunk, self._taken = memory, 0
            self._chunks.append(memory)
        address = self._chunk.data_ptr() + self._taken
        self._taken += size
        return Counters(address, size, self._chunk)


def lasting(size: int, stream: Any) -> torch.Tensor:
    """Memory for longer than a call, of the stream.

    It is asked for in a thread of its own: where PyTorch warms up a graph, a thread's memory is that of the graph, in
    which nothing may stay.
    """

    def ask() -> torch.Tensor:
        with torch.cuda.stream(stream):
            return torch.empty(size, dtype=torch.uint8, device=stream.device)

    with ThreadPoolExecutor(1) as thread:
        return thread.submit(ask).result()


@dataclass(frozen=True, eq=False)
class CudaMachine(Machine):
    """One GPU, and its driver."""

    driver: CupyDriver
    backend = "cuda"

    def make(self, kernel: CompiledKernel[Any, Any], calls: CallKind) -> Made[Path]:
        (made,) = assembled([kernel], calls)
        (binary,) = made.binary.parts.values()
        return Made(made.kernel.plan, made.kernel.source, lambda _: binary.path, binary.kernels)

    def kernel(self, layout: ArgumentLayout, head_dim: HeadDim, find: Find) -> CudaKernel:
        return CudaKernel(layout, head_dim, find, self.size, driver=self.driver)


def cuda_provider(spec: AttentionSpec, package: Package | None = None, kind: Kind = DENSE) -> GpuProvider:
    """The kernels of a spec for CUDA tensors."""
    at = functools.cache(_machine)
    return GpuProvider(spec, lambda index: at(current_device() if index is None else index), kind=kind, package=package)


def _machine(index: int) -> CudaMachine:
    driver = CupyDriver(index)
    name, *figures = describe_device(index)
    target, size = target_of(name, *figures), driver.size
    gpu = replace(board_of(target, name), product=name, sms=size.multiprocessors, l2_bytes=size.cache_bytes)
    return CudaMachine(name, target, gpu, size, driver)
