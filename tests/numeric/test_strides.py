"""Tensors as users have them: transposed, sliced, expanded, with a last dimension that is not contiguous."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from tests.numeric.helpers import assert_close, normal, operator

B, H, N, D = 2, 3, 70, 64


def heads_last(x: Tensor) -> Tensor:
    """[B, H, N, D] over memory laid out as [B, N, H, D]."""
    return x.transpose(1, 2).contiguous().transpose(1, 2)


def rows_apart(x: Tensor) -> Tensor:
    """Every second row of something longer."""
    return torch.stack([x, torch.full_like(x, torch.nan)], dim=3).flatten(2, 3)[:, :, ::2]


def wider(x: Tensor) -> Tensor:
    """The first columns of something wider, as a slice of packed q, k and v is."""
    return torch.cat([x, torch.full_like(x, torch.nan)], dim=-1)[..., : x.shape[-1]]


def columns_apart(x: Tensor) -> Tensor:
    """A last dimension that is not contiguous."""
    return torch.stack([x, torch.full_like(x, torch.nan)], dim=-1).flatten(-2)[..., ::2]


def backwards(x: Tensor) -> Tensor:
    """[B, H, N, D] over memory laid out as [N, D, H, B]: no dimension where it is expected."""
    return x.permute(2, 3, 1, 0).contiguous().permute(3, 2, 0, 1)


@pytest.mark.parametrize("arrange", [heads_last, rows_apart, wider, columns_apart, backwards])
def test_strides_change_nothing(arrange: Callable[[Tensor], Tensor]) -> None:
    op = operator("causal")
    plain = [normal(B, H, N, D, seed=seed) for seed in range(4)]
    arranged = [arrange(x) for x in plain]
    assert all(torch.equal(a, b) for a, b in zip(plain, arranged, strict=True))
    assert_identical(forward_and_backward(op, *arranged), forward_and_backward(op, *plain))


def test_expanded_keys_and_values() -> None:
    op = operator("causal")
    q, d_o = normal(B, H, N, D, seed=1), normal(B, H, N, D, seed=2)
    k, v = (normal(1, 1, N, D, seed=seed).expand(B, H, N, D) for seed in (3, 4))
    assert_identical(
        forward_and_backward(op, q, k, v, d_o), forward_and_backward(op, q, k.contiguous(), v.contiguous(), d_o)
    )


def test_an_expanded_gradient_arrives() -> None:
    op = operator("causal")
    q, k, v = (normal(B, H, N, D, seed=seed).requires_grad_() for seed in range(3))
    torch.autograd.backward(op(q, k, v).sum())
    own = [x.grad.clone() for x in (q, k, v) if x.grad is not None]
    exact = [x.detach().double().requires_grad_() for x in (q, k, v)]
    torch.autograd.backward(op.reference(*exact, dtype=torch.float64).sum())
    for name, gradient, x in zip(("dq", "dk", "dv"), own, exact, strict=True):
        assert x.grad is not None
        assert_close(gradient, x.grad, what=name)


def test_a_captured_tensor_with_strides() -> None:
    op = operator("t5")
    q, k, v = (normal(B, H, N, D, seed=seed) for seed in range(3))
    table = normal(H, 32, seed=5).t()
    assert not table.is_contiguous()
    results = []
    for given in (table, table.contiguous()):
        leaf = given.detach().requires_grad_()
        o = op(q, k, v, table=leaf)
        (gradient,) = torch.autograd.grad(o.sum(), leaf)
        results.append((o, gradient))
    assert torch.equal(results[0][0], results[1][0])
    assert_close(results[0][1], results[1][1], 1e-6, "the gradient of 'table'")


def assert_identical(first: list[Tensor], second: list[Tensor]) -> None:
    """Equal bit by bit."""
    for name, one, other in zip(("o", "dq", "dk", "dv"), first, second, strict=True):
        assert torch.equal(one, other), name


def forward_and_backward(op: Callable[..., Tensor], q: Tensor, k: Tensor, v: Tensor, d_o: Tensor) -> list[Tensor]:
    q, k, v = (x.detach().requires_grad_() for x in (q, k, v))
    o = op(q, k, v, deterministic=True)
    return [o.detach(), *torch.autograd.grad(o, (q, k, v), d_o)]
