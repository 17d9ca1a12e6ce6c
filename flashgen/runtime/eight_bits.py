"""Caches of 8 bits: numbers in ``float8_e4m3fn``, and one factor for each sequence and key/value head.

A cache holds x / factor, rounded; what attention means is a formula of the numbers times their factor.
"""

from __future__ import annotations

import torch
from torch import Tensor

F8 = torch.float8_e4m3fn
_LARGEST = 448.0


def factors_of(name: str, given: object, cache: Tensor, wanted: tuple[int, int], device: torch.device) -> Tensor:
    """The factors [B, Hkv] of a cache, float32; [0, 0] of one that has none, and of one of more than 8 bits.

    ``given`` is None, a number, or a tensor that broadcasts to [B, Hkv]. Raises ``TypeError`` and ``ValueError``.
    """
    if given is None:
        return torch.zeros((0, 0), dtype=torch.float32, device=device)
    cache_name = f"{name[0]}_cache"
    if cache.dtype is not F8:
        raise ValueError(f"'{name}' goes with a cache of 8 bits ({F8}), but '{cache_name}' is {cache.dtype}")
    if isinstance(given, (int, float)) and not isinstance(given, bool):
        return torch.full(wanted, float(given), dtype=torch.float32, device=device)
    if not isinstance(given, Tensor):
        raise TypeError(f"'{name}' must be a number or a tensor (f32[B, Hkv]), not {type(given).__name__}")
    if not given.is_floating_point():
        raise TypeError(f"'{name}' is {given.dtype}; f32[B, Hkv] is expected")
    if given.device != device:
        raise ValueError(f"'{name}' is on {given.device}, but 'q' is on {device}")
    if given.dim() > 2 or any(
        have not in (1, want) for have, want in zip(reversed(given.shape), reversed(wanted), strict=False)
    ):
        raise ValueError(f"'{name}' has shape {list(given.shape)}; [B, Hkv] = {list(wanted)} is expected")
    return given.float().expand(wanted).contiguous()


def to_8_bits(x: Tensor, factors: Tensor) -> Tensor:
    """What a cache holds of x [B, Hkv, rows, width]: numbers beyond ±448 factors become the largest there are."""
    numbers = x.float()
    if factors.numel():
        numbers = numbers / factors[:, :, None, None]
    return numbers.clamp(-_LARGEST, _LARGEST).to(F8)


def from_8_bits(x: Tensor, factors: Tensor | None) -> Tensor:
    """The numbers that rows [..., Hkv, rows, width] of a cache mean, in float32; ``factors`` are [Hkv] or none."""
    numbers = x.float()
    return numbers if factors is None else numbers * factors[:, None, None]
