"""Masks: ``BlockMask`` and ``create_block_mask``, functions that combine mods, and PyTorch's own masks as a mask_mod.

The mask_mod of a ``BlockMask`` is not evaluated here: kernels classify blocks from its expression.
"""

from __future__ import annotations

import functools
import math
import weakref
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import flex_attention as torch_flex

from flashgen.flex.tracing import Mod
from flashgen.op.conversion import as_number, int_argument
from flashgen.plan.notebook import drawn

DEFAULT_BLOCK_SIZE = 128
# What FlexAttention's masks have because they hold lists of blocks.
_OF_LISTS = frozenset(
    f"{full}{of}_{what}" for full in ("", "full_") for of in ("kv", "q") for what in ("num_blocks", "indices")
) | {"as_tuple", "sparsity", "to_dense", "to_string"}


noop_mask = torch_flex.noop_mask


def and_masks(*mask_mods: Mod) -> Mod:
    """The mask_mod that keeps what all of them keep. Takes mods and masks; raises ``TypeError`` for anything else."""
    _check("and_masks", mask_mods)
    return torch_flex.and_masks(*mask_mods)


def or_masks(*mask_mods: Mod) -> Mod:
    """The mask_mod that keeps what any of them keeps. Takes mods and masks; raises ``TypeError`` for anything else."""
    _check("or_masks", mask_mods)
    return torch_flex.or_masks(*mask_mods)


def _check(name: str, mask_mods: tuple[Any, ...]) -> None:
    for number, each in enumerate(mask_mods):
        if not callable(each):
            raise TypeError(f"{name}: argument {number} must be a mask_mod or a mask, not {type(each).__name__}")


