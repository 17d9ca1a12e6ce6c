"""Parts of rows: kernels that write float32 of 16 bits, beside those that write 16 bits, and beside float32."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor

import flashgen
from flashgen.compiler.compiled import compiled
from flashgen.hosts.emulated import recording
from flashgen.hosts.gpu_calls import kernel_variant
from flashgen.ir.shape import Shape
from flashgen.kinds.dense import DENSE
from flashgen.kinds.slices import PARTS
from flashgen.op.engine import Engine
from flashgen.op.op import AttentionOp, OpParts
from flashgen.targets.registry import GPUS
from flashgen.verification.hbm import hbm_bytes
from flashgen.verification.inputs import Inputs, random_inputs

TEXT = """attention parts_of_rows {
    head_dim 40/24
    tensor slope: f32[H] grad
    score s - slope[h] * abs(i - j)
    mask window(60)
    dropout 0.2
}"""
PLAIN = "attention parts_of_plain { head_dim 16 dtype bf16 mask causal }"
SHAPE = Shape(1, 4, 2, 70, 90)
OFFSETS = (20, 0, 0, 0, 90, 90, 1, 4)
WHERE = [("cpu", None), ("emulator", "sm_80"), ("emulator", "sm_90a")]


def call_of(op: AttentionOp, dtype: torch.dtype, shape: Shape = SHAPE) -> tuple[Inputs, tuple[Any, ...]]:
    """Random arguments, and the operator's tensors."""
    inputs = random_inputs(op.spec, shape, op.spec.head_dims[0], dtype, seed=1)
    dropout = (torch.tensor(5), torch.tensor(0.2)) if op.spec.dropout is not None else ()
    return inputs, (inputs.q, inputs.k, inputs.v, *inputs.captured.values(), *dropout)


def both(engine: Engine, inputs: Inputs, tensors: tuple[Any, ...], rows: Any = None) -> tuple[Any, list[Tensor]]:
    """What a forward pass gives, and the gradients where rows are these, or the pass's own."""
    found = engine.attend(tensors, (OFFSETS, False))
    needs = [True] * engine.signature.inputs
    own = (None, *(found if rows is None else rows))
    return found, engine.gradients(inputs.d_o, own, tensors, (OFFSETS, True), needs, is_part=True)


@pytest.mark.parametrize(("backend", "target"), WHERE)
def test_they_are_what_other_kernels_write_before_it_is_rounded(backend: str, target: str | None) -> None:
    op = flashgen.loads(TEXT, backend=backend, target=target)
    inputs, tensors = call_of(op, torch.bfloat16)
    (o, lse, extreme), gradients = both(op._registered.engine, inputs, tensors)
    with recording() as counted:
        (wide, of_parts, _), sums = both(op.engine_of(PARTS), inputs, tensors, (o.float(), lse, extreme))
    assert {x.dtype for x in (wide, *sums)} == {torch.float32}
    assert torch.equal(wide.to(o.dtype), o)
    assert torch.equal(of_parts, lse)
    assert not torch.equal(wide, o.float())  # nothing of it was rounded before
    for x, y in zip(gradients, sums, strict=True):
        # delta is summed up in another order.
        torch.testing.assert_close(x, y.to(x.dtype), rtol=2**-7, atol=float(1e-6 * y.abs().max()))
        assert (x != y.to(x.dtype)).float().mean() < 0.02 or x.dtype is torch.float32
    moved = hbm_bytes(op, inputs, counted)
    assert set(moved) == ({"forward", "backward"} if counted else set())
    assert all(each.predicted == each.counted for each in moved.values()), moved


@pytest.mark.parametrize("head_dim", ["224/160", "160"])
@pytest.mark.parametrize("deterministic", [False, True])
def test_where_warpgroups_divide_columns(head_dim: str, deterministic: bool) -> None:
    """Each stores its own; what is not rounded is nearer to the formula."""
    text = f"attention parts_of_columns {{ head_dim {head_dim}  dtype bf16  mask window(60) }}"
    op = flashgen.loads(text, backend="emulator", target="sm_90a")
    inputs, tensors = call_of(op, torch.bfloat16)
    needs, rest = [True] * 3, (OFFSETS, deterministic)
    o, lse, extreme = op._registered.engine.attend(tensors, rest)
    rounded = op._registered.engine.gradients(inputs.d_o, (None, o, lse, extreme), tensors, rest, needs)
    engine = op.engine_of(PARTS)
    sums = engine.gradients(inputs.d_o, (None, o.float(), lse, extreme), tensors, rest, needs, is_part=True)
    leaves = [x.double().requires_grad_() for x in (inputs.q, inputs.k, inputs.v)]
    exact = op.reference(*leaves, dtype=torch.float64, q_start=20, q_total=90, kv_total=90)
    truths = torch.autograd.grad(exact, leaves, inputs.d_o.double())
    for truth, wide, narrow in zip(truths, sums, rounded, strict=True):
        assert wide.dtype is torch.float32
        assert (wide - truth).norm() < 0.9 * (narrow - truth).norm() < 0.004 * truth.norm()


