"""``op.explain``: what runs for a call, compared with what ran."""

from __future__ import annotations

import json
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import flashgen
from flashgen.analysis.variant import analyse
from flashgen.hosts.emulated import SIZE, EmulatorMachine, recording
from flashgen.hosts.gpu_provider import GpuProvider
from flashgen.hosts.kernel import ELEMENTS
from flashgen.ir.shape import Shape
from flashgen.ir.types import ElementType
from flashgen.kinds.ragged import RAGGED
from flashgen.op.loading import load_spec
from flashgen.plan.explanation import Explanation
from flashgen.plan.measured import ShapeClass
from flashgen.targets.cpu.device import local_cpu
from flashgen.targets.device_table import product_of
from flashgen.targets.gpu.family import rivals, typical
from flashgen.targets.gpu.tiles import GpuPlan
from flashgen.targets.registry import GPUS
from flashgen.verification.verify import verify_case
from tests.numeric.helpers import failures
from tests.slices import one_of

CAUSAL = "attention explained { head_dim 16  mask causal }"
# What the emulator counts beside it: lists that are made, and reads of captured tensors.
OPERANDS = ("q", "k", "v", "o", "lse", "d_o", "dq", "dk", "dv", "workspace.delta", "workspace.dq")


class CallsAsTheyAre(EmulatorMachine):
    """It takes the tiles that a GPU takes for a call."""

    def shape_of(self, shape: Shape | None) -> Shape | None:
        return shape


def qkv(length: int, *, heads: int = 2, dtype: torch.dtype = torch.float32, d: int = 16) -> list[Tensor]:
    generator = torch.Generator().manual_seed(length)
    return [torch.randn(1, heads, length, d, generator=generator).to(dtype).requires_grad_() for _ in range(3)]


def test_a_call_on_the_cpu() -> None:
    op = flashgen.loads(CAUSAL, backend="cpu")
    found = op.explain(*qkv(300))
    tiles = op.plan[op.spec.head_dims[0]]
    assert isinstance(found, Explanation)
    assert (found.backend, found.target, found.element, found.shape) == ("cpu", "cpu", "f32", Shape(1, 2, 2, 300, 300))
    used = tiles.of_call(local_cpu(), ElementType.F32, found.shape)["forward"][1]
    assert (found.forward.Br, found.forward.Bc) == (used.Br, used.Bc)
    assert "vectors" in found.forward.multiplies or "matrix registers" in found.forward.multiplies
    assert found.forward.kernels[0].threads == torch.get_num_threads()
    assert found.forward.seconds is not None
    assert found.backward.seconds is not None
    assert 0 < found.forward.seconds < found.backward.seconds
    assert found.reasons
    data = json.loads(json.dumps(found.to_json()))
    assert data["passes"][0]["Br"] == found.forward.Br
    assert "forward: B_r × B_c =" in str(found)
    assert "why" in str(found)


def test_nothing_is_run_and_nothing_is_needed_but_sizes() -> None:
    op = flashgen.loads(CAUSAL, backend="cpu")
    real = op.explain(*qkv(300))
    assert op.explain(*(torch.empty(1, 2, 300, 16, device="meta") for _ in range(3))) == real
    with FakeTensorMode():
        fake = [torch.empty(1, 2, 300, 16) for _ in range(3)]
    assert op.explain(*fake) == real
    huge = op.explain(*(torch.empty(64, 32, 1 << 20, 16, device="meta") for _ in range(3)))
    assert huge.forward.hbm_bytes is not None
    assert huge.forward.hbm_bytes > 2**40


def test_wrong_arguments_are_refused_as_in_a_call() -> None:
    op = flashgen.loads(CAUSAL, backend="cpu")
    q, k, v = qkv(20)
    with pytest.raises(ValueError, match="'k' has shape"):
        op.explain(q, k[..., :8], v)
    with pytest.raises(TypeError, match="slope"):
        op.explain(q, k, v, slope=1.0)
    with pytest.raises(ValueError, match="has no dropout"):
        op.explain(q, k, v, dropout_p=0.5)


