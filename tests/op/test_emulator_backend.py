"""backend="emulator": generated CUDA source on CPU tensors, through the same op, judged by the float64 reference."""

from __future__ import annotations

import itertools
import pickle
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import flashgen
from flashgen.hosts.backends import EMULATED
from flashgen.hosts.emulated import EmulatedKernel, emulator_provider, recording
from flashgen.ir.shape import Shape
from flashgen.ir.spec import HeadDim
from flashgen.ir.types import ElementType
from flashgen.kinds.kind import BOTH
from flashgen.op.call import CallChecker
from flashgen.op.op import AttentionOp, OpParts
from flashgen.targets.registry import GPUS
from flashgen.verification.verify import verify_case
from tests.numeric.helpers import failures
from tests.op.helpers import CAUSAL, RICH, SIGMOID, captured, error, op, qkv, random

SHAPE = Shape(2, 4, 2, 37, 45)
SQUARE = Shape(1, 2, 1, 70, 70)
KERNEL = """
attention kernel {
    head_dim 20
    param ell: f32 = 1.5 grad
    score -sqdist / (2 * ell * ell)
    weights normalize(exp(s))
}
"""


@pytest.mark.parametrize(
    ("text", "element", "shape"),
    [
        (CAUSAL, ElementType.F32, SHAPE),
        (CAUSAL, ElementType.BF16, SHAPE),
        (RICH, ElementType.F32, SQUARE),
        (RICH, ElementType.F16, SQUARE),
        (SIGMOID, ElementType.BF16, SHAPE),
        (KERNEL, ElementType.F32, SHAPE),
    ],
    ids=["causal-f32", "causal-bf16", "rich-f32", "rich-f16", "sigmoid-bf16", "kernel-f32"],
)
def test_both_passes(text: str, element: ElementType, shape: Shape) -> None:
    emulated = op(text, "emulator")
    case = verify_case(emulated, emulated.spec.head_dims[-1], element, shape)
    assert case.ok, failures(case)
    assert set(case.hbm_bytes) == {"forward", "backward"}
    assert all(each.predicted == each.counted > 0 for each in case.hbm_bytes.values())


def results(attention: AttentionOp, inputs: list[Tensor], **arguments: Any) -> list[Tensor]:
    leaves = [x.detach().requires_grad_() for x in inputs]
    o = attention(*leaves, **arguments)
    return [o.detach(), *torch.autograd.grad(o, leaves, random(*o.shape, seed=9))]


