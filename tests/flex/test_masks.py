"""Masks compose, print as pictures, and are taken from PyTorch where their mod says all of them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn.attention import flex_attention as torch_flex

from flashgen.flex import and_masks, create_block_mask, flex_attention, noop_mask, or_masks
from tests.flex.helpers import assert_close, inputs, judged


def causal(b: Any, h: Any, q: Any, kv: Any) -> Any:
    return q >= kv


def even(b: Any, h: Any, q: Any, kv: Any) -> Any:
    return kv % 2 == 0


def kept(mask: Any, length: int = 24) -> Any:
    """The pairs that a mask keeps, seen through attention over one-hot values."""
    q = torch.zeros(1, 1, length, 4)
    return flex_attention(q, q, torch.eye(length)[None, None], None, mask, backend="reference")[0, 0] > 0


def test_nothing_is_evaluated() -> None:
    def never(b: Any, h: Any, q: Any, kv: Any) -> Any:
        raise AssertionError

    assert create_block_mask(never, None, None, 10**9, 10**9).shape == (1, 1, 10**9, 10**9)


def test_masks_compose() -> None:
    q, kv = torch.arange(24)[:, None], torch.arange(24)
    first = create_block_mask(causal, None, None, 24, 24)
    assert (kept(first & even) == ((q >= kv) & (kv % 2 == 0))).all()
    assert (kept(first | even) == ((q >= kv) | (kv % 2 == 0))).all()
    both = create_block_mask(and_masks(first, or_masks(even, causal), noop_mask), None, None, 24, 24)
    assert (kept(both) == (q >= kv)).all()
    assert kept(create_block_mask(noop_mask, None, None, 24, 24)).all()
    with pytest.raises(ValueError, match="cannot be combined"):
        first & create_block_mask(causal, None, None, 24, 25)
    with pytest.raises(TypeError, match="argument 1 must be a mask_mod"):
        and_masks(causal, 3)  # type: ignore[arg-type]


def test_a_mask_prints_as_a_picture() -> None:
    documents, width = torch.arange(96) // 32, 40
    mask = create_block_mask(
        lambda b, h, q, kv: (documents[q] == documents[kv]) & (q - kv < width), None, None, 96, 96, BLOCK_SIZE=16
    )
    assert str(mask).splitlines()[1:7] == [
        "████········",
        "████········",
        "····████····",
        "····████····",
        "········████",
        "········████",
    ]
    assert "33.33% of the pairs kept" in str(mask)
    assert repr(mask).startswith("BlockMask(shape=(1, 1, 96, 96)")


def test_masks_of_pytorch_are_taken_by_their_mod() -> None:
    q, k, v = (x.detach() for x in inputs())
    theirs = torch_flex.create_block_mask(
        torch_flex.and_masks(causal, even), None, None, 24, 24, device="cpu", BLOCK_SIZE=8
    )
    assert_close(
        flex_attention(q, k, v, None, theirs, backend="reference"), judged(q, k, v, None, and_masks(causal, even))[0]
    )


def test_lists_that_say_more_than_the_mod_are_refused() -> None:
    q, k, v = (x.detach() for x in inputs())
    counts, indices = torch.ones(1, 1, 3, dtype=torch.int32), torch.zeros(1, 1, 3, 3, dtype=torch.int32)
    of_blocks = torch_flex.BlockMask.from_kv_blocks(counts, indices, BLOCK_SIZE=8, mask_mod=causal)
    with pytest.raises(ValueError, match="kv_indices"):
        flex_attention(q, k, v, None, of_blocks, backend="reference")
    sliced = torch_flex.create_block_mask(causal, None, None, 24, 24, device="cpu", BLOCK_SIZE=8)[:, :, :1]
    with pytest.raises(ValueError, match="sliced"):
        flex_attention(q[:, :, :8], k, v, None, sliced, backend="reference")
