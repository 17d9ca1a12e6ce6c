"""What compiles for long is said on stderr; what is quick, stored, or turned off is not."""

from __future__ import annotations

import io
import os
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from flashgen.store import build_lock as module
from flashgen.store.build_lock import compiling
from flashgen.store.cache import Cache
from flashgen.toolchains import nvrtc
from flashgen.toolchains.cpp import Compiler, compile_sources


@dataclass(frozen=True)
class Code:
    name: str
    text: str = 'extern "C" int answer() { return 42; }\n'
    defines: tuple[tuple[str, str], ...] = ()
    headers: tuple[tuple[str, str], ...] = ()


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> None:
    """Told after a tenth of a second, as outside of tests after two."""
    monkeypatch.delenv(module.PROGRESS, raising=False)
    monkeypatch.setattr(module, "_TELL_SECONDS", 0.1)


def compiler_that_takes(folder: Path, seconds: float) -> Compiler:
    path = folder / "slow-c++"
    path.write_text(f'#!/bin/sh\nsleep {seconds}\nwhile [ "$1" != -o ]; do shift; done\necho library > "$2"\n')
    path.chmod(0o755)
    return Compiler((str(path),), "1")


@pytest.mark.usefixtures("told")
def test_a_slow_compiler_is_told_of_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    slow, cache = compiler_that_takes(tmp_path, 0.4), Cache(tmp_path / "cache")
    compile_sources([Code("a_d64_cpu"), Code("a_d128_cpu", "int b;")], cache=cache, compiler=slow)
    lines = capsys.readouterr().err.splitlines()
    assert sorted(lines) == [f"flashgen: compiling {name} (slow-c++) …" for name in ("a_d128_cpu", "a_d64_cpu")]
    compile_sources([Code("a_d64_cpu")], cache=cache, compiler=slow)
    assert not capsys.readouterr().err


def test_a_quick_one_is_not(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(module.PROGRESS)
    monkeypatch.setattr(module, "_TELL_SECONDS", 0.5)
    compile_sources([Code("a")], cache=Cache(tmp_path / "cache"), compiler=compiler_that_takes(tmp_path, 0))
    time.sleep(0.6)
    assert not capsys.readouterr().err


@pytest.mark.usefixtures("told")
@pytest.mark.parametrize("value", ["0", "off", "False"])
def test_it_can_be_turned_off(value: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(module.PROGRESS, value)
    with compiling("a", "g++"):
        time.sleep(0.2)
    assert not capsys.readouterr().err


@pytest.mark.usefixtures("told")
def test_nvrtc_names_what_is_left_in(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    fake = SimpleNamespace(
        createProgram=lambda *_: 1,
        compileProgram=lambda *_: time.sleep(0.3),
        getProgramLog=lambda _: "",
        getCUBIN=lambda _: b"cubin",
        destroyProgram=lambda _: None,
        NVRTCError=RuntimeError,
    )
    monkeypatch.setattr(nvrtc, "find_nvrtc", lambda: (fake, "13.0"))
    nvrtc.compile_cuda(Code("a_d64_sm_80"), "sm_80", cache=Cache(tmp_path / "cache"), part="backward, bf16")
    assert capsys.readouterr().err == "flashgen: compiling a_d64_sm_80, backward, bf16 (NVRTC) …\n"


@pytest.mark.usefixtures("told")
@pytest.mark.parametrize("stream", [None, io.TextIOWrapper(io.BytesIO(), "ascii"), io.StringIO()])
def test_any_stderr_will_do(stream: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[object] = []
    monkeypatch.setattr(threading, "excepthook", seen.append)
    monkeypatch.setattr(sys, "stderr", stream)
    with compiling("a", "g++"):
        time.sleep(0.2)
    if isinstance(stream, io.TextIOWrapper):
        assert stream.buffer.getvalue() == b"flashgen: compiling a (g++) ?\n"
        stream.close()
        with compiling("b", "g++"):
            time.sleep(0.2)
    assert not seen


def test_from_python(tmp_path: Path) -> None:
    """A script whose compiler takes its time; nothing is shortened here."""
    slow = compiler_that_takes(tmp_path, 2.3).command
    code = f"""
from flashgen.store.headers import Text
from flashgen.toolchains.cpp import Compiler, compile_sources
compile_sources([Text("kernel", "")], compiler=Compiler({slow!r}, "1"))
"""
    environment = {**os.environ, "FLASHGEN_CACHE_DIR": str(tmp_path / "cache")}
    environment |= {"PYTHONPATH": str(Path(__file__).parents[2])}
    del environment[module.PROGRESS]
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert done.stderr == "flashgen: compiling kernel (slow-c++) …\n"
