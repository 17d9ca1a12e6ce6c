"""What `flashgen verify` calls right where the formula has no number, or leaves the range of the tensors' type."""

from __future__ import annotations

import math

import torch

from flashgen.verification.verify import _row, relative_error

NAN, INF = math.nan, math.inf


def test_numbers_that_are_none() -> None:
    truth = torch.tensor([3.0, NAN, INF, 4.0], dtype=torch.float64)
    assert relative_error(truth.float(), truth) == 0
    assert relative_error(torch.tensor([3.0, NAN, INF, 9.0]), truth) == 1
    assert relative_error(torch.tensor([3.0, 5.0, INF, 4.0]), truth) == 0
    for wrong in ([3.0, NAN, -INF, 4.0], [NAN, NAN, INF, 4.0], [INF, NAN, INF, 4.0]):
        assert relative_error(torch.tensor(wrong), truth) == INF


def test_what_is_finite_beside_them_is_judged() -> None:
    truth = torch.tensor([3.0, NAN, 4.0], dtype=torch.float64)

    def ok(*own: float, baseline: tuple[float, ...] = (3.0, NAN, 4.0)) -> bool:
        found, reached = torch.tensor(own), torch.tensor(baseline)
        return _row("o", found, reached, truth, 0.0, is_float32=True).ok

    assert ok(3.0, NAN, 4.0)
    assert not ok(3.0, NAN, 4.1)
    assert ok(3.0, 0.0, 4.0)
    assert ok(3.0, NAN, 4.0, baseline=(3.0, NAN, INF))
    assert ok(3.0, NAN, INF, baseline=(3.0, NAN, INF))
    assert not ok(3.1, NAN, INF, baseline=(3.0, NAN, INF))
    assert not ok(3.0, NAN, INF)
