"""The compiler stage: finding a compiler, keys, flags that it refuses, sources that it refuses."""

from __future__ import annotations

import ctypes
import shlex
import shutil
import stat
import subprocess
import sys
import tempfile
import threading
from dataclasses import replace
from pathlib import Path

import pytest

from flashgen.hosts.cpu_backend import LibraryKernel
from flashgen.hosts.kernel import ArgumentLayout
from flashgen.kinds.operand import Field
from flashgen.store.cache import ENVIRONMENT_VARIABLE, Cache
from flashgen.store.headers import Text
from flashgen.toolchains.cpp import (
    LOG,
    PREAMBLE,
    CompileFailed,
    Compiler,
    CompilerMissing,
    binary_key,
    compile_sources,
    find_compiler,
)

pytestmark = pytest.mark.skipif(shutil.which("c++") is None, reason="needs a C++ compiler")


ANSWER = Text("answer", 'extern "C" int answer() { return VALUE; }\n', defines=(("VALUE", "42"),))


@pytest.fixture
def cache(tmp_path: Path) -> Cache:
    return Cache(tmp_path / "cache")


def script(path: Path, text: str) -> Path:
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


def test_compiles_and_remembers(cache: Cache) -> None:
    (binary,) = compile_sources([ANSWER], cache=cache)
    assert not binary.cached
    assert ctypes.CDLL(str(binary.path)).answer() == 42
    (again,) = compile_sources([ANSWER], cache=cache)
    assert again.cached
    assert again.path == binary.path
    assert again.seconds < 0.1
    log = (binary.path.parent / "compile.log").read_text()
    assert "-DVALUE=42" in log
    assert "-march=native" in log


