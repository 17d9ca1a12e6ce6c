"""Lengths of sequences, in ragged batches and caches: what follows from them, and what they have to fit.

In: a call's arguments, and its lengths where the host knows them. Out: whether it has to know them; ``ValueError`` that
names the sequence.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from flashgen.ir.expr import Apply, Expr, Literal, Symbol, SymbolKind, literal, size, substitute, walk
from flashgen.ir.spec import AttentionSpec, CapturedTensor, HeadDim
from flashgen.op.indices import Indices
from flashgen.reference.dense import constant_number

# Operators that grow with both of their arguments, where these are sizes and such: what is inside a tensor at the
# lengths of a sequence then is at those of the longest.
_GROW = frozenset({"add", "mul", "min", "max"})
_MOST_LENGTHS = 1 << 16
# Has the host look at cu_seqlens on a GPU, and at what says where rows of a cache are: kernels else take them as they
# come.
CHECK_LENGTHS = "FLASHGEN_CHECK_LENGTHS"


def checks_lengths() -> bool:
    """Whether the host waits for numbers that lie on a GPU, to name what is wrong with them."""
    return os.environ.get(CHECK_LENGTHS, "").strip() not in ("", "0")


class LengthChecks:
    """What of a spec follows from the lengths of sequences, and what they have to fit."""

    def __init__(self, spec: AttentionSpec, indices: Indices) -> None:
        self.spec, self.indices = spec, indices
        self._may_shrink = tuple(each for each in spec.tensors if not all(map(_grows, each.shape)))
        self._captures = bool(spec.tensors or spec.params or spec.dropout is not None)
        self._values_begin = 3 + len(spec.tensors)
        self._checked: set[object] = set()
        self._reasons: dict[object, str] = {}

    def are_seen(self, tensors: Sequence[Any], most: tuple[int | None, int | None], name: str, also: str = "") -> bool:
        """Whether the host looks at the numbers on a GPU that say where sequences are: it waits for no others.

        ``name`` is theirs; ``also``: why it has to in any case. Raises ``ValueError`` where it cannot.
        """
        why = self.why_seen(tensors, most) or also
        if why and torch.cuda.is_current_stream_capturing():
            raise ValueError(
                f"'{self.spec.name}': {why}, so that the host has to wait for {name}, which it cannot while a graph is "
                "captured"
            )
        return bool(why)

    def why_seen(self, tensors: Sequence[Any], most: tuple[int | None, int | None]) -> str:
        """Why the host has to know the lengths of sequences; nothing where it does without.

        ``tensors`` are those that dense calls have, too, ``most`` the longest that there may be; None: not given.
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
    """Whether an extent surely is no smaller for longer sequences."""
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
