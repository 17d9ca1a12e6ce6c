"""Scores that their formula bounds: exp2 without a maximum, near the bound, at it, and where another cap is too far."""

from __future__ import annotations

import pytest
import torch

import flashgen
from flashgen.runtime.op import AttentionOp
from tests.numeric.helpers import assert_close, normal

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
    """Rows that keep nothing are zero; a sink far above and one far below what scores can reach."""
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
    assert_close(lse[:, :, 12:], exact_lse[:, :, 12:], what="lse")
