"""Captured tensors without elements: each element reads 0 or false and takes no gradient, as in the reference."""

from __future__ import annotations

import pytest
import torch

import flashgen
from flashgen.ir.shape import Shape
from flashgen.ir.types import ElementType
from flashgen.op.op import AttentionOp
from flashgen.verification.verify import verify_case
from tests.cuda.targets import emulated
from tests.numeric.helpers import failures
from tests.slices import one_of

SHAPE = Shape(2, 2, 1, 37, 40)  # lengths below 64, so that nothing of `Nk // 64` is there
AT = "tensor at: i32[2 * Nk]"  # what it holds is not known before the call, nor then
SPECS = {
    "score": "tensor block: i32[Nk]  tensor t: f32[Nk // 64] grad  param w: f32 = 0.5 grad  score w * s + t[block[j]]",
    "by_pair": f"{AT}  tensor t: bf16[B, H, Nq // 64, Nk] grad  score s + t[b, h, at[i], j]",
    "by_distance": f"{AT}  tensor t: f16[H, Nk // 64] grad  score s + t[h, at[i - j + Nk]]",
    "by_row": f"{AT}  tensor t: f32[Nq // 64] grad  tensor u: f32[H] grad  score s * (1 + t[at[i]]) + u[h] + t[at[h]]",
    "mask": f"{AT}  tensor on: bool[H, Nk // 64]  tensor n: i64[Nq // 64]  mask not on[h, at[j]] and i < j + n[at[i]]",
    "layout": f"{AT}  tensor on: bool[H, Nq // 64, Nk]  layout block 16: not on[h, at[I], J]  mask causal",
    "documents": f"{AT}  tensor doc: i32[B, Nk // 64]  mask doc[b, at[i]] == doc[b, at[j]] and causal",
    "sink": f"{AT}  tensor t: f32[H // 64] grad  weights softmax(sink = t[at[h]])",
    "weights": f"{AT}  tensor t: f32[Nk // 64] grad  weights normalize(exp(s + t[at[j]]))",
    "pointwise": f"{AT}  tensor t: f32[B // 64, Nk] grad  weights sigmoid(s + t[at[b], j])",
}
WIDE = ("score", "layout", "by_distance")


def check(op: AttentionOp, elements: tuple[ElementType, ...]) -> None:
    """Against the reference, and with gradients of their shape."""
    for element in elements:
        case = verify_case(op, op.spec.head_dims[0], element, SHAPE)
        assert case.ok, failures(case)


@pytest.mark.parametrize("name", SPECS)
def test_on_cpus(name: str) -> None:
    op = flashgen.loads(f"attention nothing_{name} {{ head_dim 16  {SPECS[name]} }}", backend="cpu")
    check(op, (ElementType.F32, ElementType.BF16, ElementType.F16))


@pytest.mark.parametrize(
    ("name", "target"),
    one_of(2, [*((name, "sm_80") for name in SPECS), ("score", "sm_75"), *((n, "sm_90a") for n in WIDE)]),
)
def test_on_the_emulator(name: str, target: str) -> None:
    op = emulated(f"attention nothing_{name}_{target} {{ head_dim 64  {SPECS[name]} }}", target)
    check(op, (ElementType.F32, ElementType.BF16) if name == "score" else (ElementType.F16,))


@pytest.mark.parametrize("name", ["score", "by_row", "sink", "weights"])
def test_the_second_order(name: str) -> None:
    """Of a gradient without elements nothing may be added up, either: there was no room for that."""
    op = flashgen.loads(f"attention nothing_{name} {{ head_dim 16  {SPECS[name]} }}", backend="cpu")
    case = verify_case(op, op.spec.head_dims[0], ElementType.F32, SHAPE, order=2)
    assert case.ok, failures(case)


def test_the_gradient_has_no_elements_either() -> None:
    op = flashgen.loads(f"attention nothing_score {{ head_dim 16  {SPECS['score']} }}", backend="cpu")
    q, k, v = (torch.randn(1, 1, 40, 16, requires_grad=True) for _ in range(3))
    t, w = torch.zeros(0, requires_grad=True), torch.tensor(0.5, requires_grad=True)
    block = torch.full((40,), 2**31 - 1, dtype=torch.int32)
    for deterministic in (False, True):
        o = op(q, k, v, block=block, t=t, w=w, deterministic=deterministic)
        of_t, of_w = torch.autograd.grad(o.square().sum(), (t, w))
        assert of_t.shape == (0,)
        assert of_w.item() != 0
