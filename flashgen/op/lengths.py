"""The sequences of a ragged batch: where each begins, checked before anything is read or written.

In: ``cu_seqlens_q`` and ``cu_seqlens_k`` as callers pass them. Out: ``Lengths``. Errors name the tensor, the sequence,
what was expected and what came. Numbers in the memory of a GPU are looked at where a call needs them alone: the host
would wait.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from flashgen.op.conversion import is_integral, saturated, unwrapped
from flashgen.op.plain import transforming

Starts = np.ndarray[Any, np.dtype[np.int32]]


@dataclass(frozen=True, eq=False)
class Lengths:
    """Where sequences begin among the rows of q and of k, [sequences + 1] each, and the longest that there may be.

    ``starts`` None: only the device knows.
    """

    count: int  # of sequences
    max_q: int
    max_k: int
    starts: tuple[Starts, Starts] | None

    @property
    def q_starts(self) -> Starts:
        """Among the rows of q."""
        assert self.starts is not None, "they were not looked at"
        return self.starts[0]

    @property
    def k_starts(self) -> Starts:
        """Among those of k."""
        assert self.starts is not None, "they were not looked at"
        return self.starts[1]

    @functools.cached_property
    def pairs(self) -> list[tuple[int, int]]:
        """The lengths of each sequence, of queries and of keys; none where only the device knows."""
        if self.starts is None:
            return []
        return list(zip(*((x[1:] - x[:-1]).tolist() for x in self.starts), strict=True))

    def sequences(self) -> Iterator[tuple[int, slice, slice]]:
        """The number of each sequence, its rows of q, and those of k and v."""
        q, k = self.q_starts.tolist(), self.k_starts.tolist()
        for number in range(self.count):
            yield number, slice(q[number], q[number + 1]), slice(k[number], k[number + 1])


def check_starts(name: str, starts: object, device: torch.device | None = None) -> Tensor:
    """Cumulative lengths as an int32 tensor; values are not looked at. Raises ``TypeError`` and ``ValueError``.

    ``device`` is that of q: of a tensor without memory PyTorch would take the whole call for one without.
    """
    if not isinstance(starts, Tensor):
        raise TypeError(f"'{name}' must be a tensor of cumulative lengths (i32[B + 1]), not {type(starts).__name__}")
    if starts.dtype is not torch.int32 and not is_integral(starts.dtype):
        raise TypeError(f"'{name}' is {starts.dtype}; a tensor of cumulative lengths (i32[B + 1]) is expected")
    if starts.dim() != 1 or starts.shape[0] < 1:
        raise ValueError(
            f"'{name}' has shape {list(starts.shape)}; [B + 1] is expected, where each of B sequences begins and the "
            "last one ends"
        )
    if device is not None and starts.is_meta and device.type != "meta":
        raise ValueError(f"'{name}' is on meta, but 'q' is on {device}")
    return starts if starts.dtype is torch.int32 else saturated(starts)


def lengths(q_starts: Tensor, k_starts: Tensor, rows: tuple[int, int], most: tuple[int | None, int | None]) -> Lengths:
    """The sequences of ``rows`` rows of q and of k. Raises ``ValueError`` where they do not fit.

    ``most`` are max_seqlen_q and max_seqlen_k: no sequence may be longer; None: as long as the longest.
    """
    _check_same(q_starts, k_starts)
    q, longest_q = _checked("q", q_starts, rows[0], most[0])
    is_same = q_starts is k_starts and rows[0] == rows[1] and most[0] == most[1]
    k, longest_k = (q, longest_q) if is_same else _checked("k", k_starts, rows[1], most[1])
    return Lengths(len(q) - 1, longest_q, longest_k, (q, k))


def unseen_lengths(
    q_starts: Tensor, k_starts: Tensor, rows: tuple[int, int], most: tuple[int | None, int | None]
) -> Lengths:
    """The same without a look at numbers: kernels keep to the rows that there are, and to ``most`` of a sequence.

    Where that is not given, a sequence may have all rows.
    """
    _check_same(q_starts, k_starts)
    max_q, max_k = most
    return Lengths(q_starts.size(0) - 1, rows[0] if max_q is None else max_q, rows[1] if max_k is None else max_k, None)


def _check_same(q_starts: Tensor, k_starts: Tensor) -> None:
    if q_starts is not k_starts and q_starts.shape != k_starts.shape:
        raise ValueError(
            f"'cu_seqlens_k' has shape {list(k_starts.shape)}, but 'cu_seqlens_q' {list(q_starts.shape)}: "
            "both are [B + 1] for the same B sequences"
        )


def _checked(letter: str, starts: Tensor, rows: int, most: int | None) -> tuple[Starts, int]:
    name = f"cu_seqlens_{letter}"
    host = unwrapped(starts)
    # Under a transform of torch.func whatever PyTorch returns is a wrapper, without memory.
    numbers: Any = host.tolist() if transforming() else host.detach().cpu().numpy()
    found: Starts = np.ascontiguousarray(numbers, np.int32)
    if found.ndim != 1:
        raise ValueError(f"'{name}' is mapped by torch.vmap, which the dense formula does not take: loop over samples")
    if found[0] != 0:
        raise ValueError(f"'{name}' begins with {found[0]}; the first sequence begins at 0")
    wide = found.astype(np.int64)
    each = wide[1:] - wide[:-1]  # in a fraction of the time of np.diff
    if each.size and each.min() < 0:
        at = int(np.argmax(each < 0))
        raise ValueError(f"'{name}' falls from {found[at]} to {found[at + 1]} at sequence {at}; it must not")
    if found[-1] > rows:
        whose = "q has" if letter == "q" else "k and v have"
        raise ValueError(f"'{name}' ends at {found[-1]}, but {whose} {rows} rows; no sequence ends behind them")
    longest = int(each.max()) if each.size else 0
    if most is not None and not longest <= most:
        raise ValueError(
            f"'max_seqlen_{letter}' is {most}, but sequence {int(each.argmax())} of '{name}' has {longest} rows"
        )
    return found, longest if most is None else most
