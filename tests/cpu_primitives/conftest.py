"""The primitives, compiled once per session and instruction set, as a ctypes library.

The narrower sets prove the widths that other machines choose; a set that this machine cannot run is skipped.
"""

from __future__ import annotations

import ctypes
import os
import platform
import shlex
import subprocess
from pathlib import Path

import pytest

HERE = Path(__file__).parent
PRIMITIVES = HERE.parents[1] / "templates" / "cpu" / "primitives"
COMPILER = shlex.split(os.environ.get("CXX", "g++"))
FLAGS = ["-std=c++17", "-O3", "-fopenmp", "-fwrapv", "-fno-math-errno", "-fno-trapping-math"]
WARNINGS = ["-Wall", "-Wextra", "-Werror", "-Wno-psabi"]
X86 = platform.machine() in ("x86_64", "AMD64")
SETS = {"native": ["-march=native"] + (["-mprefer-vector-width=512"] if X86 else [])}
if X86:
    SETS["avx2"] = ["-mavx2", "-mfma", "-mno-avx512f"]
    SETS["sse"] = ["-msse4.2"]


def cpu_flags() -> str:
    path = Path("/proc/cpuinfo")
    return path.read_text() if path.exists() else ""


@pytest.fixture(scope="session", params=list(SETS))
def primitives(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    if request.param == "avx2" and not ("avx2" in cpu_flags() and "fma" in cpu_flags()):
        pytest.skip("this machine has no AVX2")
    library = tmp_path_factory.mktemp("primitives") / f"primitives_{request.param}.so"
    source = HERE / "primitives_under_test.cpp"
    options = [*FLAGS, *WARNINGS, *SETS[request.param], "-shared", "-fPIC", f"-I{PRIMITIVES}"]
    command = [*COMPILER, *options, str(source), "-o", str(library)]
    built = subprocess.run(command, capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stderr
    return ctypes.CDLL(str(library))
