"""What instructions a compiled library may hold, and whether the CPU at hand has them. Stage 5, compile.

In: a compiler, as it is called for kernels. Out: names of CPU features, as Linux spells them but without underscores.
A library that travels is loaded only where the system is of the same kind and every feature is there: an instruction
that is not would end the process.
"""

from __future__ import annotations

import platform
import re
from pathlib import Path

from flashgen.toolchains.cpp import Compiler, predefined, read_cpuinfo

# Macros of compilers whose features Linux calls otherwise; the others' names are the same but for underscores.
_OTHERWISE = {"sse3": "pni", "bmi": "bmi1", "lzcnt": "abm", "pclmul": "pclmulqdq", "sha": "shani"}
# Macros that name an instruction set which compilers choose from by themselves.
_SETS = re.compile(
    r"^#define __(SSE3|SSSE3|SSE4_1|SSE4_2|POPCNT|AVX\w*?|AMX\w*?|FMA4?|XOP|F16C|BMI2?|LZCNT|TBM|MOVBE|ADX|AES|PCLMUL"
    r"|VAES|VPCLMULQDQ|GFNI|SHA)__ 1$",
    re.MULTILINE,
)


def system() -> str:
    """The kind of machine and system, as far as libraries go by it."""
    return f"{platform.system()} {platform.machine()}"


def needed(compiler: Compiler) -> tuple[str, ...] | None:
    """The features that libraries of a compiler may use; None where nobody can tell: then only this CPU will do."""
    if platform.machine().lower() not in ("x86_64", "amd64"):
        return None
    macros = predefined(compiler)
    if macros is None or "__x86_64__" not in macros:
        return None
    names = (name.lower().replace("_", "") for name in _SETS.findall(macros))
    return tuple(sorted({_OTHERWISE.get(name, name) for name in names}))


def lacking(features: tuple[str, ...], cpuinfo: Path = Path("/proc/cpuinfo")) -> tuple[str, ...]:
    """Those that the CPU at hand does not have; all, where the system does not say."""
    found = re.search(r"^flags\s*:(.*)$", read_cpuinfo(cpuinfo), re.MULTILINE)
    there = {name.replace("_", "") for name in found[1].split()} if found else set()
    return tuple(name for name in features if name not in there)
