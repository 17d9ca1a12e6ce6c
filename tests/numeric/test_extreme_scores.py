"""Scores so large that float32 rounds a row's offset: everything must be what the formula gives in float32."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

import flashgen
from flashgen.op.op import AttentionOp
from tests.cuda.targets import each_by_kind, emulated
from tests.numeric.helpers import assert_close
from tests.slices import one_of

H, NQ, NK = 2, 37, 75
LEAST = torch.finfo(torch.float32).min
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 1.2e-2, torch.float16: 2e-3}


def masked(value: float, dtype: torch.dtype = torch.float32) -> Tensor:
    """A bias as people write masks: on every key of some rows, on some keys of others."""
    bias = torch.zeros(NQ, NK)
    bias[::3] = value
    bias[1::3, NK // 3 :] = value
    return bias.to(dtype)


def heads(*values: float) -> Tensor:
    return torch.tensor(values)


BIAS = "tensor bias: f32[Nq, Nk] grad  score s + bias[i, j]"
SINK = "tensor sinks: f32[H] grad  weights softmax(sink = sinks[h])"


@dataclass(frozen=True)
class Case:
    """A spec, what q is multiplied by, and the captured values."""

    text: str
    captured: Callable[[], dict[str, Tensor]] = dict
    factor: float = 1.0


CASES = {
    "far_apart": Case("mask causal", factor=1e10),
    "farther_apart": Case("mask causal", factor=2.0**60),
    "beyond_the_bound": Case("mask causal", factor=2.0**6),
    "learned_scale": Case("param tau: f32 = 1.0 grad  score s * tau", lambda: {"tau": torch.tensor(1e10)}),
    "minus_1e9": Case(BIAS, lambda: {"bias": masked(-1e9)}),
    "minus_1e30": Case(BIAS, lambda: {"bias": masked(-1e30)}),
    "plus_1e30": Case(BIAS, lambda: {"bias": masked(1e30)}),
    "least_float": Case(BIAS, lambda: {"bias": masked(LEAST)}),
    "least_float_and_causal": Case(f"{BIAS}  mask causal", lambda: {"bias": masked(LEAST)}),
    "infinite": Case(BIAS, lambda: {"bias": masked(-math.inf)}),
    "least_bfloat16": Case(
        BIAS.replace("f32", "bf16"), lambda: {"bias": masked(torch.finfo(torch.bfloat16).min, torch.bfloat16)}
    ),
    "least_float16": Case(BIAS.replace("f32", "f16"), lambda: {"bias": masked(-65504, torch.float16)}),
    "single_keys": Case(BIAS, lambda: {"bias": torch.where(torch.eye(NQ, NK) > 0, 3e38, 0.0)}),
    "rows": Case(
        "tensor height: f32[Nq] grad  score s + height[i]", lambda: {"height": torch.linspace(-3, 3, NQ) * 1e38}
    ),
    "slopes": Case(
        "tensor bias: f32[Nq, Nk]  tensor slope: f32[H] grad  score s + bias[i, j] - slope[h] * (i - j)",
        lambda: {"bias": masked(LEAST), "slope": heads(0.3, 0.7)},
    ),
    "sinks": Case(SINK, lambda: {"sinks": heads(1e30, LEAST)}),
    "no_sinks": Case(SINK, lambda: {"sinks": heads(-math.inf, 200.0)}),
    "sinks_of_far_scores": Case(SINK, lambda: {"sinks": heads(1e9, 3.0)}, factor=1e9),
    "sinks_and_masks": Case(f"{BIAS}  {SINK}", lambda: {"bias": masked(LEAST), "sinks": heads(LEAST, 90.0)}),
    "sinks_of_bounded_scores": Case(f"score softcap(s, 20)  {SINK}", lambda: {"sinks": heads(1e30, 100.0)}),
}


def outcome(function: Callable[..., Any], case: Case, dtype: torch.dtype, head_dim: int) -> dict[str, Tensor]:
    """o, lse and every gradient."""
    generator = torch.Generator().manual_seed(0)
    shapes = ((1, H, NQ, head_dim), (1, 1, NK, head_dim), (1, 1, NK, head_dim))
    q, k, v = (torch.randn(shape, generator=generator) for shape in shapes)
    leaves = [x.to(dtype).requires_grad_() for x in (q * case.factor, k, v)]
    captured = {name: x.clone().requires_grad_() for name, x in case.captured().items()}
    for name, x in captured.items():
        x.requires_grad_(name != "bias" or "bias: f32[Nq, Nk]  tensor" not in case.text)
    o, lse = function(*leaves, return_lse=True, **captured)
    d_o = torch.randn(o.shape, generator=generator).to(o.dtype)
    d_lse = torch.randn(lse.shape, generator=generator).to(lse.dtype)
    learned = {name: x for name, x in captured.items() if x.requires_grad}
    found = torch.autograd.grad((o, lse), (*leaves, *learned.values()), (d_o, d_lse), materialize_grads=True)
    return dict(zip(("o", "lse", "dq", "dk", "dv", *learned), (o.detach(), lse.detach(), *found), strict=True))


def check(op: AttentionOp, case: Case, dtype: torch.dtype, *, deterministic: bool = False) -> None:
    head_dim = op.spec.head_dims[0].qk
    own = outcome(lambda *args, **named: op(*args, deterministic=deterministic, **named), case, dtype, head_dim)
    formula = outcome(lambda *args, **named: op.reference(*args, dtype=torch.float32, **named), case, dtype, head_dim)
    for name, expected in formula.items():
        if name == "lse":  # row by row: a large one would hide the others
            torch.testing.assert_close(own[name], expected, rtol=2e-6, atol=1e-5, msg=f"{name}, {dtype}")
            continue
        assert own[name].isfinite().all(), (name, dtype)
        size = float(expected.double().abs().max()) or 1.0  # where all gradients are of the size of rounding errors
        tolerance = TOLERANCE[dtype] if own[name].norm() > 1e-6 * size else 1.0
        assert_close(own[name] / size, expected / size, tolerance, f"{name}, {dtype}")


@pytest.mark.parametrize("name", CASES)
def test_on_cpus(name: str) -> None:
    op = flashgen.loads(f"attention extreme {{ head_dim 24  {CASES[name].text} }}", backend="cpu")
    for dtype in TOLERANCE:
        if dtype is not torch.float16 or not (CASES[name].factor > 2.0**10 or name == "learned_scale"):
            check(op, CASES[name], dtype)


@pytest.mark.parametrize(("name", "target"), one_of(2, each_by_kind(CASES)))
def test_on_the_emulator(name: str, target: str) -> None:
    op = emulated(f"attention extreme {{ head_dim 64  {CASES[name].text} }}", target)
    for dtype in (torch.float32, torch.bfloat16):
        check(op, CASES[name], dtype)
    if name in ("far_apart", "minus_1e30", "sinks_and_masks"):  # dQ by a kernel of its own
        check(op, CASES[name], torch.bfloat16, deterministic=True)


def test_plain_rows_say_nothing_beside_lse() -> None:
    op = flashgen.loads("attention plain_rows { head_dim 24 }", backend="cpu")
    q, k, v = (torch.randn(1, 1, 20, 24, generator=torch.Generator().manual_seed(n)) for n in range(3))
    q[0, 0, 5] *= 1e6
    operator = getattr(torch.ops.flashgen, op._registered.name).default
    _, lse, parts = operator(q, k, v, 0, 0, 0, 0, None, None, None, None, False)
    assert lse[0, 0].abs().argmax() == 5
    assert parts[0, 0, 5].any()
    parts[0, 0, 5] = 0
    assert not parts.any()
