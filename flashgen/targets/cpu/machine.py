"""The processor at hand by name, for what is measured on it. Stage 3, plan; in: what the system reports."""

from __future__ import annotations

import platform
import re

from flashgen.targets.cpu.device import local_cpu, read_cpuinfo


def cpu_name() -> str:
    """The model, as its maker calls it."""
    found = re.search(r"^model name\s*:\s*(.+?)\s*$", read_cpuinfo(), re.MULTILINE)
    return found[1] if found else platform.processor() or platform.machine() or "unknown CPU"


def cpu_identity() -> str:
    """The model and what a plan depends on: two machines of one identity run the same tiles alike."""
    device = local_cpu()
    registers = ", matrix registers" if device.matrix_per_clock else ", pairs" if device.pairs_per_clock else ""
    return f"{cpu_name()}, {device.cores} cores, {device.lanes} lanes{registers}, {device.sram_bytes // 1024} KiB L2"
