"""Adds a part of the keys to what rows have seen so far, in place: by a kernel on a GPU, else by PyTorch's operators.

In: o and lse of rows, and of the same rows over more keys. Out: those over both. lse is never one number, which would
hold nothing of weights beside scores near float32's end: it is c top + log. ``top`` is a score from which kernels count
where scores are extreme, else 0; c makes a natural exponent of it.

    lse = log Σ exp(p lse') / p      o = Σ exp(lse' - lse) o'      p: the power of a denominator that is a plain sum
"""

from __future__ import annotations

import ctypes
import math
from dataclasses import dataclass

import torch
from torch import Tensor

from flashgen.runtime.standalone import Standalone

LOG2_E = 1.0 / math.log(2.0)
KERNEL = Standalone("add_part", ("instructions.cuh", "updates.cuh"))


@dataclass(frozen=True)
class Exponents:
    """What makes an exponent in base 2 of an extreme score, and p."""

    factor: float
    degree: float

    @property
    def natural(self) -> float:
        """What makes a natural exponent of an extreme score."""
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
    return Seen(o, *_exact(lse, extremes))


def add_part(rows: Seen, o: Tensor, lse: Tensor, extremes: Tensor | None, exponents: Exponents) -> None:
    """Add one more, in place; its o is of the type of theirs."""
    if _has_kernel(rows.o, o, lse):
        return _launch(rows, o, lse, extremes, exponents)
    log, top = _exact(lse, extremes)
    closer = join((rows.log, rows.top), (log, top), exponents)
    kept, added = (x.to(rows.o.dtype) for x in (closer.kept, closer.added))
    rows.o.mul_(kept[..., None]).addcmul_(o, added[..., None])
    rows.log.copy_(closer.log)
    rows.top.copy_(closer.top)
    return None


@dataclass(frozen=True)
class Joined:
    """Of two sums, c top + log each: that of both, and the share of each; all float64. Without keys: none, 0 and 0."""

    log: Tensor
    top: Tensor
    kept: Tensor
    added: Tensor


def join(sum_of: tuple[Tensor, Tensor], more: tuple[Tensor, Tensor], exponents: Exponents) -> Joined:
    """Of (log, top) and (log, top), which broadcast."""
    (log, top), (other, other_top) = sum_of, more
    # Never by lse itself: that of equal tops cancels, however large they are.
    ahead = (other_top - top) * exponents.natural + (other - log)
    is_other, p = ahead > 0, exponents.degree
    grown = torch.log1p((-p * ahead.abs()).exp()) / p
    found = torch.where(is_other, other, log) + grown
    nothing = (log == -math.inf) & (other == -math.inf)
    behind = (-ahead.abs() - grown).exp()
    shares = (torch.where(is_other, behind, (-grown).exp()), torch.where(is_other, (-grown).exp(), behind))
    return Joined(
        torch.where(nothing, -math.inf, found), torch.where(is_other, other_top, top),
        *(torch.where(nothing, 0.0, share) for share in shares),
    )  # fmt: skip


def _exact(lse: Tensor, extremes: Tensor | None) -> tuple[Tensor, Tensor]:
    """log and top."""
    exact = lse.double()
    if extremes is None:
        return exact, torch.zeros_like(exact)
    top, log = extremes.double().unbind(-1)
    return torch.where((top != 0) | (log != 0), log / LOG2_E, exact), top


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
    """Of a launch."""
    batch, heads, count, width = rows.o.shape
    return Arguments(
        rows.o.data_ptr(), 0 if o is None else o.data_ptr(), rows.log.data_ptr(), rows.top.data_ptr(), lse.data_ptr(),
        0 if extremes is None else extremes.data_ptr(), batch * heads, count, rows.o.stride(1), rows.log.stride(1),
        exponents.factor, exponents.degree, width, 0,
    )  # fmt: skip


def _has_kernel(o: Tensor, part: Tensor, lse: Tensor) -> bool:
    """Whether these lie as the kernel takes them: [B, H] one number, rows together."""
    if not o.is_cuda or not o.dtype is part.dtype is lse.dtype is torch.float32 or not part.is_contiguous():
        return False
    batch, heads, rows, width = o.shape
    together = o.stride(3) == 1 and o.stride(2) == width and (batch == 1 or o.stride(0) == heads * o.stride(1))
    return together and rows > 0 and width > 0 and o.data_ptr() % 16 == 0


def _launch(rows: Seen, o: Tensor | None, lse: Tensor, extremes: Tensor | None, exponents: Exponents) -> None:
    packed = arguments(rows, o, lse, extremes, exponents)
    KERNEL.launch(rows.o.device.index, packed, math.prod(rows.log.shape))
