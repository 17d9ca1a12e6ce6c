"""Scores that positions decide by their distance: what is computed once a diagonal belongs to that diagonal alone."""

from __future__ import annotations

import pytest
import torch

import flashgen
from flashgen.ir.shape import Shape
from flashgen.ir.types import ElementType
from flashgen.verification.verify import verify_case
from tests.numeric.helpers import failures, normal

H, D = 2, 64


@pytest.mark.parametrize("tokens", [50, 64, 301])
def test_not_a_number_stays_in_its_diagonals(tokens: int) -> None:
    """Key ``bad`` is seen at distances 0 to N - 1 - bad; vectors of rows reach beyond the last row."""
    op = flashgen.loads(
        "attention nearby_sigmoid { head_dim 64 tensor table: f32[H, Nk] grad weights sigmoid(s) "
        "score s + table[h, i - j] mask causal }"
    )
    bad = tokens - 10
    q, k, v = (normal(1, H, tokens, D, seed=seed) for seed in range(3))
    k[0, 0, bad] = torch.nan
    table = normal(H, tokens, seed=3).requires_grad_()
    o = op(q, k, v, table=table)
    (gradient,) = torch.autograd.grad(o, table, torch.ones_like(o))
    assert gradient[0, :10].isnan().all()
    assert gradient[0, 10:].isfinite().all()
    assert gradient[1].isfinite().all()


def test_a_table_is_read_once_a_distance_and_not_beyond() -> None:
    """Entries that no kept pair reads have no part in the result, whatever they hold, and no gradient."""
    op = flashgen.loads(
        "attention nearby { head_dim 64 tensor table: f32[H, Nk] grad score s + table[h, i - j] mask causal }"
    )
    tokens = 40
    q, k, v = (normal(1, H, tokens, D, seed=seed) for seed in range(3))
    table = normal(H, tokens, seed=3)
    truth = op(q, k, v, table=table)
    q, table = q[:, :, :20], table.clone()
    table[:, 20:] = torch.nan
    table.requires_grad_()
    o = op(q, k, v, table=table)
    torch.testing.assert_close(o, truth[:, :, :20], rtol=1e-5, atol=1e-6)
    (gradient,) = torch.autograd.grad(o.sum(), table)
    assert not gradient[:, 20:].any()


@pytest.mark.parametrize("backend", [None, "emulator"])
def test_conditions_on_what_a_diagonal_keeps(backend: str | None) -> None:
    """Pairs compare numbers of diagonals, choose by them, and take indices from them."""
    op = flashgen.loads(
        "attention compared { head_dim 16 tensor slope: f32[H] grad tensor g: f32[Nk] grad "
        "tensor rel: f32[Nq + Nk] grad tensor p: f32[Nq, 4 * Nk] grad "
        "score where(rel[i - j + Nk] > 0, s, s + p[i, int(3 * log(1 + abs(i - j))) + j]) "
        "* (1 if log(1 + abs(i - j)) < 2.0 else tanh(s)) - g[j] * clamp(slope[h] * (i - j), 0, 4) }",
        backend=backend,
    )
    case = verify_case(op, op.spec.head_dims[0], ElementType.F32, Shape(1, 2, 1, 37, 50))
    assert not failures(case), failures(case)
