"""Rotary embedding of the queries and the new keys of a call with a cache.

In: rows [B, N, H, D], cos and sin by position. Out: rows of the same type, rotated in float32.
"""

from __future__ import annotations

import torch
from torch import Tensor

from flashgen.op.conversion import as_number, is_integral


def rotated(
    q: Tensor,
    k: Tensor | None,
    angles: tuple[object, object],
    places: tuple[int | Tensor, int],
    *,
    is_interleaved: bool,
    moves: bool,
) -> tuple[Tensor, Tensor]:
    """q and k with their first features rotated by ``angles``: cos and sin [Nmax, R / 2].

    ``places``: the position of each sequence's first row, and the number of positions. ``moves``: each query has a
    position of its own; else all have the first. Raises ``TypeError`` and ``ValueError``.
    """
    first, capacity = places
    if k is None:
        raise ValueError("'rotary_cos' and 'rotary_sin' rotate what is new: pass k and v, or leave them out")
    cos, sin = _checked(q, k, angles, capacity)
    at = _positions(first, q)

    def by_rows(x: Tensor, rows: int) -> Tensor:
        # What lies outside of the cache is named by the op.
        places = (at[:, None] + torch.arange(rows, device=q.device)).clamp(0, max(0, cos.shape[0] - 1))
        return _rotated(x, cos[places][:, :, None], sin[places][:, :, None], is_interleaved)

    return by_rows(q, q.shape[1] if moves else 1), by_rows(k, k.shape[1])


def _checked(q: Tensor, k: Tensor, angles: tuple[object, object], capacity: int) -> tuple[Tensor, Tensor]:
    """cos and sin in float32."""
    width, found = q.shape[3], []
    if q.dtype.itemsize == 1 or k.dtype.itemsize == 1:
        raise TypeError(f"'rotary_cos': q is {q.dtype} and k is {k.dtype}; rotate rows before they are of 8 bits")
    for name, x in zip(("rotary_cos", "rotary_sin"), angles, strict=True):
        if not isinstance(x, Tensor):
            raise TypeError(f"'{name}' must be a tensor [Nmax, R / 2], not {type(x).__name__}; pass both, or neither")
        if x.dim() != 2 or x.shape[0] < capacity or not 0 < 2 * x.shape[1] <= width:
            raise ValueError(
                f"'{name}' has shape {list(x.shape)}; [Nmax, R / 2] is expected, of {capacity} or more rows and at "
                f"most {width // 2} columns"
            )
        if x.dtype is not q.dtype or x.device != q.device:
            raise TypeError(f"'{name}' is {x.dtype} on {x.device}; q is {q.dtype} on {q.device}")
        found.append(x)
    cos, sin = found
    if cos.shape != sin.shape:
        raise ValueError(f"'rotary_cos' has shape {list(cos.shape)} and 'rotary_sin' {list(sin.shape)}; they differ")
    return cos.float(), sin.float()


def _positions(first: int | Tensor, q: Tensor) -> Tensor:
    """The position of the first row of each sequence."""
    if isinstance(first, Tensor):
        if not is_integral(first.dtype) or first.shape not in ((), (1,), q.shape[:1]):
            raise ValueError(
                f"'rotary_seqlens' is {first.dtype} {list(first.shape)}; i32[{q.shape[0]}] is expected, the position "
                "of the first new row of each sequence"
            )
    elif as_number(first, whole=True) is None:
        raise TypeError(f"'rotary_seqlens' must be a tensor (i32[B]) or an int, not {type(first).__name__}")
    return torch.as_tensor(first, device=q.device).long().expand(q.shape[0])


def _rotated(x: Tensor, cos: Tensor, sin: Tensor, is_interleaved: bool) -> Tensor:
    count = 2 * cos.shape[-1]
    first, rest = x[..., :count].float(), x[..., count:]
    a, b = (first[..., ::2], first[..., 1::2]) if is_interleaved else first.chunk(2, -1)
    turned = (a * cos - b * sin, a * sin + b * cos)
    rows = torch.stack(turned, -1).flatten(-2) if is_interleaved else torch.cat(turned, -1)
    return torch.cat((rows.to(x.dtype), rest), -1)
