"""Masked tiles of masks that bound a line: rows and columns know what they keep, pairs are not asked."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import flashgen
from tests.cuda.helpers import emitted
from tests.cuda.hopper import random

# Of a mask: captured ints, and what a call passes beside them.
MASKS: dict[str, tuple[str, str, dict[str, int]]] = {
    "causal, lower right": ("", "causal_lower_right", {}),
    "a window of either side": ("", "abs(i - j) <= 21", {}),
    "a prefix, two runs": ("", "j < 37 or j <= i", {}),
    "a sink and a window": ("", "j < 4 or (j <= i and i - j < 33)", {}),
    "a window that may be any int": ("param w: i32", "j <= i and i - j < w", {"w": 2**31 - 1}),
    "a window that is none": ("param w: i32", "j <= i and i - j < w", {"w": -(2**31) + 1}),
    "what rows begin with": ("tensor first: i32[B, Nq]", "j >= first[b, i] and j <= i + 100", {}),
    "what columns end at": ("tensor last: i32[B, Nk]", "i <= last[b, j]", {}),
    "rows of three kinds": ("", "(i % 3 == 0 or j >= 40) and j <= i", {}),
    "chunks": ("", "j <= i and i // 48 == j // 48", {}),
    "chunks of any size, from the end": ("param w: i32", "(i + Nk - Nq) // w == j // w or j < 2", {"w": 37}),
    "chunks of a row's number": ("tensor first: i32[B, Nq]  param w: i32", "first[b, i] // w == j // w", {"w": -9}),
}
QUICK = ("a sink and a window", "a window that may be any int")
LINES = ("keys_of_row", "queries_of_column")


@pytest.mark.parametrize(
    "name", [pytest.param(each, marks=() if each in QUICK else pytest.mark.slow) for each in MASKS]
)
@pytest.mark.parametrize("target", ["sm_90a", pytest.param("sm_80", marks=pytest.mark.slow)])
def test_masked_tiles(name: str, target: str) -> None:
    """Forward and gradients against float64; lengths that end inside a tile."""
    declared, mask, params = MASKS[name]
    op = flashgen.loads(
        f"attention kept_lines {{ head_dim 16  dtype f16  {declared}  mask {mask} }}", backend="emulator", target=target
    )
    q, k, v = (random(1, 1, n, 16, seed=seed).half().requires_grad_() for seed, n in enumerate((150, 171, 171)))
    captured: dict[str, Any] = dict(params)
    if "first" in declared:
        captured["first"] = torch.arange(150).view(1, 150).int() // 3 - 5
    if "last" in declared:
        captured["last"] = torch.arange(171).view(1, 171).int() * 2 % 170
    o = op(q, k, v, **captured)
    exact = op.reference(q, k, v, **captured, dtype=torch.float64)
    assert (o.double() - exact).abs().max() < 3e-3
    weight = random(1, 1, 150, 16, seed=9).half()
    found = torch.autograd.grad(o, (q, k, v), weight)
    for x, y in zip(found, torch.autograd.grad(exact, (q, k, v), weight.double()), strict=True):
        assert (x.double() - y.double()).norm() <= 5e-3 * max(float(y.norm()), 1.0)


def test_which_masks_ask_lines() -> None:
    """A mask of documents is asked for each pair, one of a row's first key only by columns, chunks by neither."""
    text = "attention t {{ head_dim 64  {} }}"
    documents = emitted(text.format("tensor doc: i32[B, Nk]  mask same_document(doc)"), "sm_90a").text
    assert not any(f"{each} = true" in documents for each in LINES)
    firsts = emitted(text.format("tensor first: i32[B, Nq]  mask j >= first[b, i]"), "sm_90a").text
    assert [f"{each} = true" in firsts for each in LINES] == [True, False]
    for position in ("i", "(i + Nk - Nq)"):
        chunks = emitted(text.format(f"param w: i32  mask causal and {position} // w == j // w"), "sm_90a").text
        assert all(f"{each} = true" in chunks for each in LINES)
