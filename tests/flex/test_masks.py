"""Masks compose, print as pictures, and are taken from PyTorch where their mod says all of them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn.attention import flex_attention as torch_flex

from flashgen.flex import (
    BlockMask,
    and_masks,
    create_block_mask,
    create_mask,
    create_nested_block_mask,
    flex_attention,
    noop_mask,
    or_masks,
)
from tests.flex.helpers import assert_close, gradients, inputs, judged


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


def blocks() -> tuple[Any, Any]:
    """Lists of the first block, of two, and of none."""
    counts = torch.tensor([1, 2, 0], dtype=torch.int32)[None, None]
    indices = torch.tensor([[0, 1, 2], [2, 0, 1], [0, 1, 2]], dtype=torch.int32)[None, None]
    return counts, indices


LISTED = (
    torch.tensor([[1, 0, 0], [1, 0, 1], [0, 0, 0]], dtype=torch.bool).repeat_interleave(8, 0).repeat_interleave(8, 1)
)
LATER = (torch.arange(24)[:, None] >= torch.arange(24)).bool()


@pytest.mark.parametrize("mask_mod", [None, noop_mask, torch_flex.noop_mask])
def test_lists_without_a_mod_keep_their_blocks(mask_mod: Any) -> None:
    assert (kept(BlockMask.from_kv_blocks(*blocks(), BLOCK_SIZE=8, mask_mod=mask_mod)) == LISTED).all()


def test_lists_that_say_more_than_the_mod_count() -> None:
    assert (kept(BlockMask.from_kv_blocks(*blocks(), BLOCK_SIZE=8, mask_mod=causal)) == LISTED & LATER).all()
    last = torch.zeros(1, 1, 3, dtype=torch.int32), torch.zeros(1, 1, 3, 3, dtype=torch.int32)
    last[0][..., 2], last[1][..., 0] = 1, 2
    full = torch.zeros(24, 24, dtype=torch.bool)
    full[16:, 16:] = True
    mask = BlockMask.from_kv_blocks(*blocks(), *last, BLOCK_SIZE=8, mask_mod=causal)
    assert (kept(mask) == LISTED & LATER | full).all()
    mask.mask_mod = even  # looked at anew
    assert (kept(mask) == LISTED & (torch.arange(24) % 2 == 0) | full).all()


def test_lists_of_entries_heads_and_rectangles_with_gradients() -> None:
    """[B, H] of their own; the last blocks are not whole, and fewer columns are held than there are blocks."""
    q, k, v = inputs(q_len=21, kv_len=37)
    held = torch.randint(0, 2, (2, 4, 2, 3), generator=torch.Generator().manual_seed(1)).bool()
    counts, indices = torch_flex._dense_to_ordered(held)
    mask = BlockMask.from_kv_blocks(counts, indices, BLOCK_SIZE=(16, 8), seq_lengths=(21, 37), compute_q_blocks=False)
    wide = torch.cat((held, held.new_zeros(2, 4, 2, 2)), -1)

    def mod(b: Any, h: Any, i: Any, j: Any) -> Any:
        return wide[b, h, i // 16, j // 8]

    mine = flex_attention(q, k, v, None, mask, return_lse=True, backend="reference")
    theirs = judged(q, k, v, None, mod)
    for x, y in zip((*mine, *gradients(mine, [q, k, v])), (*theirs, *gradients(theirs, [q, k, v])), strict=True):
        assert_close(x, y)


def test_slices_have_no_mod_until_one_is_set() -> None:
    """As gpt-fast decodes: a row of blocks of the mask of all, and the mask_mod of a position."""
    q, k, v = (x.detach() for x in inputs())
    mask = create_block_mask(causal, None, None, 24, 24, BLOCK_SIZE=8)
    sliced = mask[:, :, torch.tensor([1])]
    with pytest.raises(ValueError, match="sliced"):
        flex_attention(q[:, :, 9:10], k, v, None, sliced, backend="reference")
    position = torch.tensor(9)
    sliced.mask_mod = lambda b, h, i, j: mask.mask_mod(b, h, i + position, j)
    sliced.seq_lengths = (1, 24)
    found = flex_attention(q[:, :, 9:10], k, v, None, sliced, backend="reference")
    assert_close(found, judged(q, k, v, None, causal)[0][:, :, 9:10])
    sliced.mask_mod = lambda b, h, i, j: i + 24 >= j  # the blocks of its row, and no others
    found = flex_attention(q[:, :, 9:10], k, v, None, sliced, backend="reference")
    assert_close(found, judged(q, k[:, :, :16], v[:, :, :16])[0][:, :, 9:10])


def test_a_mask_tells_what_that_of_pytorch_tells() -> None:
    mine = create_block_mask(causal, 2, None, 300, 200)
    theirs = torch_flex.create_block_mask(causal, 2, None, 300, 200, device="cpu")
    assert (mine.shape, mine.numel(), mine.seq_lengths) == (theirs.shape, theirs.numel(), theirs.seq_lengths)
    assert mine.BLOCK_SIZE == theirs.BLOCK_SIZE
    assert mine.sparsity() == theirs.sparsity()
    assert torch.equal(mine.to_dense(), theirs.to_dense())
    assert len(mine.as_tuple()) == len(theirs.as_tuple())
    for name in ("kv_num_blocks", "kv_indices", "full_kv_num_blocks", "full_kv_indices", "q_num_blocks", "q_indices"):
        assert torch.equal(getattr(mine, name), getattr(theirs, name))
    assert mine[1, :, 0].kv_indices.shape == theirs[1, :, 0].kv_indices.shape
    assert not hasattr(mine, "kv_blocks")
    with pytest.raises(AttributeError, match="a BlockMask has no attribute 'kv_blocks'"):
        mine.kv_blocks  # noqa: B018


def test_a_mask_is_adjusted_to_other_lengths_without_lists() -> None:
    def never(b: Any, h: Any, q: Any, kv: Any) -> Any:
        raise AssertionError

    adjusted = create_block_mask(never, None, None, 10**9, 10**9)._adjust(30, 10**9)
    assert adjusted.shape == (1, 1, 30, 10**9)
    assert (kept(create_block_mask(causal, None, None, 99, 5)._adjust(24, 24)) == LATER).all()


def test_a_dense_mask_is_made_where_it_is_asked_for() -> None:
    assert torch.equal(create_mask(causal, 1, 1, 24, 24, device="cpu")[0, 0], LATER)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_masks_of_nested_tensors_are_asked_of_each_sequence() -> None:
    lengths, window = (7, 12, 3), torch.tensor([2, 4, 9])

    def local(b: Any, h: Any, q: Any, kv: Any) -> Any:
        return (q >= kv) & (q - kv < window[b])

    rows = [[x.detach()[0, :, :n] for x in inputs(q_len=24)] for n in lengths]
    q_nt, k_nt, v_nt = (
        torch.nested.nested_tensor([x[n].transpose(0, 1) for x in rows], layout=torch.jagged).transpose(1, 2)
        for n in range(3)
    )
    mask = create_nested_block_mask(local, 1, 1, q_nt)
    found = flex_attention(q_nt, k_nt, v_nt, block_mask=mask, backend="reference")
    for number, (own, (q, k, v)) in enumerate(zip(found.unbind(), rows, strict=True)):
        wanted = judged(q[None], k[None], v[None], None, lambda b, h, i, j, n=number: local(n, h, i, j))[0]
        assert_close(own, wanted[0])
    with pytest.raises(ValueError, match="no lists of blocks"):
        mask.kv_indices  # noqa: B018
    q, k, v = inputs()
    with pytest.raises(ValueError, match="for nested tensors, but 'query' is none; use create_block_mask"):
        flex_attention(q, k, v, block_mask=mask, backend="reference")
    with pytest.raises(TypeError, match="'q_nt' must be a NestedTensor"):
        create_nested_block_mask(local, 1, 1, q)
