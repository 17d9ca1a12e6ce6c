"""Block masks of PyTorch's own, by their mask_mod.

PyTorch's ``BlockMask`` holds lists of blocks besides, which mostly follow from its mask_mod. Where they leave out more,
or keep more, the mask means something that its mask_mod does not say, and is refused.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import flex_attention as torch_flex

from flashgen.flex.tracing import Mod

_BORDERLESS = 1 << 30  # the block size of a mask that keeps all
_AT_ONCE = 1 << 24  # pairs
# What PyTorch gives a slice for a mask_mod; before 2.7 that keeps all, and only its lists are shorter.
_SLICED = getattr(torch_flex, "_sliced_mask_mod_error", object())
_CHECKED: weakref.WeakKeyDictionary[Any, bool] = weakref.WeakKeyDictionary()


def mod_of(mask: torch_flex.BlockMask) -> Mod | None:
    """The mask_mod that says all of a mask; None where it keeps every pair. Raises ``ValueError`` where none does."""
    mask_mod = mask.mask_mod
    if mask_mod is _SLICED or mask.kv_num_blocks.shape[-1] * mask.BLOCK_SIZE[0] < mask.seq_lengths[0]:
        raise ValueError(
            "this BlockMask was sliced, and PyTorch gives it no mask_mod; set mask_mod, or use "
            "flashgen.flex.create_block_mask"
        )
    if min(mask.BLOCK_SIZE) >= _BORDERLESS:
        return None if mask_mod is torch_flex.noop_mask else mask_mod
    if mask not in _CHECKED:
        _check(mask, mask_mod)
        _CHECKED[mask] = True
    return mask_mod


def _check(mask: torch_flex.BlockMask, mask_mod: Mod) -> None:
    """Compare the lists of blocks with the mask_mod, a few rows of blocks at a time."""
    rows, columns = mask.BLOCK_SIZE
    q_len, kv_len = mask.seq_lengths
    lists = mask.kv_num_blocks
    device, batch, heads = lists.device, lists.shape[0], lists.shape[1]
    partial = _dense(mask.kv_num_blocks, mask.kv_indices)
    full = torch.zeros_like(partial)
    if mask.full_kv_num_blocks is not None and mask.full_kv_indices is not None:
        full = _dense(mask.full_kv_num_blocks, mask.full_kv_indices)
    keys = torch.arange(kv_len, device=device)
    at_once = max(1, _AT_ONCE // max(1, rows * kv_len * batch * heads)) * rows
    for start in range(0, q_len, at_once):
        queries = torch.arange(start, min(start + at_once, q_len), device=device)
        kept = _evaluated(mask_mod, batch, heads, queries, keys)
        block_rows, block_columns = queries // rows, keys // columns
        listed = partial[:, :, block_rows][..., block_columns]
        filled = full[:, :, block_rows][..., block_columns]
        if bool((kept & ~(listed | filled)).any()) or bool((~kept & filled).any()):
            raise ValueError(
                "this BlockMask holds lists of blocks (kv_indices) that its mask_mod does not follow; say in the "
                "mask_mod which blocks are kept: blocks[b, h, q_idx // 128, kv_idx // 128] & …"
            )


def _dense(counts: Tensor, indices: Tensor) -> Tensor:
    """[B, H, rows, columns]: whether each block is listed."""
    found = torch.zeros((*indices.shape[:-1], indices.shape[-1] + 1), dtype=torch.bool, device=indices.device)
    listed = torch.arange(indices.shape[-1], device=indices.device) < counts.unsqueeze(-1)
    found.scatter_(-1, torch.where(listed, indices, indices.shape[-1]).long(), value=True)
    return found[..., :-1]


def _evaluated(mask_mod: Mod, batch: int, heads: int, queries: Tensor, keys: Tensor) -> Tensor:
    from torch._dynamo._trace_wrapped_higher_order_op import TransformGetItemToIndex  # noqa: PLC0415 - imports Dynamo

    over_pairs: Any = torch_flex._vmap_for_bhqkv(mask_mod, prefix=())
    b, h = (torch.arange(count, device=queries.device) for count in (batch, heads))
    with torch.no_grad(), TransformGetItemToIndex():
        kept: Tensor = over_pairs(b, h, queries, keys)
    return kept.expand(batch, heads, len(queries), len(keys))