@pytest.mark.skipif("Free Software" not in find_compiler().version, reason="needs GCC")
def test_what_sources_begin_with_is_compiled_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From the third library of a cache on; it does not change what a library computes."""
    monkeypatch.setenv(ENVIRONMENT_VARIABLE, str(tmp_path))
    headers = ((PREAMBLE, "#pragma once\ninline int answer() { return VALUE; }\n"),)
    texts = [f'#include "{PREAMBLE}"\nextern "C" int a{n}() {{ return answer(); }}\n' for n in range(5)]
    sources = [Text(f"a{n}", text, headers, (("VALUE", str(n // 4)),)) for n, text in enumerate(texts)]
    logs = []
    for n, source in enumerate(sources):
        (binary,) = compile_sources([source])
        for thread in threading.enumerate():
            if thread.name == "flashgen-preamble":
                thread.join()
        assert ctypes.CDLL(str(binary.path))[f"a{n}"]() == n // 4
        logs.append((binary.path.parent / LOG).read_text())
    taken = ["-include" in log for log in logs]
    assert taken == [False, False, False, True, False], "of other macros it is another"
    command = shlex.split(logs[3].splitlines()[0].removeprefix("$ "))
    at = command.index("-include")
    checked = [*command[: at + 2], "-Winvalid-pch", "-Werror", "-x", "c++", "-fsyntax-only", "/dev/null"]
    assert subprocess.run(checked, check=False, capture_output=True).returncode == 0, "GCC takes it"


def test_several_at_once(cache: Cache) -> None:
    codes = [replace(ANSWER, defines=(("VALUE", str(n)),)) for n in range(4)]
    binaries = compile_sources(codes, cache=cache)
    assert [ctypes.CDLL(str(binary.path)).answer() for binary in binaries] == [0, 1, 2, 3]
    assert compile_sources([], cache=cache) == ()


def test_a_truncated_library_is_compiled_anew(cache: Cache) -> None:
    (binary,) = compile_sources([ANSWER], cache=cache)
    binary.path.write_bytes(binary.path.read_bytes()[:1000])
    (again,) = compile_sources([ANSWER], cache=cache)
    assert not again.cached
    assert ctypes.CDLL(str(again.path)).answer() == 42


def test_the_key_covers_all_that_matters() -> None:
    compiler = Compiler(("c++",), "1")
    variants = [
        (ANSWER, compiler),
        (replace(ANSWER, text=ANSWER.text + "\n"), compiler),
        (replace(ANSWER, defines=(("VALUE", "43"),)), compiler),
        (ANSWER, Compiler(("c++",), "2")),
        (ANSWER, Compiler(("c++", "-m32"), "1")),
    ]
    assert len({binary_key(code, by) for code, by in variants}) == len(variants)
    assert binary_key(ANSWER, compiler) == binary_key(replace(ANSWER, name="other"), compiler)


@pytest.mark.parametrize("refused", ["-march=native", "-fopenmp"])
def test_flags_that_a_compiler_refuses_are_left_out(cache: Cache, tmp_path: Path, refused: str) -> None:
    text = f'for each in "$@"; do [ "$each" = {refused} ] && echo "error: {refused}" >&2 && exit 1; done\nexec c++ "$@"'
    picky = Compiler((str(script(tmp_path / "picky", text)),), "picky")
    (binary,) = compile_sources([ANSWER], cache=cache, compiler=picky)
    assert ctypes.CDLL(str(binary.path)).answer() == 42
    assert refused not in (binary.path.parent / "compile.log").read_text()


def test_a_source_that_is_refused(cache: Cache) -> None:
    broken = Text("broken", "int main( {\n")
    with pytest.raises(CompileFailed, match=r"could not compile 'broken': broken\.cpp:1:.*error") as caught:
        compile_sources([ANSWER, broken], cache=cache)
    assert "$ " in caught.value.log
    folder = Path(str(caught.value).rpartition("source and log: ")[2])
    assert (folder / "broken.cpp").read_text() == broken.text
    assert (folder / "compile.log").read_text() == caught.value.log


def test_cxx_is_obeyed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "g++ -Wall")
    assert find_compiler().command[1:] == ("-Wall",)


@pytest.mark.parametrize("named", ["-march=x86-64", "-mcpu=cortex-a53"])
def test_a_cpu_that_cxx_names_is_the_one_that_is_meant(
    cache: Cache, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, named: str
) -> None:
    """Of two that are named compilers take the last, or refuse both."""
    text = f'for each in "$@"; do [ "$each" = {named} ] || set -- "$@" "$each"; shift; done\nexec c++ "$@"'
    monkeypatch.setenv("CXX", f"{script(tmp_path / 'cross', text)} {named}")
    (binary,) = compile_sources([ANSWER], cache=cache)
    log = (binary.path.parent / "compile.log").read_text()
    assert named in log
    assert "-march=native" not in log


@pytest.mark.parametrize(
    ("cxx", "said"),
    [
        ("/nowhere/c++", "does not exist"),
        ("nowhere-c++ -O2", "not on the path"),
        ("false", "does not start"),
        ("/etc/passwd", "may not be executed"),
        ("/etc", "is a folder"),
        ("g++ 'x", "is no command"),
        ("''", "''"),
    ],
)
def test_a_cxx_that_does_not_work(monkeypatch: pytest.MonkeyPatch, cxx: str, said: str) -> None:
    monkeypatch.setenv("CXX", cxx)
    with pytest.raises(CompilerMissing, match=r"no C\+\+ compiler: \$CXX ") as refused:
        find_compiler()
    assert said in str(refused.value)


def test_a_compiler_that_writes_nothing_or_nonsense(cache: Cache, tmp_path: Path) -> None:
    silent = Compiler((str(script(tmp_path / "silent", "exit 0")),), "1")
    with pytest.raises(CompileFailed, match="wrote no library"):
        compile_sources([ANSWER], cache=cache, compiler=silent)
    text = 'while [ "$1" != -o ]; do shift; done; echo nonsense > "$2"'
    foreign = Compiler((str(script(tmp_path / "foreign", text)),), "1")
    (binary,) = compile_sources([ANSWER], cache=cache, compiler=foreign)
    with pytest.raises(CompileFailed, match="cannot be loaded here"):
        LibraryKernel.load(binary.path, "answer", FIELDS)


def test_a_temporary_folder_without_room(cache: Cache, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is not the cache's fault, and is not said to be."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "gone"))
    with pytest.raises(CompileFailed, match=r"could not be compiled in the temporary folder .*gone"):
        compile_sources([ANSWER], cache=cache)


def test_no_compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(CompilerMissing, match=r"none of c\+\+, g\+\+, clang\+\+.*apt install"):
        compile_sources([ANSWER], cache=Cache(tmp_path))


def test_a_compiler_that_vanishes(tmp_path: Path) -> None:
    with pytest.raises(CompilerMissing, match="cannot be started"):
        compile_sources([ANSWER], cache=Cache(tmp_path), compiler=Compiler((str(tmp_path / "gone"),), "1"))


def test_nothing_here_imports_torch() -> None:
    code = "import sys, flashgen.toolchains.cpp, flashgen.hosts.kernel; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


# Kernels --------------------------------------------------------------------------------------------------------------

FIELDS = (
    Field("q", "const pointer"),
    Field("threads", "i32"),
    Field("stride", "i64"),
    Field("threshold", "u32"),
    Field("scale", "f32"),
    Field("deterministic", "i32"),
    Field("seed", "u64"),
    Field("o", "pointer"),
)
KERNEL = Text(
    "kernel",
    """
