"""Headers of generated sources: each stands alone, decides what is compiled, and is named where something is wrong."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from flashgen.hosts.emulator.program import compile_program
from flashgen.hosts.emulator.report import EmulatorError, FaultKind
from flashgen.store.gallery import shipped
from flashgen.store.headers import Text, headers_of, in_one, shipped_header
from flashgen.toolchains.cpp import CompileFailed
from flashgen.toolchains.nvrtc import compile_cuda, created, find_nvrtc, is_compiled
from tests.cuda.helpers import emitted
from tests.cuda.nvrtc import needs_nvrtc
from tests.emulator.helpers import launch

INCLUDE = shipped("templates") / "include"
NAMES = sorted(each.relative_to(INCLUDE).as_posix() for each in INCLUDE.rglob("*.*"))
CAUSAL = "attention causal { head_dim 64 mask causal }"
STORE = """
#include "flashgen/updates.cuh"
struct A { float* x; int n; };
extern "C" __global__ void store(const A a) { fg::global_store(a.x + a.n, fg::global_read(a.x)); }
"""


@needs_nvrtc
@pytest.mark.parametrize("name", [name for name in NAMES if re.fullmatch(r"flashgen/\w+\.cuh", name)])  # not kernels
def test_each_includes_what_it_needs(name: str) -> None:
    nvrtc, _ = find_nvrtc()
    text = f'#include "{name}"\n'
    program = created(nvrtc, Text("alone", text, headers_of(text)))
    nvrtc.compileProgram(program, ("-std=c++17", "-arch=compute_90a", "-fdevice-syntax-only"))


@pytest.mark.parametrize("target", ["sm_80", "sm_90a"])
def test_a_source_in_one_text_says_where_its_lines_come_from(target: str) -> None:
    source = emitted(CAUSAL, target)
    files = {source.file_name: source.text, **dict(source.headers)}
    assert set(files) <= {source.file_name, *NAMES}
    places, place = [], (source.file_name, 1)
    for line in source.whole.splitlines():
        if line.startswith("#line "):
            _, number, name = line.split(" ")
            place = name.strip('"'), int(number)
            continue
        there = files[place[0]].splitlines()[place[1] - 1]
        assert line == there or (line == "" and there.startswith(("#include", "#pragma once")))
        places.append(place)
        place = place[0], place[1] + 1
    assert sorted(set(places)) == sorted(places), "no line stands there twice"
    wanted = {(name, number) for name, text in files.items() for number in range(1, len(text.splitlines()) + 1)}
    left_out = {files[name].splitlines()[number - 1] for name, number in wanted - set(places)}
    assert all(line.startswith("#include ") for line in left_out)
    assert in_one(source.file_name, source.whole, ()) == source.whole


@needs_nvrtc
def test_another_header_is_another_binary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also one that is included by a header alone."""
    monkeypatch.setenv("FLASHGEN_CACHE_DIR", str(tmp_path))
    source = Text("store", STORE, headers_of(STORE))
    assert [name for name, _ in source.headers] == ["flashgen/updates.cuh", "flashgen/instructions.cuh"]
    compile_cuda(source, "sm_80")
    assert is_compiled(source, "sm_80")
    for n in (0, 1):
        headers = list(source.headers)
        headers[n] = (headers[n][0], headers[n][1] + "// another\n")
        assert not is_compiled(replace(source, headers=tuple(headers)), "sm_80")
    broken = replace(source, headers=(source.headers[0], ("flashgen/instructions.cuh", "#pragma once\nint x = y;\n")))
    with pytest.raises(CompileFailed, match=r"flashgen/instructions\.cuh\(2\): error"):
        compile_cuda(broken, "sm_80")


def test_the_emulator_names_files_and_their_lines() -> None:
    whole = in_one("test.cu", STORE, headers_of(STORE))
    broken = in_one("test.cu", STORE, (("flashgen/updates.cuh", "#pragma once\nint x = y;\n"),))
    with pytest.raises(CompileFailed, match=r"flashgen/updates\.cuh:2:\d+: error"):
        compile_program(broken, name="test")
    for source in (STORE, whole, STORE.replace("flashgen/updates", "flashgen/instructions").replace("_read", "_load")):
        with pytest.raises(EmulatorError) as caught:
            launch(source, {"x": np.zeros(8, np.float32), "n": 8}, name="store")
        assert caught.value.kind is FaultKind.OUTSIDE
        assert "global_store(a.x + a.n" in caught.value.line_text
        assert "test.cu:4 | " in str(caught.value)
    planted = whole.replace("return *p;", "return global_load(p + 8);")
    with pytest.raises(EmulatorError, match="reads 4 bytes at byte 32 of 'x'") as caught:
        launch(planted, {"x": np.zeros(8, np.float32), "n": 7}, name="store")
    number = 1 + shipped_header("flashgen/updates.cuh").partition("return *p;")[0].count("\n")
    assert f"flashgen/updates.cuh:{number} | " in str(caught.value)