def test_where_no_kernel_runs() -> None:
    reference = flashgen.loads(CAUSAL, backend="reference")
    found = reference.explain(*qkv(20))
    assert (found.backend, found.passes) == ("reference", ())
    assert "dense formula" in found.reasons[0]
    with pytest.raises(LookupError, match="dense formula"):
        _ = found.forward
    assert reference.plan == {}
    assert reference.sources == ()
    empty = flashgen.loads(CAUSAL, backend="cpu").explain(*qkv(0))
    assert "no pair" in empty.reasons[0]


SPECS: dict[str, tuple[str, dict[str, int], dict[str, float]]] = {
    "causal": ("head_dim 16  mask causal", {}, {}),
    "offsets": ("head_dim 16  mask causal", {"q_start": 64, "kv_start": 16, "q_total": 200, "kv_total": 200}, {}),
    "param": ("head_dim 16  param w: i32  mask window(w)", {}, {"w": 9}),
    "learned": ("head_dim 16  param w: f32 grad  score s - w * abs(i - j)  mask window(20)", {}, {"w": 0.1}),
    "pointwise": ("head_dim 16  weights relu(s)", {}, {}),
    "dropout": ("head_dim 16  dropout 0.2  mask causal", {}, {}),
}


@pytest.mark.parametrize(("name", "target"), one_of(2, product(SPECS, ["sm_75", "sm_80", "sm_90a"])))
def test_what_is_explained_is_what_the_emulator_ran(name: str, target: str) -> None:
    """Kernels by name and bytes as counted, for the offsets and params of the call."""
    text, offsets, named = SPECS[name]
    op = flashgen.loads(f"attention e_{name} {{ dtype bf16  {text} }}", backend="emulator", target=target)
    inputs = qkv(70, dtype=torch.bfloat16)
    q, k, v = inputs
    arguments: dict[str, Any] = {**offsets, **named}
    found = op.explain(q, k, v, **arguments)
    if "dropout" in text:
        arguments["seed"] = 3
    with recording() as counted:
        o = op(q, k, v, **arguments)
        torch.autograd.grad(o.sum(), inputs)
    assert found.target == target
    plan = op.plan[op.spec.head_dims[0]]
    assert isinstance(plan, GpuPlan)
    for each, ran in zip(found.passes, counted, strict=True):
        assert each.name == ran.name
        assert each.kernels
        assert all(any(kernel.name in source.text for source in op.sources) for kernel in each.kernels)
        assert any("dropout" in kernel.name for kernel in each.kernels) is (name == "dropout")
        tiles = plan.by_element[ElementType.BF16]
        tile = tiles.forward if each.name == "forward" else tiles.backward
        assert (each.Br, each.Bc, each.warps, each.stages) == (tile.Br, tile.Bc, tile.warps, tile.stages)
        moved = sum(ran.report.traffic[buffer].total for buffer in OPERANDS if buffer in ran.report.traffic)
        assert each.hbm_bytes == moved
        assert not each.at_most


def test_masks_over_captured_tensors_are_bounds() -> None:
    text = "attention e_documents { head_dim 16 dtype bf16 tensor d: i32[Nq] mask d[i] == d[j] }"
    op = flashgen.loads(text, backend="emulator")
    found = op.explain(*qkv(70, dtype=torch.bfloat16), d=torch.zeros(70, dtype=torch.int32))
    assert found.forward.at_most
    assert "at most" in str(found)


def test_deterministic_backward_passes() -> None:
    """Other kernels, of which nothing is predicted, and that is said."""
    text = "attention e_exact { head_dim 16 dtype bf16 param w: f32 grad score s - w * abs(i - j) }"
    op = flashgen.loads(text, backend="emulator")
    inputs = qkv(40, dtype=torch.bfloat16)
    plain, exact = op.explain(*inputs, w=0.1), op.explain(*inputs, w=0.1, deterministic=True)
    assert [each.name for each in plain.backward.kernels] != [each.name for each in exact.backward.kernels]
    assert exact.backward.seconds is None
    assert any("deterministic" in reason for reason in exact.reasons)
    assert exact.forward == plain.forward


