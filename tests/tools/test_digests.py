"""Digests of machine code: of functions wherever they lie, of kernels of a cubin, and what is said of two files."""

from __future__ import annotations

import copy
import json
import platform
import shutil
import struct
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tools.digests.command import compare, main
from tools.digests.elf import function_digests, functions, instructions, kernel_digests, sections
from tools.digests.sample import CPU_KINDS, EIGHT, GPU_KINDS, pieces

CODE = """
static const float factors[4] = {1.5f, 2.5f, 3.5f, 4.5f};
__attribute__((noinline)) static float scaled(float x, int n) { return x * factors[n & 3]; }
float total(const float* x, int n) {
    float sum = 0.25f;
    for (int i = 0; i < n; ++i) sum += scaled(x[i], i);
    return sum;
}
typedef float lanes __attribute__((vector_size(16)));
lanes counted(lanes x) { return x + (lanes){0, 1, 2, 3}; }
"""
BEFORE = "const double other[9] = {1.0, 7.0};\ndouble first(int n) { return other[n] * 3.0; }\n"
needs_tools = pytest.mark.skipif(
    platform.machine() != "x86_64" or not (shutil.which("cc") and shutil.which("objdump")),
    reason="needs cc and objdump for x86-64",
)


def library(folder: Path, name: str, text: str) -> Path:
    code, made = folder / f"{name}.c", folder / f"{name}.so"
    code.write_text(text)
    subprocess.run(["cc", "-O2", "-fPIC", "-shared", str(code), "-o", str(made)], check=True)
    return made


@needs_tools
def test_functions_are_found_with_their_bytes(tmp_path: Path) -> None:
    image = library(tmp_path, "plain", CODE).read_bytes()
    names = {each.name for each in functions(image)}
    assert {"total", "scaled", "counted"} == {each.partition(".")[0] for each in names}
    text = next(each for each in sections(image) if each.name == ".text")
    assert all(text.holds(each.address) for each in functions(image))


@needs_tools
def test_digests_do_not_depend_on_where_code_and_data_lie(tmp_path: Path) -> None:
    own, moved = library(tmp_path, "own", CODE), library(tmp_path, "moved", BEFORE + CODE)
    assert own.read_bytes() != moved.read_bytes()
    digests = function_digests(own)
    assert digests.items() <= function_digests(moved).items()
    assert function_digests(own).keys() < function_digests(moved).keys()


@needs_tools
@pytest.mark.parametrize(
    ("function", "before", "after"),
    [
        ("total", "0.25f", "0.75f"),
        ("total", "sum += ", "sum -= "),
        ("total", "i < n", "i <= n"),
        ("counted", "0, 1, 2, 3", "0, 1, 2, 4"),
    ],
    ids=["constant", "code", "jump", "lane"],
)
def test_digests_of_other_code_are_others(function: str, before: str, after: str, tmp_path: Path) -> None:
    own, other = library(tmp_path, "own", CODE), library(tmp_path, "other", CODE.replace(before, after))
    found, changed = function_digests(own), function_digests(other)
    assert {name for name in found if found[name] != changed[name]} == {function}


@needs_tools
def test_names_of_functions_do_not_matter(tmp_path: Path) -> None:
    own, other = library(tmp_path, "own", CODE), library(tmp_path, "other", CODE.replace("scaled", "multiplied"))
    found, renamed = function_digests(own), function_digests(other)
    assert found.keys() != renamed.keys()
    assert sorted(found.values()) == sorted(renamed.values())


@needs_tools
def test_jumps_name_an_instruction_of_their_function(tmp_path: Path) -> None:
    lines = instructions(library(tmp_path, "own", CODE))["total"]
    jumps = [int(line.rpartition("@")[2]) for line in lines if "@" in line and line.startswith("j")]
    assert jumps
    assert max(jumps) < len(lines)


def cubin(**kernels: bytes) -> bytes:
    """An ELF file with a section for each kernel."""
    names = ["", *(f".text.{each}" for each in kernels), ".shstrtab"]
    table = b"".join(each.encode() + b"\0" for each in names)
    contents = [b"", *kernels.values(), table]
    headers, at, offset = b"", 64, 0
    for name, content in zip(names, contents, strict=True):
        headers += struct.pack("<IIQQQQIIQQ", offset, int(bool(content)), 6, 0, at, len(content), 0, 0, 1, 0)
        at, offset = at + len(content), offset + len(name) + 1
    start = b"\x7fELF\x02\x01".ljust(40, b"\0") + struct.pack(
        "<QIHHHHHH", at, 0, 64, 0, 0, 64, len(names), len(names) - 1
    )
    return start + b"".join(contents) + headers


def test_each_kernel_of_a_cubin_has_a_digest() -> None:
    found = kernel_digests(cubin(one=b"abc", two=b"def"))
    assert found.keys() == {"one", "two"}
    assert found["one"] == kernel_digests(cubin(two=b"xyz", one=b"abc"))["one"] != found["two"]


