"""Small CUDA kernels over the primitives of layer 1, launched under the emulator with arrays for arguments."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from flashgen.hosts.emulator.program import DeviceMemory, compile_program
from flashgen.hosts.emulator.report import Report
from flashgen.hosts.tensor_maps import PARAMETER_ALIGNMENT, TensorMap, emulated, map_bytes

KERNELS = Path(__file__).parent / "kernels"

Array = npt.NDArray[Any]


@dataclass
class Outcome:
    """The report of a launch and every array after it."""

    report: Report
    arrays: dict[str, Array] = field(default_factory=dict)


def kernel(name: str) -> str:
    """The source of tests/emulator/kernels/<name>.cu."""
    return (KERNELS / f"{name}.cu").read_text(encoding="utf-8")


def launch(
    source: str,
    arguments: dict[str, Array | int],
    *,
    allocated: dict[str, Array] | None = None,
    maps: Sequence[TensorMap] = (),
    name: str,
    grid: tuple[int, int, int] = (1, 1, 1),
    threads: int = 32,
    block: tuple[int, int, int] | None = None,
    shared_bytes: int = 0,
    seed: int = 0,
    host_threads: int = 1,
) -> Outcome:
    """Launch ``name`` of ``source``: arrays become pointers, numbers become 32-bit integers, in their order.

    ``maps`` of arrays, of these or others that are ``allocated``, are the kernel's second parameter.
    """
    memory = DeviceMemory()
    fields: list[tuple[str, type[ctypes.c_void_p] | type[ctypes.c_int]]] = []
    values: list[int] = []
    for each, value in arguments.items():
        if isinstance(value, int):
            fields.append((each, ctypes.c_int))
            values.append(value)
        else:
            fields.append((each, ctypes.c_void_p))
            values.append(memory.put(each, value.tobytes()))
    parameters = bytes(type("Arguments", (ctypes.Structure,), {"_fields_": fields})(*values))
    for each, array in (allocated or {}).items():
        memory.put(each, array.tobytes())
    if maps:
        parameters += bytes(-len(parameters) % PARAMETER_ALIGNMENT)
        parameters += b"".join(map_bytes(each, memory.address(each.tensor), emulated) for each in maps)
    program = compile_program(source, name="test")
    report = program.launch(
        name,
        grid,
        block or (threads, 1, 1),
        shared_bytes,
        parameters,
        memory.allocations,
        seed=seed,
        host_threads=host_threads,
    )
    return Outcome(
        report,
        {
            each: np.frombuffer(memory.bytes_of(each), value.dtype).reshape(value.shape)
            for each, value in arguments.items()
            if not isinstance(value, int)
        },
    )
