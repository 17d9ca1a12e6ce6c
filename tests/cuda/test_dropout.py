"""Dropout's decisions on GPUs, drawn by squares or by pairs: those of the reference, wherever a shard begins."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import flashgen
from flashgen.op.loading import load_spec
from tests.numeric.helpers import assert_close, normal

TEXT = "attention drops { head_dim 32/48  dtype %s  mask i - j < 90  dropout 0.3 }"


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("target", ["sm_80", "sm_90a"])
@pytest.mark.parametrize("starts", [(0, 0), (16, 48), (7, 0), (7, 3), (8, 16), (32, 8), (0, 14)])
def test_shards_that_begin_inside_of_squares(starts: tuple[int, int], target: str, deterministic: bool) -> None:
    check("bf16", torch.bfloat16, target, 2e-2, {}, starts, deterministic=deterministic)


@pytest.mark.parametrize("starts", [(0, 0), (5, 0)])
def test_float32(starts: tuple[int, int]) -> None:
    check("f32", torch.float32, "sm_80", 1e-5, {}, starts)


@pytest.mark.parametrize("target", ["sm_80", "sm_90a"])
@pytest.mark.parametrize("dropout_p", [1e-9, 0.96875, 0.96878, 0.9999])
def test_probabilities_at_the_ends(dropout_p: float, target: str) -> None:
    # Numbers above 0x7c00 of 2^15 are not compared by halves: 0.96875 is the last that is.
    check("bf16", torch.bfloat16, target, 2e-2, {"dropout_p": dropout_p}, (0, 0))


def check(
    element: str,
    dtype: torch.dtype,
    target: str,
    tolerance: float,
    options: dict[str, Any],
    starts: tuple[int, int],
    *,
    deterministic: bool = False,
) -> None:
    op = load_spec(flashgen.loads(TEXT % element, backend="reference").spec, "emulator", target)
    sizes = ((1, 2, 75, 32), (1, 1, 141, 32), (1, 1, 141, 48))
    leaves = [normal(*size, seed=seed + starts[1]).to(dtype).requires_grad_() for seed, size in enumerate(sizes)]
    d_o = normal(1, 2, 75, 48, seed=9).to(dtype)
    given = {"seed": 12345678901234 + starts[1], "q_start": starts[0], "kv_start": starts[1], "h_start": 1, **options}
    o = op(*leaves, **given, deterministic=deterministic)
    exact = [x.detach().double().requires_grad_() for x in leaves]
    exact_o = op.reference(*exact, **given, dtype=torch.float64)
    assert_close(o, exact_o, tolerance, "o")
    gradients = torch.autograd.grad(o, leaves, d_o), torch.autograd.grad(exact_o, exact, d_o.double())
    for name, found, wanted in zip(("dq", "dk", "dv"), *gradients, strict=True):
        assert_close(found, wanted, tolerance, name)