#include <cstdint>
struct Arguments {
  const void* q; int32_t threads; int64_t stride; uint32_t threshold; float scale; int32_t deterministic; uint64_t seed;
  void* o;
};
extern "C" int64_t k_forward_workspace(const Arguments* a) { return a->stride; }
extern "C" int64_t k_backward_workspace(const Arguments* a) { return int64_t(a->seed >> 32); }
extern "C" void k_forward(const Arguments* a) {
  double* o = static_cast<double*>(a->o);
  o[0] = *static_cast<const double*>(a->q); o[1] = a->threads; o[2] = a->threshold; o[3] = a->scale;
  o[4] = a->deterministic;
}
extern "C" void k_backward(const Arguments* a) { *static_cast<double*>(a->o) = -1; }
""",
)


def test_arguments_arrive_as_c_lays_them_out(cache: Cache) -> None:
    (binary,) = compile_sources([KERNEL], cache=cache)
    kernel = LibraryKernel.load(binary.path, "k", FIELDS)
    q, o = (ctypes.c_double * 1)(2.5), (ctypes.c_double * 5)()
    values = kernel.layout.values(
        {"threads": 3, "stride": -(2**40), "threshold": 2**32 - 1, "scale": 0.75, "seed": 2**63}
    )
    values[kernel.layout.slots["q"]] = ctypes.addressof(q)
    values[kernel.layout.slots["o"]] = ctypes.addressof(o)
    values[kernel.layout.slots["deterministic"]] = True
    packed = kernel.layout.pack(*values)
    (forward, workspace), (backward, backward_workspace) = (kernel.find(name, {}) for name in ("forward", "backward"))
    assert workspace(packed) == -(2**40)
    assert backward_workspace(packed) == 2**31
    forward(packed)
    assert list(o) == [2.5, 3.0, 2.0**32 - 1, 0.75, 1.0]
    backward(packed)
    assert o[0] == -1


def test_what_varies_arrives_beside_what_is_settled(cache: Cache) -> None:
    """The fields that vary end before an odd place of four bytes."""
    (binary,) = compile_sources([KERNEL], cache=cache)
    fields = tuple(replace(field, varies=field.name in ("q", "threads")) for field in FIELDS)
    kernel = LibraryKernel.load(binary.path, "k", fields)
    q, o = (ctypes.c_double * 1)(2.5), (ctypes.c_double * 5)()
    values = kernel.layout.values({"stride": 77, "threshold": 5, "scale": 0.25, "o": ctypes.addressof(o)})
    prepared = kernel.prepare("forward", values)
    assert (kernel.layout.varying, prepared.workspace_bytes) == (2, 77)
    for threads in (3, 4):
        prepared.run([ctypes.addressof(q), threads])
        assert list(o) == [2.5, threads, 5, 0.25, 0]


def test_missing_functions(cache: Cache) -> None:
    (binary,) = compile_sources([KERNEL], cache=cache)
    with pytest.raises(OSError, match="has no function 'other_forward'"):
        LibraryKernel.load(binary.path, "other", FIELDS)


def test_layout_starts_from_zero() -> None:
    assert ArgumentLayout(FIELDS).values({}) == [0] * 8
