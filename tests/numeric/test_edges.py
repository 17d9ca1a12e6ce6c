"""Where there is nothing to attend to: empty tensors, rows that the mask leaves empty, scores without end."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import flashgen
from flashgen.ir.shape import Shape
from flashgen.op.signature import TORCH_DTYPES
from flashgen.verification import random_inputs
from flashgen.verification.inputs import tensor_shape
from tests.numeric.helpers import GALLERY, assert_close, dtypes, normal, operator
from tests.slices import one_of

D = 64


@pytest.mark.parametrize(
    ("batch", "q_len", "kv_len"), [(0, 5, 5), (2, 0, 5), (2, 5, 0), (0, 0, 0)], ids=["B", "Nq", "Nk", "all"]
)
def test_empty_tensors(batch: int, q_len: int, kv_len: int) -> None:
    op = operator("causal")
    q = normal(batch, 2, q_len, D).requires_grad_()
    k, v = (normal(batch, 2, kv_len, D, seed=seed).requires_grad_() for seed in (1, 2))
    o, lse = op(q, k, v, return_lse=True)
    assert o.shape == (batch, 2, q_len, D)
    assert lse.shape == (batch, 2, q_len)
    assert not o.any()
    assert torch.equal(lse, torch.full_like(lse, -torch.inf))
    gradients = torch.autograd.grad(o.sum(), (q, k, v))
    for x, gradient in zip((q, k, v), gradients, strict=True):
        assert gradient.shape == x.shape
        assert not gradient.any()


@pytest.mark.parametrize("name", one_of(5, GALLERY))
def test_no_keys_for_any_spec(name: str) -> None:
    op = operator(name)
    head_dim, dtype = op.spec.head_dims[0], TORCH_DTYPES[dtypes(op.spec)[0]]
    shape = Shape(2, 2, 2, 0, 0)
    if any(extent < 0 for tensor in op.spec.tensors for extent in tensor_shape(tensor, shape, head_dim)):
        pytest.skip("a captured tensor has no shape at these sizes")
    inputs = random_inputs(op.spec, shape, head_dim, dtype)
    o = op(inputs.q, inputs.k, inputs.v, **inputs.named)
    assert o.shape == (2, 2, 0, head_dim.v)


def test_rows_with_nothing_kept_give_zero() -> None:
    """With fewer keys than queries, the first rows of a lower-right causal mask see nothing."""
    op = flashgen.loads("attention lower { head_dim 64 mask causal_lower_right }")
    q, k, v = normal(1, 2, 20, D), normal(1, 2, 8, D, seed=1), normal(1, 2, 8, D, seed=2)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    o, lse = op(*leaves, return_lse=True)
    empty = slice(0, 12)
    assert not o[:, :, empty].any()
    assert torch.equal(lse[:, :, empty], torch.full((1, 2, 12), -torch.inf))
    assert lse[:, :, 12:].isfinite().all()
    dq, dk, dv = torch.autograd.grad(
        (o, torch.where(lse.isfinite(), lse, 0.0)), leaves, (torch.ones_like(o), torch.ones_like(lse))
    )
    assert not dq[:, :, empty].any()
    assert all(gradient.isfinite().all() for gradient in (dq, dk, dv))


def test_a_mask_that_keeps_nothing() -> None:
    op = flashgen.loads("attention nothing { head_dim 64 tensor keep: bool[B, Nk] mask keep[b, j] }")
    q, k, v = (normal(2, 2, 33, D, seed=seed).requires_grad_() for seed in range(3))
    keep = torch.zeros(2, 33, dtype=torch.bool)
    keep[1] = True
    o, lse = op(q, k, v, keep=keep, return_lse=True)
    assert not o[0].any()
    assert torch.equal(lse[0], torch.full_like(lse[0], -torch.inf))
    gradients = torch.autograd.grad(o.sum(), (q, k, v))
    assert all(not gradient[0].any() and gradient.isfinite().all() for gradient in gradients)


@pytest.mark.parametrize("factor", [1e2, 1e3])
def test_scores_far_apart_neither_overflow_nor_lose_rows(factor: float) -> None:
    op = operator("causal")
    q, k, v = normal(1, 2, 50, D) * factor, normal(1, 2, 50, D, seed=1), normal(1, 2, 50, D, seed=2)
    o, lse = op(q, k, v, return_lse=True)
    exact, exact_lse = op.reference(q.double(), k.double(), v.double(), dtype=torch.float64, return_lse=True)
    assert_close(o, exact, 1e-4, "o")
    assert_close(lse, exact_lse, what="lse")


def test_a_nan_stays_in_its_row() -> None:
    op = operator("causal")
    q, k, v = normal(1, 1, 40, D), normal(1, 1, 40, D, seed=1), normal(1, 1, 40, D, seed=2)
    q[0, 0, 7] = torch.nan
    o, lse = op(q, k, v, return_lse=True)
    wrong = o.isnan().any(-1)[0, 0]
    assert wrong[7]
    assert wrong.sum() == 1
    assert lse.isnan()[0, 0].sum() == 1


def test_an_infinite_score_is_masked() -> None:
    """A score of -inf counts as masked, in the gradient too."""
    op = flashgen.loads("attention cut { head_dim 64 tensor bias: f32[Nk] grad score s + bias[j] }")
    q, k, v = (normal(1, 2, 30, D, seed=seed).requires_grad_() for seed in range(3))
    bias = torch.zeros(30)
    bias[11:] = -torch.inf
    bias.requires_grad_()
    o = op(q, k, v, bias=bias)
    exact = torch.nn.functional.scaled_dot_product_attention(q.double(), k[:, :, :11].double(), v[:, :, :11].double())
    assert_close(o, exact, what="o")
    gradients = torch.autograd.grad(o.square().sum(), (q, k, v, bias))
    assert all(gradient.isfinite().all() for gradient in gradients)
    assert not gradients[3][11:].any()


@pytest.mark.parametrize(("backend", "target"), [("cpu", None), ("emulator", "sm_80"), ("emulator", "sm_90a")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "statements",
    [
        "score where(D > 0, inf, s)  weights normalize2(exp(s))",
        "score where(D > 0, inf, s)",
        "param on: i32 = 1  score where(on > 0, inf, s)",
        "param most: f32 = inf  score most",
        "tensor bias: f32[H]  score 0.0 + bias[h]",
        "tensor bias: f32[H] grad  score bias[h]  weights softmax(sink = 1.0)",
    ],
)
def test_a_score_that_no_product_moves_gives_it_no_gradient(
    statements: str, backend: str, target: str | None, dtype: torch.dtype
) -> None:
    """Nor does one of +inf, whose row has no numbers: none of it reaches q and k, as in the reference."""
    op = flashgen.loads(f"attention still {{ head_dim 32  {statements} }}", backend=backend, target=target)
    captured: dict[str, Any] = {"bias": torch.full((2,), torch.inf)} if "bias" in statements else {}
    q, k, v = (normal(1, 2, 30, 32, seed=seed).to(dtype).requires_grad_() for seed in range(3))
    o, lse = op(q, k, v, **captured, return_lse=True)
    assert o.isnan().all()
    assert lse.eq(torch.inf).all() if "normalize2" in statements else not lse.isfinite().any()
    for deterministic in (False, True):
        o = op(q, k, v, **captured, deterministic=deterministic)
        for gradient in torch.autograd.grad(o.float().sum(), (q, k)):
            assert not gradient.any()


@pytest.mark.parametrize(("backend", "target"), [("cpu", None), ("emulator", "sm_80"), ("emulator", "sm_90a")])
@pytest.mark.parametrize("deterministic", [False, True])
def test_an_element_without_a_number_leaves_the_others(backend: str, target: str | None, deterministic: bool) -> None:
    op = flashgen.loads(
        "attention some { head_dim 32  tensor bias: f32[H] grad  score s + bias[h]  weights softmax(sink = 0.0) }",
        backend=backend,
        target=target,
    )
    bias = torch.tensor([0.5, torch.inf, -1.0], requires_grad=True)
    inputs = [normal(1, 3, 20, 32, seed=seed).to(torch.bfloat16) for seed in range(3)]
    weigh = normal(1, 3, 20, 32, seed=3)
    results = op(*inputs, bias=bias, deterministic=deterministic), op.reference(*inputs, bias=bias)
    found, exact = (torch.autograd.grad((o.float() * weigh).sum(), bias)[0] for o in results)
    assert found.isnan().tolist() == exact.isnan().tolist() == [False, True, False]
    torch.testing.assert_close(found[::2], exact[::2], rtol=0.02, atol=0.02)


@pytest.mark.parametrize(("target", "head_dim"), [("sm_80", 64), ("sm_90a", 64), ("sm_90a", 256)])
@pytest.mark.parametrize(
    ("sizes", "shape", "statements"),
    [
        ("H, Nq, Nk", (2, 37, 50), "score s + t[h, i, j]"),
        ("Nq + Nk", (87,), "score s + t[i - j + Nk - 1]  mask causal"),
        ("Nq, 16", (37, 16), "score s + t[i, (i * j) % 16]"),
    ],
)
@pytest.mark.parametrize("deterministic", [False, True])
def test_keys_that_are_nan_write_inside_of_gradients(
    sizes: str, shape: tuple[int, ...], statements: str, target: str, head_dim: int, deterministic: bool
) -> None:
    """A tile's rows past the last query are 0, but 0 times NaN is a weight of NaN: these rows have no elements."""
    text = f"attention odd {{ head_dim {head_dim} tensor t: f32[{sizes}] grad {statements} }}"
    op = flashgen.loads(text, backend="emulator", target=target)
    q, k, v = (normal(1, 2, length, head_dim, seed=length).bfloat16() for length in (37, 50, 50))
    k[0, :, 7] = torch.nan
    t = torch.zeros(shape, requires_grad=True)
    (gradient,) = torch.autograd.grad(op(q, k, v, t=t, deterministic=deterministic).float().sum(), t)
    assert gradient.isnan().any()


def test_one_key_leaves_no_gradient_however_large_scores_are() -> None:
    """A weight is 1 whatever the score: the backward pass finds the forward pass's scores again to the bit."""
    op = flashgen.loads("attention one_key { head_dim 16 }", backend="cpu")
    generator = torch.Generator().manual_seed(0)
    q, k, v = (30 * torch.randn(1, 1, rows, 16, generator=generator) for rows in (2, 1, 1))
    q.requires_grad_(), k.requires_grad_()
    op(q, k, v).sum().backward()  # type: ignore[no-untyped-call]
    assert q.grad is not None
    assert k.grad is not None
    assert max(q.grad.abs().max(), k.grad.abs().max()) == 0
