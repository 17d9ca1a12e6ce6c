"""Head dimensions above 256: warps and warpgroups that share rows, on the emulator and on the CPU."""

from __future__ import annotations

import pytest
import torch

import flashgen
from flashgen.ir.shape import Shape
from flashgen.ir.types import ElementType
from flashgen.op.op import AttentionOp
from flashgen.verification.verify import relative_error, verify_case

from .helpers import failures, normal
from .test_ragged import batch, check

MASKED = "attention masked {{ head_dim {head_dim}  mask causal }}"
# Sums over rows and over columns, both of them where a score uses the distance; what a row agrees on: maxima, sums.
SUMS = """
attention sums {{
    head_dim {head_dim}
    tensor by_row: f32[B, H, Nq] grad
    tensor by_head: f32[H] grad
    score s - 0.01 * sqdist + by_row[b, h, i]
    mask causal and i - j < 21
    weights softmax(sink = by_head[h])
    dropout 0.2
}}
"""
CAPPED = """
attention capped {{
    head_dim {head_dim}
    tensor by_key: f32[H, Nk] grad
    score 5 * tanh(s / 5) + by_key[h, j]
    mask i - j < 50
    dropout 0.1
}}
"""
SIGMOID = "attention weighed {{ head_dim {head_dim}  mask causal  weights sigmoid(s) }}"
# float16 keeps their weights near 1 by a factor of each row, on which warps agree, too.
NORMALISED = "attention normalised {{ head_dim {head_dim}  mask causal  weights normalize(exp(s)) }}"

GROUPED, UNEVEN = Shape(1, 4, 2, 37, 45), Shape(1, 2, 1, 67, 145)
slow = pytest.mark.slow


def emulated(text: str, head_dim: str, target: str) -> AttentionOp:
    return flashgen.loads(text.format(head_dim=head_dim), backend="emulator", target=target)


# With 64 and 99 KiB of shared memory a tile has fewer keys than there are warps to share them.
@pytest.mark.parametrize(
    ("text", "head_dim", "target", "element", "shape"),
    [
        (MASKED, "576/512", "sm_80", "bf16", GROUPED),
        (MASKED, "512", "sm_90a", "bf16", UNEVEN),
        (SUMS, "300", "sm_75", "f16", GROUPED),
        (MASKED, "301", "sm_80", "f16", GROUPED),
        (SUMS, "384", "sm_80", "f32", GROUPED),  # scores of 8 keys at a time
        # One source has both: in float32 warps share rows, in 16 bits warpgroups have rows of their own.
        (MASKED, "272", "sm_90a", "bf16", GROUPED),
        pytest.param(MASKED, "272", "sm_90a", "f32", GROUPED, marks=slow),
        pytest.param(SUMS, "512", "sm_86", "bf16", GROUPED, marks=slow),
        pytest.param(SUMS, "576/512", "sm_90a", "bf16", GROUPED, marks=slow),
        pytest.param(CAPPED, "576/512", "sm_90a", "f16", UNEVEN, marks=slow),
        pytest.param(CAPPED, "384", "sm_90a", "bf16", UNEVEN, marks=slow),
        pytest.param(CAPPED, "264", "sm_80", "f32", UNEVEN, marks=slow),
        pytest.param(SIGMOID, "512", "sm_86", "f16", UNEVEN, marks=slow),
        pytest.param(NORMALISED, "512", "sm_80", "f16", UNEVEN, marks=slow),
        pytest.param(NORMALISED, "320/512", "sm_90a", "f16", UNEVEN, marks=slow),
        pytest.param(MASKED, "576", "sm_90", "bf16", UNEVEN, marks=slow),
        pytest.param(MASKED, "512/64", "sm_90a", "bf16", UNEVEN, marks=slow),
        pytest.param(MASKED, "320", "sm_120", "f32", UNEVEN, marks=slow),
    ],
)
def test_results_and_bytes(text: str, head_dim: str, target: str, element: str, shape: Shape) -> None:
    op = emulated(text, head_dim, target)
    case = verify_case(op, op.spec.head_dims[0], ElementType(element), shape)
    assert case.ok, failures(case)
    assert set(case.hbm_bytes) == {"forward", "backward"}
    for name, each in case.hbm_bytes.items():
        assert each.predicted == each.counted, name


@slow
@pytest.mark.parametrize(("head_dim", "target"), [("512", "sm_80"), ("576/512", "sm_90a")])
def test_ragged_and_repeatable(head_dim: str, target: str) -> None:
    op = emulated(CAPPED, head_dim, target)
    given = batch(op, ((5, 5), (0, 3), (70, 33), (9, 0), (1, 1)), heads=2, kv_heads=1, dtype=torch.bfloat16)
    check(op, given, seed=3)
    check(op, given, seed=3, deterministic=True)


@pytest.mark.parametrize("element", [ElementType.BF16, pytest.param(ElementType.F32, marks=slow)])
def test_on_the_cpu(element: ElementType) -> None:
    op = flashgen.loads(MASKED.format(head_dim="576/512"), backend="cpu")
    case = verify_case(op, op.spec.head_dims[0], element, GROUPED)
    assert case.ok, failures(case)


def test_decoding_on_the_cpu() -> None:
    """One query over a cache, as the dense formula has it: keys of 576 numbers, of which values are the first 512."""
    op = flashgen.loads(MASKED.format(head_dim="576/512"), backend="cpu")
    q, cache = normal(2, 8, 1, 576), normal(2, 2, 128, 576, seed=1)
    lengths = torch.tensor([100, 77], dtype=torch.int32)
    o = op.decode(q, cache, cache[..., :512], cache_seqlens=lengths)
    for b, length in enumerate(lengths.tolist()):
        k = cache[b, :, :length].double().repeat_interleave(4, 0)
        weights = torch.softmax(q[b].double() @ k.mT / 576**0.5, -1)
        assert relative_error(o[b], weights @ k[..., :512]) < 2e-6