@dataclass(frozen=True, eq=False, repr=False)
class BlockMask:
    """A mask for lengths: the mask_mod, and how many batch entries, heads, queries and keys it is meant for.

    ``B`` and ``H`` are None where the mask is the same for all. It can be called as its mask_mod, and ``&`` and ``|``
    combine it with mods and masks. ``str(mask)`` is a picture. Lists of blocks (``kv_num_blocks`` and its like,
    ``sparsity()``, ``to_dense()``, ``as_tuple()``, ``mask[b, h, q]``) are PyTorch's, made when one is asked for: that
    takes time and memory as the pairs of all, for its mask_mod is then evaluated densely. ``is_nested``: of nested
    tensors; the mask_mod is asked of each sequence, ``b`` being its number.
    """

    mask_mod: Mod
    B: int | None
    H: int | None
    Q_LEN: int
    KV_LEN: int
    device: torch.device
    BLOCK_SIZE: tuple[int, int] = (DEFAULT_BLOCK_SIZE, DEFAULT_BLOCK_SIZE)
    is_nested: bool = False

    from_kv_blocks = torch_flex.BlockMask.from_kv_blocks

    @staticmethod
    def __flashgen_mod__(mask: BlockMask) -> Mod:
        return mask.mask_mod

    def __call__(self, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        """What the mask_mod says of a pair."""
        return self.mask_mod(b, h, q_idx, kv_idx)

    @functools.cached_property
    def shape(self) -> tuple[int, int, int, int]:
        """Batch entries, heads, queries, keys; 1 where the mask is the same for all."""
        return (self.B or 1, self.H or 1, self.Q_LEN, self.KV_LEN)

    @property
    def seq_lengths(self) -> tuple[int, int]:
        return (self.Q_LEN, self.KV_LEN)

    @functools.cached_property
    def lists(self) -> torch_flex.BlockMask:
        """PyTorch's mask of the same pairs, with lists of blocks. Raises ``ValueError`` for nested tensors."""
        if self.is_nested:
            raise ValueError("a mask of nested tensors has no lists of blocks: each sequence has its own")
        sizes = (self.B, self.H, self.Q_LEN, self.KV_LEN)
        return torch_flex.create_block_mask(self.mask_mod, *sizes, str(self.device), self.BLOCK_SIZE)

    def __getattr__(self, name: str) -> Any:
        if name in _OF_LISTS:
            return getattr(self.lists, name)
        raise AttributeError(f"a BlockMask has no attribute '{name}'")

    def __getitem__(self, index: Any) -> torch_flex.BlockMask:
        """PyTorch's mask of some entries, heads and rows of blocks. It has no mask_mod until one is set."""
        return self.lists[index]

    def numel(self) -> int:
        """The number of pairs, kept or not."""
        return math.prod(self.shape)

    def _adjust(self, new_q_len: int, new_kv_len: int) -> BlockMask:
        return replace(self, Q_LEN=new_q_len, KV_LEN=new_kv_len)

    def __and__(self, other: object) -> BlockMask:
        return self._with(other, and_masks)

    def __or__(self, other: object) -> BlockMask:
        return self._with(other, or_masks)

    def to(self, device: torch.device | str) -> BlockMask:
        """The mask for another device. Tensors that the mask_mod captures stay where they are."""
        return replace(self, device=torch.device(device))

    def _with(self, other: object, combine: Callable[..., Mod]) -> BlockMask:
        if not callable(other):
            raise TypeError(f"a mask is combined with a mask or a mask_mod, not {type(other).__name__}")
        B, H = self.B, self.H
        if isinstance(other, BlockMask):
            if other.seq_lengths != self.seq_lengths:
                raise ValueError(
                    f"masks of {self.seq_lengths} and of {other.seq_lengths} queries and keys cannot be combined"
                )
            B, H = _common("B", B, other.B), _common("H", H, other.H)
        return replace(self, mask_mod=combine(self, other), B=B, H=H)

    def __repr__(self) -> str:
        return f"BlockMask(shape={self.shape}, mask_mod={getattr(self.mask_mod, '__name__', self.mask_mod)})"

    def __str__(self) -> str:
        return f"{self!r}\n{drawn('mask in letters', self)}"

    def _repr_html_(self) -> str:
        return drawn("mask", self)


def _common(name: str, x: int | None, y: int | None) -> int | None:
    if x is not None and y is not None and x != y:
        raise ValueError(f"masks of {name} = {x} and of {name} = {y} cannot be combined")
    return y if x is None else x


def create_block_mask(
    mask_mod: Mod,
    B: int | None,
    H: int | None,
    Q_LEN: int,
    KV_LEN: int,
    device: torch.device | str | None = None,
    BLOCK_SIZE: int | tuple[int, int] = DEFAULT_BLOCK_SIZE,
    _compile: bool = False,
    **others: Any,
) -> BlockMask:
    """A mask. Nothing is evaluated, and nothing of size Q_LEN × KV_LEN exists, here or later.

    Takes what FlexAttention's function takes. ``BLOCK_SIZE``, ``_compile``, ``separate_full_blocks`` and those about
    the order of writes steer FlexAttention's kernels and change no result; they change nothing here. Raises
    ``TypeError`` for what is no mask_mod, no int, or an unknown argument, ``ValueError`` for lengths below 0 and sizes
    of blocks that are none.
    """
    unknown = others.keys() - {"separate_full_blocks", "compute_dq_write_order", "dq_kv_order"}
    if unknown:
        raise TypeError(f"create_block_mask has no argument '{min(unknown)}'")
    if not callable(mask_mod):
        raise TypeError(f"mask_mod must be a function of b, h, q_idx and kv_idx, not {type(mask_mod).__name__}")
    for name, count in (("B", B), ("H", H), ("Q_LEN", Q_LEN), ("KV_LEN", KV_LEN)):
        is_open = count is None and name in "BH"
        if not is_open and int_argument(name, count) < 0:
            raise ValueError(f"'{name}' is {count}; it must not be negative")
    where = torch.device("cpu" if device is None else device)
    return BlockMask(mask_mod, B, H, int(Q_LEN), int(KV_LEN), where, _block_size(BLOCK_SIZE))


def create_nested_block_mask(
    mask_mod: Mod,
    B: int | None,
    H: int | None,
    q_nt: Any,
    kv_nt: Any = None,
    BLOCK_SIZE: int | tuple[int, int] = DEFAULT_BLOCK_SIZE,
    _compile: bool = False,
) -> BlockMask:
    """The mask of jagged NestedTensors: the mask_mod is asked of each sequence alone, ``b`` being its number.

    Takes what FlexAttention's function takes, and evaluates nothing. Raises what ``create_block_mask`` raises, and
    ``TypeError`` for what is no NestedTensor.
    """
    kv_nt = q_nt if kv_nt is None else kv_nt
    for name, x in (("q_nt", q_nt), ("kv_nt", kv_nt)):
        if not isinstance(x, Tensor) or not x.is_nested or x.layout is not torch.jagged:
            raise TypeError(f"'{name}' must be a NestedTensor of layout=torch.jagged; for others: create_block_mask")
    q_len, kv_len = (x.values().numel() // max(1, x.shape[1] * x.shape[3]) for x in (q_nt, kv_nt))
    return replace(create_block_mask(mask_mod, B, H, q_len, kv_len, q_nt.device, BLOCK_SIZE), is_nested=True)


def _block_size(given: object) -> tuple[int, int]:
    both = given if isinstance(given, (tuple, list)) else (given, given)
    sizes: list[Any] = [as_number(each, whole=True) for each in both]
    if len(sizes) != 2 or any(each is None or each < 1 for each in sizes):
        raise ValueError(f"'BLOCK_SIZE' is {given!r}; an int of at least 1, or two, is expected")
    return sizes[0], sizes[1]


# -- masks of PyTorch --------------------------------------------------------------------------------------------------

# A pair is kept if its block is listed as full, or if its block is listed and the mask_mod keeps the pair. Mostly the
# lists follow from the mask_mod, which then is the answer. Where the lists keep other pairs, or there is no mask_mod,
# blocks are a tensor that the mask reads.

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
    from torch._dynamo._trace_wrapped_higher_order_op import TransformGetItemToIndex  # noqa: PLC0415 - imports Dynamo

    over_pairs: Any = torch_flex._vmap_for_bhqkv(mask_mod, prefix=())
    rows, columns = mask.BLOCK_SIZE
    q_len, kv_len = mask.seq_lengths
    device, (batch, heads) = partial.device, partial.shape[:2]
    full = torch.zeros_like(partial) if full is None else full
    b, h, keys = (torch.arange(count, device=device) for count in (batch, heads, kv_len))
    at_once = max(1, _AT_ONCE // max(1, rows * kv_len * batch * heads)) * rows
    for start in range(0, q_len, at_once):
        queries = torch.arange(start, min(start + at_once, q_len), device=device)
        with torch.no_grad(), TransformGetItemToIndex():
            kept = over_pairs(b, h, queries, keys).expand(batch, heads, len(queries), kv_len)
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
