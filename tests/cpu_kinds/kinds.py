"""Kinds of CPU, imitated by what a compiler is told: which vectors and which registers a kernel may use.

A kind that this machine cannot run is compiled only; those of another architecture run under user-mode emulation.
``CXX`` selects one for the whole of flashgen, as a user would: ``compiler(kind)`` is its value.
"""

from __future__ import annotations

import platform
import re
import shutil
from dataclasses import dataclass
from pathlib import Path

MACHINE = {"AMD64": "x86_64", "arm64": "aarch64"}.get(platform.machine(), platform.machine())
COMPILERS = ("g++", "clang++")
ARRAYS, PAIRS = "-DFLASHGEN_MATRIX_PRODUCTS=2", "-DFLASHGEN_PAIR_PRODUCTS=2"  # what stands for instructions
# What cross compilers of Debian are called, and what runs their programs: g++-aarch64-linux-gnu, qemu-user.
CROSS_COMPILER, EMULATOR = "aarch64-linux-gnu-g++", ("qemu-aarch64", "-L", "/usr/aarch64-linux-gnu")


@dataclass(frozen=True)
class Kind:
    """A CPU by a name that tests show. ``needs``: features that it takes to run, as Linux calls them."""

    name: str
    flags: tuple[str, ...]
    needs: frozenset[str] = frozenset()

    def runs_here(self) -> bool:
        """Whether this machine is of the kind, or of a better one."""
        return self.needs <= features()

    def with_arrays(self) -> Kind:
        """The same with matrix registers of arrays."""
        return Kind(f"{self.name}-arrays", (*self.flags, ARRAYS), self.needs)


def features() -> frozenset[str]:
    """What the processor at hand has."""
    path = Path("/proc/cpuinfo")
    found = re.findall(r"^(?:flags|Features)\s*:(.*)$", path.read_text() if path.exists() else "", re.MULTILINE)
    return frozenset(" ".join(found).split())


NATIVE = Kind("native", ("-march=native",))
_AVX2 = frozenset({"avx2", "fma", "bmi2", "f16c", "movbe", "abm"})
_AVX512 = _AVX2 | {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"}
_AMX = _AVX512 | {"amx_tile", "amx_bf16"}
_WIDE = "-mprefer-vector-width=512"
_X86 = (
    Kind("sse2", ("-march=x86-64",)),
    Kind("sse4", ("-march=x86-64", "-msse4.2")),
    Kind("avx", ("-march=sandybridge",), frozenset({"avx"})),
    Kind("avx2", ("-march=haswell",), _AVX2),
    Kind("avx512", ("-march=skylake-avx512", _WIDE), _AVX512),
    Kind("avx512_bf16", ("-march=skylake-avx512", "-mavx512bf16", _WIDE), _AVX512 | {"avx512_bf16"}),
    Kind("amx", ("-march=skylake-avx512", "-mamx-tile", "-mamx-bf16", _WIDE), _AMX),
)
# All that are imitated here, without registers of arrays, which each may have.
KINDS: tuple[Kind, ...] = (NATIVE, *(_X86 if MACHINE == "x86_64" else ()))


def kind(name: str) -> Kind:
    """One of ``KINDS``."""
    return next(each for each in KINDS if each.name == name)


def has_compiler(name: str) -> bool:
    """Whether it is installed. Compilers that are missing are skipped by name."""
    return shutil.which(name) is not None


def cross_tools_missing() -> str:
    """What lacks to compile and run programs for arm64; empty if nothing does, and on arm64 itself."""
    missing = [tool for tool in (CROSS_COMPILER, EMULATOR[0]) if shutil.which(tool) is None]
    return f"needs {' and '.join(missing)} (Debian: g++-aarch64-linux-gnu, qemu-user)" if missing else ""
