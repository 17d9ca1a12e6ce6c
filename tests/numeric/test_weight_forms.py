"""Forms of weights that no spec of the gallery has: a formula of their own, the reference, and every backend."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import flashgen
from flashgen.ir.shape import Shape
from flashgen.ir.types import ElementType
from flashgen.language import parse_text
from flashgen.reference.dense import attention
from flashgen.verification.verify import verify_case
from tests.numeric.helpers import failures, normal
from tests.reference.test_algorithms import BLOCKS, same_backward, same_forward, truth
from tools.paper import (
    algorithm_0,
    algorithm_2,
    algorithm_3,
    algorithm_4,
    flash2_backward,
    flash2_forward,
    rabe_staats_backward,
    rabe_staats_forward,
)

TEXT = """
attention example {
    head_dim 16/24
    tensor   t: f32[H, Nk] grad
    param    less: f32 = 0.4 grad
    mask     window_left(40)
    dropout  0.2
    weights  WEIGHTS
}
"""
FORMS: dict[str, Callable[[Tensor], tuple[Tensor, Tensor]]] = {  # of E, 0 where masked: P and lse
    "normalize2(softplus(s + t[h, j]) - less)": lambda e: (e / e.norm(dim=-1, keepdim=True), e.norm(dim=-1).log()),
}
forms = pytest.mark.parametrize("weights", FORMS)
ELEMENTS = (ElementType.F32, ElementType.BF16, ElementType.F16)
SHAPE = Shape(1, 4, 2, 70, 83)


@forms
def test_the_reference_computes_the_formula(weights: str) -> None:
    q, k, v = (normal(1, 2, 50, size, seed=seed, dtype=torch.float64) for seed, size in enumerate((16, 16, 24)))
    t, less = normal(2, 50, seed=4, dtype=torch.float64), torch.tensor(0.4, dtype=torch.float64)
    leaves = [x.requires_grad_() for x in (q, k, v, t, less)]
    spec = parse_text(TEXT.replace("WEIGHTS", weights)).specs[0]
    o, found_lse = attention(spec, q, k, v, tensors={"t": t}, params={"less": less})
    assert found_lse is not None
    found = (o, found_lse)
    distance = torch.arange(50)[:, None] - torch.arange(50)
    e = torch.nn.functional.softplus(q @ k.mT / 4 + t[:, None]) - less
    p, lse = FORMS[weights](torch.where(distance < 40, e, 0.0))
    expected = (p @ v, lse)
    arriving = [normal(*x.shape, seed=9, dtype=torch.float64) for x in expected]
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-11, atol=1e-12)
    pairs = zip(*(torch.autograd.grad(x, leaves, arriving) for x in (found, expected)), strict=True)
    for one, other in pairs:
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-11)


@forms
def test_the_algorithms_of_the_paper_agree_with_the_reference(weights: str) -> None:
    spec = parse_text(TEXT.replace("WEIGHTS", weights)).specs[0]
    expected = truth(spec, Shape(1, 2, 1, 9, 13), spec.head_dims[0])
    arriving = (expected.d_o, expected.d_lse, BLOCKS)
    standard = algorithm_0(expected.problem, BLOCKS)
    same_backward(algorithm_3(standard, *arriving), expected)
    for forward_pass, backward_pass in (
        (algorithm_2, algorithm_4),
        (flash2_forward, flash2_backward),
        (rabe_staats_forward, rabe_staats_backward),
    ):
        forward = forward_pass(expected.problem, BLOCKS)
        same_forward(forward.o, forward.lse, expected)
        same_backward(backward_pass(forward, *arriving), expected)


@forms
@pytest.mark.parametrize(
    "backend",
    [("cpu", None), ("emulator", "sm_90a")]
    + [pytest.param(("emulator", each), marks=pytest.mark.slow) for each in ("sm_75", "sm_80")],
)
def test_kernels_agree_with_the_reference(weights: str, backend: tuple[str, str | None]) -> None:
    """Every gradient, that of lse, dropout, in every element type."""
    op = flashgen.loads(TEXT.replace("WEIGHTS", weights), backend=backend[0], target=backend[1])
    for element in ELEMENTS:
        case = verify_case(op, op.spec.head_dims[0], element, SHAPE)
        assert case.ok, failures(case)


@forms
def test_a_row_of_nothing_is_zero(weights: str) -> None:
    text = TEXT.replace("WEIGHTS", weights).replace("window_left(40)", "i != 3 and j < 30")
    op = flashgen.loads(text, backend="cpu")
    q, k, v = (normal(1, 2, 40, size, seed=seed).requires_grad_() for seed, size in enumerate((16, 16, 24)))
    o, lse = op(q, k, v, t=normal(2, 40, seed=5), dropout_p=0.0, return_lse=True)
    (d_q,) = torch.autograd.grad(o.sum(), q)
    assert (lse[..., 3] == -torch.inf).all()
    assert o[..., 3, :].abs().max() == d_q[..., 3, :].abs().max() == 0
    assert d_q.isfinite().all()


@pytest.mark.parametrize("backend", ["cpu", "emulator"])
def test_weights_that_do_not_look_at_scores_have_no_gradient_through_them(backend: str) -> None:
    """Not even through a score that is infinite."""
    text = "tensor t: f32[H] grad  score dot * where(i > 5, -inf, inf) * t[h] - sqdist  weights normalize(0.0)"
    op = flashgen.loads(f"attention blind {{ head_dim 16 {text} }}", backend=backend)
    leaves = [normal(1, 2, 20, 16, seed=seed).requires_grad_() for seed in range(3)] + [torch.ones(2).requires_grad_()]
    o = op(*leaves[:3], t=leaves[3])
    gradients = torch.autograd.grad(o.sum(), leaves, materialize_grads=True)
    assert not o.any()
    assert not any(gradient.any() for gradient in gradients)