# Every pair of a target, a text and a head dimension in `make test`, every triple in `make test-all`.
SHORT = [
    pytest.param(target, text, head_dim, marks=pytest.mark.slow if (n + row + column) % 2 else ())
    for n, target in enumerate(("sm_80", "sm_90a"))
    for row, text in enumerate(("mask causal", "score 20 * tanh(s / 20)  mask window(64)"))
    for column, head_dim in enumerate((64, 128))
]


@pytest.mark.parametrize(("target", "text", "head_dim"), SHORT)
def test_tiles_of_short_calls_are_right(target: str, text: str, head_dim: int) -> None:
    """Every plan that some class takes in the place of the planner's: numbers, and bytes as predicted."""
    spec = flashgen.loads(f"attention short {{ head_dim {head_dim} dtype bf16 {text} }}", backend="reference").spec
    variant, gpu = analyse(spec, spec.head_dims[0]), product_of(GPUS[target])
    found = rivals(variant, gpu, ElementType.BF16)
    assert found is not None
    classes = [
        ShapeClass.of(Shape(1, heads, heads, n, n), ElementType.BF16)
        for heads in (1, 8, 64, 256)
        for n in (64, 256, 512, 1024, 2048, 4096, 16_384)
    ]
    pins = {each: found.of_class(each, 1) for each in classes}
    assert found.of_class(classes[-1], 1).is_empty, "long sequences with many heads keep the planner's"
    assert len(set(pins.values())) <= 9
    assert any(not each.is_empty for each in pins.values())
    assert all(typical(each, 1).q_len <= each.q_len for each in classes)
    for n, each in enumerate(dict.fromkeys(each for each in pins.values() if not each.is_empty)):
        own = each.pinned(spec)
        op = load_spec(own, "emulator", target)
        tiles = op.plan[spec.head_dims[0]].by_element[ElementType.BF16]
        for tile, got in ((each.forward, tiles.forward), (each.backward, tiles.backward)):
            assert tile is None or (tile.Br, tile.Bc, tile.warps) == (got.Br, got.Bc, got.warps)
        case = verify_case(op, spec.head_dims[0], ElementType.BF16, Shape(1, 2, 1, 200 + n, 200 + n))
        assert case.ok, failures(case)
        assert all(moved.predicted == moved.counted for moved in case.hbm_bytes.values())


def test_what_computes_derivatives() -> None:
    told = flashgen.loads(CAUSAL, backend="cpu").explain(*qkv(30))
    tangents, others, samples = told.derivatives
    assert tangents.startswith("tangents: a kernel of forward mode, compiled when first asked for")
    assert told.jvp is not None
    assert "tiled path by PyTorch's operators, slices of 262,144 pairs; linear memory" in others
    assert samples.startswith("torch.vmap: samples become a part of the batch (B)")
    op = flashgen.loads("attention numbered { head_dim 16  score s + b }", backend="reference")
    found = op.explain(*qkv(30))
    assert "dense formula" in found.derivatives[0]
    assert "one sample after another" in str(found)
    assert op.plan.derivatives == found.derivatives


@pytest.mark.parametrize(("count", "length", "warps"), [(1, 8192, 12), (16, 1056, 12), (64, 256, 4), (300, 40, 4)])
def test_ragged_calls_take_the_tiles_of_their_mean_length(count: int, length: int, warps: int) -> None:
    """All rows together say nothing: 64 sequences of 256 rows are short calls."""
    spec = flashgen.loads("attention ragged { head_dim 64  mask causal }", backend="reference").spec
    gpu = product_of(GPUS["sm_90a"])
    machine = CallsAsTheyAre("emulated", GPUS["sm_90a"], gpu, SIZE, None, None)
    rows = {"q_len": count * length, "kv_len": count * length}
    numbers = {"batch": count, "heads": 16, "kv_heads": 16, "dropout_threshold": 0}
    values = {"element": ELEMENTS.index(ElementType.BF16), **numbers, **rows}
    provider = GpuProvider(spec, lambda _: machine, kind=RAGGED)
    made, _ = provider.of_call(spec.head_dims[0], machine, "forward", values)
    assert made.plan.own.forward.warps == warps
