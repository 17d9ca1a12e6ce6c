"""The primitives, compiled once per session and instruction set, as ctypes libraries.

The narrower sets prove the widths that other machines choose; a set that this machine cannot run is skipped.
That of arm64 runs in an emulated process.
"""

from __future__ import annotations

import ctypes
import os
import platform
import shlex
import subprocess
from pathlib import Path
from typing import cast

import pytest

from tests.cpu_kinds import remote
from tests.cpu_kinds.kinds import CROSS_COMPILER, EMULATOR, cross_tools_missing

HERE = Path(__file__).parent
PRIMITIVES = HERE.parents[1] / "templates" / "include"
COMPILER = shlex.split(os.environ.get("CXX", "g++"))
FLAGS = ["-std=c++17", "-O3", "-fwrapv", "-fno-math-errno", "-fno-trapping-math"]
WARNINGS = ["-Wall", "-Wextra", "-Werror", "-Wno-psabi"]
X86 = platform.machine() in ("x86_64", "AMD64")
NATIVE = ["-march=native"] + (["-mprefer-vector-width=512"] if X86 else [])
SETS = {"native": NATIVE}
if X86:
    SETS["avx2"] = ["-mavx2", "-mfma", "-mno-avx512f"]
    SETS["sse"] = ["-msse4.2"]
    SETS["arm64"] = ["-march=armv8-a"]
ARRAYS, IMITATED_PAIRS = "-DFLASHGEN_MATRIX_PRODUCTS=2", "-DFLASHGEN_PAIR_PRODUCTS=2"


def cpu_flags() -> str:
    path = Path("/proc/cpuinfo")
    return path.read_text() if path.exists() else ""


def skip_what_cannot_run(name: str) -> None:
    """Skips, with the reason, where this machine does not run such code."""
    if name == "avx2" and not ("avx2" in cpu_flags() and "fma" in cpu_flags()):
        pytest.skip("this machine has no AVX2")
    if name == "registers" and "amx_bf16" not in cpu_flags():
        pytest.skip("this machine has no matrix registers")
    if name == "avx512_bf16" and "avx512_bf16" not in cpu_flags():
        pytest.skip("this machine multiplies no pairs")
    if name == "arm64" and cross_tools_missing():
        pytest.skip(cross_tools_missing())


def compiled(source: str, name: str, flags: list[str], folder: Path) -> ctypes.CDLL:
    """One of the sources beside this file, for a set."""
    library = folder / "library.so"
    options = [*FLAGS, *WARNINGS, *flags, "-shared", "-fPIC", f"-I{PRIMITIVES}"]
    is_arm64 = name == "arm64"
    command = [*([CROSS_COMPILER] if is_arm64 else COMPILER), *options, str(HERE / source), "-o", str(library)]
    built = subprocess.run(command, capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stderr
    if is_arm64:
        process = remote.RemoteProcess(EMULATOR, remote.build_main([CROSS_COMPILER], folder), library)
        return cast("ctypes.CDLL", remote.RemoteLibrary(process))
    return ctypes.CDLL(str(library))


@pytest.fixture(scope="session", params=list(SETS))
def primitives(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    name = request.param
    skip_what_cannot_run(name)
    return compiled("primitives_under_test.cpp", name, SETS[name], tmp_path_factory.mktemp("primitives"))


@pytest.fixture(scope="session", params=["registers", *SETS])
def matrices(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    """Matrix products in the machine's registers, and in those of arrays by each set."""
    name = request.param
    skip_what_cannot_run(name)
    flags = NATIVE if name == "registers" else [*SETS[name], ARRAYS]
    library = compiled("matrices_under_test.cpp", name, flags, tmp_path_factory.mktemp("matrices"))
    if not library.matrices():
        pytest.skip("the system does not grant matrix registers")
    return library


@pytest.fixture(scope="session", params=["avx512_bf16", *SETS])
def pairs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    """Products of pairs by the machine's instruction, and by what stands for it in each set."""
    name = request.param
    skip_what_cannot_run(name)
    flags = [*NATIVE, "-DFLASHGEN_PAIR_PRODUCTS=1"] if name == "avx512_bf16" else [*SETS[name], IMITATED_PAIRS]
    return compiled("pairs_under_test.cpp", name, flags, tmp_path_factory.mktemp("pairs"))
