"""Scores that positions decide by their distance: what is computed once a diagonal belongs to that diagonal alone."""

from __future__ import annotations

import pytest
import torch

import flashgen
from tests.numeric.helpers import normal

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
