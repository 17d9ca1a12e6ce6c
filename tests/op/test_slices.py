"""Slices of rows: kernels that write o and dq into larger tensors, and gradients of keys in float32."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor

import flashgen
from flashgen.hosts.emulated import recording
from flashgen.ir.shape import Shape
from flashgen.kinds.slices import SLICES
from flashgen.op.slices import has_kernel
from flashgen.verification.hbm import hbm_bytes
from flashgen.verification.inputs import random_inputs

TEXT = """attention slices_of_rows {
    head_dim 40/24
    tensor slope: f32[H] grad
    score s - slope[h] * abs(i - j)
    mask window(60)
    dropout 0.2
}"""
WIDE = "attention slices_of_wide { head_dim 224/160  dtype bf16  mask window(60) }"
POINTWISE = "attention slices_of_sigmoids { head_dim 33 weights sigmoid(s) mask window(60) }"
SHAPE, OFFSETS = Shape(2, 4, 2, 70, 90), (20, 0, 0, 0, 90, 90, 2, 4)
BEFORE, BEHIND = 13, 24  # rows of the larger tensors
CASES = [
    (TEXT, torch.bfloat16),
    (TEXT, torch.float32),
    (WIDE, torch.bfloat16),
    (POINTWISE, torch.bfloat16),
    (POINTWISE, torch.float32),
]
WHERE = [("cpu", None), ("emulator", "sm_80"), ("emulator", "sm_90a")]


@pytest.mark.parametrize(
    ("text", "dtype"), CASES, ids=["slopes, bf16", "slopes", "wide", "pointwise, bf16", "pointwise"]
)
@pytest.mark.parametrize(("backend", "target"), WHERE)
def test_they_are_what_other_kernels_write(backend: str, target: str | None, text: str, dtype: torch.dtype) -> None:
    """Rows around them stay as they are."""
    op: Any = flashgen.loads(text, backend=backend, target=target)
    inputs = random_inputs(op.spec, SHAPE, op.spec.head_dims[0], dtype, seed=1)
    dropout = (torch.tensor(5), torch.tensor(0.2)) if op.spec.dropout is not None else ()
    tensors = (inputs.q, inputs.k, inputs.v, *inputs.captured.values(), *dropout)
    at = slice(BEFORE, BEFORE + SHAPE.q_len)

    def larger(like: Tensor) -> Tensor:
        return torch.full((*like.shape[:2], BEFORE + SHAPE.q_len + BEHIND, *like.shape[3:]), 7.0, dtype=like.dtype)

    assert has_kernel(op.engine_of(SLICES), inputs.q, inputs.v)
    for repeats in (False, True):
        rest, needs = (OFFSETS, repeats), [True] * op.signature.inputs
        attended: tuple[Any, ...] = op.engine.attend(tensors, rest)
        d_lse = None if attended[1] is None else torch.randn_like(attended[1])
        wholes: list[Any] = [None if x is None else larger(x) for x in (d_lse, *attended, inputs.q)]
        own_d_lse, o, lse, extremes, dq = (None if x is None else x[:, :, at] for x in wholes)
        if own_d_lse is not None:
            own_d_lse.copy_(d_lse)
        with recording() as counted:
            op.engine_of(SLICES).attend_into((o, lse, extremes), tensors, rest)
            rows = (own_d_lse, o, lse, extremes)
            into = (dq, *(torch.full(x.shape, 7.0) for x in (inputs.k, inputs.v)))
            found = op.engine_of(SLICES).gradients_into(into, inputs.d_o, rows, tensors, rest, needs)
        assert all(x is y for x, y in zip(found, into, strict=False))
        assert all(y is None or torch.equal(x, y) for x, y in zip(attended, rows[1:], strict=True))
        wanted = op.engine.gradients(inputs.d_o, (d_lse, *attended), tensors, rest, needs)
        assert {x.dtype for x in found[1:]} == {torch.float32}
        for x, y in zip(wanted, found, strict=True):
            torch.testing.assert_close(x, y.to(x.dtype), rtol=2**-7, atol=float(1e-6 * y.abs().max()))
            assert not repeats or x.dtype is torch.float32 or torch.equal(x, y.to(x.dtype))
        for whole in wholes:
            if whole is not None:
                whole[:, :, at] = 7.0
                assert bool((whole == 7.0).all())
        moved = hbm_bytes(op, inputs, counted)
        assert set(moved) == ({"forward", "backward"} if counted else set())
        assert all(each.predicted == each.counted for each in moved.values()), moved


def test_where_there_are_none_they_say_so() -> None:
    op: Any = flashgen.loads(POINTWISE, backend="cpu")
    inputs = random_inputs(op.spec, SHAPE, op.spec.head_dims[0], torch.float32, seed=1)
    kernels = op._parts.kernels["cpu"]

    def without(head_dim: Any, index: int) -> Any:
        return dataclasses.replace(kernels(head_dim, index), other=lambda _: None)

    engine = type(op.engine_of(SLICES))(op.spec, {"cpu": without})
    assert not has_kernel(engine, inputs.q, inputs.v)
    assert not has_kernel(flashgen.loads(POINTWISE, backend="reference").engine_of(SLICES), inputs.q, inputs.v)
