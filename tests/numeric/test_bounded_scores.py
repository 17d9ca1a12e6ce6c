"""Scores that their formula bounds: exp2 without a maximum, near the bound, at it, and where another cap is too far."""

from __future__ import annotations

import pytest
import torch

import flashgen
from flashgen.op.op import AttentionOp
from tests.numeric.helpers import assert_close, normal
from tests.slices import one_of

D, TOKENS = 64, 201  # rows enough for matrix registers
WITHOUT_MAXIMUM, WITH_MAXIMUM = 55.0, 56.0  # log2(e) times the cap against 80


def capped(cap: float = WITHOUT_MAXIMUM) -> AttentionOp:
    return flashgen.loads(f"attention capped {{ head_dim 64 score softcap(s, {cap}) mask causal }}")


@pytest.mark.parametrize("cap", [2.0, WITHOUT_MAXIMUM, WITH_MAXIMUM])
@pytest.mark.parametrize("factor", [1.0, 30.0, 1e4], ids=["small", "mixed", "saturated"])
def test_against_the_reference(cap: float, factor: float) -> None:
    op = capped(cap)
    q, k, v, d_o = (normal(1, 2, TOKENS, D, seed=seed) for seed in range(4))
    leaves = [x.requires_grad_() for x in (q * factor, k, v)]
    o, lse = op(*leaves, return_lse=True)
    exact_leaves = [x.detach().double().requires_grad_() for x in leaves]
    exact, exact_lse = op.reference(*exact_leaves, dtype=torch.float64, return_lse=True)
    assert_close(o, exact, 1e-4, "o")
    assert_close(lse, exact_lse, what="lse")
    gradients = torch.autograd.grad(o, leaves, d_o)
    exact_gradients = torch.autograd.grad(exact, exact_leaves, d_o.double())
    for name, gradient, truth in zip("qkv", gradients, exact_gradients, strict=True):
        if factor < 1e4 or name == "v":
            assert_close(gradient, truth, 1e-4, f"d{name}")
        else:  # 1 - tanh² cancels where tanh is near 1
            assert gradient.isfinite().all()


@pytest.mark.parametrize("size", [1e-6, 1.0, 1e6])
@pytest.mark.parametrize("sign", [-1.0, 1.0])
def test_rows_at_the_bound_keep_values_of_any_size(sign: float, size: float) -> None:
    """Every score is the cap, or less the cap: weights of 2^±79 before they are divided by their sum."""
    q, k = torch.full((1, 1, 300, D), sign * 1e3), torch.full((1, 1, 300, D), 1e3)
    v = size * normal(1, 1, 300, D)
    o, lse = capped()(q, k, v, return_lse=True)
    seen = torch.arange(1, 301)
    assert_close(o, v.double().cumsum(2) / seen[:, None], what="o")
    assert_close(lse[0, 0], sign * WITHOUT_MAXIMUM + seen.double().log(), what="lse")


def test_infinities_meet_the_cap_and_nan_stays_in_its_row() -> None:
    q, k, v = (normal(1, 1, TOKENS, D, seed=seed) for seed in range(3))
    q[0, 0, 30] = 0
    q[0, 0, 30, 5] = torch.inf
    q[0, 0, 50] = torch.nan
    o, lse = capped()(q, k, v, return_lse=True)
    wrong = o.isnan().any(-1)[0, 0]
    assert wrong[50]
    assert wrong.sum() == 1
    at_the_cap = WITHOUT_MAXIMUM * k[0, 0, :31, 5].sign().double()
    assert_close(o[0, 0, 30], at_the_cap.softmax(0) @ v[0, 0, :31].double(), what="o")
    assert_close(lse[0, 0, 30], at_the_cap.logsumexp(0), what="lse")


def test_empty_rows_and_sinks() -> None:
    """Rows that keep nothing have the sink alone; one of these is far above and one far below what scores can reach."""
    op = flashgen.loads(
        "attention capped { head_dim 64 tensor sinks: f32[H] weights softmax(sink = sinks[h]) "
        f"score softcap(s, {WITHOUT_MAXIMUM}) mask causal_lower_right }}"
    )
    q, k, v = normal(1, 3, 20, D), normal(1, 3, 8, D, seed=1), normal(1, 3, 8, D, seed=2)
    sinks = torch.tensor([-200.0, 0.5, 70.0])
    o, lse = op(q, k, v, sinks=sinks, return_lse=True)
    empty = slice(0, 12)
    assert not o[:, :, empty].any()
    exact, exact_lse = op.reference(
        q.double(), k.double(), v.double(), sinks=sinks.double(), dtype=torch.float64, return_lse=True
    )
    assert_close(o[:, :2], exact[:, :2], what="o")
    torch.testing.assert_close(o[:, 2], exact[:, 2].float(), rtol=1e-4, atol=0)
    assert torch.equal(lse[:, :, empty], sinks.view(1, 3, 1).expand(1, 3, 12))
    assert_close(lse[:, :, 12:], exact_lse[:, :, 12:], what="lse")


