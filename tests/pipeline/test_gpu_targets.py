"""Targets that are GPUs, on a machine without one: devices, what runs where, what is shown, and what is missing."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

import flashgen
from flashgen.analysis.variant import analyse
from flashgen.compiler.building import build_file
from flashgen.compiler.compiled import assembled, compiled
from flashgen.compiler.package.manifest import Manifest
from flashgen.compiler.pipeline import plan_file
from flashgen.diagnostics import SpecError
from flashgen.emit.kernel_source import KernelSource
from flashgen.hosts import cuda, gpu_calls
from flashgen.hosts.cuda import CudaMissing, cuda_provider
from flashgen.hosts.gpu_calls import Made, launches_of
from flashgen.hosts.gpu_provider import GpuProvider
from flashgen.hosts.kernel import ELEMENTS
from flashgen.hosts.schedule import DeviceSize
from flashgen.ir.shape import Shape
from flashgen.ir.spec import AttentionSpec
from flashgen.ir.types import ElementType
from flashgen.kinds.kind import BOTH, PassName
from flashgen.language import parse_text
from flashgen.plan.measured import Tile
from flashgen.plan.plan import ANY_CALLS, CallKind, Part
from flashgen.targets.gpu import compile as gpu_compile
from flashgen.targets.gpu.architecture import UnsupportedGpu
from flashgen.targets.gpu.family import tile_of
from flashgen.targets.gpu.tiles import GpuPlan
from flashgen.targets.registry import target_of
from flashgen.toolchains.nvrtc import CudaBinary, NvrtcMissing, Resources
from tests.cuda.helpers import kernels_in
from tests.pipeline.gpus import SM_80, SPEC, needs_nvrtc
from tests.slices import one_of

# -- devices -----------------------------------------------------------------------------------------------------------


def test_plans_for_gpus(file: Path) -> None:
    (h100,), (a10,) = plan_file(file, device="h100"), plan_file(file, device="sm_86")
    assert isinstance(h100, GpuPlan)
    assert isinstance(a10, GpuPlan)
    assert (h100.device, a10.device) == ("sm_90a", "sm_86")
    assert h100.sram_bytes == 227 * 1024
    assert all(tiles.sram_bytes <= a10.sram_bytes for tiles in a10.passes.values())
    (small,) = plan_file(file, device="a100", sram=16 * 1024)
    assert isinstance(small, GpuPlan)
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

    def entry_points(self) -> None:
        return None


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


# -- what is shown is what runs ----------------------------------------------------------------------------------------

LONG = "attention shown { head_dim 64  dtype bf16  mask causal }"


@pytest.fixture
def a100(monkeypatch: pytest.MonkeyPatch) -> None:
    """One, as far as up to the launch of a kernel."""
    monkeypatch.setattr(cuda, "CupyDriver", FakeDriver)
    monkeypatch.setattr(cuda, "describe_device", lambda _: ("NVIDIA A100", 80, 163 * 1024))
    monkeypatch.setattr(cuda, "current_device", lambda: 0)
    monkeypatch.setattr(cuda, "check", lambda: None)
    monkeypatch.setattr(cuda, "is_there", lambda: True)


@pytest.fixture
def assembler(monkeypatch: pytest.MonkeyPatch) -> list[KernelSource]:
    """NVRTC that compiles nothing: what it was asked for. Every forward kernel of 128 × 128 spills."""
    asked: list[KernelSource] = []

    def compile_cuda_parts(parts: Sequence[tuple[str, KernelSource]], target: str) -> tuple[CudaBinary, ...]:
        ((_, source),) = parts
        asked.append(source)
        name = "forward" if "_forward_" in source.name else "backward"
        tiles = source.text.partition("ForwardPlan<fg::bfloat_t> {")[2].partition("}")[0]
        spill = 300 if name == "forward" and "BR = 128, BC = 128" in tiles else 0
        kernel = Resources(f"{source.symbol}_{name}_bf16", 200, 0, spill, 0)
        return (CudaBinary(source.name, target, Path("none"), (kernel,), 0.0, cached=False),)

    monkeypatch.setattr(gpu_compile, "compile_cuda_parts", compile_cuda_parts)
    return asked


def shape(length: int) -> Shape:
    """Few heads where it is short, many where it is long."""
    heads = 8 if length < 1024 else 64
    return Shape(1, heads, heads, length, length)


def values(length: int) -> dict[str, float]:
    """The call's in bfloat16, without dropout, as ``struct Arguments`` has them."""
    sizes = shape(length)
    return {
        "batch": sizes.batch,
        "heads": sizes.heads,
        "kv_heads": sizes.kv_heads,
        "q_len": sizes.q_len,
        "kv_len": sizes.kv_len,
        "element": ELEMENTS.index(ElementType.BF16),
        "dropout_threshold": 0,
        "deterministic": 0,
    }


