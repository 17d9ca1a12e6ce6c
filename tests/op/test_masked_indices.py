"""Indices that only dropped pairs take out of their tensor, or that params decide: taken, or refused by name."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

import flashgen
from tests.op.helpers import op

HEAD = "attention indexed { head_dim 16"


def attended(backend: str, text: str, t: Tensor, index: Tensor, keep: Tensor, **params: int) -> None:
    """o and the gradients of q and t are those of a formula that reads no dropped pair."""
    length = keep.shape[0]
    generator = torch.Generator().manual_seed(length)
    q, k, v = (torch.randn(1, 2, length, 16, generator=generator) for _ in range(3))
    q.requires_grad_()
    t.requires_grad_()
    assert bool(((index >= 0) & (index < t.shape[0]))[keep].all()), "a kept pair reads outside"
    scores = q.double() @ k.double().mT / 4 + torch.where(keep, t.double()[index.clamp(0, t.shape[0] - 1)], 0.0)
    expected = scores.masked_fill(~keep, -math.inf).softmax(-1) @ v.double()
    run: Any = op(f"{HEAD} {text} }}", backend)
    found = run(q, k, v, t=t, **params)
    torch.testing.assert_close(found.double(), expected, atol=2e-6, rtol=1e-5)
    weight = torch.randn(expected.shape, generator=generator)
    gradients = [torch.autograd.grad((o * weight).sum(), (q, t)) for o in (found, expected)]
    for own, right in zip(*gradients, strict=True):
        torch.testing.assert_close(own, right, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("backend", ["reference", "cpu", "emulator"])
def test_a_neighbourhood_with_biases(backend: str) -> None:
    i, j = torch.arange(9)[:, None], torch.arange(9)[None]
    text = "tensor t: f32[9] grad let c = clamp(i, 2, 6) score s + t[j - i + 4] mask abs(j - c) <= 2"
    attended(backend, text, torch.randn(9), j - i + 4, (j - i.clamp(2, 6)).abs() <= 2)


@pytest.mark.parametrize("length", [5, 40, 260])
def test_a_neighbourhood_that_moves_in_at_the_border(length: int) -> None:
    i, j = torch.arange(length)[:, None], torch.arange(length)[None]
    text = "tensor t: f32[9] grad let c = clamp(i, 2, Nk - 3) score s + t[j - i + 4] mask abs(j - c) <= 2"
    attended("reference", text, torch.randn(9), j - i + 4, (j - i.clamp(2, length - 3)).abs() <= 2)


def test_a_width_that_is_a_param() -> None:
    i, j = torch.arange(12)[:, None], torch.arange(12)[None]
    text = "param w: i32 tensor t: f32[9] grad let c = clamp(i, 2, Nk - 3) score s + t[j - i + 4] mask abs(j - c) <= w"
    attended("reference", text, torch.randn(9), j - i + 4, (j - i.clamp(2, 9)).abs() <= 2, w=2)
    with pytest.raises(ValueError, match=r"'j - i \+ 4' .* but dimension 0 .*write clamp\(j - i \+ 4, 0, 8\)"):
        attended("reference", text, torch.randn(9), 0 * (i + j), i == j, w=3)


def test_a_window_of_rows_and_columns_of_any_length() -> None:
    """Too many pairs to look at each; proved at the lengths of the call."""
    run = flashgen.loads(
        f"{HEAD} const side = 16 tensor t: f32[5] let ca = clamp(i // side, 1, Nk // side - 2) "
        "score s + t[j // side - i // side + 2] mask abs(j // side - ca) <= 1 }",
        backend="reference",
    )
    q, k, v = (torch.randn(1, 1, 2048, 16) for _ in range(3))
    run(q, k, v, t=torch.randn(5))


def test_what_a_kept_pair_takes_outside_is_refused_with_what_to_write() -> None:
    run = op(f"{HEAD} tensor t: f32[9] let c = clamp(i, 2, 6) score s + t[j - i + 4] mask abs(j - c) <= 2 }}", None)
    q, k, v = (torch.randn(1, 1, 14, 16) for _ in range(3))
    with pytest.raises(ValueError, match=r"is -1, .* \(j = 8, i = 13, .*; if .* write clamp\(j - i \+ 4, 0, 8\)"):
        run(q, k, v, t=torch.randn(9))


@pytest.mark.parametrize("backend", ["reference", "cpu"])
def test_indices_divided_by_a_param(backend: str) -> None:
    i = torch.arange(48)[:, None].expand(48, 48)
    text = "param w: i32 tensor t: f32[4] grad score s + t[i // w]"
    attended(backend, text, torch.randn(4), i // 12, torch.ones(48, 48, dtype=torch.bool), w=12)
    with pytest.raises(ValueError, match=r"'i // w' of tensor 't' is 4, .* \(i = 47, Nq = 48, w = 11\)"):
        attended(backend, text, torch.randn(4), 0 * i, i >= 0, w=11)
