"""Scores that their formula bounds: maxima of rows are looked at where they begin, and once weights are large."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from flashgen.analysis.factors import LOG2_E
from flashgen.ir.expr import Literal
from flashgen.ir.shape import Shape
from flashgen.ir.types import ElementType
from flashgen.targets.gpu.recipe import decide
from flashgen.targets.gpu.score import Bounded
from flashgen.verification.verify import verify_case
from tests.cuda.helpers import variant_of
from tests.cuda.targets import KINDS, each_by_kind, emulated
from tests.cuda.test_pairs import _value
from tests.numeric.helpers import failures, normal
from tests.slices import one_of


@pytest.mark.parametrize(
    ("body", "bounded"),
    [
        ("score softcap(s, 50.0)", True),
        ("score softcap(s, 55.0)  mask causal", True),
        ("score softcap(s, 56.0)", False),  # 80.8 in base 2
        ("score 20 * sin(s) + cos(i - j)", True),
        ("score clamp(s, -50, 3)", True),
        ("score clamp(s, -60, 3)", False),
        ("tensor sink: f32[H]  score softcap(s, 30.0)  weights softmax(sink = sink[h])", True),
        ("tensor bias: f32[Nk]  score softcap(s, 30.0) + bias[j]", False),
        ("tensor bias: f32[Nk]  score softcap(s + bias[j], 30.0)", True),
        ("param cap: f32  score softcap(s, cap)", True),
        ("score s if sin(s) > 0 else -inf", False),
        ("score cos(i - j)", False),  # a number by distance, as it is
        ("score softcap(s, 30.0)  weights sigmoid(s)", False),
        ("score s", False),
    ],
)
def test_what_is_bounded(body: str, bounded: bool) -> None:
    recipe = decide(variant_of(f"attention b {{ head_dim 64  {body} }}"))
    assert isinstance(recipe.score, Bounded) == bounded


@pytest.mark.parametrize("cap", [2.0, 30.0, 50.0, -7.0])
def test_exponents_near_0_are_right(cap: float) -> None:
    score = decide(variant_of(f"attention near {{ head_dim 64  score {cap} * tanh(s / {cap}) }}")).score
    small = score.small_tanh
    assert small is not None
    assert isinstance(small.bound, Literal)
    dot = np.linspace(-small.bound.value, small.bound.value, 1_000_001).astype(np.float32)
    exact = LOG2_E * cap * np.tanh(dot.astype(np.float64) / 8 / cap)
    assert np.abs(_value(small.exponent, dot) - exact).max() < LOG2_E * 3.2e-7 * abs(cap)


SPECS = {
    "cap": ("head_dim 64  score softcap(s, 50.0)  mask causal", Shape(2, 2, 1, 140, 202)),
    "bottom": ("head_dim 128  score softcap(s, 8.0) - 40  mask causal", Shape(1, 2, 1, 150, 150)),
    "sink": (
        "head_dim 64  tensor sink: f32[H] grad  score softcap(s, 20.0)  weights softmax(sink = sink[h])  mask i > j",
        Shape(1, 2, 2, 170, 90),
    ),
    "distances": ("head_dim 32  score 8 * tanh(s / 8) + 3 * cos(i - j)", Shape(1, 2, 2, 90, 170)),
    "bias": (
        "head_dim 64  tensor bias: bf16[B, H, Nq, Nk] grad  score softcap(s + bias[b, h, i, j], 25.0)  mask causal",
        Shape(2, 2, 1, 70, 142),
    ),
    "squared": ("head_dim 64  score clamp(-0.1 * sqdist, -40, 0)", Shape(1, 2, 1, 66, 134)),
    "dropout": ("head_dim 64  score 20 * sin(s)  dropout 0.2", Shape(1, 2, 2, 77, 131)),
    "halves": ("head_dim 192/128  score softcap(s, 30.0)  mask window_left(70)", Shape(1, 2, 2, 100, 102)),
    "wide": ("head_dim 256  score softcap(s, 30.0)  mask causal", Shape(1, 2, 1, 130, 190)),
    "documents": (
        "head_dim 64  tensor doc: i32[B, Nk]  score softcap(s, 50.0)  mask same_document(doc)",
        Shape(2, 2, 1, 200, 200),
    ),
}


@pytest.mark.parametrize(("name", "target"), one_of(4, each_by_kind(SPECS)))
def test_results(name: str, target: str) -> None:
    body, shape = SPECS[name]
    op = emulated(f"attention bounded_{name} {{ dtype bf16, f16  {body} }}", target)
    for element in (ElementType.BF16, ElementType.F16):
        case = verify_case(op, op.spec.head_dims[0], element, shape)
        assert case.ok, failures(case)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("target", KINDS[1:])
def test_rows_at_either_end_of_a_cap(target: str, dtype: torch.dtype) -> None:
    """Scores of 50 and of -50, a row with both, and one that keeps no key."""
    op = emulated("attention ends { dtype bf16, f16  head_dim 64  score softcap(s, 50.0)  mask i != 77 }", target)
    q, k, v = (normal(1, 1, 300, 64, seed=seed) for seed in range(3))
    q, k = q.abs() * 100, k.abs()
    q[:, :, 20:50] *= -1
    k[:, :, 140:] *= -1
    q[:, :, 60] /= 1000
    q, k, v = (x.to(dtype) for x in (q, k, v))
    o, lse = op(q, k, v, return_lse=True)
    exact, exact_lse = op.reference(q.double(), k.double(), v.double(), dtype=torch.float64, return_lse=True)
    assert (o.double() - exact).abs().max() < 1e-2
    others = torch.arange(300) != 77
    assert (lse.double() - exact_lse)[:, :, others].abs().max() < 3e-5
    assert lse[0, 0, 77] == -torch.inf
    assert not o[:, :, 77].any()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("target", KINDS[1:])
def test_maxima_that_grow(target: str, dtype: torch.dtype) -> None:
    """From tile to tile by a little, or by much, of some rows; weights of one key, which are rounded nowhere."""
    op = emulated("attention grow { dtype bf16, f16  head_dim 64  score softcap(s, 50.0) }", target)
    q, k, v = (normal(1, 2, 150, 64, seed=1), normal(1, 2, 800, 64, seed=2), normal(1, 2, 800, 64, seed=3))
    k += torch.linspace(-40, 40, 800)[:, None] * torch.nn.functional.normalize(q[:, :, 70:71], dim=-1)
    k[:, :, 777] = 30 * q[:, :, 100]
    q, k, v = (x.to(dtype) for x in (q, k, v))
    o, lse = op(q, k, v, return_lse=True)
    exact, exact_lse = op.reference(q.double(), k.double(), v.double(), dtype=torch.float64, return_lse=True)
    assert (lse.double() - exact_lse).abs().max() < 3e-5
    assert (o.double() - exact).norm() < (4e-3 if dtype is torch.bfloat16 else 6e-4) * exact.norm()
    assert (o[0, :, 100] - v[0, :, 777]).abs().max() < 1e-3 * float(v[0, :, 777].abs().max())


@pytest.mark.parametrize("target", KINDS[1:])
def test_nan_stays(target: str) -> None:
    op = emulated("attention nan { dtype bf16  head_dim 64  score softcap(s, 50.0)  mask causal }", target)
    q, k, v = (normal(1, 1, 130, 64, seed=seed).bfloat16() for seed in range(3))
    q[0, 0, 90, 3] = torch.nan
    o = op(q, k, v)
    rows = torch.arange(130) == 90
    assert o[0, 0, rows].isnan().all()
    assert not o[0, 0, ~rows].isnan().any()