def of_call(provider: GpuProvider, name: PassName, values: Mapping[str, float]) -> tuple[Made[Any], tuple[str, ...]]:
    """Of the only head dimension on the first device."""
    return provider.of_call(provider.spec.head_dims[0], provider.machines(0), name, values)


def meta(length: int) -> torch.Tensor:
    return torch.empty(1, shape(length).heads, length, 64, dtype=torch.bfloat16, device="meta")


@pytest.mark.usefixtures("a100")
def test_a_call_compiles_the_plan_of_its_length(assembler: list[KernelSource]) -> None:
    """Each pass by itself, what is needed alone, and the same again for the same call."""
    spec = parse_text(LONG).specs[0]
    provider = cuda_provider(spec)
    (head_dim,) = spec.head_dims
    bf16 = ElementType.BF16

    def tile(length: int) -> Tile:
        ready, _ = of_call(provider, "forward", values(length))
        return tile_of(ready.plan.by_element[bf16], "forward")

    short = tile(512)
    assert len(assembler) == 1
    assert assembler[0].name == "shown_d64_forward_bf16_sm_80"
    long = tile(16_384)
    assert short != long
    assert tile(512) == short
    assert tile(400) == short
    count = len(assembler)
    assert tile(15_000) == long
    assert len(assembler) == count, "classes of one plan share its binary"
    pins = provider.choices(head_dim, provider.machines(0)).of_call(bf16, shape(512))
    assert pins.forward == short
    assert "by the model" in pins.reasons[0]


@pytest.mark.usefixtures("a100")
def test_a_first_call_compiles_its_own_type_alone(assembler: list[KernelSource]) -> None:
    """Of a spec with all element types, and of the two passes."""
    spec = parse_text("attention typed { head_dim 64  mask causal }").specs[0]
    (head_dim,) = spec.head_dims
    provider = cuda_provider(spec)
    assert len(compiled(analyse(spec, head_dim), SM_80).plan.elements) == 3
    for name, length in itertools.product(BOTH, (512, 16_384)):  # tiles of the model, of the planner
        del assembler[:]
        of_call(provider, name, values(length))
        assert assembler
        for source in assembler:
            assert kernels_in(source)
            assert all("_bf16" in each for each in kernels_in(source))
            assert any(each.startswith("typed_d64_forward") for each in kernels_in(source)) is (name == "forward")


@needs_nvrtc
def test_a_part_holds_the_kernels_of_its_type() -> None:
    spec = parse_text("attention typed { head_dim 16  mask causal }").specs[0]
    variant = analyse(spec, spec.head_dims[0])
    for name in BOTH:
        (made,) = assembled([compiled(variant, SM_80, part=Part(ElementType.BF16, name))], CallKind())
        assert made.binary.kernels
        assert all(each.name.partition("_bf16")[1] for each in made.binary.kernels)


