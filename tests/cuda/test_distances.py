"""Scores over squared distances beside products: what keys get of |k|² has nothing of the product's factor."""

from __future__ import annotations

import pytest
import torch

from flashgen.ir.shape import Shape
from flashgen.ir.types import ElementType
from flashgen.verification.verify import verify_case
from tests.cuda.targets import each_by_kind, emulated
from tests.numeric.helpers import failures
from tests.slices import one_of

ELEMENTS = (ElementType.F32, ElementType.BF16, ElementType.F16)
# The derivative by the dot product is a constant, with and without a part of the distance; and none.
SPECS = {
    "distance": ("head_dim 64  score -sqdist / 16", Shape(1, 2, 1, 50, 70)),
    "both": ("head_dim 20  score s - 0.01 * sqdist  mask causal", Shape(1, 2, 2, 70, 50)),
    "learned": ("head_dim 32  param w: f32 = 0.5 grad  score s - w * sqdist", Shape(1, 1, 1, 33, 40)),
    "halves": ("head_dim 160  score s - sqdist / 64  mask (i + j) % 3 != 0", Shape(1, 1, 1, 40, 50)),
    "bandwidth": ("head_dim 64  param ell: f32 = 1.5 grad  score -sqdist / (2 * ell * ell)", Shape(1, 2, 2, 70, 90)),
    "heads": (
        "head_dim 40/24  tensor g: f32[H] grad  score s - abs(g[h]) * sqdist  mask causal",
        Shape(2, 4, 2, 70, 60),
    ),
    "rows": (
        "head_dim 32  tensor g: f32[B, Nq] grad  score -sqdist * (0.1 + abs(g[b, i]))  mask causal",
        Shape(2, 2, 2, 60, 70),
    ),
    "far": ("head_dim 64  score 0.5 * (s - sqdist / 32) - 2.0 ** (-h) * (i - j)  mask causal", Shape(1, 4, 2, 90, 100)),
    "sink": (
        "head_dim 64  tensor sink: f32[H] grad  score -sqdist / 16  weights softmax(sink=sink[h])  mask window(30)",
        Shape(1, 4, 2, 90, 100),
    ),
    "empty": (
        "head_dim 64  tensor keep: bool[B, Nk]  score -sqdist / 16  mask keep[b, j] and j < i - 3",
        Shape(2, 2, 2, 80, 80),
    ),
    "sigmoid": ("head_dim 16  weights sigmoid(s)  score 0.2 * dot - sqdist / 8", Shape(1, 2, 1, 40, 50)),
}


@pytest.mark.parametrize(
    "deterministic", [pytest.param(False, id="at_once"), pytest.param(True, id="apart", marks=pytest.mark.slow)]
)
@pytest.mark.parametrize(("name", "target"), one_of(2, each_by_kind(SPECS)))
def test_gradients(name: str, target: str, *, deterministic: bool) -> None:
    text, shape = SPECS[name]
    op = emulated(f"attention {name}_{target} {{ {text} }}", target)
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(deterministic)
    try:
        for element in ELEMENTS:
            case = verify_case(op, op.spec.head_dims[0], element, shape)
            assert case.ok, failures(case)
    finally:
        torch.use_deterministic_algorithms(before)
