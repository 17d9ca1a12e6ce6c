"""Dropout decisions: Philox4x32-7 over the global coordinates of a pair, in torch's int64 arithmetic.

In: a seed, a drop probability and coordinates. Out: a boolean tensor that says which pairs are kept. Every
backend draws the same decisions. A call draws for sixteen pairs of two squares of 16 x 16 side by side: rows r and
r + 8 by columns 2 c, 2 c + 1, 2 c + 8 and 2 c + 9 of each, as the matrix units of GPUs give them to one lane.

    row     = 8 (i // 16) + i % 8         column = 4 (j // 32) + j % 8 // 2
    counter = (h, row, b, column)         key    = (seed & 0xffffffff, seed >> 32)
    word    = output[2 (j % 16 // 8) + i % 16 // 8]; in the right square, j // 16 odd, rotated to the left by 8 bits
    number  = the low 15 bits of the word's half j % 2, of which 0 is the low one
    kept    = number >= threshold(p)      survivors are scaled by 1 / (1 - threshold / 2**15)

So 128 bits give sixteen numbers of 15 bits. The seven high bits of each are its own; the eight low ones, which decide
only where the high ones are the threshold's, are the high ones of a neighbour (and its unused bit). A number alone is
uniform. Two that share bits, those of (i, j) and of two pairs 16 or 16 ± 1 columns away, agree a little more often than
by chance: the correlation of their decisions is at most 1/256, at p = 0.1 0.0017.

The generator is that of Salmon et al., "Parallel random numbers: as easy as 1, 2, 3" (SC 2011); seven rounds are the
fewest that pass its tests.
"""

from __future__ import annotations

import torch
from torch import Tensor

Words = tuple[Tensor, Tensor, Tensor, Tensor]

_MASK = 0xFFFFFFFF
_ROUNDS = 7
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_NUMBERS = 2**15  # that a pair may draw


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
    """A pair is dropped where its number is below round(p * 2**15), which for p in (0, 1) is 1 to 2**15 - 1."""
    if probability == 0.0:
        return 0
    return min(max(round(probability * _NUMBERS), 1), _NUMBERS - 1)


def survivor_scale(threshold: int) -> float:
    """The factor of survivors, by which the mean of a weight is that without dropout."""
    return _NUMBERS / (_NUMBERS - threshold)


def kept_pairs(seed: int | Tensor, threshold: int, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
    """Which pairs survive: bool [B, H, Nq, Nk] for the global coordinates b [B], h [H], i [Nq] and j [Nk].

    ``i`` and ``j`` must count up by one. ``seed`` is an int or a 0-dim int64 tensor, taken modulo 2**64.
    """
    if i.numel() == 0 or j.numel() == 0:
        return torch.ones(b.numel(), h.numel(), i.numel(), j.numel(), dtype=torch.bool, device=j.device)
    i0, j0 = int(i[0]), int(j[0])
    down, along = i0 % 16 + i.numel() + 15 >> 4, j0 % 32 + j.numel() + 31 >> 5  # squares, and pairs of them
    words = philox(
        (
            h.to(torch.int64).view(1, -1, 1, 1),
            torch.arange(8 * down, device=i.device, dtype=torch.int64).view(1, 1, -1, 1) + i0 // 16 * 8,
            b.to(torch.int64).view(-1, 1, 1, 1),
            torch.arange(4 * along, device=j.device, dtype=torch.int64).view(1, 1, 1, -1) + j0 // 32 * 4,
        ),
        (seed & _MASK, seed >> 32 & _MASK),
    )
    of_squares = [each for word in words for each in (word, word << 8 | word >> 24)]
    kept = torch.stack([(each >> low & _NUMBERS - 1) >= threshold for each in of_squares for low in (0, 16)], dim=-1)
    # [B, H, square, row, two squares, columns, right half?, lower half?, right square?, column]
    squares = kept.view(b.numel(), h.numel(), down, 8, along, 4, 2, 2, 2, 2).permute(0, 1, 2, 7, 3, 4, 8, 6, 5, 9)
    whole = squares.reshape(b.numel(), h.numel(), 16 * down, 32 * along)
    return whole[..., i0 % 16 : i0 % 16 + i.numel(), j0 % 32 : j0 % 32 + j.numel()]
