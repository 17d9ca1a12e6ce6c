"""Pairs that their score prunes: weight 0, no gradient; rows of which nothing is left are empty rows."""

from __future__ import annotations

from itertools import product

import pytest
import torch

import flashgen
from flashgen.ir.shape import Shape
from flashgen.ir.types import ElementType
from flashgen.verification.verify import verify_case
from tests.numeric.helpers import assert_close, failures, normal
from tests.slices import one_of

BACKENDS = [None, "emulator"]
SHAPES = (Shape(1, 2, 1, 37, 50), Shape(2, 1, 1, 70, 70))
SPECS = {
    "plain": "score where(s > 0.1, s, -inf)",
    "chained": "score where(2 < sqdist < 30, -sqdist / 8, -inf) mask causal",
    "with_positions": "tensor sinks: f32[H] grad tensor bias: f32[H] grad weights softmax(sink = sinks[h]) "
    "score where(causal and (s > 0.1 or i == j), s + bias[h], -inf)",
    "nested": "score where(s > 0, where(causal, s, -inf), 2 * s if i % 2 == 0 else -inf) weights sigmoid(s)",
    "minimum": "score min(s, -inf if s < 0 else inf) - 0.01 * (i - j)",
    "learned": "tensor t: f32[H, Nk] grad score s + t[h, j] + (0 if dot > t[h, j] else -inf) "
    "weights normalize(exp(-s))",
    "without_dot": "tensor t: f32[H, Nk] grad score where(dot > 5, t[h, j], -inf) weights normalize(softplus(s))",
    "logarithm": "score log(s) + (0 if s > 0.5 else -inf)",
}


@pytest.mark.parametrize(("name", "backend"), one_of(3, product(SPECS, BACKENDS)))
def test_against_the_reference(name: str, backend: str | None) -> None:
    op = flashgen.loads(f"attention {name} {{ head_dim 16 {SPECS[name]} }}", backend=backend)
    for shape in SHAPES if backend is None else SHAPES[:1]:
        case = verify_case(op, op.spec.head_dims[0], ElementType.F32, shape, seed=3)
        assert not failures(case), failures(case)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("sink", ["", "weights softmax(sink = 0.5)"])
def test_rows_that_keep_nothing(sink: str, backend: str | None) -> None:
    """As for masks: weight 0, o = 0, lse that of the sink alone; derivatives that are infinite there do not matter."""
    text = f"attention pruned {{ head_dim 16 score where(s > 0, sqrt(s), -inf) {sink} }}"
    op = flashgen.loads(text, backend=backend)
    q, k, v = (normal(1, 2, 20, 16, seed=seed) for seed in range(3))
    q[:, :, 3:9] = 0
    k[:, :, 11] = 0
    leaves = [x.requires_grad_() for x in (q, k, v)]
    o, lse = op(*leaves, return_lse=True)
    assert not o[:, :, 3:9].any()
    assert (lse[:, :, 3:9] == (0.5 if sink else -torch.inf)).all()
    gradients = torch.autograd.grad(o.square().sum(), leaves)
    assert all(gradient.isfinite().all() for gradient in gradients)
    assert not gradients[0][:, :, 3:9].any()
    assert not gradients[1][:, :, 11].any()
    assert not gradients[2][:, :, 11].any()

    scores = (q @ k.transpose(-1, -2)).double() / 4
    kept = scores > 0
    scores = torch.where(kept, scores, 1.0).sqrt()
    weights = torch.where(kept, scores.exp(), 0.0)
    total = weights.sum(-1, keepdim=True) + (torch.tensor(0.5).exp() if sink else 0)
    truth = torch.where(kept.any(-1, keepdim=True), weights / total, 0.0) @ v.double()
    assert_close(o, truth, what="o")
    exact = torch.autograd.grad(truth.square().sum(), leaves)
    for name, gradient, wanted in zip("qkv", gradients, exact, strict=True):
        assert_close(gradient, wanted, what=f"d{name}")
