"""Shared libraries of another architecture, called in a process that runs under a user-mode emulator.

``RemoteLibrary`` stands where a ``ctypes.CDLL`` would: its functions take integers, doubles and arrays, which they may
write to. ``remote_kernel`` makes of one the ``Kernel`` of a spec. Who touches memory behind an array ends the process.
"""

from __future__ import annotations

import ctypes
import struct
import subprocess
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from flashgen.hosts.cpu_backend import Find
from flashgen.hosts.emulated import extents
from flashgen.hosts.kernel import ArgumentLayout
from flashgen.ir.spec import HeadDim
from flashgen.kinds.operand import Field

MAIN = Path(__file__).with_name("remote_main.cpp")
INTEGER, DOUBLE, BUFFER = range(3)
FORMATS = {"const pointer": "P", "pointer": "P", "i32": "i", "i64": "q", "u32": "I", "u64": "Q", "f32": "f"}
Place = tuple[int, int, int]  # in which buffer, at which offset, the address of which buffer stands


def build_main(compiler: Sequence[str], folder: Path) -> Path:
    """The program that calls, made by a cross compiler."""
    program = folder / "remote_main"
    subprocess.run(
        [*compiler, "-std=c++17", "-O1", "-Wall", "-Wextra", str(MAIN), "-ldl", "-o", str(program)], check=True
    )
    return program


class RemoteProcess:
    """A library under an emulator; calls come one after another."""

    def __init__(self, emulator: Sequence[str], main: Path, library: Path) -> None:
        self._process = subprocess.Popen(
            [*emulator, str(main), str(library)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
        weakref.finalize(self, _end, self._process)

    def call(
        self, name: str, arguments: Sequence[tuple[int, Any]], buffers: Sequence[bytes], places: Sequence[Place] = ()
    ) -> tuple[int, list[bytes]]:
        """What the function returns, and what then stands in the buffers."""
        request = [struct.pack("<Q", len(name)), name.encode(), struct.pack("<Q", len(buffers))]
        for content in buffers:
            request += [struct.pack("<Q", len(content)), content]
        request.append(struct.pack("<Q", len(places)))
        request += [struct.pack("<QQQ", *place) for place in places]
        request.append(struct.pack("<Q", len(arguments)))
        request += [struct.pack("<Qd" if kind == DOUBLE else "<Qq", kind, value) for kind, value in arguments]
        process = self._process
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            process.stdin.write(b"".join(request))
            process.stdin.flush()
        except BrokenPipeError:
            self._fail(name)
        result = self._read(name, 8)
        return struct.unpack("<q", result)[0], [self._read(name, len(content)) for content in buffers]

    def _read(self, name: str, size: int) -> bytes:
        assert self._process.stdout is not None
        found = self._process.stdout.read(size)
        if len(found) < size:
            self._fail(name)
        return found

    def _fail(self, name: str) -> None:
        assert self._process.stderr is not None
        said = self._process.stderr.read().decode(errors="replace").strip()
        raise AssertionError(f"'{name}' ended its process with status {self._process.wait()}: {said}")


def _end(process: subprocess.Popen[bytes]) -> None:
    for pipe in (process.stdin, process.stdout, process.stderr):
        if pipe is not None:
            pipe.close()
    process.kill()
    process.wait()


class RemoteFunction:
    """One function of a library. ``restype`` and ``argtypes`` are those of ctypes; arrays come as ``calls.Pointer``."""

    def __init__(self, process: RemoteProcess, name: str) -> None:
        self._process, self._name = process, name
        self.restype: Any = ctypes.c_int
        self.argtypes: Sequence[Any] = ()

    def __call__(self, *given: Any) -> Any:
        arguments: list[tuple[int, Any]] = []
        arrays: list[Any] = []
        for value in given:
            array = getattr(value, "array", None)
            if array is not None:
                arguments.append((BUFFER, len(arrays)))
                arrays.append(array)
            elif isinstance(value, float):
                arguments.append((DOUBLE, value))
            else:
                number = int(getattr(value, "value", value))
                arguments.append((INTEGER, number - 2**64 if number >= 2**63 else number))
        result, contents = self._process.call(self._name, arguments, [array.tobytes() for array in arrays])
        for array, content in zip(arrays, contents, strict=True):
            ctypes.memmove(array.ctypes.data, content, len(content))
        return None if self.restype is None else self.restype(result).value


class RemoteLibrary:
    """What ``ctypes.CDLL`` is for a library of this machine."""

    def __init__(self, process: RemoteProcess) -> None:
        self._process = process

    def __getattr__(self, name: str) -> RemoteFunction:
        function = RemoteFunction(self._process, name)
        setattr(self, name, function)
        return function


def remote_functions(process: RemoteProcess, symbol: str, fields: Sequence[Field], head_dim: HeadDim) -> Find:
    """The functions of a kernel's library: each takes the packed arguments, whose pointers are this process's."""
    layout = ArgumentLayout(fields)
    formats = "@" + "".join(FORMATS[field.kind] for field in fields)
    # "0P" pads what stands before a field as C does.
    offsets = [struct.calcsize(f"{formats[: 1 + at]}0{FORMATS[field.kind]}") for at, field in enumerate(fields)]

    def function(name: str) -> Callable[[bytes], int]:
        def call(packed: bytes) -> int:
            values = struct.unpack_from(formats, packed)
            known = extents(layout, head_dim, values)
            buffers, places = [packed], []
            for field, (address, size) in known.items():
                places.append((0, offsets[layout.slots[field]], len(buffers)))
                buffers.append(ctypes.string_at(address, size))
            if values[layout.slots["workspace"]]:
                workspace, _ = process.call(f"{symbol}_{name}_workspace", [(BUFFER, 0)], buffers, places)
                places.append((0, offsets[layout.slots["workspace"]], len(buffers)))
                buffers.append(bytes(workspace))
            result, contents = process.call(f"{symbol}_{name}", [(BUFFER, 0)], buffers, places)
            for (field, (address, size)), content in zip(known.items(), contents[1:], strict=False):
                if fields[layout.slots[field]].kind == "pointer":
                    ctypes.memmove(address, content, size)
            return result

        return call

    return lambda name, _: (function(name), function(f"{name}_workspace"))
