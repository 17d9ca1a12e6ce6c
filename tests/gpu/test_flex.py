"""Mods of FlexAttention that are traced on a GPU: captured tensors, numbers, lists of blocks, gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from flashgen.flex import AuxRequest, create_block_mask, flex_attention
from tests.flex.helpers import judged

B, H, HKV, N, D = 2, 4, 2, 200, 64
SLOPES = torch.tensor([0.5, 0.25, 0.125, 0.0625])
DOCUMENTS = (torch.arange(N) // 70).int()
BIAS = torch.linspace(-1, 1, 2 * N)
CAP = 20.0

Mods = tuple[Callable[..., Any] | None, Callable[..., Any] | None]


def mods(name: str, device: str) -> Mods:
    """A score and a mask whose captured tensors lie on the device."""
    slopes, documents, bias = (x.to(device) for x in (SLOPES, DOCUMENTS, BIAS))

    def causal(_b: Tensor, _h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return i >= j

    known: dict[str, Mods] = {
        "causal": (None, causal),
        "alibi": (lambda s, b, h, i, j: s + slopes[h] * (j - i), causal),
        "softcap": (lambda s, b, h, i, j: CAP * torch.tanh(s / CAP), causal),
        "documents": (None, lambda b, h, i, j: (documents[i] == documents[j]) & (i >= j)),
        "bias": (lambda s, b, h, i, j: s + bias[i - j + N], None),
        "where": (lambda s, b, h, i, j: torch.where(i - j > 30, s * 0.5, s), lambda b, h, i, j: (i - j) ** 2 < 900),
    }
    return known[name]


def drawn() -> list[Tensor]:
    generator = torch.Generator("cuda").manual_seed(7)
    shapes = ((B, H, N, D), (B, HKV, N, D), (B, HKV, N, D), (B, H, N, D))
    return [torch.randn(shape, generator=generator, device="cuda", dtype=torch.bfloat16) for shape in shapes]


def error(found: Tensor, expected: Tensor) -> float:
    """Of the worst row, by its norm, or by that of a usual row where it is small."""
    found, expected = found.detach().double().cpu(), expected.detach().double().cpu()
    norms = expected.norm(dim=-1)
    return float(((found - expected).norm(dim=-1) / norms.clamp_min(norms.mean())).max())


@pytest.mark.parametrize("name", ["causal", "alibi", "softcap", "documents", "bias", "where"])
def test_against_float64(name: str) -> None:
    q, k, v, d_o = drawn()
    score, mask = mods(name, "cuda")
    blocks = None if mask is None else create_block_mask(mask, None, None, N, N, device="cuda")
    q, k, v = (x.requires_grad_() for x in (q, k, v))
    found, aux = flex_attention(
        q, k, v, score, blocks, enable_gqa=True, return_aux=AuxRequest(lse=True), backend="cuda"
    )
    gradients = torch.autograd.grad(found, (q, k, v), d_o)
    exact_q, exact_k, exact_v = (x.detach().double().cpu().requires_grad_() for x in (q, k, v))
    expected, lse = judged(exact_q, exact_k, exact_v, *mods(name, "cpu"))
    wanted = torch.autograd.grad(expected, (exact_q, exact_k, exact_v), d_o.double().cpu())
    assert error(found, expected) < 0.02
    assert error(aux.lse[..., None], lse[..., None]) < 0.01
    assert [error(x, y) < 0.05 for x, y in zip(gradients, wanted, strict=True)] == [True] * 3


def test_other_values_of_the_same_mods_are_not_compiled_again() -> None:
    q, k, v, _ = drawn()
    first = flex_attention(q, k, v, lambda s, b, h, i, j: s + SLOPES.cuda()[h] * j, enable_gqa=True)
    bias = torch.randn(H, device="cuda", requires_grad=True)
    second = flex_attention(q, k, v, lambda s, b, h, i, j: s + bias[h] * j, enable_gqa=True)
    second.float().sum().backward()
    assert first.shape == second.shape
    assert bias.grad is not None
    assert bias.grad.shape == (H,)