def test_what_is_no_elf_file_is_refused() -> None:
    with pytest.raises(ValueError, match="no 64-bit ELF file"):
        sections(b"MZ" + bytes(100))


KEY = "sm_80/causal/dense/forward/bf16/usual"
CALL = "host/causal/dense/all/f32/cpu"


def taken() -> dict[str, Any]:
    kernel = {"digest": "a", "registers": 128, "spill_bytes": 0, "shared_bytes": 4096}
    host = {"python_calls": 20, "microseconds": 10.0}
    return {
        "about": {"sources": "x", "commit": "y", "nvrtc": "13.0"},
        "pieces": [KEY, CALL],
        "entries": {f"{KEY}/forward": kernel, f"{KEY}/merge": {**kernel, "digest": "b"}, f"{CALL}/call": host},
    }


def test_nothing_is_said_of_equal_files() -> None:
    new = taken()
    new["about"]["sources"] = "other"
    new["entries"][f"{CALL}/call"]["microseconds"] = 10.9
    assert compare(taken(), new) == (["2 kernels and functions of 2 programs; 0 differ"], False)


def test_what_differs_is_said() -> None:
    new = taken()
    new["entries"][f"{KEY}/forward"] = {"digest": "c", "registers": 130, "spill_bytes": 8, "shared_bytes": 2048}
    new["entries"][f"{CALL}/call"] = {"python_calls": 21, "microseconds": 11.1}
    said, differs = compare(taken(), new)
    assert differs
    assert said == [
        f"other code: {KEY}/forward",
        f"21 functions of Python, 20 before: {CALL}/call",
        f"11.1 µs of the host, 10.0 before: {CALL}/call",
        f"130 registers, 128 before: {KEY}/forward",
        f"8 bytes that spill, 0 before: {KEY}/forward",
        f"2048 bytes of shared memory, 4096 before: {KEY}/forward",
        "2 kernels and functions of 2 programs; 1 differ",
    ]


def test_slower_hosts_are_no_other_code() -> None:
    new = taken()
    new["entries"][f"{CALL}/call"]["microseconds"] = 99.0
    said, differs = compare(taken(), new)
    assert (len(said), differs) == (2, False)


def test_kernels_that_went_and_came_differ_and_those_that_were_renamed_do_not() -> None:
    new = taken()
    new["entries"][f"{KEY}/merged"] = new["entries"].pop(f"{KEY}/merge")
    assert compare(taken(), new)[1] is False
    assert f"renamed: {KEY}/merge is {KEY}/merged" in compare(taken(), new)[0]
    new["entries"][f"{KEY}/merged"]["digest"] = "d"
    said, differs = compare(taken(), new)
    assert differs
    assert {f"gone: {KEY}/merge", f"new: {KEY}/merged"} <= set(said)


def test_programs_of_one_file_are_not_compared() -> None:
    new = copy.deepcopy(taken())
    new["pieces"].remove(KEY)
    new["entries"] = {f"{CALL}/call": new["entries"][f"{CALL}/call"]}
    said, differs = compare(taken(), new)
    assert not differs
    assert "only the old file has 1 programs, which are not compared" in said


def test_the_command_compares_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    old, new = tmp_path / "old.json", tmp_path / "new.json"
    changed = taken()
    changed["entries"][f"{KEY}/forward"]["digest"] = "z"
    old.write_text(json.dumps(taken()))
    new.write_text(json.dumps(changed))
    assert main(["compare", str(old), str(old)]) == 0
    assert main(["compare", str(old), str(new)]) == 1
    assert f"other code: {KEY}/forward\n" in capsys.readouterr().out


def test_digests_of_other_sources_are_not_mixed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "taken.json"
    file.write_text(json.dumps(taken()))
    assert main(["take", str(file), "--quick"]) == 2
    assert "is of other sources" in capsys.readouterr().err


def test_the_quick_sample_covers_every_kind_of_both_sorts_of_targets(specs: Path) -> None:
    gallery = sorted(each.stem for each in specs.glob("*.attn"))
    every = pieces(gallery)
    quick = [each for each in every if each.quick]
    assert len({each.key for each in every}) == len(every)
    assert set(EIGHT) <= set(gallery)
    for target in ("sm_80", "sm_90a"):
        assert GPU_KINDS.keys() <= {each.kind for each in quick if each.target == target}
    for target in ("avx2", "avx512"):
        assert CPU_KINDS.keys() <= {each.kind for each in quick if each.target == target}
    dense = {
        (each.spec, each.name)
        for each in quick
        if (each.target, each.kind, each.element) == ("sm_90a", "dense", "bf16")
    }
    assert {(spec, name) for spec in gallery for name in ("forward", "backward")} <= dense