@pytest.mark.usefixtures("a100", "assembler")
def test_an_op_shows_what_its_gpu_runs() -> None:
    """Registers and all, for the current GPU; explain for a call, whose length may choose another plan."""
    op = flashgen.loads(LONG)
    (head_dim,) = op.spec.head_dims
    plan = op.plan[head_dim]
    assert isinstance(plan, GpuPlan)
    assert plan.target == "sm_80"
    forward = plan.by_element[ElementType.BF16].forward
    own = compiled(analyse(op.spec, head_dim), SM_80).plan
    assert isinstance(own, GpuPlan)
    spilling = own.by_element[ElementType.BF16].forward
    assert (spilling.Br, spilling.Bc) == (128, 128)
    assert forward != spilling
    assert any("spills 300 bytes" in lost.reason for lost in plan.rejected)
    assert all("__global__" in source.text for source in op.sources)
    assert any(f"{forward.Br}" in source.text for source in op.sources)

    long, short = (op.explain(meta(n), meta(n), meta(n)) for n in (16_384, 512))
    assert (long.backend, long.device, long.target) == ("cuda", "NVIDIA A100", "sm_80")
    assert (long.forward.Br, long.forward.Bc) == (forward.Br, forward.Bc)
    assert (short.forward.Br, short.forward.Bc) != (forward.Br, forward.Bc)
    assert short.forward.kernels[0].registers == 200
    assert short.forward.kernels[0].blocks == 8 * -(-512 // short.forward.Br)
    assert any("by the model" in reason for reason in short.reasons)
    assert any("spills 300 bytes" in lost.reason for lost in long.rejected)
    on_cpu = torch.zeros(1, 2, 64, 64, dtype=torch.bfloat16)
    assert op.explain(on_cpu, on_cpu, on_cpu).backend == "cpu"


@pytest.mark.usefixtures("a100")
def test_a_package_runs_from_text(assembler: list[KernelSource], tmp_path: Path) -> None:
    """Its text where a call takes the tiles that it has; other tiles from the spec; an edited text for every call."""
    file = tmp_path / "shown.attn"
    file.write_text(LONG)
    build_file(file, output=tmp_path)
    folder = tmp_path / "shown"
    spec = parse_text(LONG).specs[0]
    file = folder / "shown_d64_backward_bf16_sm_80.cu"
    text = file.read_text()

    def run(length: int) -> str:
        provider = cuda_provider(spec, (folder, Manifest.read(folder)))
        ready, _ = of_call(provider, "backward", values(length))
        return ready.source.text

    assert run(16_384) == text
    assert assembler[-1].text == text
    assert dict(assembler[-1].defines) == {
        "FLASHGEN_WITH_DROPOUT": "0",
        "FLASHGEN_REPEATABLE": "0",
    }
    provider = cuda_provider(spec, (folder, Manifest.read(folder)))
    ready, _ = of_call(provider, "forward", values(512))
    assert ready.source.text != text
    file.write_text(text + "// edited\n")
    for length in (512, 16_384):
        assert run(length).endswith("// edited\n")
    provider = cuda_provider(spec, (folder, Manifest.read(folder)))
    _, reasons = of_call(provider, "backward", values(512))
    assert "was edited, and runs as it stands" in reasons[0]
    ready, _ = of_call(provider, "forward", values(16_384))
    assert ready.source.text == (folder / "shown_d64_forward_bf16_sm_80.cu").read_text()


@needs_nvrtc
@pytest.mark.usefixtures("a100")
def test_a_deterministic_call_of_a_package_without_nvrtc(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a package has no binary for is compiled; where that cannot be, it is said how to build one."""
    file = tmp_path / "shown.attn"
    file.write_text(LONG)
    (built,) = build_file(file, output=tmp_path, targets=("sm_80",))
    spec = parse_text(LONG).specs[0]

    def compile_cuda_parts(*_: object) -> tuple[CudaBinary, ...]:
        raise NvrtcMissing("no NVRTC")

    monkeypatch.setattr(gpu_compile, "compile_cuda_parts", compile_cuda_parts)
    provider = cuda_provider(spec, (built.folder, Manifest.read(built.folder)))
    usual, repeated = values(16_384), values(16_384) | {"deterministic": 1}
    ready, _ = of_call(provider, "backward", usual)
    assert b"shown_d64_backward_bf16" in ready.binary(frozenset()).read_bytes()
    assert of_call(provider, "forward", repeated)
    with pytest.raises(NvrtcMissing, match=r"no NVRTC; the package has no binary for deterministic .* --deterministic"):
        of_call(provider, "backward", repeated)


@needs_nvrtc
@pytest.mark.parametrize(
    ("name", "dropout", "deterministic", "of_any"),
    one_of(8, itertools.product(reversed(BOTH), (1, 0), (1, 0), (False, True))),
)
def test_parts_hold_the_kernels_of_their_pass(name: PassName, dropout: int, deterministic: int, of_any: bool) -> None:
    """Every launch of a pass is found in what is compiled of it alone."""
    text = (
        "attention parts { head_dim 16  dtype bf16  param w: f32 grad  score s * w  mask dilated(8, 2)  dropout 0.1 }"
    )
    spec = parse_text(text).specs[0]
    variant = analyse(spec, spec.head_dims[0])
    values = {"dropout_threshold": dropout, "deterministic": deterministic, "grad_w": 1}
    calls = ANY_CALLS if of_any else gpu_calls.kind_of(name, values)
    (made,) = assembled([compiled(variant, SM_80, part=Part(ElementType.BF16, name))], calls)
    content = b"".join(each.path.read_bytes() for each in made.binary.parts.values())
    plan = made.kernel.plan
    assert isinstance(plan, GpuPlan)
    launches = launches_of(plan, name, values)
    for kernel in launches.kernels:
        assert kernel.encode() in content


@needs_nvrtc
@pytest.mark.parametrize(
    ("body", "kernels"),
    [
        ("", {"backward_bf16"}),
        ("dropout 0.1", {"backward_bf16"}),
        ("score s - 0.01 * sqdist", {"keys_bf16", "queries_bf16"}),
        ("param w: f32 grad  score s * w", {"backward_bf16"}),
        ("tensor t: f32[Nq] grad  score s + t[i]", {"keys_bf16", "queries_bf16"}),
    ],
)
def test_the_usual_calls_compile_no_other_kernels(body: str, kernels: set[str]) -> None:
    """A first call waits for what it starts: not for kernels with dropout, nor for those that repeat."""
    spec = parse_text(f"attention usual {{ head_dim 16  dtype bf16  {body} }}").specs[0]
    variant = analyse(spec, spec.head_dims[0])
    (made,) = assembled([compiled(variant, SM_80, part=Part(ElementType.BF16, "backward"))], CallKind())
    prefix = f"{made.kernel.source.symbol}_"
    found = {each.name.removeprefix(prefix) for each in made.binary.kernels}
    assert {each for each in found if each.startswith(("backward", "keys", "queries"))} == kernels
