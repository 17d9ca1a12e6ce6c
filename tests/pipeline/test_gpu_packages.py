"""Packages for GPUs, on a machine without one: binaries, the manifest, what an opened package brings."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from flashgen.analysis.variant import analyse
from flashgen.compiler.building import build_file
from flashgen.compiler.compiled import assembled, compiled
from flashgen.compiler.package import manifest as packages
from flashgen.compiler.package.folder import FolderRefused
from flashgen.compiler.package.manifest import Manifest, Packaged, edited_sources, packaged
from flashgen.compiler.pipeline import target_names
from flashgen.diagnostics import SpecError
from flashgen.emit.kernel_source import KernelSource
from flashgen.hosts import gpu_calls
from flashgen.hosts.gpu_calls import launches_of
from flashgen.ir.spec import AttentionSpec, HeadDim
from flashgen.ir.types import ElementType
from flashgen.kinds.kind import PassName
from flashgen.language import parse_text
from flashgen.plan.plan import ANY_CALLS, CallKind, Part, Rejection
from flashgen.store.cache import Cache
from flashgen.targets.gpu import compile as gpu_compile
from flashgen.targets.gpu.tiles import GpuPlan
from flashgen.targets.registry import GPUS as GPU_TARGETS
from flashgen.toolchains import nvrtc
from flashgen.toolchains.cpp import CompileFailed
from flashgen.toolchains.nvrtc import CudaBinary, Resources
from tests.pipeline.gpus import CUBINS, SM_80, SOURCES, SPEC, needs_nvrtc

Parts = list[tuple[str, KernelSource]]


@needs_nvrtc
def test_build_for_a_gpu(file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    output = tmp_path / "generated"
    (built,) = build_file(file, output=output, targets=("cpu", "sm_80"))
    assert {each.name for each in built.files if each.parent == built.folder} == {
        "__init__.py", "tiny.attn", "spec.json", "manifest.json",
        "tiny_d16_cpu.cpp", "tiny_d16_cpu.so", *SOURCES, *CUBINS,
    }  # fmt: skip
    content = json.loads((output / "tiny" / "manifest.json").read_text())
    kernels = [entry for entry in content["kernels"] if entry["target"] == "sm_80"]
    assert {"tiny_d16_forward_bf16", "tiny_d16_backward_bf16"} <= {entry["name"] for entry in kernels}
    for entry in kernels:
        assert 0 < entry["registers"] <= 255
        assert entry["spill_bytes"] == 0
        assert entry["shared_bytes"] <= SM_80.block_bytes
    manifest = Manifest.read(output / "tiny")
    assert manifest.to_json() == (output / "tiny" / "manifest.json").read_text()
    library, *binaries = manifest.binaries
    assert library.file == "tiny_d16_cpu.so"
    assert {each.file for each in binaries} == CUBINS
    assert all(each.compiler.startswith("NVRTC ") for each in binaries)
    assert not build_file(file, output=output, targets=("cpu", "sm_80"), check=True)[0].changed

    monkeypatch.setenv("FLASHGEN_CACHE_DIR", str(tmp_path / "another cache"))
    (other,) = build_file(file, output=tmp_path / "again", targets=("sm_80",))
    again = {each.name: each.read_bytes() for each in other.files if each.suffix in (".cu", ".cubin")}
    assert again == {name: (output / "tiny" / name).read_bytes() for name in again}

    (cpu,) = build_file(file, output=output, targets=("cpu",))
    assert {each.name for each in cpu.changed if each.suffix not in (".cuh", ".h")} == {
        "manifest.json", *SOURCES, *CUBINS,
    }  # fmt: skip
    assert not list((output / "tiny").glob("*.cu*"))
    assert not list((output / "tiny").rglob("*.cuh"))


@pytest.fixture
def parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Parts:
    """What two processes compile into an empty cache."""
    monkeypatch.setenv("FLASHGEN_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(nvrtc, "available_cores", lambda: 2)
    texts = {name: f'extern "C" __global__ void {name}(float* x) {{ *x = 1; }}' for name in ("one", "two", "three")}
    head_dim = HeadDim(16, 16)
    return [(name, KernelSource(f"{name}.cu", "sm_80", name, head_dim, text, ())) for name, text in texts.items()]


@needs_nvrtc
def test_parts_are_compiled_side_by_side(parts: Parts, monkeypatch: pytest.MonkeyPatch) -> None:
    """A helper fills the cache: here all of it, as this process takes nothing."""
    monkeypatch.setattr(nvrtc, "_take_parts", lambda *_: None)
    made = nvrtc.compile_cuda_parts(parts, "sm_80")
    assert [each.kernels[0].name for each in made] == ["one", "two", "three"]
    assert all(each.cached for each in made)


@needs_nvrtc
def test_parts_are_compiled_without_helpers(parts: Parts, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where no process can be started, or helpers would store in folders of their own, this one does it."""

    def popen(*_: object, **__: object) -> None:
        raise BlockingIOError("no more processes")

    monkeypatch.setattr("flashgen.toolchains.nvrtc.subprocess.Popen", popen)
    assert len(nvrtc.compile_cuda_parts(parts[:2], "sm_80")) == 2
    monkeypatch.setattr(nvrtc, "_fill_cache", popen)
    monkeypatch.setattr(Cache, "hindrance", lambda _: "read-only file system")
    assert len(nvrtc.compile_cuda_parts(parts, "sm_80")) == 3


