"""CUDA kernels of gallery specs, run by the emulator, against the float64 reference: forward and every gradient."""

from __future__ import annotations

import pytest

from flashgen.ir.shape import Shape
from flashgen.ir.types import ElementType
from flashgen.verification import fitting
from flashgen.verification.verify import verify_case
from tests.numeric.helpers import failures, operator

# One for each way of a kernel: plain, row gradients, tables, layouts, dropout, sinks, weights, distances, 192/128.
SPECS = (
    "causal",
    "forgetting",
    "swin",
    "sparse_butterfly",
    "gemma2_local",
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


@pytest.mark.parametrize("name", SPECS[:3])
def test_float32_is_as_accurate_as_float32(name: str) -> None:
    op = operator(name, "emulator")
    case = verify_case(op, op.spec.head_dims[0], ElementType.F32, fitting(op.spec, Shape(1, 2, 2, 33, 65)))
    assert case.ok, failures(case)


def test_weights_below_the_range_of_float16() -> None:
    """Rows whose scores are all negative have weights of 1e-6, which float16 holds as 1.0133e-6."""
    op = operator("relu2_normalized", "emulator")
    case = verify_case(op, op.spec.head_dims[0], ElementType.F16, Shape(1, 2, 1, 77, 203))
    assert case.ok, failures(case)
