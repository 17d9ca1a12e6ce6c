"""CPUs: what a planner has to know of one, and the machine at hand. Known products stand in ``devices.toml``.

In: nothing, or what the operating system reports. Out: ``Cpu``.
"""

from __future__ import annotations

import os
import platform
import re
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import ClassVar, Self

from flashgen.toolchains.cpp import available_cores, read_cpuinfo

KIB = 1024
LOCAL = "local"  # the machine at hand
MIB = 1024 * KIB


@dataclass(frozen=True)
class Cpu:
    """One device. On a CPU the SRAM that a tile lives in (the paper's M) is one core's L2 cache.

    ``lanes`` are the float32 lanes of a vector register; a core starts ``fma_per_clock`` vector multiply-adds at
    ``clock_hz``, ``pairs_per_clock`` of those that take pairs of bfloat16, 0 where it has none, and
    ``matrix_per_clock`` multiply-adds of bfloat16 in matrix registers, 0 where it has none;
    ``bandwidth`` of the memory in bytes a second, None where it is not known. ``source`` says where the figures come
    from.
    """

    name: str
    kind: str = field(default="cpu", init=False)
    cores: int
    lanes: int
    l1_bytes: int
    sram_bytes: int
    source: str
    clock_hz: float = 2.5e9
    fma_per_clock: int = 2
    bandwidth: float | None = None
    pairs_per_clock: int = 0
    matrix_per_clock: int = 0
    tiles_by_element: ClassVar[bool] = False  # those of one type are those of all: what is inside is float32 anyway
    remarks: ClassVar[tuple[str, ...]] = ()

    @property
    def product(self) -> str:
        """The name that people know it by."""
        return self.name

    def with_sram(self, size: int) -> Self:
        """The same device with another SRAM."""
        return replace(self, name=f"{self.name} with {size} bytes", sram_bytes=size, source="given")


AMX_PER_CLOCK = 512  # a product of registers, 16 x 16 x 32, every 16 clocks

GENERIC_CPU = Cpu(
    name="generic",
    cores=8,
    lanes=8,
    l1_bytes=32 * KIB,
    sram_bytes=512 * KIB,
    source="an AVX2 core with a small L2; what a source is planned for by default",
)


def local_cpu() -> Cpu:
    """The machine at hand, as its operating system describes it."""
    l1, l2, cpuinfo = _cache_bytes(1), _cache_bytes(2), read_cpuinfo()
    return Cpu(
        name=LOCAL,
        cores=available_cores(),
        lanes=_lanes(cpuinfo),
        l1_bytes=l1 or GENERIC_CPU.l1_bytes,
        sram_bytes=l2 or GENERIC_CPU.sram_bytes,
        source="reported by the operating system" if l1 and l2 else "cache sizes not reported: those of 'generic'",
        clock_hz=_clock_hz(cpuinfo) or GENERIC_CPU.clock_hz,
        pairs_per_clock=GENERIC_CPU.fma_per_clock if _has_pairs(cpuinfo) else 0,
        matrix_per_clock=AMX_PER_CLOCK if _has_amx(cpuinfo) else 0,
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


def _lanes(cpuinfo: str) -> int:
    """Float32 lanes of the widest vector register that the compiler will use."""
    if re.search(r"\bavx512f\b", cpuinfo):
        return 16
    if re.search(r"\bavx\b", cpuinfo):
        return 8
    return 4 if cpuinfo or platform.machine() in ("arm64", "aarch64") else GENERIC_CPU.lanes


def _has_pairs(cpuinfo: str) -> bool:
    """Whether vectors multiply pairs of bfloat16."""
    return _has(cpuinfo, "avx512_bf16", "avx512f")


def _has_amx(cpuinfo: str) -> bool:
    """Whether the system offers matrix registers that multiply bfloat16."""
    return _has(cpuinfo, "amx_tile", "amx_bf16", "avx512f")


def _has(cpuinfo: str, *features: str) -> bool:
    return all(re.search(rf"\b{name}\b", cpuinfo) for name in features)


def _clock_hz(cpuinfo: str) -> float | None:
    """The clock of the first core: the highest that the system may choose, else what it runs at now."""
    try:
        return 1e3 * int(Path("/sys/devices/system/cpu/cpu0/cpufreq/cpuinfo_max_freq").read_text())
    except (OSError, ValueError):
        found = re.search(r"^cpu MHz\s*:\s*([\d.]+)", cpuinfo, re.MULTILINE)
    return 1e6 * float(found[1]) if found and float(found[1]) > 0 else None


def cpu_name() -> str:
    """The model, as its maker calls it."""
    found = re.search(r"^model name\s*:\s*(.+?)\s*$", read_cpuinfo(), re.MULTILINE)
    return found[1] if found else platform.processor() or platform.machine() or "unknown CPU"


def cpu_identity() -> str:
    """The model and what a plan depends on: two machines of one identity run the same tiles alike."""
    device = local_cpu()
    registers = ", matrix registers" if device.matrix_per_clock else ", pairs" if device.pairs_per_clock else ""
    return f"{cpu_name()}, {device.cores} cores, {device.lanes} lanes{registers}, {device.sram_bytes // 1024} KiB L2"
