"""Compile a generated CUDA source for the emulator and launch its kernels.

In: the text of a ``.cu`` file, its headers in it or not. Out: a ``Program``; each launch gives a ``Report`` or raises
``EmulatorError``. What is compiled is one self-contained text, so that a cache key covers all of it: the emulator's
header in the place of its ``#include``, and an entry for each kernel behind the end. Lines keep their numbers, as an
access is known by one. The machine is one library for all kernels. Nothing here imports torch.
``DeviceMemory`` stands for a GPU's: allocations lie far apart, so that an index that is off by little hits none.
"""

from __future__ import annotations

import ctypes
import functools
import mmap
import re
import shutil
import subprocess
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from flashgen.hosts.emulator.report import EmulatorError, FaultKind, Report, SharedRequests, Traffic, placed
from flashgen.store.cache import Cache
from flashgen.store.gallery import shipped
from flashgen.store.headers import Text, headers_of, in_one
from flashgen.toolchains.cpp import CompileFailed, Compiler, compile_sources, find_compiler, load_library

HEADER = "flashgen_emulator.h"

_INCLUDE = re.compile(r'^[ \t]*#[ \t]*include[ \t]+"([^"]+)".*$', re.MULTILINE)
_DIRECTIVE = re.compile(r"^#line .*", re.MULTILINE)
_PRAGMA_ONCE = re.compile(r"^#pragma once\n", re.MULTILINE)
_COMMENT = re.compile(r"//.*")
_NESTED = r"\((?:[^()]|\((?:[^()]|\([^()]*\))*\))*\)"
_CLUSTER = r"(?:__cluster_dims__\(\d+, 1, 1\)\s*)?"
_KERNEL = re.compile(
    rf"\b__global__\s+(?:__launch_bounds__\s*{_NESTED}\s*)?void\s+{_CLUSTER}(?:__launch_bounds__\s*{_NESTED}\s*)?(\w+)\s*\("
)

_REGISTERS = 'extern "C" void* flashgen_registers() { return &fg::emulator::registers; }\n'
_ENTRY = """\
extern "C" void flashgen_enter_KERNEL(const void* arguments) { fg::emulator::enter(KERNEL, arguments); }
extern "C" size_t flashgen_argument_bytes_KERNEL() { return fg::emulator::argument_bytes(KERNEL); }
"""


def kernel_names(text: str) -> tuple[str, ...]:
    """The kernels that a source defines, in its order."""
    return tuple(dict.fromkeys(_KERNEL.findall(_COMMENT.sub("", text))))


def blocks_of_cluster(text: str, kernel: str) -> int:
    """How many blocks of a kernel run together."""
    for found in _KERNEL.finditer(_COMMENT.sub("", text)):
        if found[1] == kernel:
            size = re.search(r"__cluster_dims__\((\d+)", found[0])
            return int(size[1]) if size else 1
    return 1


def kernel_source(text: str, name: str, kernels: Collection[str] | None = None) -> Text:
    """A generated source for the host's compiler. Its kernels are ``extern "C"``, so their names are theirs alone.

    Where only some ``kernels`` are wanted the others are ``static``, without an entry: a compiler drops them unread.
    """
    wanted = [each for each in kernel_names(text) if kernels is None or each in kernels]
    if kernels is not None:
        text = _KERNEL.sub(lambda found: found[0] if found[1] in kernels else f"static {found[0]}", text)
        text = text.replace('extern "C" static ', "[[maybe_unused]] static ")
    header = f'#define FLASHGEN_EMULATOR 1\n{_pasted(HEADER)}#line 1 "{name}.cu"\n'
    body = _INCLUDE.sub(lambda found: "" if Path(found[1]).name == HEADER else found[0], _DIRECTIVE.sub("", text))
    entries = "".join(_ENTRY.replace("KERNEL", kernel) for kernel in wanted)
    return Text(name, f'{header}{body}\n#line 1 "{name}.entries"\n{_REGISTERS}{entries}')


@functools.cache
def machine_source() -> Text:
    """The machine that all kernels run on."""
    return Text("emulator", _pasted("machine/machine.cpp"))


@functools.cache
def _pasted(name: str) -> str:
    """A file with its own includes pasted, each once, as a compiler would read them."""
    seen: set[Path] = set()

    def paste(path: Path) -> str:
        if path in seen:
            return ""
        seen.add(path)
        text = _PRAGMA_ONCE.sub("", path.read_text(encoding="utf-8"))
        return _INCLUDE.sub(lambda found: paste((path.parent / found[1]).resolve()), text)

    return paste((shipped("templates") / "emulator" / name).resolve())


