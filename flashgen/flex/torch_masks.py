"""PyTorch's own block masks as a mask_mod: their lists of blocks and their mask_mod.

A pair is kept if its block is listed as full, or if its block is listed and the mask_mod keeps the pair. Mostly the
lists follow from the mask_mod, which then is the answer. Where the lists keep other pairs, or there is no mask_mod,
blocks are a tensor that the mask reads.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import flex_attention as torch_flex

from flashgen.flex.masks import and_masks, noop_mask, or_masks
from flashgen.flex.tracing import Mod

_BORDERLESS = 1 << 30  # the block size of a mask that keeps all
_AT_ONCE = 1 << 24  # pairs
# What PyTorch gives a slice for a mask_mod; before 2.7 that keeps all, and only its lists are shorter.
_SLICED = getattr(torch_flex, "_sliced_mask_mod_error", object())
# Of each mask the mask_mod that its lists were compared with, and what says all.
_KNOWN: weakref.WeakKeyDictionary[Any, tuple[Any, Mod]] = weakref.WeakKeyDictionary()


def mod_of(mask: torch_flex.BlockMask) -> Mod | None:
    """The mask_mod that keeps the pairs of a mask; None where all are kept. Raises ``ValueError`` where there is none.

    Lists are compared once for a mask: they must not be changed in place.
    """
    mask_mod = mask.mask_mod
    if mask_mod is _SLICED or mask.kv_num_blocks.shape[-1] * mask.BLOCK_SIZE[0] < mask.seq_lengths[0]:
        raise ValueError(
            "this BlockMask was sliced, and PyTorch gives it no mask_mod; set mask_mod, and seq_lengths to the queries "
            "and keys that it is for, or use flashgen.flex.create_block_mask"
        )
    if min(mask.BLOCK_SIZE) >= _BORDERLESS:
        return None if mask_mod is noop_mask else mask_mod
    known = _KNOWN.get(mask)
    if known is None or known[0] is not mask_mod:
        known = _KNOWN[mask] = mask_mod, _found(mask, mask_mod)
    return known[1]


def _found(mask: torch_flex.BlockMask, mask_mod: Mod | None) -> Mod:
    if mask.kv_num_blocks.dim() != 3:
        raise ValueError(
            f"'kv_num_blocks' of this BlockMask has shape {list(mask.kv_num_blocks.shape)}; [B, H, rows of blocks] is "
            "expected"
        )
    columns = -(-mask.seq_lengths[1] // mask.BLOCK_SIZE[1])
    listed = _dense(mask.kv_num_blocks, mask.kv_indices, columns)
    filled = None
    if mask.full_kv_num_blocks is not None and mask.full_kv_indices is not None:
        filled = _dense(mask.full_kv_num_blocks, mask.full_kv_indices, columns)
    if mask_mod in (None, noop_mask):
        return _kept_in(listed if filled is None else listed | filled, mask.BLOCK_SIZE)
    if _say_the_same(mask, mask_mod, listed, filled):
        return mask_mod
    kept = and_masks(_kept_in(listed, mask.BLOCK_SIZE), mask_mod)
    return kept if filled is None else or_masks(kept, _kept_in(filled, mask.BLOCK_SIZE))


def _kept_in(blocks: Tensor, block_size: tuple[int, int]) -> Mod:
    """The mask_mod that keeps all pairs of some blocks, [B or 1, H or 1, rows, columns]."""
    sizes = dict(enumerate(block_size))  # what a trace takes for constants
    by_batch, by_head = (count > 1 for count in blocks.shape[:2])
    blocks = blocks[:, 0] if not by_head else blocks
    blocks = blocks[0] if not by_batch else blocks

    def in_blocks(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        heads = (*((b,) if by_batch else ()), *((h,) if by_head else ()))
        return blocks[(*heads, q_idx // sizes[0], kv_idx // sizes[1])]

    return in_blocks


def _say_the_same(mask: torch_flex.BlockMask, mask_mod: Mod, partial: Tensor, full: Tensor | None) -> bool:
    """Whether the lists of blocks follow from the mask_mod, compared by a few rows of blocks at a time."""
    rows, columns = mask.BLOCK_SIZE
    q_len, kv_len = mask.seq_lengths
    device, (batch, heads) = partial.device, partial.shape[:2]
    full = torch.zeros_like(partial) if full is None else full
    keys = torch.arange(kv_len, device=device)
    at_once = max(1, _AT_ONCE // max(1, rows * kv_len * batch * heads)) * rows
    for start in range(0, q_len, at_once):
        queries = torch.arange(start, min(start + at_once, q_len), device=device)
        kept = _evaluated(mask_mod, batch, heads, queries, keys)
        block_rows, block_columns = queries // rows, keys // columns
        listed = partial[:, :, block_rows][..., block_columns]
        filled = full[:, :, block_rows][..., block_columns]
        if bool((kept & ~(listed | filled)).any()) or bool((~kept & filled).any()):
            return False
    return True


def _dense(counts: Tensor, indices: Tensor, columns: int) -> Tensor:
    """[B, H, rows, columns]: whether each block is listed."""
    found = torch.zeros((*indices.shape[:-1], columns + 1), dtype=torch.bool, device=indices.device)
    listed = torch.arange(indices.shape[-1], device=indices.device) < counts.unsqueeze(-1)
    listed &= (indices >= 0) & (indices < columns)
    found.scatter_(-1, torch.where(listed, indices, columns).long(), value=True)
    return found[..., :-1]


def _evaluated(mask_mod: Mod, batch: int, heads: int, queries: Tensor, keys: Tensor) -> Tensor:
    from torch._dynamo._trace_wrapped_higher_order_op import TransformGetItemToIndex  # noqa: PLC0415 - imports Dynamo

    over_pairs: Any = torch_flex._vmap_for_bhqkv(mask_mod, prefix=())
    b, h = (torch.arange(count, device=queries.device) for count in (batch, heads))
    with torch.no_grad(), TransformGetItemToIndex():
        kept: Tensor = over_pairs(b, h, queries, keys)
    return kept.expand(batch, heads, len(queries), len(keys))
