"""CUDA kernels of gallery specs, run by the emulator, against the float64 reference: forward and every gradient."""

from __future__ import annotations

import math
from functools import partial

import pytest
import torch

import flashgen
from flashgen.ir.shape import Shape
from flashgen.ir.types import ElementType
from flashgen.verification import fitting, random_inputs
from flashgen.verification.verify import call_op, first_order, of_learned, verify_case, widened
from tests.numeric.helpers import failures, operator

# One for each way of a kernel: plain, row gradients, tables, layouts, dropout, tables by distance, sinks, weights,
# distances, 192/128.
SPECS = (
    "causal",
    "forgetting",
    "swin",
    "sparse_butterfly",
    "gemma2_local",
    "t5",
    "relative_bias",
    "gpt_oss",
    "sigmoid_attention",
    "relu2_normalized",
    "gaussian_regression",
    "mla",
)


@pytest.mark.parametrize("name", SPECS)
def test_the_emulator_agrees_with_the_reference(name: str) -> None:
    op = operator(name, "emulator")
    case = verify_case(op, op.spec.head_dims[0], ElementType.BF16, fitting(op.spec, Shape(1, 2, 1, 70, 70)))
    assert case.ok, failures(case)


@pytest.mark.parametrize("element", [ElementType.BF16, ElementType.F32])
def test_o_takes_the_place_of_less_than_itself(element: ElementType) -> None:
    """O of wide values is stored where Q, K, V and then the list of tiles were, while other warps are still at it."""
    text = "attention wide { head_dim 32/256  mask causal  schedule { Br = 128  Bc = 16  warps = 8  stages = 1 } }"
    op = flashgen.loads(text, backend="emulator")
    case = verify_case(op, op.spec.head_dims[0], element, Shape(1, 1, 1, 150, 70))
    assert case.ok, failures(case)


@pytest.mark.parametrize("name", SPECS[:3])
def test_float32_is_as_accurate_as_float32(name: str) -> None:
    op = operator(name, "emulator")
    case = verify_case(op, op.spec.head_dims[0], ElementType.F32, fitting(op.spec, Shape(1, 2, 2, 33, 65)))
    assert case.ok, failures(case)


def test_float32_stays_accurate_over_many_keys() -> None:
    """Sums that matrix units cut off towards zero would be short by an error that grows with the number of keys."""
    op = operator("plain", "emulator")
    case = verify_case(op, op.spec.head_dims[0], ElementType.F32, Shape(1, 1, 1, 40, 700))
    for row in case.rows:
        assert row.error <= 2 * row.baseline + 2.0**-23, failures(case) or row


def test_float32_cancels_where_there_is_a_single_key() -> None:
    """There dP - delta is the gradient of lse; float32 leaves of a dP of about 8 an error of its last places."""
    op = operator("plain", "emulator")
    inputs = random_inputs(op.spec, Shape(1, 64, 64, 1, 1), op.spec.head_dims[0], torch.float32)
    call = of_learned(partial(call_op, op), inputs)
    found = first_order(call, inputs.differentiable(op.spec), inputs.d_o, inputs.d_lse)
    wide = widened(inputs)
    scale = wide.k[..., 0, :] / math.sqrt(wide.k.shape[-1])  # dQ = dS K scale
    d_score = (found["dq"][..., 0, :].double() * scale).sum(-1) / scale.square().sum(-1)
    d_weight = (wide.d_o * wide.v).sum((-2, -1))
    errors = (d_score - wide.d_lse[..., 0]) / d_weight.square().mean().sqrt()
    assert errors.square().mean().sqrt() <= 2.0**-22


def test_weights_below_the_range_of_float16() -> None:
    """Rows whose scores are all negative have weights of 1e-6, which float16 holds as 1.0133e-6."""
    op = operator("relu2_normalized", "emulator")
    case = verify_case(op, op.spec.head_dims[0], ElementType.F16, Shape(1, 2, 1, 77, 203))
    assert case.ok, failures(case)