_KINDS = tuple(FaultKind)
_MOST_PLACES = 1 << 14
# Line numbers, and calls that return to the line that made them: for traces.
_FLAGS = ("-g1", "-fno-optimize-sibling-calls")
# Of kernels: the rest of -O2 takes 0.8 of 2.3 s of a compilation and does not make a launch shorter.
_KERNEL_FLAGS = ("-O1",)


class _Allocation(ctypes.Structure):
    _fields_ = (("name", ctypes.c_char_p), ("address", ctypes.c_uint64), ("bytes", ctypes.c_uint64))


class _Traffic(ctypes.Structure):
    _fields_ = (("loaded", ctypes.c_uint64), ("stored", ctypes.c_uint64), ("added", ctypes.c_uint64))


class _SharedRequests(ctypes.Structure):
    _fields_ = (
        ("place", ctypes.c_uint64),
        ("requests", ctypes.c_uint64),
        ("wavefronts", ctypes.c_uint64),
        ("least", ctypes.c_uint64),
        ("line", ctypes.c_int),
    )


class _Failure(ctypes.Structure):
    _fields_ = (
        ("fault", ctypes.c_int),
        ("line", ctypes.c_int),
        ("other_line", ctypes.c_int),
        ("frames", ctypes.c_int),
        ("frame", ctypes.c_uint64 * 24),
        ("message", ctypes.c_char * 480),
    )


class _Launch(ctypes.Structure):
    """``struct Launch`` of templates/emulator/interface.h."""

    _fields_ = (
        ("enter", ctypes.c_void_p),
        ("registers", ctypes.c_void_p),
        ("arguments", ctypes.c_char_p),
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("cluster", ctypes.c_int),
        ("shared_bytes", ctypes.c_uint64),
        ("seed", ctypes.c_uint64),
        ("host_threads", ctypes.c_int),
        ("lines", ctypes.c_int),
        ("allocations", ctypes.c_int),
        ("allocation", ctypes.POINTER(_Allocation)),
        ("traffic", ctypes.POINTER(_Traffic)),
        ("shared", ctypes.POINTER(_SharedRequests)),
        ("places", ctypes.c_int),
        ("places_used", ctypes.POINTER(ctypes.c_int)),
        ("failure", ctypes.POINTER(_Failure)),
    )


@dataclass(frozen=True)
class Program:
    """A compiled source with its headers in it. ``seconds``: what compiling took, or taking it from the cache."""

    name: str
    source: str
    kernels: tuple[str, ...]
    seconds: float
    _library: ctypes.CDLL = field(repr=False)
    _machine: ctypes.CDLL = field(repr=False)

    def launch(
        self,
        kernel: str,
        grid: tuple[int, int, int],
        block: tuple[int, int, int],
        shared_bytes: int,
        arguments: bytes,
        allocations: Mapping[str, tuple[int, int]],
        *,
        seed: int = 0,
        host_threads: int = 1,
    ) -> Report:
        """Run one kernel on host memory.

        ``arguments`` are the bytes of the kernel's argument struct, ``allocations`` the address and size in bytes of
        all that its pointers may touch. With one host thread, everything depends on the seed alone.
        """
        if kernel not in self.kernels:
            raise ValueError(f"'{self.name}' has no kernel '{kernel}'; it has {', '.join(map(repr, self.kernels))}")
        expected = self._library[f"flashgen_argument_bytes_{kernel}"]
        expected.restype = ctypes.c_size_t
        if len(arguments) != expected():
            raise ValueError(f"the arguments of '{kernel}' have {expected()} bytes, not {len(arguments)}")
        traffic = (_Traffic * len(allocations))()
        shared = (_SharedRequests * _MOST_PLACES)()
        used = ctypes.c_int(0)
        failure = _Failure()
        self._machine.flashgen_emulator_run(
            ctypes.byref(
                _Launch(
                    ctypes.cast(self._library[f"flashgen_enter_{kernel}"], ctypes.c_void_p),
                    ctypes.cast(self._library.flashgen_registers, ctypes.c_void_p),
                    arguments,
                    grid,
                    block,
                    blocks_of_cluster(self.source, kernel),
                    shared_bytes,
                    seed,
                    host_threads,
                    self.source.count("\n") + 1,
                    len(allocations),
                    (_Allocation * len(allocations))(
                        *(_Allocation(name.encode(), *place) for name, place in allocations.items())
                    ),
                    traffic,
                    shared,
                    _MOST_PLACES,
                    ctypes.pointer(used),
                    ctypes.pointer(failure),
                )
            )
        )
        if failure.fault:
            message = failure.message.decode(errors="replace")
            frames = failure.frame[: failure.frames]
            raise EmulatorError(
                _KINDS[failure.fault - 1],
                message,
                failure.line,
                failure.other_line,
                self._lines_of(frames),
                self.source,
            )
        return Report(
            {
                name: Traffic(moved.loaded, moved.stored, moved.added)
                for name, moved in zip(allocations, traffic, strict=True)
            },
            tuple(
                SharedRequests(each.line, each.place, each.requests, each.wavefronts, each.least)
                for each in shared[: used.value]
            ),
        )

    def conflicts(self, *reports: Report) -> Sequence[tuple[tuple[int, ...], int]]:
        """Wavefronts that bank conflicts cost by chains of callers, the innermost line first; the most lost first."""
        found = Counter[tuple[int, ...]]()
        for each in Report.total(reports).places:
            if each.conflicts:
                found[self._lines_of([each.place]) or (each.line,)] += each.conflicts
        return found.most_common()

    def _lines_of(self, addresses: Sequence[int]) -> tuple[int, ...]:
        return lines_of(Path(self._library._name), addresses, f"{self.name}.cu")