def assert_equal(first: list[Tensor], second: list[Tensor]) -> None:
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_repeatable_gradients_of_captured_values() -> None:
    """In integers, measured first: the sum does not depend on the order, here not even on the emulator's."""
    emulated = op(RICH, "emulator")
    runs = []
    for _ in range(2):
        inputs, named = qkv(), captured()
        o = emulated(*inputs, **named, deterministic=True)
        learned = [*inputs, named["slope"], named["table"]]
        runs.append([o.detach(), *torch.autograd.grad(o.sum(), learned)])
    assert_equal(*runs)
    inputs, named = qkv(), captured()
    exact = op(RICH, "emulator").reference(*inputs, **named)
    learned = [*inputs, named["slope"], named["table"]]
    for own, truth in zip(runs[0][1:], torch.autograd.grad(exact.sum(), learned), strict=True):
        assert error(own, truth) < (5e-3 if own.dtype is torch.bfloat16 else 2e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_that_start_anywhere(dtype: torch.dtype) -> None:
    """Storage offsets and strides that are no multiples of 16 bytes: a copy, and the same bits."""
    emulated = op(CAUSAL, "emulator")
    shapes = ((1, 2, 20, 16), (1, 2, 20, 16), (1, 2, 20, 8))
    aligned = [random(*shape, seed=n, dtype=dtype) for n, shape in enumerate(shapes)]
    shifted = [torch.cat([torch.zeros(3, dtype=dtype), x.flatten()])[3:].view(x.shape) for x in aligned]
    assert all(x.data_ptr() % 16 for x in shifted)
    wide = [torch.nn.functional.pad(x, (0, 1))[..., :-1] for x in aligned]
    expected = results(emulated, aligned)
    assert_equal(results(emulated, shifted), expected)
    assert_equal(results(emulated, wide), expected)


def test_rows_that_are_no_whole_chunks() -> None:
    """A head dimension of 20 in 16 bits: rows are read element by element, wherever they start."""
    emulated = flashgen.loads("attention odd { head_dim 20  dtype bf16 }", backend="emulator")
    q, k, v = (random(1, 1, 17, 20, seed=n, dtype=torch.bfloat16) for n in range(3))
    shifted = [torch.cat([torch.zeros(1, dtype=x.dtype), x.flatten()])[1:].view(x.shape) for x in (q, k, v)]
    assert_equal(results(emulated, shifted), results(emulated, [q, k, v]))
    assert error(emulated(q, k, v), emulated.reference(q, k, v)) < 5e-3


def test_tensors_that_are_divided_among_launches() -> None:
    """As for more than 2^31 elements, with a limit that small tensors reach: by batches, then by heads."""
    spec = op(RICH, "emulator").spec
    provider = emulator_provider(spec, GPUS[EMULATED])
    found = provider(HeadDim(16, 16), 0)
    assert isinstance(found, EmulatedKernel)

    def limited(most: int) -> AttentionOp:
        kernel = replace(found, most=most)
        # An op is known by what it computes, so that each of these has to be called by another name.
        renamed = flashgen.loads(RICH.replace("rich", f"rich_{most}"), backend="reference").spec
        return AttentionOp(OpParts(renamed, {"cpu": lambda *_: kernel}, backend="emulator"))

    for deterministic in (False, True):
        runs = []
        for most in (10**6, 4 * 37 * 16, 2 * 37 * 16):
            inputs, named = qkv(), captured()
            learned = [*inputs, named["slope"], named["table"]]
            o = limited(most)(*inputs, **named, deterministic=deterministic)
            runs.append([o.detach(), *torch.autograd.grad(o, learned, random(*o.shape, seed=9))])
        for run in runs[1:]:
            assert_equal(run[:4], runs[0][:4])
            for own, whole in zip(run[4:], runs[0][4:], strict=True):
                assert error(own, whole) < (5e-3 if own.dtype is torch.bfloat16 else 1e-5)


def test_params_and_seeds_in_the_memory_of_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels fetch them where they lie, and the host never asks for their values."""
    emulated = op(RICH, "emulator")
    inputs = [x.detach() for x in qkv()]
    named: dict[str, Any] = {name: x.detach() for name, x in captured().items() if isinstance(x, Tensor)}
    named |= {"ell": torch.tensor(0.75), "cut": torch.tensor(5, dtype=torch.int32), "seed": torch.tensor(-(2**62) - 3)}
    expected = results(emulated, inputs, **named)
    monkeypatch.setattr(CallChecker, "is_fetched", lambda self, call, value: value is not None)
    with recording() as counted:
        assert_equal(results(emulated, inputs, **named), expected)
    values = counted[0].values
    assert (values["param_ell"], values["param_cut"], values["seed"]) == (0, 0, 0)
    assert {"place_ell", "place_cut", "seed_at"} <= set(counted[0].report.traffic)


def test_what_is_counted() -> None:
    emulated = op(CAUSAL, "emulator")
    q, k, v = qkv(20, heads=1, kv_heads=1, v=8)
    with recording() as outer:
        with recording() as inner:
            o = emulated(q, k, v)
        torch.autograd.grad(o.sum(), (q, k, v))
    assert [each.name for each in inner] == ["forward"]
    assert [each.name for each in outer] == ["backward"]
    traffic = inner[0].report.traffic
    assert traffic["q"].loaded == q.numel() * 4
    assert traffic["o"].stored == o.numel() * 4
    assert traffic["lse"].stored == 2 * 20 * 4
    assert inner[0].values["q_len"] == 20


def test_sources_and_backends() -> None:
    emulated = op(CAUSAL, "emulator")
    assert emulated.backends == ("emulator", "reference")
    parts = itertools.product(("causal_d16", "causal_d16_8"), ("f16", "bf16", "f32"), BOTH)
    assert [source.name for source in emulated.sources] == [f"{d}_{name}_{each}_sm_80" for d, each, name in parts]
    assert all("__global__" in source.text for source in emulated.sources)
    assert emulated.name != op(CAUSAL, "cpu").name


@pytest.mark.parametrize("target", ["sm_75", "sm_86", "sm_90a"])
def test_another_target(target: str) -> None:
    """Without asynchronous copies, with 99 KiB of shared memory, by warpgroups."""
    text = "attention small { head_dim 128  dtype bf16  mask causal }"
    attention = flashgen.loads(text, backend="emulator", target=target)
    plan = attention.plan[HeadDim(128, 128)]
    assert [source.name for source in attention.sources] == [f"small_d128_{name}_bf16_{target}" for name in BOTH]
    assert plan.elements[0].forward.warpgroups is (target == "sm_90a")
    assert attention.name != flashgen.loads(text, backend="emulator").name
    assert pickle.loads(pickle.dumps(attention)).name == attention.name
    case = verify_case(attention, HeadDim(128, 128), ElementType.BF16, Shape(1, 1, 1, 70, 70))
    assert case.ok, failures(case)
    assert all(each.predicted == each.counted for each in case.hbm_bytes.values())


def test_a_target_is_for_the_emulator() -> None:
    with pytest.raises(ValueError, match="target 'sm_80' is for backend='emulator'; the default backend runs on"):
        flashgen.loads(CAUSAL, target="sm_80")
    with pytest.raises(ValueError, match="no target 'sm_8' to emulate; known are 'sm_75'"):
        flashgen.loads(CAUSAL, backend="emulator", target="sm_8")
