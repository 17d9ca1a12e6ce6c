"""Merges attention over parts of the keys into rows, in place: by a kernel on a GPU, else by PyTorch's operators.

In: o and lse of rows over some keys, and of the same rows over other keys. Out: o and lse over both. lse is kept as two
numbers, c top + log, as one number would lose the weights beside scores near float32's end. ``top`` is the score that
kernels subtract where scores are extreme, else 0; c makes a natural exponent of it.

    lse = log Σ exp(p lse') / p      o = Σ exp(lse' - lse) o'      p: the power of a denominator that is a plain sum
"""

from __future__ import annotations

import ctypes
import math
from dataclasses import dataclass

import torch
from torch import Tensor

from flashgen.hosts.standalone import Standalone
from flashgen.op.values import address

LOG2_E = 1.0 / math.log(2.0)
KERNEL = Standalone("add_part")


@dataclass(frozen=True)
class Exponents:
    """``factor`` makes an exponent in base 2 of an extreme score; ``degree`` is p."""

    factor: float
    degree: float

    @property
    def natural(self) -> float:
        """The factor that makes a natural exponent of an extreme score."""
        return self.factor / LOG2_E


@dataclass
class Seen:
    """``o`` [B, H, n, Dv], float32 at least; ``log`` and ``top`` [B, H, n], float64. Each a slice of rows, or whole."""

    o: Tensor
    log: Tensor
    top: Tensor


def first_part(o: Tensor, lse: Tensor, extremes: Tensor | None, exponents: Exponents) -> Seen:
    """Rows that have seen one part; ``extremes`` [B, H, n, 2] as kernels leave them, None where there are none."""
    if _has_kernel(o, o, lse):
        found = Seen(o, *(torch.empty_like(lse, dtype=torch.float64) for _ in range(2)))
        _launch(found, None, lse, extremes, exponents)
        return found
    return Seen(o, *exact(lse, extremes))


def add_part(rows: Seen, o: Tensor, lse: Tensor, extremes: Tensor | None, exponents: Exponents) -> None:
    """Merge one more part into rows, in place; its o has the type of theirs."""
    if _has_kernel(rows.o, o, lse):
        return _launch(rows, o, lse, extremes, exponents)
    log, top = exact(lse, extremes)
    before, p = rows.log, exponents.degree
    # Not by differences of lse: equal tops cancel here, however large they are.
    ahead = (top - rows.top) * exponents.natural + (log - before)
    grown = torch.log1p((-p * ahead.abs()).exp()) / p
    most, least = (-grown).exp(), (-ahead.abs() - grown).exp()
    is_ahead, nothing = ahead > 0, (before == -math.inf) & (log == -math.inf)  # of two parts without keys none is left
    kept = torch.where(nothing, 0.0, torch.where(is_ahead, least, most)).to(rows.o.dtype)
    added = torch.where(nothing, 0.0, torch.where(is_ahead, most, least)).to(rows.o.dtype)
    rows.o.mul_(kept[..., None]).addcmul_(o, added[..., None])
    rows.log.copy_(torch.where(nothing, -math.inf, torch.where(is_ahead, log, before) + grown))
    rows.top.copy_(torch.where(is_ahead, top, rows.top))
    return None


def exact(lse: Tensor, extremes: Tensor | None) -> tuple[Tensor, Tensor]:
    """log and top of rows, float64; of rows without extreme scores log is lse."""
    whole = lse.double()
    if extremes is None:
        return whole, torch.zeros_like(whole)
    top, log = extremes.double().unbind(-1)
    return torch.where((top != 0) | (log != 0), log / LOG2_E, whole), top


# -- on a GPU ----------------------------------------------------------------------------------------------------------


class Arguments(ctypes.Structure):
    """``struct AddPart``."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("o", "part_o", "log", "top", "part_lse", "extremes")),
        *((name, ctypes.c_int64) for name in ("heads", "rows", "o_by_head", "log_by_head")),
        *((name, ctypes.c_double) for name in ("factor", "degree")),
        *((name, ctypes.c_int) for name in ("width", "padding")),
    )


def arguments(rows: Seen, o: Tensor | None, lse: Tensor, extremes: Tensor | None, exponents: Exponents) -> Arguments:
    """The arguments of a launch."""
    batch, heads, count, width = rows.o.shape
    return Arguments(
        rows.o.data_ptr(), address(o), rows.log.data_ptr(), rows.top.data_ptr(), lse.data_ptr(),
        address(extremes), batch * heads, count, rows.o.stride(1), rows.log.stride(1),
        exponents.factor, exponents.degree, width, 0,
    )  # fmt: skip


def _has_kernel(o: Tensor, part: Tensor, lse: Tensor) -> bool:
    """Whether tensors lie as the kernel takes them: one stride for [B, H], rows together."""
    if not o.is_cuda or not o.dtype is part.dtype is lse.dtype is torch.float32 or not part.is_contiguous():
        return False
    batch, heads, rows, width = o.shape
    together = o.stride(3) == 1 and o.stride(2) == width and (batch == 1 or o.stride(0) == heads * o.stride(1))
    return together and rows > 0 and width > 0 and o.data_ptr() % 16 == 0


def _launch(rows: Seen, o: Tensor | None, lse: Tensor, extremes: Tensor | None, exponents: Exponents) -> None:
    packed = arguments(rows, o, lse, extremes, exponents)
    KERNEL.launch(rows.o.device.index, packed, math.prod(rows.log.shape))