def compile_program(
    source: str,
    *,
    name: str = "kernel",
    cache: Cache | None = None,
    kernels: Collection[str] | None = None,
) -> Program:
    """Compile all kernels of a source, or only some of these names; raises ``CompilerMissing`` and ``CompileFailed``.

    The machine is kept in the user's cache, whatever ``cache`` holds the kernels.
    """
    source = in_one(f"{name}.cu", source, headers_of(source))
    found = find_compiler()
    compiler = Compiler((*found.command, *_FLAGS), found.version)
    (machine,) = compile_sources([machine_source()], compiler=compiler)
    own = replace(compiler, flags=_KERNEL_FLAGS)
    try:
        (library,) = compile_sources([kernel_source(source, name, kernels)], cache=cache, compiler=own)
    except CompileFailed as failure:
        said, log = (placed(each, f"{name}.cu", source) for each in (str(failure), failure.log))
        raise CompileFailed(said, log) from None
    names = tuple(each for each in kernel_names(source) if kernels is None or each in kernels)
    return Program(name, source, names, library.seconds, _load(library.path), _load(machine.path))


_load = functools.cache(load_library)


_PLACE = re.compile(r"^(.*):(\d+)(?: \(discriminator \d+\))?$")


def lines_of(library: Path, addresses: Sequence[int], file_name: str) -> tuple[int, ...]:
    """The lines of ``file_name`` at these addresses; empty where nothing can tell them."""
    tool = shutil.which("addr2line")
    if tool is None or not addresses:
        return ()
    done = subprocess.run(
        [tool, "-i", "-e", str(library), *(hex(address) for address in addresses)],
        capture_output=True,
        check=False,
        text=True,
        errors="replace",
    )
    places = [found for found in map(_PLACE.match, done.stdout.splitlines()) if found]
    return tuple(int(found[2]) for found in places if Path(found[1]).name == file_name)


_ALIGNMENT = 4096
_GAP = 1 << 20  # untouched pages cost nothing


class DeviceMemory:
    """Named allocations, aligned to 4096 bytes, fresh ones filled with ones: a NaN in every float format."""

    def __init__(self) -> None:
        self._maps: dict[str, mmap.mmap] = {}
        self._views: dict[str, ctypes.Array[ctypes.c_char]] = {}
        self._sizes: dict[str, int] = {}

    def allocate(self, name: str, size: int) -> int:
        """The address of a new allocation."""
        return self.put(name, b"\xff" * size)

    def put(self, name: str, data: bytes) -> int:
        """The address of a new allocation with this content."""
        if name in self._sizes:
            raise ValueError(f"'{name}' is already allocated")
        size = len(data)
        whole = -(-size // _ALIGNMENT) * _ALIGNMENT + 2 * _GAP
        self._maps[name] = mmap.mmap(-1, whole)
        self._maps[name][_GAP : _GAP + size] = data
        self._views[name] = (ctypes.c_char * whole).from_buffer(self._maps[name])
        self._sizes[name] = size
        return self.address(name)

    def bytes_of(self, name: str) -> bytes:
        """The content of an allocation."""
        return self._maps[name][_GAP : _GAP + self._sizes[name]]

    def address(self, name: str) -> int:
        """Where an allocation is."""
        return ctypes.addressof(self._views[name]) + _GAP

    @property
    def allocations(self) -> Mapping[str, tuple[int, int]]:
        """Address and bytes by name, for a launch."""
        return {name: (self.address(name), size) for name, size in self._sizes.items()}
