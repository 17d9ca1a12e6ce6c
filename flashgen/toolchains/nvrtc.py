"""Stage 5, compile for GPUs: CUDA source to a binary for one architecture, by NVRTC, through the cache, without a GPU.

In: a ``KernelSource`` and a target such as ``sm_80``. Out: a ``CudaBinary``: the path of a cubin, and what each of its
kernels takes of a multiprocessor. The key of an entry is the sha256 of the source, all of its headers, the options and
NVRTC's version. CuPy has the binding; its own compile call would refuse some targets. Nothing here imports torch.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import os
import pickle
import re
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Protocol

from flashgen.store.build_lock import compiling
from flashgen.store.cache import Cache, key_of
from flashgen.store.headers import Headers, Source, in_one
from flashgen.toolchains.cpp import LOG, CompileFailed, CompilerMissing, available_cores, fetched

OPTIONS = ("-std=c++17", "--ptxas-options=-v", "-diag-suppress=177")  # not every spec uses every primitive
INSTALL = "pip install 'flashgen[cuda13]', or flashgen[cuda12] where the driver knows no CUDA 13"

# Since CUDA 13 NVRTC keeps binaries where there is a GPU, and says nothing of what it took from there.
_OPTIONS_SINCE_13 = ("--no-cache",)

_CUBIN = "kernels.cubin"
_KERNEL = re.compile(r"Function properties for (\w+)\n")
_STACK = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
_SERIALIZED = re.compile(r"wgmma\.mma_async instructions are serialized .*function '(\w+)'")
_REGISTERS = re.compile(r"Used (\d+) registers")
_SHARED = re.compile(r"(\d+) bytes smem")
_LOCK = threading.Lock()  # NVRTC compiles one program at a time


@dataclass(frozen=True)
class Resources:
    """What one kernel takes: registers a thread, bytes of its own shared memory, bytes that spill from registers.

    ``serialized``: each product of a warpgroup waits for the one before, as the assembler says (C7510 to C7514).
    """

    name: str
    registers: int
    shared_bytes: int
    spill_bytes: int
    stack_bytes: int
    serialized: bool = False


@dataclass(frozen=True)
class CudaBinary:
    """A compiled source. ``seconds``: from asking to having it; ``cached``: it was there before."""

    name: str
    target: str
    path: Path
    kernels: tuple[Resources, ...]
    seconds: float
    cached: bool


class NvrtcMissing(CompilerMissing):
    """NVRTC cannot be used; the message says what to install."""


class CudaSource(Source, Protocol):
    """What is compiled: ``KernelSource`` and anything of the same shape."""

    @property
    def headers(self) -> Headers:
        """All that the text includes."""


def is_compiled(source: CudaSource, target: str) -> bool:
    """Whether the cache has it. Raises ``NvrtcMissing``."""
    return Cache.default().find(_key(source, _options(source, target)), _CUBIN, LOG) is not None


def _options(source: CudaSource, target: str) -> tuple[str, ...]:
    newer = _OPTIONS_SINCE_13 if int(find_nvrtc()[1].partition(".")[0]) >= 13 else ()
    return (f"-arch={target}", *OPTIONS, *newer, *(f"-D{name}={value}" for name, value in source.defines))


def _key(source: CudaSource, options: tuple[str, ...]) -> str:
    return key_of(source.text, *(each for header in source.headers for each in header), *options, find_nvrtc()[1])


def compile_cuda(source: CudaSource, target: str, *, cache: Cache | None = None, part: str = "") -> CudaBinary:
    """Compile a source, or take it from the cache. ``part`` tells people which of its kernels are left in.

    Raises ``NvrtcMissing``, and ``CompileFailed`` where NVRTC refuses the source or the target.
    """
    start = time.perf_counter()
    cache = cache or Cache.default()
    nvrtc, _ = find_nvrtc()
    options = _options(source, target)
    key = _key(source, options)
    shown = f"{source.name}, {part}" if part else source.name
    files, build = (_CUBIN, LOG), functools.partial(_build, nvrtc, source, options, shown)
    path, cached = fetched(cache, key, files, build, _shown(source), shown)
    log = (path.parent / LOG).read_text(encoding="utf-8")
    return CudaBinary(source.name, target, path, resources(log), time.perf_counter() - start, cached)


def resources(log: str) -> tuple[Resources, ...]:
    """What the assembler said of each kernel, in the order of their names."""
    found, serialized = [], set(_SERIALIZED.findall(log))
    names = list(_KERNEL.finditer(log))
    ends = [*(name.start() for name in names[1:]), len(log)]
    for name, end in zip(names, ends, strict=False):  # no name: nothing was said
        said = log[name.end() : end]
        stack, registers, shared = _STACK.search(said), _REGISTERS.search(said), _SHARED.search(said)
        if stack and registers:
            spills = int(stack[2]) + int(stack[3])
            own = int(shared[1]) if shared else 0
            found.append(Resources(name[1], int(registers[1]), own, spills, int(stack[1]), name[1] in serialized))
    return tuple(sorted(found, key=lambda each: each.name))


@functools.cache
def find_nvrtc() -> tuple[Any, str]:
    """CuPy's binding and NVRTC's version. Raises ``NvrtcMissing``."""
    try:
        nvrtc = importlib.import_module("cupy_backends.cuda.libs.nvrtc")
        version = ".".join(map(str, nvrtc.getVersion()))
    except Exception as error:  # an import error, or whatever the search for the library raises
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        raise NvrtcMissing(
            f"CUDA sources are compiled by NVRTC through CuPy, which cannot be used ({reason}): {INSTALL}"
        ) from None
    return nvrtc, version


def compiler_name() -> str:
    """What compiles, for people. Raises ``NvrtcMissing``."""
    return f"NVRTC {find_nvrtc()[1]}"


def _build(nvrtc: Any, source: CudaSource, options: tuple[str, ...], shown: str) -> dict[str, bytes]:
    """The files of an entry."""
    with _LOCK, compiling(shown, "NVRTC"):
        program = created(nvrtc, source)
        try:
            nvrtc.compileProgram(program, options)
            # CuPy takes the last byte of an ELF file, which is 0, for the end of a string and drops it.
            log, cubin = nvrtc.getProgramLog(program), nvrtc.getCUBIN(program) + b"\0"
        except nvrtc.NVRTCError as error:
            log = nvrtc.getProgramLog(program)
            complaints = [line for line in log.splitlines() if "error" in line] or [str(error)]
            raise CompileFailed(
                f"NVRTC could not compile '{source.name}' for {options[0]}: {complaints[0]}", log
            ) from None
        finally:
            nvrtc.destroyProgram(program)
    return {_CUBIN: cubin, **_shown(source), LOG: log.encode()}


def created(nvrtc: Any, source: CudaSource) -> Any:
    """A program of NVRTC, not yet compiled."""
    names, texts = ([each[n].encode() for each in source.headers] for n in (0, 1))
    return nvrtc.createProgram(source.text, f"{source.name}.cu", texts, names)


def _shown(source: CudaSource) -> dict[str, bytes]:
    """The file of an entry for people to read: the source with its headers."""
    return {f"{source.name}.cu": in_one(f"{source.name}.cu", source.text, source.headers).encode()}


# -- parts side by side ------------------------------------------------------------------------------------------------

# This process and helpers, one for each other core, take numbers of parts from a pipe and fill the cache: CuPy holds
# Python's lock while NVRTC is at work, so that no thread of this process could hand out anything. What a helper cannot
# do, for whatever reason, this process does, or says why it cannot be done.
_MOST_PARTS = 256  # a number is one byte, so that no reader gets half of it
_HELPER = f"import sys; from {__name__} import help_with; help_with(*map(int, sys.argv[1:]))"


def compile_cuda_parts(parts: Sequence[tuple[str, CudaSource]], target: str) -> tuple[CudaBinary, ...]:
    """Compile parts of sources, begun in the order given, or take them from the cache.

    Raises as ``compile_cuda`` does, for one of the parts that cannot be compiled.
    """
    missing = [(part, source, target) for part, source in parts if not is_compiled(source, target)]
    helpers = min(len(missing), available_cores()) - 1
    if helpers > 0 and os.name == "posix" and _shares_cache():
        _fill_cache(missing[:_MOST_PARTS], helpers)
    return tuple(compile_cuda(source, target, part=part) for part, source in parts)


def _shares_cache() -> bool:
    """Whether helpers would store where this process looks, and not each in a private folder."""
    cache = Cache.default()
    return not cache.doubt() and not cache.hindrance()


def _fill_cache(parts: list[tuple[str, CudaSource, str]], helpers: int) -> None:
    with contextlib.ExitStack() as stack:
        file = stack.enter_context(tempfile.TemporaryFile())
        pickle.dump(parts, file)
        file.flush()
        numbers, writing = os.pipe()
        stack.callback(os.close, numbers)
        os.write(writing, bytes(range(len(parts))))
        os.close(writing)
        started: list[subprocess.Popen[bytes]] = []
        with contextlib.suppress(OSError):  # where no process can be started, there is this one
            started.extend(stack.enter_context(_helper(file, numbers)) for _ in range(helpers))
        _take_parts(parts, numbers)
        for each in started:
            each.wait()


@contextlib.contextmanager
def _helper(file: IO[bytes], numbers: int) -> Iterator[subprocess.Popen[bytes]]:
    """A process that finds the modules that this one does. It is gone afterwards, whatever it was at."""
    paths = [each or str(Path.cwd()) for each in sys.path]
    process = subprocess.Popen(
        [sys.executable or "", "-P", "-c", _HELPER, str(numbers), str(os.getpid())],
        stdin=file,
        stdout=subprocess.DEVNULL,
        pass_fds=(numbers,),
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        start_new_session=True,  # Ctrl-C is for this process, which ends the others
    )
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def help_with(numbers: int, parent: int) -> None:
    """What a helper does: the parts that it reads on stdin, by their numbers from a pipe."""
    parts = pickle.loads(os.pread(0, os.fstat(0).st_size, 0))  # noqa: S301 - a file of the process that started this
    with contextlib.suppress(Exception):  # the other process meets it, too, and says it
        _take_parts(parts, numbers, parent)


def _take_parts(parts: list[tuple[str, CudaSource, str]], numbers: int, parent: int | None = None) -> None:
    """Until none is left, one cannot be compiled, or nobody waits for them."""
    try:
        while number := os.read(numbers, 1):
            if parent not in (None, os.getppid()):
                return
            part, source, target = parts[number[0]]
            compile_cuda(source, target, part=part)
    finally:
        while os.read(numbers, _MOST_PARTS):
            pass
