"""`flashgen doctor` with planted faults: each is named with its cure, and none ends the look."""

from __future__ import annotations

import json
import os
import stat
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from flashgen.cli import doctor
from flashgen.cli.doctor import Finding, MachineReport, examine
from tests.cli.helpers import Outcome, flashgen, flashgen_process

ROOT = Path(__file__).parents[2]
TORCH = '__version__ = "2.9.0"\nclass version: cuda = None\n'
NO_CUPY = 'raise ImportError("libcupy.so is not there")\n'


def process(folder: Path, modules: Mapping[str, str], *options: str, **environment: str) -> Outcome:
    """The command beside modules that stand in for real ones."""
    for name, text in modules.items():
        (folder / f"{name}.py").write_text(text)
    path = os.pathsep.join((str(folder), str(ROOT)))
    place = {"PYTHONPATH": path, "FLASHGEN_CACHE_DIR": str(folder / "cache")}
    return flashgen_process("doctor", *options, folder=folder, environment={**os.environ, **place, **environment})


def findings(outcome: Outcome) -> dict[str, Any]:
    return {each["name"]: each for each in json.loads(outcome.stdout)["findings"]}


def test_nothing_works(tmp_path: Path) -> None:
    """PyTorch crashes, there is no compiler, no CuPy, and no place for the cache."""
    crash = "import os, signal\nos.kill(os.getpid(), signal.SIGSEGV)\n"
    modules = {"torch": crash, "cupy": NO_CUPY, "cupy_backends": NO_CUPY}
    outcome = process(tmp_path, modules, "--json", CXX="/nowhere/c++", FLASHGEN_CACHE_DIR="/dev/null/cache")
    assert outcome.code == 1
    assert outcome.stderr == "no backend runs here\n"
    found = findings(outcome)
    assert found["PyTorch"]["found"] == "cannot be imported: the process was ended by signal 11"
    assert found["PyTorch"]["cure"].startswith("pip install 'torch")
    assert found["C++ compiler"]["state"] == "missing"
    assert "'/nowhere/c++' (it does not exist)" in found["C++ compiler"]["found"]
    assert "apt install g++" in found["C++ compiler"]["cure"]
    assert "/dev/null/cache is not used" in found["cache"]["found"]
    assert "Not a directory" in found["cache"]["found"]
    assert "FLASHGEN_CACHE_DIR" in found["cache"]["cure"]
    assert "libcupy.so is not there" in found["CuPy"]["found"]
    assert "flashgen[cuda13]" in found["CuPy"]["cure"]
    assert "libcupy.so is not there" in found["NVRTC"]["found"]
    assert "pip install" not in found["NVRTC"]["found"], "the cure says it"
    assert "flashgen[cuda13]" in found["NVRTC"]["cure"]
    backends = json.loads(outcome.stdout)["backends"]
    assert not any(each["runs"] for each in backends.values())
    assert backends["cpu"]["why_not"].startswith("PyTorch: cannot be imported")


def test_what_runs_without_a_gpu(tmp_path: Path) -> None:
    """For people: what is not needed here does not count as missing."""
    outcome = process(tmp_path, {"torch": TORCH, "cupy": NO_CUPY})
    assert outcome.code == 0, outcome.stderr
    lines = outcome.stdout.splitlines()
    assert any(line.startswith("ok       PyTorch") and "2.9.0, without CUDA" in line for line in lines)
    assert any(line.startswith("ok       OpenMP") and "threads" in line for line in lines)
    assert "backend 'cpu' runs here" in lines
    if "backend 'cuda' does not run here; GPU: none" in lines:
        assert any(line.startswith("-        CuPy") for line in lines)
        assert "MISSING" not in outcome.stdout


# -- one look at a time ------------------------------------------------------------------------------------------------

ANSWERS: dict[str, Any] = {
    "torch": {"version": "2.9.0+cu130", "cuda": "13.0", "gpus": ["NVIDIA H200"], "why": ""},
    "driver": {
        "version": 13000,
        "boards": [{"name": "NVIDIA H200", "capability": 90, "block_bytes": 232448}],
        "why": "",
    },
    "cupy": {"version": "14.2.0", "runtime": 13000},
    "nvrtc": {"version": "13.0"},
}


def examined(monkeypatch: pytest.MonkeyPatch, **changed: Any) -> tuple[dict[str, Finding], MachineReport]:
    """What is found on a machine with an H200, but for what is changed: other answers, or a failure in words."""
    by_code = {doctor._QUESTIONS[name]: {**ANSWERS, **changed}[name] for name in ANSWERS}

    def ask(code: str) -> doctor._Answer:
        answer = by_code.get(code, {"openmp": 201511, "threads": 2})
        return doctor._Answer({}, answer) if isinstance(answer, str) else doctor._Answer(answer)

    monkeypatch.setattr(doctor, "_ask", ask)
    monkeypatch.setattr(doctor, "compile_sources", lambda *_, **__: [type("Binary", (), {"path": "library.so"})])
    report = examine()
    return {each.name: each for each in report.findings}, report