@needs_nvrtc
def test_a_part_that_does_not_compile(parts: Parts, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is said once, by this process, whoever met it; what has not begun does not begin."""
    one, two, three = parts
    broken = [("two", dataclasses.replace(two[1], text="void")), one, three]
    with pytest.raises(CompileFailed, match="NVRTC could not compile 'two' for -arch=sm_80"):
        nvrtc.compile_cuda_parts(broken, "sm_80")
    monkeypatch.setattr(nvrtc, "_take_parts", lambda *_: None)
    with pytest.raises(CompileFailed, match="NVRTC could not compile 'two' for -arch=sm_80"):
        nvrtc.compile_cuda_parts(broken, "sm_80")
    assert not nvrtc.is_compiled(three[1], "sm_80")


@needs_nvrtc
def test_what_a_package_brings(file: Path, tmp_path: Path) -> None:
    build_file(file, output=tmp_path, targets=("sm_80",))
    folder = tmp_path / "tiny"
    spec, manifest = parse_text(SPEC).specs[0], Manifest.read(folder)

    usual_plan = compiled_plan(spec)

    def brought(target: str, name: PassName = "forward") -> Packaged | None:
        return packaged(folder, manifest, usual_plan, GPU_TARGETS[target]).get((ElementType.BF16, name))

    cubin = folder / "tiny_d16_forward_bf16_sm_80.cubin"
    found, backward = brought("sm_80"), brought("sm_80", "backward")
    assert found is not None
    assert backward is not None
    assert found.images[ANY_CALLS].read_bytes() == cubin.read_bytes()
    assert found.plan.own == usual_plan.by_element[ElementType.BF16]
    assert found.plan.recipe == usual_plan.recipe
    assert {each.name for each in found.resources} >= {"tiny_d16_forward_bf16"}
    assert backward.image(CallKind(repeatable=False)) == backward.images[CallKind(None, False, None)]
    assert backward.image(CallKind(repeatable=True)) is None
    assert brought("sm_87") is not None, "a later architecture of the same generation"
    assert brought("sm_86") is None, "which has less shared memory than the tiles were planned for"
    assert brought("sm_90") is None

    image = cubin.read_bytes()
    cubin.write_bytes(image[:1000])
    damaged = brought("sm_80")
    assert damaged is not None
    assert not damaged.images, "the source is compiled again"
    assert not damaged.edited
    assert brought("sm_80", "backward") == backward
    cubin.write_bytes(image)
    source = folder / "tiny_d16_forward_bf16_sm_80.cu"
    source.write_text(source.read_text() + "// edited\n")
    edited = brought("sm_80")
    assert edited is not None
    assert edited.edited == source.name
    assert not edited.images, "the binary is of another source"
    assert edited.source.text.endswith("// edited\n")


@needs_nvrtc
def test_a_header_that_was_edited_runs_as_it_stands(file: Path, tmp_path: Path) -> None:
    """A package compiles with the headers that it ships: what is changed in one is compiled, and is part of the op."""
    build_file(file, output=tmp_path, targets=("sm_80",))
    folder = tmp_path / "tiny"
    spec, manifest = parse_text(SPEC).specs[0], Manifest.read(folder)
    header = folder / "include" / "flashgen" / "math.cuh"
    assert not edited_sources(folder, manifest)
    header.write_text(header.read_text() + "#error edited\n")
    found = packaged(folder, manifest, compiled_plan(spec), SM_80)[ElementType.BF16, "forward"]
    assert found.edited == "include/flashgen/math.cuh"
    assert not found.images
    edited, *_ = edited_sources(folder, manifest)
    assert "#error edited" in edited.whole
    assert "#error" not in edited.text
    with pytest.raises(CompileFailed, match=r"flashgen/math.cuh\(\d+\): .*#error directive: edited"):
        gpu_compile.compile_calls([found.source], ANY_CALLS, "sm_80")
    with pytest.raises(FolderRefused, match=r"'include/flashgen/math.cuh' was edited"):
        build_file(file, output=tmp_path, targets=("sm_80",))
    header.unlink()
    assert not edited_sources(folder, manifest), "flashgen has it as it was"
    build_file(file, output=tmp_path, targets=("sm_80",))
    assert header.is_file()
    header.unlink()
    other = dataclasses.replace(manifest, files={**manifest.files, "include/flashgen/math.cuh": "00"})
    with pytest.raises(FileNotFoundError):
        edited_sources(folder, other)


@needs_nvrtc
def test_a_package_has_what_it_says_of_deterministic_calls(file: Path, tmp_path: Path) -> None:
    """By default binaries hold what usual calls start, and the manifest says so; asked for, also what the others do."""
    plan = compiled_plan(parse_text(SPEC).specs[0])
    values = {"dropout_threshold": 0, "deterministic": 1}
    for asked in (False, True):
        (built,) = build_file(file, output=tmp_path, targets=("sm_80",), deterministic=asked)
        assert bool(built.left) is not asked
        assert all("`flashgen build --deterministic` makes them now" in each for each in built.left)
        manifest = Manifest.read(built.folder)
        found = packaged(built.folder, manifest, plan, SM_80)[ElementType.BF16, "backward"]
        for repeatable in (False, True):
            values["deterministic"] = repeatable
            kind = gpu_calls.kind_of("backward", values)
            image = found.image(kind)
            assert (image is None) is (repeatable and not asked)
            launches = launches_of(found.plan, "backward", values)
            started = set(launches.kernels)
            assert image is None or all(each.encode() in image.read_bytes() for each in started)
            said = {each.name for each in manifest.gpu_kernels}
            assert (started <= said) is (image is not None)
        kinds = [each.deterministic for each in manifest.binaries if "_backward_" in each.source]
        assert set(kinds) == ({False, True} if asked else {False})
        assert not build_file(file, output=tmp_path, targets=("sm_80",), deterministic=asked, check=True)[0].changed


def compiled_plan(spec: AttentionSpec) -> GpuPlan:
    plan = compiled(analyse(spec, spec.head_dims[0]), SM_80).plan
    assert isinstance(plan, GpuPlan)
    return plan


def test_unknown_targets(file: Path, tmp_path: Path) -> None:
    with pytest.raises(SpecError) as caught:
        build_file(file, output=tmp_path, targets=("sm_8",))
    assert "sm_80" in caught.value.diagnostics[0].hints[0]
    assert {"cpu", "sm_80", "sm_86", "sm_90a", "sm_120"} <= set(target_names())


@pytest.mark.usefixtures("no_cupy")
def test_build_without_nvrtc(file: Path, tmp_path: Path) -> None:
    """Texts all the same, and what was left out."""
    (built,) = build_file(file, output=tmp_path, targets=("cpu", "sm_80"))
    assert {each.suffix for each in built.files} >= {".cpp", ".cu"}
    assert not [each for each in built.files if each.suffix == ".cubin"]
    (left,) = built.left
    assert "compiled by NVRTC through CuPy" in left
    assert "pip install 'flashgen[cuda13]'" in left


@pytest.mark.usefixtures("no_cupy")
def test_both_sources_by_default(file: Path, tmp_path: Path) -> None:
    """C++ and CUDA for two architectures, without NVRTC; and checking asks for none."""
    (built,) = build_file(file, output=tmp_path)
    sources = {each.name for each in built.files if each.suffix in (".cpp", ".cu", ".cubin")}
    assert sources == {"tiny_d16_cpu.cpp", *SOURCES, *(each.replace("sm_80", "sm_90a") for each in SOURCES)}
    (left,) = built.left
    assert "`flashgen build --target cpu,sm_80,sm_90a` makes them now" in left
    manifest = Manifest.read(tmp_path / "tiny")
    assert [each.target for each in manifest.gpu_sources] == ["sm_80"] * 2 + ["sm_90a"] * 2
    assert manifest.binaries == ()
    assert not build_file(file, output=tmp_path, check=True)[0].changed
    text = tmp_path / "tiny" / "tiny_d16_forward_bf16_sm_90a.cu"
    text.write_text(text.read_text().replace("causal", "none"))
    assert [each.name for each in build_file(file, output=tmp_path, check=True)[0].changed] == [text.name]


def test_a_target_that_nobody_named_is_left_out_where_it_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "uneven.attn"
    path.write_text("attention uneven { head_dim 160/72  mask causal }")
    (built,) = build_file(path, output=tmp_path)
    assert not [each for each in built.files if each.suffix == ".cu"]
    assert any("'uneven' for sm_90a" in left and "72" in left for left in built.left)
    with pytest.raises(SpecError, match="cannot divide head dimension 160/72"):
        build_file(path, output=tmp_path, targets=("sm_90a",))


def test_spilling_tiles_are_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel that spills sends its tile back, with the reason; harmless spills and other kernels do not."""
    texts: list[str] = []

    def compile_cuda_parts(parts: Parts, target: str) -> tuple[CudaBinary, ...]:
        texts.append(parts[0][1].text)
        spills = {"forward_bf16": 200 if len(texts) == 1 else 0, "backward_bf16": 40, "convert_bf16": 999}
        kernels = tuple(Resources(f"tiny_d16_{name}", 255, 0, spill, 0) for name, spill in spills.items())
        return tuple(CudaBinary(each.name, target, Path("none"), kernels, 0.0, cached=False) for _, each in parts)

    monkeypatch.setattr(gpu_compile, "compile_cuda_parts", compile_cuda_parts)
    spec = parse_text(SPEC).specs[0]
    own = compiled(analyse(spec, spec.head_dims[0]), SM_80, part=Part(ElementType.BF16, "forward"))
    (made,) = assembled([own])
    assert len(texts) == 2
    (lost,) = made.kernel.plan.rejected
    assert isinstance(lost, Rejection)
    assert lost.pass_name == "forward"
    assert "spills 200 bytes of registers" in lost.reason
    first, second = (text.partition("ForwardPlan<fg::bfloat_t> {")[2].partition("}")[0] for text in texts)
    assert first != second


def test_the_cache_holds_packaged_binaries(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLASHGEN_CACHE_DIR", str(tmp_path))
    path = packages._stored(b"binary")
    assert path.read_bytes() == b"binary"
    assert path == packages._stored(b"binary") != packages._stored(b"another")
    assert len(Cache.default().entries()) == 2