SCORES = {"cap": "softcap(s, 4)", "tanh": "50.0 * tanh(s / 50.0)", "sine": "9 * sin(s)"}
TARGETS = [("cpu", None), ("emulator", "sm_80"), ("emulator", "sm_90a")]


def errors_of_rows(op: AttentionOp, tensors: list[torch.Tensor], arriving: torch.Tensor) -> list[torch.Tensor]:
    """How far each row of o, dq and dk is from the formula in float64."""
    leaves = [x.clone().requires_grad_() for x in tensors]
    exact_leaves = [x.double().requires_grad_() for x in tensors]
    o, exact = op(*leaves), op.reference(*exact_leaves)
    found = (o, *torch.autograd.grad(o, leaves[:2], arriving))
    truth = (exact, *torch.autograd.grad(exact, exact_leaves[:2], arriving.double()))
    return [(x.double() - y).norm(dim=-1).detach() for x, y in zip(found, truth, strict=True)]


@pytest.mark.parametrize(("backend", "target"), one_of(3, TARGETS))
@pytest.mark.parametrize("name", one_of(3, SCORES))
def test_rows_are_as_exact_as_those_with_maxima(name: str, backend: str, target: str | None) -> None:
    """What o is divided by adds weights up as they are multiplied. A param, which nothing bounds, asks for maxima."""
    op, with_maxima = (
        flashgen.loads(f"attention rows {{ head_dim 16 {text} mask causal }}", backend=backend, target=target)
        for text in (f"score {SCORES[name]}", f"param none: f32 = 0  score {SCORES[name]} + none")
    )
    for dtype in (torch.bfloat16, torch.float16):
        q, k, v, d_o = (normal(1, 4, 70, 16, seed=seed).to(dtype) for seed in range(4))
        ways = (errors_of_rows(each, [q, k, v], d_o) for each in (op, with_maxima))
        for found, same in zip(*ways, strict=True):
            # Which row is off by much is chance: that of the same rank among all rows is off by no more than twice.
            assert (found.flatten().sort().values <= 2 * same.flatten().sort().values + 1e-5).all()
        of_o, *gradients = errors_of_rows(op, [q, k[:, :, :1], v[:, :, :1]], d_o)
        assert not of_o.any()
        assert max(x.max() for x in gradients) < 5e-5  # float32 of slopes of up to 9


@pytest.mark.parametrize("weights", ["normalize(exp(s / 3))", "normalize2(sigmoid(s))"])
def test_of_one_key_normalized_weights_leave_the_value(weights: str) -> None:
    op = flashgen.loads(f"attention rows {{ head_dim 16 weights {weights} }}", backend="cpu")
    q, k, v = (normal(1, 4, rows, 16, seed=seed).bfloat16() for seed, rows in enumerate((70, 1, 1)))
    assert torch.equal(op(q, k, v), v.expand_as(q))


@pytest.mark.parametrize(("backend", "target"), one_of(2, TARGETS))
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_rows_of_low_scores_count_from_their_maximum(dtype: torch.dtype, backend: str, target: str | None) -> None:
    """Weights of 2^-72 would be nothing in float16; a later tile may hold such of 2^72."""
    op = flashgen.loads("attention low { head_dim 16 score softcap(s, 50) }", backend=backend, target=target)
    q = normal(1, 1, 1, 16).expand(1, 2, 40, 16).to(dtype)
    k = -40 * q[:, :, :1] * (1 + 0.01 * normal(1, 2, 300, 1, seed=1)).to(dtype)
    k[:, 1, 290:] = 40 * q[:, 1, :1]
    v = normal(1, 2, 300, 16, seed=2).to(dtype)
    o, lse = op(q, k, v, return_lse=True)
    exact, exact_lse = op.reference(q, k, v, dtype=torch.float64, return_lse=True)
    assert exact_lse.abs().min() > 40
    assert_close(o, exact, 2 * torch.finfo(dtype).eps, "o")
    assert_close(lse, exact_lse, what="lse")
