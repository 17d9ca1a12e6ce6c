"""Kernels for the kinds of CPU that others have: made as ``CXX`` asks, against the reference in float64."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

import flashgen
from flashgen.analysis.variant import analyse
from flashgen.hosts import cpu_backend
from flashgen.hosts.cpu_backend import Find
from flashgen.ir.shape import Shape
from flashgen.ir.types import ElementType
from flashgen.language import parse_text
from flashgen.op.op import AttentionOp
from flashgen.plan.arguments import argument_fields
from flashgen.targets.cpu.device import GENERIC_CPU
from flashgen.targets.cpu.emit import emit_cpu
from flashgen.targets.cpu.plan import plan_cpu
from flashgen.toolchains.cpp import Compiler, compile_sources, find_compiler
from flashgen.verification import fitting
from flashgen.verification.verify import verify_case
from tests.cpu_kinds import remote
from tests.cpu_kinds.kinds import (
    ARRAYS,
    COMPILERS,
    CROSS_COMPILER,
    EMULATOR,
    KINDS,
    PAIRS,
    Kind,
    cross_tools_missing,
    has_compiler,
    kind,
)
from tests.numeric.helpers import failures
from tests.numeric.test_matrix_products import SPECS

SHAPES = (Shape(1, 2, 2, 1, 1), Shape(2, 4, 2, 45, 77), Shape(1, 2, 1, 203, 203))
SLICE = ("captured", "blocks")  # of the specs
ALL_CALLS = "-DFLASHGEN_FEWEST_ROWS=1"  # take matrix registers, however few rows they have
EVERYWHERE = [(each, by) for each in KINDS for by in COMPILERS]
IN_SLICE = [(kind("sse2"), "g++"), (kind("avx2"), "clang++")] if len(KINDS) > 1 else [(KINDS[0], "g++")]


def slow(each: tuple[Kind, str], *, is_quick: bool, name: str = "") -> object:
    marks = () if is_quick else (pytest.mark.slow,)
    return pytest.param(*each, *((name,) if name else ()), marks=marks, id="-".join((each[0].name, each[1], name)))


def judge(op: AttentionOp, shapes: Sequence[Shape] = SHAPES) -> None:
    for element in (ElementType.F32, ElementType.BF16, ElementType.F16):
        for seed, shape in enumerate(shapes):
            case = verify_case(op, op.spec.head_dims[0], element, fitting(op.spec, shape), seed=seed)
            assert case.ok, failures(case)


def needs(imitated: Kind, compiler: str) -> None:
    if not has_compiler(compiler):
        pytest.skip(f"{compiler} is not installed")
    if not imitated.runs_here():
        pytest.skip(f"this CPU cannot run what is made for {imitated.name}; it is compiled only")


@pytest.mark.parametrize(
    ("imitated", "compiler", "name"),
    [slow(each, is_quick=each in IN_SLICE and name in SLICE, name=name) for each in EVERYWHERE for name in SPECS],
)
def test_each_kind(imitated: Kind, compiler: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    needs(imitated, compiler)
    monkeypatch.setenv("CXX", " ".join((compiler, *imitated.flags)))
    judge(flashgen.loads(f"attention {name}_on_{imitated.name} {{ {SPECS[name]} }}"))


@pytest.mark.slow
@pytest.mark.parametrize("instructions", ["arrays", "pairs"])
@pytest.mark.parametrize(("imitated", "compiler"), [slow(each, is_quick=True) for each in EVERYWHERE])
def test_what_stands_for_instructions(
    imitated: Kind, compiler: str, instructions: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    needs(imitated, compiler)
    flags = (ARRAYS, ALL_CALLS) if instructions == "arrays" else (PAIRS,)
    monkeypatch.setenv("CXX", " ".join((compiler, *imitated.flags, *flags, "-Wno-psabi")))
    judge(flashgen.loads(f"attention {instructions}_on_{imitated.name} {{ {SPECS['captured']} }}"))


@pytest.mark.parametrize(
    ("imitated", "compiler"),
    [
        slow(each, is_quick=each[1] == "g++" and each[0].name == "avx512")
        for each in EVERYWHERE
        if not each[0].runs_here()
    ],
)
def test_what_cannot_run_here_compiles(imitated: Kind, compiler: str) -> None:
    if not has_compiler(compiler):
        pytest.skip(f"{compiler} is not installed")
    spec = parse_text(f"attention a {{ {SPECS['captured']} }}").specs[0]
    variant = analyse(spec, spec.head_dims[0])
    found = find_compiler_named(compiler)
    made = Compiler((*found.command, *imitated.flags), found.version)
    (binary,) = compile_sources([emit_cpu(variant, plan_cpu(variant, GENERIC_CPU))], compiler=made)
    assert imitated.flags[0] in (binary.path.parent / "compile.log").read_text()


def find_compiler_named(name: str) -> Compiler:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CXX", name)
        return find_compiler()


@pytest.fixture(scope="module")
def caller(tmp_path_factory: pytest.TempPathFactory) -> Path:
    missing = cross_tools_missing()
    if missing:
        pytest.skip(missing)
    return remote.build_main([CROSS_COMPILER], tmp_path_factory.mktemp("caller"))


@pytest.mark.parametrize(
    ("name", "flags"),
    [
        *(pytest.param(name, "", marks=() if name in SLICE else pytest.mark.slow) for name in SPECS),
        pytest.param("captured", f"{ARRAYS} {ALL_CALLS} -Wno-psabi", marks=pytest.mark.slow, id="arrays"),
        pytest.param("captured", f"{PAIRS} -Wno-psabi", marks=pytest.mark.slow, id="pairs"),
    ],
)
def test_arm64(name: str, flags: str, caller: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whole kernels in a process that is emulated; memory behind their tensors cannot be touched."""
    text = f"attention {name}_on_arm {{ {SPECS[name]} }}"
    (spec,) = parse_text(text).specs
    (head_dim,) = spec.head_dims

    def functions_of(path: Path, symbol: str, _names: Sequence[str] = ()) -> Find:
        process = remote.RemoteProcess(EMULATOR, caller, path)
        return remote.remote_functions(process, symbol, argument_fields(spec), head_dim)

    monkeypatch.setenv("CXX", f"{CROSS_COMPILER} -march=armv8-a {flags}")
    monkeypatch.setattr(cpu_backend, "functions_of", functions_of)
    judge(flashgen.loads(text))
