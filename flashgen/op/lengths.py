"""The sequences of a ragged batch: where each begins, checked before anything is read or written; what follows from it.

In: ``cu_seqlens_q`` and ``cu_seqlens_k`` as callers pass them. Out: ``Lengths``, and ``LengthChecks`` of a spec, which
caches use, too. Errors name the tensor, the sequence, what was expected and what came. The host reads numbers in the
memory of a GPU only where a call needs them, as it has to wait for them.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from flashgen.ir.expr import Apply, Expr, Literal, Symbol, SymbolKind, literal, size, substitute, walk
from flashgen.ir.spec import AttentionSpec, CapturedTensor, HeadDim
from flashgen.op.checks import Indices
from flashgen.op.conversion import is_integral, saturated, unwrapped
from flashgen.op.tensor_kinds import transforming
from flashgen.reference.dense import constant_number

Starts = np.ndarray[Any, np.dtype[np.int32]]

# Operators that grow with both of their arguments. An extent of sizes and these operators is no larger for a sequence
# than for the longest one.
_GROW = frozenset({"add", "mul", "min", "max"})
_MOST_LENGTHS = 1 << 16
# If set, the host checks cu_seqlens on a GPU, and the places of rows in a cache. Else nobody checks them there.
CHECK_LENGTHS = "FLASHGEN_CHECK_LENGTHS"


@dataclass(frozen=True, eq=False)
class Lengths:
    """Where sequences begin among the rows of q and of k, [sequences + 1] each, and the longest lengths.

    ``starts`` None: only the device knows.
    """

    count: int  # of sequences
    max_q: int
    max_k: int
    starts: tuple[Starts, Starts] | None

    @functools.cached_property
    def pairs(self) -> list[tuple[int, int]]:
        """The lengths of each sequence, of queries and of keys; empty where only the device knows."""
        if self.starts is None:
            return []
        return list(zip(*((x[1:] - x[:-1]).tolist() for x in self.starts), strict=True))

    def sequences(self) -> Iterator[tuple[int, slice, slice]]:
        """The number of each sequence, its rows of q, and those of k and v."""
        assert self.starts is not None, "they were looked at"
        q, k = (each.tolist() for each in self.starts)
        for number in range(self.count):
            yield number, slice(q[number], q[number + 1]), slice(k[number], k[number + 1])


def check_starts(name: str, starts: object, device: torch.device | None = None) -> Tensor:
    """Cumulative lengths as an int32 tensor; values are not looked at. Raises ``TypeError`` and ``ValueError``.

    ``device`` is that of q. With ``starts`` on meta PyTorch would run the whole call on meta.
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
    """``lengths`` whose numbers the host does not read: kernels keep to ``rows``, and to ``most`` of a sequence.

    Without ``most`` a sequence may have all rows.
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


# What follows from lengths --------------------------------------------------------------------------------------------


def checks_lengths() -> bool:
    """Whether the host waits for numbers on a GPU, to check them."""
    return os.environ.get(CHECK_LENGTHS, "").strip() not in ("", "0")


class LengthChecks:
    """Checks of a spec by the lengths of sequences, and whether the host has to know these."""

    def __init__(self, spec: AttentionSpec, indices: Indices) -> None:
        self.spec, self.indices = spec, indices
        self._may_shrink = tuple(each for each in spec.tensors if not all(map(_grows, each.shape)))
        self._captures = bool(spec.tensors or spec.params or spec.dropout is not None)
        self._values_begin = 3 + len(spec.tensors)
        self._checked: set[object] = set()
        self._reasons: dict[object, str] = {}

    def are_seen(self, tensors: Sequence[Any], most: tuple[int | None, int | None], name: str, also: str = "") -> bool:
        """Whether the host reads the numbers on a GPU that say where sequences are.

        ``name`` is the name of their tensor; ``also`` is another reason to read them. Raises ``ValueError`` where they
        have to be read and cannot.
        """
        why = self.why_seen(tensors, most) or also
        if why and torch.cuda.is_current_stream_capturing():
            raise ValueError(
                f"'{self.spec.name}': {why}, so that the host has to wait for {name}, which it cannot while a graph is "
                "captured"
            )
        return bool(why)

    def why_seen(self, tensors: Sequence[Any], most: tuple[int | None, int | None]) -> str:
        """Why the host has to know the lengths of sequences; empty where it need not.

        ``tensors`` are those of a dense call, ``most`` the longest lengths; None: not given.
        """
        if checks_lengths():
            return f"{CHECK_LENGTHS} is set"
        if not self._captures:
            return ""
        dims, values = (tensors[0].size(-1), tensors[2].size(-1)), tensors[self._values_begin :]
        key = (dims, most[0] is None, most[1] is None, *[x is None for x in values])
        why = self._reasons.get(key)
        if why is None:
            why = self._reasons[key] = self._reason(HeadDim(*dims), values, most)
        return why

    def _reason(self, head_dim: HeadDim, values: Sequence[Any], most: tuple[int | None, int | None]) -> str:
        if self.indices.of(head_dim) or self._may_shrink:
            return "indices of captured tensors are checked for the lengths of each sequence"
        for name, size_name, longest in (("q", "Nq", most[0]), ("k", "Nk", most[1])):
            shapes = (extent for declared in self.spec.tensors for extent in declared.shape)
            if longest is None and any(reads(extent, {size_name}) for extent in shapes):
                return (
                    f"shapes of captured tensors follow from the longest sequence, and max_seqlen_{name} is not given"
                )
        by_length = params_by_length(self.spec, values[: len(self.spec.params)])
        if by_length:
            return f"param '{min(by_length)}' follows from the lengths of each sequence"
        if drops_by_length(self.spec, values, by_length):
            return "the probability of dropout follows from the lengths of each sequence"
        return ""

    def check(self, head_dim: HeadDim, whole_sizes: Mapping[str, int], pairs: Sequence[tuple[int, int]]) -> None:
        """Raise ``ValueError`` where an index leaves its tensor at the lengths of a sequence."""
        if not self.spec.tensors or not (self.indices.of(head_dim) or self._may_shrink):
            return
        whole = (head_dim, *whole_sizes.values())
        for number, (q_len, kv_len) in enumerate(pairs):
            key = (*whole, q_len, kv_len)
            if key in self._checked:
                continue
            sizes = {**whole_sizes, "Nq": q_len, "Nk": kv_len}
            try:
                self.indices.check(head_dim, sizes)
                for declared in self._may_shrink:
                    _check_extents(declared, sizes, whole_sizes)
            except ValueError as error:
                raise ValueError(f"sequence {number}, of {q_len} queries and {kv_len} keys: {error}") from None
            if len(self._checked) >= _MOST_LENGTHS:
                self._checked.clear()
            self._checked.add(key)


def _grows(extent: Expr) -> bool:
    """Whether an extent is certainly no smaller for longer sequences."""
    if isinstance(extent, Literal):
        return extent.value >= 0
    if isinstance(extent, Symbol):
        return extent.kind is SymbolKind.SIZE
    if isinstance(extent, Apply) and extent.op in _GROW:
        return all(map(_grows, extent.args))
    return not reads(extent, {"Nq", "Nk"})


def _check_extents(declared: CapturedTensor, sizes: Mapping[str, int], whole: Mapping[str, int]) -> None:
    """Raise ``ValueError`` where a sequence could read more of a tensor than there is."""
    for axis, extent in enumerate(declared.shape):
        own, given = (_number(extent, each) for each in (sizes, whole))
        if own > given:
            raise ValueError(
                f"it reads {own} entries of dimension {axis} of tensor '{declared.name}', which has {given}, those of "
                "the longest sequence; declare the tensor so that longer sequences have no fewer"
            )


def _number(extent: Expr, sizes: Mapping[str, int]) -> int:
    values: dict[Expr, Expr] = {size(name): literal(value) for name, value in sizes.items()}
    return int(constant_number(substitute(extent, values)))


def params_by_length(spec: AttentionSpec, given: Sequence[Tensor | None]) -> set[str]:
    """The params that are not given and whose defaults follow from the lengths of a sequence."""
    by_length: set[str] = set()
    for param, x in zip(spec.params, given, strict=True):
        if x is None and param.default is not None and reads(param.default, {"Nq", "Nk"} | by_length):
            by_length.add(param.name)
    return by_length


def drops_by_length(spec: AttentionSpec, tensors: Sequence[Any], by_length: set[str]) -> bool:
    """Whether the probability of dropout follows from the lengths of a sequence."""
    is_own = spec.dropout is not None and (len(tensors) == 0 or tensors[-1] is None)
    return is_own and spec.dropout is not None and reads(spec.dropout, {"Nq", "Nk"} | by_length)


def reads(expr: Expr, names: set[str]) -> bool:
    """Whether an expression reads one of these names."""
    return any(isinstance(node, Symbol) and node.name in names for node in walk(expr))