def test_everything_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    found, report = examined(monkeypatch)
    assert report.runs == ("cpu", "cuda", "emulator", "reference")
    assert found["GPU"].found == "NVIDIA H200, target sm_90a"
    assert found["driver"].found == "knows CUDA 13.0"


OLD_BOARD = {**ANSWERS["driver"], "boards": [{"name": "Tesla K80", "capability": 37, "block_bytes": 49152}]}
NO_CUDA = {**ANSWERS["torch"], "cuda": None, "gpus": []}


@pytest.mark.parametrize(
    ("changed", "name", "said", "cure"),
    [
        ({"cupy": "ImportError: no cupy"}, "CuPy", "no cupy", "flashgen[cuda13]"),
        ({"driver": {**ANSWERS["driver"], "version": 12040}}, "CuPy", "newer than the driver's", "flashgen[cuda12]"),
        ({"nvrtc": "no libnvrtc"}, "NVRTC", "no libnvrtc", "flashgen[cuda13]"),
        ({"torch": NO_CUDA}, "PyTorch on GPUs", "built without CUDA", "torch"),
        ({"driver": OLD_BOARD}, "GPU", "compute capability 3.7", "reference"),
    ],
)
def test_a_gpu_that_cannot_be_used(
    changed: dict[str, Any], name: str, said: str, cure: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    found, report = examined(monkeypatch, **changed)
    assert found[name].state == "missing"
    assert said in found[name].found
    assert cure in found[name].cure
    assert report.backends["cuda"].startswith(f"{name}: ")
    assert report.runs == ("cpu", "emulator", "reference")


def test_a_torch_that_is_too_old(monkeypatch: pytest.MonkeyPatch) -> None:
    found, report = examined(monkeypatch, torch={**ANSWERS["torch"], "version": "2.5.1"})
    assert (found["PyTorch"].state, report.runs) == ("missing", ())


def test_a_mistake_of_the_doctor_is_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    found, report = examined(monkeypatch, torch={"version": None}, nvrtc={})
    assert "KeyError" in found["GPU"].found
    assert found["PyTorch"].state == "missing"
    assert not report.runs


def test_no_compiler_on_the_path(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    found, report = examined(monkeypatch)
    assert found["C++ compiler"].found == "the path has none of c++, g++, clang++, or it does not start"
    assert report.runs == ("cuda", "reference")


def test_a_compiler_whose_libraries_do_not_load(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    script = tmp_path / "foreign"
    script.write_text(
        '#!/bin/sh\n[ "$1" = --version ] && echo Foreign 1 && exit\n'
        'while [ "$1" != -o ]; do shift; done; echo nonsense > "$2"\n'
    )
    script.chmod(script.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("CXX", str(script))
    (found,) = doctor._compiler()
    assert found.state == "missing"
    assert "Foreign 1; what it makes does not run here" in found.found
    assert "CXX" in found.cure


def test_a_compiler_without_openmp(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    script = tmp_path / "plain"
    script.write_text('#!/bin/sh\nfor each in "$@"; do [ "$each" = -fopenmp ] && exit 1; done\nexec c++ "$@"\n')
    script.chmod(script.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("CXX", str(script))
    compiler, openmp = doctor._compiler()
    assert compiler.state == "ok"
    assert (openmp.state, openmp.found) == ("optional", "not there: kernels run on one thread")


def test_a_cache_of_others(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    folder = tmp_path / "open"
    folder.mkdir()
    folder.chmod(0o777)
    monkeypatch.setenv("FLASHGEN_CACHE_DIR", str(folder))
    (found,) = doctor._cache()
    assert found.state == "optional"
    assert "other users can write" in found.found


def test_processes_that_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    assert doctor._ask("print('{}')") == doctor._Answer({})
    for code, said in (
        ("", "nothing that could be read"),
        ("print('[1]')", "nothing that"),
        ("raise OSError(3)", "OSError: 3"),
    ):
        assert said in doctor._ask(code).failure
    monkeypatch.setattr(doctor, "_SECONDS", 0.2)
    assert "no answer" in doctor._ask("import time; time.sleep(9)").failure
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    assert "no process could be started" in doctor._ask("").failure


def test_the_command_prints_what_was_found(monkeypatch: pytest.MonkeyPatch) -> None:
    examined(monkeypatch, cupy="ImportError: no cupy")
    outcome = flashgen("doctor")
    assert outcome.code == 0
    assert "MISSING  CuPy" in outcome.stdout
    assert "to get it: pip install 'flashgen[cuda13]'" in outcome.stdout
    assert "backend 'cuda' does not run here; CuPy: cannot be imported: ImportError: no cupy" in outcome.stdout
