"""Targets that are GPUs, on a machine without one: binaries, the manifest, what runs where, and what is missing."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import flashgen
from flashgen import targets
from flashgen.analysis.variant import analyse
from flashgen.backends import cuda_provider
from flashgen.cache import Cache
from flashgen.diagnostics import SpecError
from flashgen.emit.kernel_source import KernelSource
from flashgen.ir.spec import AttentionSpec
from flashgen.language import parse_text
from flashgen.pipeline import TARGETS, build_file, plan_file
from flashgen.plan.cuda_devices import TARGETS as GPU_TARGETS
from flashgen.plan.cuda_plan import CudaPlan
from flashgen.plan.manifest import Manifest
from flashgen.plan.plan import Rejection
from flashgen.runtime import cuda, nvrtc
from flashgen.runtime.cuda import CudaMissing
from flashgen.runtime.nvrtc import CudaBinary, NvrtcMissing, Resources
from flashgen.runtime.schedule import DeviceSize
from flashgen.targets import UnsupportedGpu, compile_variant, packaged_kernel, target_of

SPEC = "attention tiny { head_dim 16  dtype bf16  mask causal  weights relu(s) }"
SM_80 = GPU_TARGETS["sm_80"]


def has_nvrtc() -> bool:
    try:
        nvrtc.find_nvrtc()
    except NvrtcMissing:
        return False
    return True


needs_nvrtc = pytest.mark.skipif(not has_nvrtc(), reason="needs NVRTC: pip install 'flashgen[cuda13]'")


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "tiny.attn"
    path.write_text(SPEC)
    return path


@pytest.fixture
def no_cupy(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """CuPy cannot be imported."""
    for name in [name for name in sys.modules if name.partition(".")[0] in ("cupy", "cupy_backends", "cupyx")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "cupy", None)
    monkeypatch.setitem(sys.modules, "cupy_backends", None)
    nvrtc.find_nvrtc.cache_clear()
    yield
    nvrtc.find_nvrtc.cache_clear()


# -- build -------------------------------------------------------------------------------------------------------------


@needs_nvrtc
def test_build_for_a_gpu(file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    output = tmp_path / "generated"
    (built,) = build_file(file, output=output, targets=("cpu", "sm_80"))
    assert {each.name for each in built.files} == {
        "__init__.py", "tiny.attn", "spec.json", "manifest.json",
        "tiny_d16_cpu.cpp", "tiny_d16_sm_80.cu", "tiny_d16_sm_80.cubin",
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
    (binary,) = manifest.binaries
    assert binary.compiler.startswith("NVRTC ")
    assert not build_file(file, output=output, targets=("cpu", "sm_80"), check=True)[0].changed

    monkeypatch.setenv("FLASHGEN_CACHE_DIR", str(tmp_path / "another cache"))
    (other,) = build_file(file, output=tmp_path / "again", targets=("sm_80",))
    again = {each.name: each.read_bytes() for each in other.files if each.suffix in (".cu", ".cubin")}
    assert again == {name: (output / "tiny" / name).read_bytes() for name in again}

    (cpu,) = build_file(file, output=output)
    assert {each.name for each in cpu.changed} == {"manifest.json", "tiny_d16_sm_80.cu", "tiny_d16_sm_80.cubin"}
    assert not list((output / "tiny").glob("*.cu*"))


@needs_nvrtc
def test_what_a_package_brings(file: Path, tmp_path: Path) -> None:
    build_file(file, output=tmp_path, targets=("sm_80",))
    folder = tmp_path / "tiny"
    spec, manifest = parse_text(SPEC).specs[0], Manifest.read(folder)

    def brought(target: str) -> targets.GpuKernel | None:
        return packaged_kernel(folder, manifest, spec, spec.head_dims[0], GPU_TARGETS[target])

    cubin = folder / "tiny_d16_sm_80.cubin"
    found = brought("sm_80")
    assert found is not None
    assert found.binary.path.read_bytes() == cubin.read_bytes()
    assert found.plan.by_element == compile_variant(analyse(spec, spec.head_dims[0]), SM_80).plan.by_element
    assert brought("sm_87") is not None, "a later architecture of the same generation"
    assert brought("sm_86") is None, "which has less shared memory than the tiles were planned for"
    assert brought("sm_90") is None

    image = cubin.read_bytes()
    cubin.write_bytes(image[:1000])
    repaired = brought("sm_80")
    assert repaired is not None
    assert repaired.binary.path.read_bytes() == image, "compiled again"
    source = folder / "tiny_d16_sm_80.cu"
    source.write_text(source.read_text() + "// edited\n")
    edited = brought("sm_80")
    assert edited is not None
    assert edited.source.text.endswith("// edited\n")


def test_unknown_targets(file: Path, tmp_path: Path) -> None:
    with pytest.raises(SpecError) as caught:
        build_file(file, output=tmp_path, targets=("sm_8",))
    assert "sm_80" in caught.value.diagnostics[0].hints[0]
    assert {"cpu", "sm_80", "sm_86", "sm_90a", "sm_120"} <= set(TARGETS)


@pytest.mark.usefixtures("no_cupy")
def test_build_without_nvrtc(file: Path, tmp_path: Path) -> None:
    with pytest.raises(NvrtcMissing, match=r"compiled by NVRTC through CuPy, .* pip install 'flashgen\[cuda13\]'"):
        build_file(file, output=tmp_path, targets=("cpu", "sm_80"))
    assert build_file(file, output=tmp_path)[0].changed, "the CPU's needs none of it"


def test_spilling_tiles_are_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel that spills sends its tile back, with the reason; harmless spills and other kernels do not."""
    texts: list[str] = []

    def compile_cuda(source: KernelSource, target: str) -> CudaBinary:
        texts.append(source.text)
        spills = {"forward_bf16": 200 if len(texts) == 1 else 0, "backward_bf16": 40, "convert_bf16": 999}
        kernels = tuple(Resources(f"tiny_d16_{name}", 255, 0, spill, 0) for name, spill in spills.items())
        return CudaBinary(source.name, target, Path("none"), kernels, 0.0, cached=False)

    monkeypatch.setattr(targets, "compile_cuda", compile_cuda)
    spec = parse_text(SPEC).specs[0]
    kernel = compile_variant(analyse(spec, spec.head_dims[0]), SM_80)
    assert len(texts) == 2
    (lost,) = kernel.plan.rejected
    assert isinstance(lost, Rejection)
    assert lost.pass_name == "forward"
    assert "spills 200 bytes of registers" in lost.reason
    first, second = (text.partition("ForwardPlan<fg::bfloat_t> {")[2].partition("}")[0] for text in texts)
    assert first != second


