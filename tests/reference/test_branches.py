"""Gradients of the formula where a branch is not taken: its derivatives may be infinite, and count for nothing."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import flashgen

TEXTS = {
    "where": "(t[h] * log(i - j) if i > j else 0.0)",
    "nested": "((t[h] * log(i - j) if i - j > 2 else sqrt(i - j) * t[h]) if i > j else 0.0)",
    "min": "t[h] * min(1.0 / abs(i - j), 5.0)",
    "clamp": "clamp(t[h] / (i - j), -1.0, 1.0)",
    "used twice": "(t[h] * log(i - j) if i > j else 0.0) + 0.1 * exp(t[h] * log(i - j) if i - j > 1 else 0.0)",
}


def formula(name: str, t: Tensor) -> Tensor:
    """The same in PyTorch, which never computes what is not taken."""
    apart = (torch.arange(9)[:, None] - torch.arange(9)).double()
    log, slope = apart.clamp(min=1).log(), t[:, None, None]
    match name:
        case "where":
            return slope * log
        case "nested":
            return slope * torch.where(apart > 2, log, apart.clamp(min=0).sqrt())
        case "min":
            return slope * torch.where(apart == 0, 5.0, 1 / torch.where(apart == 0, 1.0, apart).abs())
        case "clamp":
            return torch.where(apart == 0, slope.detach().sign(), slope / torch.where(apart == 0, 1.0, apart))
    return slope * log + 0.1 * (slope * torch.where(apart > 1, log, 0.0)).exp()


@pytest.mark.parametrize("name", TEXTS)
def test_gradients_and_their_gradients(name: str) -> None:
    text = f"attention branch {{ head_dim 8  tensor t: f32[H] grad  score s + {TEXTS[name]}  mask causal }}"
    op = flashgen.loads(text, backend="reference")
    q, k, v = (torch.randn(1, 2, 9, 8, dtype=torch.float64) for _ in range(3))
    found = []
    for mine in (True, False):
        t = torch.tensor([0.5, -0.3], dtype=torch.float64, requires_grad=True)
        if mine:
            o = op.reference(q, k, v, t=t, dtype=torch.float64)
        else:
            s = q @ k.mT / 8**0.5 + formula(name, t)
            o = s.masked_fill(torch.ones(9, 9).triu(1).bool(), -torch.inf).softmax(-1) @ v
        (first,) = torch.autograd.grad(o.square().sum(), t, create_graph=True)
        (second,) = torch.autograd.grad(first.square().sum(), t)
        found.append((first.detach(), second))
    for mine, truth in zip(*found, strict=True):
        torch.testing.assert_close(mine, truth)


def test_what_is_zero_by_chance_has_gradients_of_gradients() -> None:
    """The derivative of s ** 2 at 0 is 0, and its derivative is not."""
    op = flashgen.loads("attention square { head_dim 8  weights s ** 2 }", backend="reference")
    q = torch.zeros(1, 1, 3, 8, dtype=torch.float64, requires_grad=True)
    k, v = (torch.randn(1, 1, 4, 8, dtype=torch.float64) for _ in range(2))
    (first,) = torch.autograd.grad(op.reference(q, k, v, dtype=torch.float64).sum(), q, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), q)
    assert not first.any()
    p = 2 * (k.sum(-1) / 8) * v.sum(-1)
    torch.testing.assert_close(second, (p[..., None] * k).sum(2, keepdim=True).expand_as(q))


def test_softplus_at_zero() -> None:
    """Where its formula has a branch its derivatives have none."""
    op = flashgen.loads("attention soft { head_dim 8  weights softplus(s) }", backend="reference")
    q = torch.zeros(1, 1, 3, 8, dtype=torch.float64, requires_grad=True)
    k, v = (torch.randn(1, 1, 4, 8, dtype=torch.float64) for _ in range(2))
    found = []
    for mine in (True, False):
        s = q @ k.mT / 8**0.5
        o = op.reference(q, k, v, dtype=torch.float64) if mine else torch.nn.functional.softplus(s) @ v
        (first,) = torch.autograd.grad(o.square().sum(), q, create_graph=True)
        (second,) = torch.autograd.grad(first.square().sum(), q, create_graph=True)
        (third,) = torch.autograd.grad(second.square().sum(), q)
        found.append((o.detach(), first.detach(), second.detach(), third))
    for mine, truth in zip(*found, strict=True):
        torch.testing.assert_close(mine, truth)
