"""Dropout decisions: Philox4x32-10 over the global coordinates of a pair, in torch's int64 arithmetic.

In: a seed, a drop probability and coordinates. Out: a boolean tensor that says which pairs are kept. Every
backend draws the same decisions:

    counter = (j // 4, i, h, b)        key = (seed & 0xffffffff, seed >> 32)        word = output[j % 4]
    kept    = word >= threshold(p)     survivors are scaled by 1 / (1 - p)

The generator is that of Salmon et al., "Parallel random numbers: as easy as 1, 2, 3" (SC 2011).
"""

from __future__ import annotations

import torch
from torch import Tensor

Words = tuple[Tensor, Tensor, Tensor, Tensor]

_MASK = 0xFFFFFFFF
_ROUNDS = 10
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)


def philox(counter: Words, key: tuple[int | Tensor, int | Tensor]) -> Words:
    """The four 32-bit output words for each counter; int64 tensors in [0, 2**32), shapes broadcast."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_ROUNDS):
        # The int64 product wraps modulo 2**64, so that both of its halves are those of the unsigned product.
        product0 = c0 * _MULTIPLIERS[0]
        product1 = c2 * _MULTIPLIERS[1]
        c0, c1, c2, c3 = (
            (product1 >> 32 & _MASK) ^ c1 ^ k0,
            product1 & _MASK,
            (product0 >> 32 & _MASK) ^ c3 ^ k1,
            product0 & _MASK,
        )
        k0 = (k0 + _WEYL[0]) & _MASK
        k1 = (k1 + _WEYL[1]) & _MASK
    return c0, c1, c2, c3


def drop_threshold(probability: float) -> int:
    """A pair is dropped where its word is below this: round(p * 2**32), at most 2**32 - 1."""
    return min(round(probability * 2.0**32), _MASK)


def kept_pairs(seed: int | Tensor, threshold: int, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
    """Which pairs survive: bool [B, H, Nq, Nk] for the global coordinates b [B], h [H], i [Nq] and j [Nk].

    ``j`` must count up by one. ``seed`` is an int or a 0-dim int64 tensor, taken modulo 2**64.
    """
    if j.numel() == 0:
        return torch.ones(b.numel(), h.numel(), i.numel(), 0, dtype=torch.bool, device=j.device)
    if isinstance(seed, int):
        key: tuple[int | Tensor, int | Tensor] = (seed & _MASK, seed >> 32 & _MASK)
    else:
        key = (seed & _MASK, seed >> 32 & _MASK)
    first = int(j[0])
    groups = torch.arange(first // 4, (first + j.numel() - 1) // 4 + 1, device=j.device, dtype=torch.int64)
    words = philox(
        (
            groups.view(1, 1, 1, -1),
            i.to(torch.int64).view(1, 1, -1, 1),
            h.to(torch.int64).view(1, -1, 1, 1),
            b.to(torch.int64).view(-1, 1, 1, 1),
        ),
        key,
    )
    shape = (b.numel(), h.numel(), i.numel(), groups.numel())
    kept = torch.stack([word.expand(shape) >= threshold for word in words], dim=-1).flatten(-2)
    return kept[..., first % 4 : first % 4 + j.numel()]
