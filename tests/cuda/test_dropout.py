"""Dropout's decisions on GPUs, drawn by quads of keys or by pairs: those of the reference, wherever a shard begins."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import flashgen
from flashgen.pipeline import load_spec
from tests.numeric.helpers import assert_close, normal

TEXT = "attention drops { head_dim 32/48  dtype bf16  mask i - j < 90  dropout 0.3 }"


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("target", ["sm_80", "sm_90a"])
@pytest.mark.parametrize("kv_start", [0, 3, 8, 14])
def test_shards_that_begin_inside_of_quads(kv_start: int, target: str, deterministic: bool) -> None:
    op = load_spec(flashgen.loads(TEXT, backend="reference").spec, "emulator", target)
    sizes = ((1, 2, 75, 32), (1, 1, 141, 32), (1, 1, 141, 48))
    leaves = [normal(*size, seed=seed + kv_start).bfloat16().requires_grad_() for seed, size in enumerate(sizes)]
    d_o = normal(1, 2, 75, 48, seed=9).bfloat16()
    given: dict[str, Any] = {"seed": 12345678901234 + kv_start, "q_start": 7, "kv_start": kv_start, "h_start": 1}
    o = op(*leaves, **given, deterministic=deterministic)
    exact = [x.detach().double().requires_grad_() for x in leaves]
    exact_o = op.reference(*exact, **given, dtype=torch.float64)
    assert_close(o, exact_o, 2e-2, "o")
    gradients = torch.autograd.grad(o, leaves, d_o), torch.autograd.grad(exact_o, exact, d_o.double())
    for name, found, wanted in zip(("dq", "dk", "dv"), *gradients, strict=True):
        assert_close(found, wanted, 2e-2, name)
