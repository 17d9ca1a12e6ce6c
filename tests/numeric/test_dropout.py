"""Dropout is exact: the decisions are those that the reference draws, on every shard and in the backward pass."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import flashgen
from flashgen.op.op import AttentionOp
from tests.numeric.helpers import assert_close, normal

TEXT = "attention dropped { head_dim 64 mask causal dropout 0.3 }"
D = 64


@pytest.fixture(scope="module")
def op() -> AttentionOp:
    return flashgen.loads(TEXT)


def weights(op: AttentionOp, n: int, **arguments: Any) -> Tensor:
    """P' itself: with v the identity, o is the matrix of weights."""
    q, k = normal(2, 3, n, D), normal(2, 3, n, D, seed=1)
    o: Tensor = op(q, k, torch.eye(n, D).expand(2, 3, n, D), **arguments)
    return o


def test_the_decisions_are_those_of_the_reference(op: AttentionOp) -> None:
    n = D
    q, k = normal(2, 3, n, D), normal(2, 3, n, D, seed=1)
    v = torch.eye(n, D).expand(2, 3, n, D)
    own = op(q, k, v, seed=99)
    exact = op.reference(q, k, v, seed=99, dtype=torch.float64)
    assert torch.equal(own == 0, exact == 0)
    assert_close(own, exact, what="P'")
    causal = torch.ones(n, n, dtype=torch.bool).tril()
    dropped = (own == 0)[..., causal].double().mean().item()
    assert abs(dropped - 0.3) < 0.02


def test_another_seed_makes_other_decisions_and_the_same_seed_the_same(op: AttentionOp) -> None:
    assert torch.equal(weights(op, D, seed=1), weights(op, D, seed=1))
    assert not torch.equal(weights(op, D, seed=1), weights(op, D, seed=2))


def test_without_a_seed_torch_draws_it(op: AttentionOp) -> None:
    torch.manual_seed(7)
    first, second = weights(op, D), weights(op, D)
    torch.manual_seed(7)
    again = weights(op, D)
    assert torch.equal(first, again)
    assert not torch.equal(first, second)


def test_dropout_p_overrides_the_spec(op: AttentionOp) -> None:
    none = weights(op, D, dropout_p=0.0)
    assert torch.equal(none, weights(op, D, dropout_p=0.0))
    causal = torch.ones(D, D, dtype=torch.bool).tril()
    assert (none[..., causal] > 0).all()
    most = weights(op, D, dropout_p=0.9, seed=1)
    assert 0.85 < (most == 0)[..., causal].double().mean().item() < 0.95


@pytest.mark.parametrize("probability", [-0.1, 1.0, 1.5, float("nan")])
def test_an_impossible_probability_is_refused(op: AttentionOp, probability: float) -> None:
    with pytest.raises(ValueError, match="dropout_p"):
        weights(op, D, dropout_p=probability)


def test_the_gradient_uses_the_same_decisions(op: AttentionOp) -> None:
    n = 113
    leaves = [normal(2, 3, n, D, seed=seed).requires_grad_() for seed in range(3)]
    d_o = normal(2, 3, n, D, seed=9)
    own = torch.autograd.grad(op(*leaves, seed=5), leaves, d_o)
    wide = [x.detach().double().requires_grad_() for x in leaves]
    exact = torch.autograd.grad(op.reference(*wide, seed=5, dtype=torch.float64), wide, d_o.double())
    for name, gradient, truth in zip(("dq", "dk", "dv"), own, exact, strict=True):
        assert_close(gradient, truth, what=name)


def test_lse_is_taken_before_dropout(op: AttentionOp) -> None:
    q, k, v = (normal(1, 2, 50, D, seed=seed) for seed in range(3))
    _, dropped = op(q, k, v, return_lse=True, seed=1)
    _, plain = op(q, k, v, return_lse=True, dropout_p=0.0)
    assert torch.equal(dropped, plain)


def test_a_shard_makes_the_decisions_of_the_whole(op: AttentionOp) -> None:
    q, k, v = (normal(2, 4, 96, D, seed=seed) for seed in range(3))
    whole = op(q, k, v, seed=11)
    part = op(q[1:, 2:, 40:], k[1:, 2:], v[1:, 2:], seed=11, q_start=40, h_start=2, b_start=1)
    assert_close(part, whole[1:, 2:, 40:], 1e-6, "o")


def test_tile_sizes_change_no_decision() -> None:
    q, k, v = (normal(1, 2, 150, D, seed=seed) for seed in range(3))
    other = flashgen.loads(TEXT.replace("dropout", "schedule { Br = 16 Bc = 24 } dropout"))
    assert_close(other(q, k, v, seed=3), flashgen.loads(TEXT)(q, k, v, seed=3), 1e-6, "o")
