"""The emulator: generated CUDA source, compiled by the host's compiler and run on host memory.

In: the text of a ``.cu`` file, a launch, the bytes of the kernel's argument struct and the allocations that its
pointers may touch. Out: a ``Report`` of what moved, or an ``EmulatorError`` that names the line at fault. What it
checks and counts is described in templates/emulator/machine, one file for each part of the machine.
"""

from flashgen.hosts.emulator.program import DeviceMemory, Program, compile_program
from flashgen.hosts.emulator.report import Conflict, EmulatorError, FaultKind, Report, SharedRequests, Traffic

__all__ = [
    "compile_program",
    "Program",
    "DeviceMemory",
    "Report",
    "Traffic",
    "SharedRequests",
    "Conflict",
    "EmulatorError",
    "FaultKind",
]