# -- devices -----------------------------------------------------------------------------------------------------------


def test_plans_for_gpus(file: Path) -> None:
    (h100,), (a10,) = plan_file(file, device="h100"), plan_file(file, device="sm_86")
    assert isinstance(a10, CudaPlan)
    assert (h100.device, a10.device) == ("sm_90a", "sm_86")
    assert h100.sram_bytes == 227 * 1024
    assert all(tiles.sram_bytes <= a10.sram_bytes for tiles in a10.passes.values())
    (small,) = plan_file(file, device="a100", sram=16 * 1024)
    assert isinstance(small, CudaPlan)
    assert all(tiles.sram_bytes <= 16 * 1024 for tiles in small.passes.values())
    assert json.dumps(h100.to_json())
    with pytest.raises(SpecError) as caught:
        plan_file(file, device="h10")
    assert "h100" in caught.value.diagnostics[0].hints[0]


def test_which_target_a_gpu_gets() -> None:
    assert target_of("NVIDIA A100", 80, 163 * 1024).name == "sm_80"
    assert target_of("NVIDIA H200", 90, 227 * 1024).name == "sm_90a"
    unknown = target_of("a later one", 88, 99 * 1024)
    assert dataclasses.astuple(unknown)[:3] == ("sm_88", 88, 99 * 1024)
    with pytest.raises(UnsupportedGpu, match=r"'Tesla P100' has compute capability 6.0; the oldest .* is 7.5"):
        target_of("Tesla P100", 60, 48 * 1024)


class FakeDriver:
    """A device that finds kernels in binaries and starts none."""

    size = DeviceSize(multiprocessors=132, cache_bytes=50 << 20)

    def __init__(self, index: int) -> None:
        self.found: list[tuple[Path, str]] = []

    def function(self, path: Path, name: str, shared_bytes: int) -> int:
        assert name.encode() in path.read_bytes()
        self.found.append((path, name))
        return len(self.found)

    def stream(self) -> int:
        return 0

    def clear(self, *_: int) -> None: ...

    def launch(self, *_: int) -> None: ...

    def enter(self) -> Any:
        return contextlib.nullcontext()

    def is_current(self) -> bool:
        return True


