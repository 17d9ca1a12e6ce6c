"""Selected keys in kernels for GPUs, on the emulator: results, gradients, bytes, and what is never read."""

from __future__ import annotations

import functools

import pytest
import torch

import flashgen
from flashgen.ir.shape import Shape
from flashgen.ir.types import ElementType
from flashgen.kinds.ragged import RAGGED
from flashgen.op import lengths, ragged
from flashgen.op.op import AttentionOp
from flashgen.verification.verify import relative_error, verify_case
from tests.numeric.helpers import failures

PER_QUERY = """
attention per_query {
    head_dim 32
    tensor idx: i32[B, Hkv, Nq, 3]
    select 16: idx[b, hkv, i, :]
    mask causal
}
"""
PER_BLOCK = "attention per_block { head_dim 64  tensor idx: i32[B, ceildiv(Nq, 64), 1]  select 64: idx[b, i // 64, :] }"


@functools.cache
def emulated(text: str, target: str) -> AttentionOp:
    return flashgen.loads(text, backend="emulator", target=target)


@pytest.mark.parametrize(
    ("text", "target", "element"),
    [
        (PER_QUERY, "sm_80", ElementType.F32),
        (PER_QUERY, "sm_80", ElementType.BF16),
        (PER_BLOCK, "sm_80", ElementType.F16),
        (PER_BLOCK, "sm_90a", ElementType.BF16),
        (PER_QUERY, "sm_90a", ElementType.BF16),
    ],
)
def test_results_gradients_and_bytes(text: str, target: str, element: ElementType) -> None:
    op = emulated(text, target)
    case = verify_case(op, op.spec.head_dims[0], element, Shape(1, 2, 1, 130, 150), seed=2)
    assert case.ok, failures(case)
    assert set(case.hbm_bytes) == {"forward", "backward"}
    assert all(each.predicted == each.counted for each in case.hbm_bytes.values())


@pytest.mark.parametrize("target", ["sm_80", "sm_90a"])
def test_nothing_is_read_of_tiles_that_nobody_selects(target: str) -> None:
    op = emulated(PER_BLOCK, target)
    q, k, v = (torch.randn(1, 1, 256, 64, dtype=torch.bfloat16) for _ in range(3))
    k[:, :, 128:], v[:, :, 128:] = torch.nan, torch.nan
    inputs = [x.requires_grad_() for x in (q, k, v)]
    o = op(*inputs, idx=torch.tensor([[[0], [1], [-1], [0]]], dtype=torch.int32))
    gradients = torch.autograd.grad(o, inputs, torch.ones_like(o))
    assert all(x.isfinite().all() for x in (o, *gradients))
    assert not o[:, :, 128:192].any()
    assert not gradients[1][:, :, 128:].any()


def test_lists_need_no_lengths_of_sequences(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bits are as long as the longest sequence may be: on a GPU nobody waits for lengths."""
    op, starts = emulated(PER_QUERY, "sm_80"), torch.tensor([0, 70, 75, 110], dtype=torch.int32)
    q, k, v = rows = [torch.randn(110, heads, 32, requires_grad=True) for heads in (4, 2, 2)]
    idx, d_o = torch.randint(-2, 6, (3, 2, 70, 3), dtype=torch.int32), torch.randn(110, 4, 32)
    assert not op.engine_of(RAGGED).checker.lengths.why_seen((*rows, idx), (70, None))
    exact = op.reference.varlen(q, k, v, starts, starts, idx=idx, dtype=torch.float64)
    wanted = torch.autograd.grad(exact, rows, d_o.double())
    monkeypatch.setattr(ragged, "lengths", lengths.unseen_lengths)
    found = op.varlen(q, k, v, starts, starts, 70, idx=idx)
    for x, y in zip((found, *torch.autograd.grad(found, rows, d_o)), (exact, *wanted), strict=True):
        assert relative_error(x, y) < 1e-5