# In turns, one step after another with an odd number of panels of V, by warps.
@pytest.mark.parametrize(("head_dim", "target"), [("384", "sm_90a"), ("448", "sm_90a"), ("448", "sm_80")])
def test_where_those_who_share_rows_divide_columns_of_o(head_dim: str, target: str) -> None:
    text = f"attention parts_of_o {{ head_dim {head_dim}  dtype bf16  mask window(60) }}"
    op = flashgen.loads(text, backend="emulator", target=target)
    _, tensors = call_of(op, torch.bfloat16)
    o, lse, _ = op._registered.engine.attend(tensors, (OFFSETS, False))
    wide, of_parts, _ = op.engine_of(PARTS).attend(tensors, (OFFSETS, False))
    assert wide.dtype is torch.float32
    assert torch.equal(wide.to(o.dtype), o)
    assert lse is not None
    assert of_parts is not None
    assert torch.equal(of_parts, lse)


def test_calls_in_float32_take_the_kernels_that_others_take() -> None:
    op = flashgen.loads(TEXT, backend="cpu")
    inputs, tensors = call_of(op, torch.float32)
    (o, lse, extreme), gradients = both(op._registered.engine, inputs, tensors)
    (wide, _, _), sums = both(op.engine_of(PARTS), inputs, tensors, (o, lse, extreme))
    assert torch.equal(wide, o)
    assert all(torch.equal(x, y) for x, y in zip(gradients, sums, strict=True))


def test_selected_keys_are_summed_up_in_float32() -> None:
    op = flashgen.loads("attention few { head_dim 8 dtype bf16 tensor idx: i32[H, 2] select 16: idx[h, :] }")
    q, k, v = (torch.randn(1, 2, 64, 8, generator=torch.Generator().manual_seed(n)).bfloat16() for n in range(3))
    idx = torch.tensor([[0, 2], [3, -1]], dtype=torch.int32)
    wide, _, _ = op.engine_of(PARTS).attend((q, k, v, idx), ((0, 0, 0, 0, 64, 64, 1, 2), False))
    assert wide.dtype is torch.float32
    assert torch.equal(wide.bfloat16(), op(q, k, v, idx=idx))
    truth = op.reference(q, k, v, idx=idx, dtype=torch.float64)
    assert (wide - truth).norm() < 2**-9 * truth.norm()  # where pairs of bfloat16 are multiplied, weights are


def test_where_there_are_none_what_is_read_is_widened() -> None:
    """The spec need not allow float32 for it."""
    op = flashgen.loads(PLAIN, backend="cpu")
    inputs, tensors = call_of(op, torch.bfloat16)
    (truth, _, _), wanted = both(op.engine_of(PARTS), inputs, tensors)
    kernels = op._parts.kernels["cpu"]
    assert kernels is not None

    def without(head_dim: Any, index: int) -> Any:
        kernel: Any = kernels(head_dim, index)
        return dataclasses.replace(kernel, other=lambda _: None)

    for given in (OpParts(op.spec, {"cpu": without}), OpParts(op.spec, {"cpu": None})):
        (wide, _, _), sums = both(AttentionOp(given).engine_of(PARTS), inputs, tensors)
        assert {x.dtype for x in (wide, *sums)} == {torch.float32}
        for x, y in zip((wide, *sums), (truth, *wanted), strict=True):
            assert (x - y).abs().max() <= 2**-7 * y.abs().max()
    dense = AttentionOp(OpParts(op.spec, {}, backend="reference")).engine_of(PARTS)
    assert dense.kind is PARTS
    assert dense.attend(tensors, (OFFSETS, False))[0].dtype is torch.float32


def test_other_kernels_have_none_of_it() -> None:
    spec = flashgen.loads(PLAIN, backend="reference").spec
    for target in ("sm_80", "sm_90a"):
        dense, parts = (
            compiled(kernel_variant(spec, spec.head_dims[0], rows), GPUS[target]) for rows in (DENSE, PARTS)
        )
        assert '#include "flashgen/parts.cuh"' not in dense.source.text
        assert '#include "flashgen/parts.cuh"' in parts.source.text
        assert dense.plan == parts.plan  # tiles are the same
        assert dense.source.symbol != parts.source.symbol