@needs_nvrtc
def test_a_gpu_compiles_what_it_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    """The provider of CUDA tensors up to the launch: target, plan, binary, the kernels of each pass."""
    monkeypatch.setattr(cuda, "CupyDriver", FakeDriver)
    monkeypatch.setattr(cuda, "describe_device", lambda index: ("fake", 86 if index else 80, 99 * 1024))
    spec = parse_text(SPEC).specs[0]
    provider = cuda_provider(spec)
    kernel = provider(spec.head_dims[0], 0)
    assert kernel is provider(spec.head_dims[0], 0)
    assert kernel is not provider(spec.head_dims[0], 1)
    assert isinstance(kernel, cuda.CudaKernel)
    sizes = dict.fromkeys(("batch", "heads", "kv_heads", "q_len", "kv_len"), 2)
    values = kernel.layout.values(sizes | {"element": 1})
    prepared = kernel.prepare("backward", values)
    assert prepared.workspace_bytes > 0
    prepared.run(values[: kernel.layout.varying])
    driver = kernel.driver
    assert isinstance(driver, FakeDriver)
    assert [name for _, name in driver.found] == ["tiny_d16_backward_bf16", "tiny_d16_convert_bf16"]


def test_a_gpu_of_an_old_generation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda, "CupyDriver", FakeDriver)
    monkeypatch.setattr(cuda, "describe_device", lambda _: ("Tesla V100", 70, 96 * 1024))
    spec = parse_text(SPEC).specs[0]
    with pytest.raises(UnsupportedGpu, match="backend='reference' runs on any GPU"):
        cuda_provider(spec)(spec.head_dims[0], 0)
    monkeypatch.setattr(cuda, "check", lambda: None)
    monkeypatch.setattr(cuda, "current_device", lambda: 0)
    with pytest.raises(ValueError, match=r"backend 'cuda': 'Tesla V100' has compute capability 7.0; the oldest"):
        flashgen.loads(SPEC, backend="cuda")


@pytest.mark.usefixtures("no_cupy")
def test_without_cupy(monkeypatch: pytest.MonkeyPatch) -> None:
    """CUDA tensors say what to install; CPU tensors do not notice."""
    spec: AttentionSpec = parse_text(SPEC).specs[0]
    with pytest.raises(CudaMissing, match=r"CuPy, which cannot be imported .*pip install 'flashgen\[cuda1[23]\]'"):
        cuda_provider(spec)(spec.head_dims[0], 0)
    monkeypatch.setattr(cuda, "is_there", lambda: True)
    op = flashgen.loads(SPEC)
    q = torch.randn(1, 1, 5, 16, dtype=torch.bfloat16, requires_grad=True)
    assert torch.autograd.grad(op(q, q, q).sum(), q)[0].shape == q.shape
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "init", lambda: None)
    with pytest.raises(ValueError, match=r"backend 'cuda': .*CuPy, .*pip install 'flashgen\[cuda13\]'"):
        flashgen.loads(SPEC, backend="cuda")


def test_without_a_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch for CUDA on a machine whose driver is missing: its reason, without its advice over several lines."""

    def init() -> None:
        raise RuntimeError("Found no NVIDIA driver on your system.\nPlease check that you have an NVIDIA GPU")

    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "init", init)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(
        ValueError, match=r"^backend 'cuda': PyTorch finds no GPU: Found no NVIDIA driver on your sy.*$"
    ):
        flashgen.loads(SPEC, backend="cuda")
    q = torch.randn(1, 1, 5, 16, dtype=torch.bfloat16)
    assert flashgen.loads(SPEC)(q, q, q).shape == q.shape


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_without_a_gpu() -> None:
    with pytest.raises(ValueError, match=r"backend 'cuda': PyTorch .*(built without CUDA|finds no GPU)"):
        flashgen.loads(SPEC, backend="cuda")
    assert flashgen.loads(SPEC).backends == ("cpu", "reference")


def test_the_cache_holds_packaged_binaries(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLASHGEN_CACHE_DIR", str(tmp_path))
    path = targets._stored(b"binary")
    assert path.read_bytes() == b"binary"
    assert path == targets._stored(b"binary") != targets._stored(b"another")
    assert len(Cache.default().entries()) == 2
