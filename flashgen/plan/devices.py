"""Devices as data: what a planner has to know of one, the machine at hand, and a table of known ones.

In: nothing, or what the operating system reports. Out: ``Device``.
"""

from __future__ import annotations

import os
import platform
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Literal as OneOf

KIB = 1024
MIB = 1024 * KIB


@dataclass(frozen=True)
class Device:
    """One device. On a CPU the SRAM that a tile lives in (the paper's M) is one core's L2 cache.

    ``lanes`` are the float32 lanes of a vector register; ``source`` says where the figures come from.
    """

    name: str
    kind: OneOf["cpu"]
    cores: int
    lanes: int
    l1_bytes: int
    sram_bytes: int
    source: str

    def with_sram(self, size: int) -> Device:
        """The same device with another SRAM."""
        return replace(self, name=f"{self.name} with {size} bytes", sram_bytes=size, source="given")


def _cpu(name: str, cores: int, lanes: int, l1_kib: int, l2_kib: int, source: str) -> Device:
    return Device(name, "cpu", cores, lanes, l1_kib * KIB, l2_kib * KIB, source)


DEVICES: Mapping[str, Device] = MappingProxyType(
    {
        device.name: device
        for device in (
            _cpu("generic", 1, 8, 32, 512, "an AVX2 core with a small L2; what a source is planned for by default"),
            _cpu("skylake-sp", 28, 16, 32, 1024, "Intel Xeon Platinum 8180: 32 KB L1d and 1 MB L2 a core"),
            _cpu("icelake-sp", 40, 16, 48, 1280, "Intel Xeon Platinum 8380: 48 KB L1d and 1.25 MB L2 a core"),
            _cpu("sapphire-rapids", 56, 16, 48, 2048, "Intel Xeon Platinum 8480+: 48 KB L1d and 2 MB L2 a core"),
            _cpu("zen2", 64, 8, 32, 512, "AMD EPYC 7742: 32 KB L1d and 512 KB L2 a core"),
            _cpu("zen3", 64, 8, 32, 512, "AMD EPYC 7763: 32 KB L1d and 512 KB L2 a core"),
            _cpu("zen4", 96, 16, 32, 1024, "AMD EPYC 9654: 32 KB L1d and 1 MB L2 a core"),
            _cpu("neoverse-n1", 64, 4, 64, 1024, "AWS Graviton2: 64 KB L1d and 1 MB L2 a core"),
            _cpu("neoverse-v1", 64, 4, 64, 1024, "AWS Graviton3: 64 KB L1d and 1 MB L2 a core"),
        )
    }
)

GENERIC_CPU = DEVICES["generic"]


def local_cpu() -> Device:
    """The machine at hand, as its operating system describes it."""
    l1, l2 = _cache_bytes(1), _cache_bytes(2)
    return Device(
        name="local",
        kind="cpu",
        cores=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        lanes=_lanes(),
        l1_bytes=l1 or GENERIC_CPU.l1_bytes,
        sram_bytes=l2 or GENERIC_CPU.sram_bytes,
        source="reported by the operating system" if l1 and l2 else "cache sizes not reported: those of 'generic'",
    )


def _cache_bytes(level: int, root: Path = Path("/sys/devices/system/cpu/cpu0/cache")) -> int | None:
    """Size of the first core's data cache of this level, None where the system does not say."""
    for entry in sorted(root.glob("index*")):
        try:
            found = {name: (entry / name).read_text().strip() for name in ("level", "type", "size")}
        except OSError:
            continue
        size = re.fullmatch(r"(\d+)([KM]?)", found["size"])
        if found["level"] == str(level) and found["type"] in ("Data", "Unified") and size:
            return int(size[1]) * {"": 1, "K": KIB, "M": MIB}[size[2]]
    name = "SC_LEVEL1_DCACHE_SIZE" if level == 1 else f"SC_LEVEL{level}_CACHE_SIZE"
    if name in getattr(os, "sysconf_names", {}):
        return os.sysconf(name) or None
    return None


def _lanes(cpuinfo: Path = Path("/proc/cpuinfo")) -> int:
    """Float32 lanes of the widest vector register that the compiler will use."""
    try:
        text = cpuinfo.read_text(errors="replace")
    except OSError:
        text = ""
    if re.search(r"\bavx512f\b", text):
        return 16
    if re.search(r"\bavx\b", text):
        return 8
    return 4 if text or platform.machine() in ("arm64", "aarch64") else GENERIC_CPU.lanes
