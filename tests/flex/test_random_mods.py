"""Mods that nobody has written: what they are to FlexAttention, and their text the same."""

from __future__ import annotations

import math
import random

import pytest
import torch
from torch import Tensor

from flashgen.flex import create_block_mask, flex_attention, from_mods, to_spec
from flashgen.language import parse_text
from tests.flex.helpers import inputs, judged
from tests.flex.random_mods import NK, NQ, B, H, Mods, random_mods

SETTLED = range(60)  # by `make test-random`, too
DRAWN = 40
PARTS = 5  # one of which runs in `make test`


def results(outcome: tuple[Tensor, Tensor], wanted: list[Tensor]) -> list[Tensor]:
    """o, lse, and gradients of a weighted sum of o and of the finite entries of lse."""
    o, lse = outcome
    weights = torch.linspace(-1, 1, o.numel(), dtype=o.dtype).view(o.shape)
    total = (o * weights).sum() + 0.1 * torch.where(torch.isfinite(lse), lse, 0).sum()
    return [o.detach(), lse.detach(), *torch.autograd.grad(total, wanted, materialize_grads=True)]


def judge(mods: Mods, backend: str) -> None:
    q, k, v = inputs(batch=B, heads=H, kv_heads=H, q_len=NQ, kv_len=NK)
    wanted = [q, k, v, *mods.learned]
    mask = create_block_mask(mods.mask_mod, None, None, NQ, NK)
    mine = results(flex_attention(q, k, v, mods.score_mod, mask, return_lse=True, backend=backend), wanted)
    theirs = results(judged(q, k, v, mods.score_mod, mods.mask_mod), wanted)
    for n, (x, y) in enumerate(zip(mine, theirs, strict=True)):
        assert torch.equal(x.isneginf(), y.isneginf()), (n, mods.text)
        own, exact = (torch.where(each.isneginf(), 0.0, each.double()) for each in (x, y))
        size = float(exact.norm()) or math.sqrt(exact.numel())
        assert float((own - exact).norm()) <= 1e-4 * size + 1e-6, (n, mods.text)


@pytest.mark.parametrize("part", range(PARTS))
def test_on_the_formula(part: int, seed: int) -> None:
    chance = random.Random(seed)
    for number in (*SETTLED[part::PARTS], *(chance.randrange(2**31) for _ in range(DRAWN // PARTS))):
        judge(random_mods(number), "reference")


@pytest.mark.parametrize("seed", [3, 17])
def test_on_kernels(seed: int) -> None:
    judge(random_mods(seed), "cpu")


def test_the_text_means_the_same() -> None:
    for seed in SETTLED:
        mods = random_mods(seed)
        shape = (B, H, NQ, NK)
        (parsed,) = parse_text(to_spec(score_mod=mods.score_mod, mask_mod=mods.mask_mod, head_dim=8, shape=shape)).specs
        op, _ = from_mods(
            score_mod=mods.score_mod, mask_mod=mods.mask_mod, head_dim=8, shape=shape, backend="reference"
        )
        assert (parsed.score, parsed.mask, parsed.tensors) == (op.spec.score, op.spec.mask, op.spec.tensors), mods.text
