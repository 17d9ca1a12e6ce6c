"""Mods as people write them mean what they mean to FlexAttention: outputs, lse, gradients, text."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn.attention import flex_attention as torch_flex

import flashgen
from flashgen.flex import create_block_mask, flex_attention, from_mods, to_spec
from flashgen.language import parse_text
from tests.flex.helpers import assert_close, gradients, inputs, judged
from tests.flex.mods import MODS, NK, NQ, B, D, H

COMPILED = ("sinks_by_score", "documents")  # on kernels; the others on the formula, which takes no compiler


@pytest.mark.parametrize("name", MODS)
def test_mods_are_what_they_are_to_flex_attention(name: str) -> None:
    score_mod, mask_mod, learned = MODS[name]()
    q, k, v = inputs()
    mask = None if mask_mod is None else create_block_mask(mask_mod, None, None, NQ, NK)
    backend = None if name in COMPILED else "reference"
    mine = flex_attention(q, k, v, score_mod, mask, return_lse=True, backend=backend)
    theirs = judged(q, k, v, score_mod, mask_mod)
    for x, y in zip(mine, theirs, strict=True):
        assert_close(x, y)
    wanted = [q, k, v, *learned]
    for x, y in zip(gradients(mine, wanted), gradients(theirs, wanted), strict=True):
        assert_close(x, y, 1e-4)


@pytest.mark.parametrize("name", MODS)
def test_the_text_means_the_same(name: str) -> None:
    score_mod, mask_mod, _ = MODS[name]()
    shape = (B, H, NQ, NK)
    text = to_spec(score_mod=score_mod, mask_mod=mask_mod, head_dim=D, shape=shape)
    (parsed,) = parse_text(text).specs
    op, captured = from_mods(score_mod=score_mod, mask_mod=mask_mod, head_dim=D, shape=shape, backend="reference")
    assert (parsed.score, parsed.mask, parsed.scale) == (op.spec.score, op.spec.mask, op.spec.scale)
    assert parsed.tensors == op.spec.tensors
    q, k, v = inputs()
    again: Any = flashgen.loads(text, backend="reference")
    tensors = {name: x for name, x in captured.items() if isinstance(x, torch.Tensor)}
    assert_close(again(q, k, v, **tensors), op(q, k, v, **captured), 1e-6)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_flex_attention_itself_agrees_with_the_judge() -> None:
    score_mod, mask_mod, _ = MODS["alibi"]()
    q, k, v = (x.detach() for x in inputs())
    torch_mask = torch_flex.create_block_mask(mask_mod, None, None, NQ, NK, device="cpu")
    theirs = torch_flex.flex_attention(q, k, v, score_mod, torch_mask)
    assert_close(theirs, judged(q, k, v, score_mod, mask_mod)[0])
    assert_close(flex_attention(q, k, v, score_mod, torch_mask, backend="reference"), theirs)
