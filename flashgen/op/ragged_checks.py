"""Checks of calls over ragged batches: where sequences begin, and shapes of captured tensors for the longest.

In: a call's arguments, and its lengths where the host knows them. Out: a ``Call``, or ``TypeError`` and ``ValueError``
that name the argument.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor

from flashgen.ir.expr import Apply, Expr, Literal, Symbol, SymbolKind, literal, size, substitute
from flashgen.ir.spec import AttentionSpec, CapturedTensor, HeadDim
from flashgen.kinds.kind import Kind
from flashgen.kinds.ragged import RAGGED
from flashgen.op.call import Call, CallChecker, Rest, check_captured, check_shard, match
from flashgen.op.per_sequence import drops_by_length, params_by_length, reads
from flashgen.reference.dense import constant_number
from flashgen.reference.shard import Shard

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


class RaggedChecker(CallChecker):
    """Turns ragged calls into ``Call``s: the shard is a batch of sequences that are as long as the longest."""

    def __init__(
        self, spec: AttentionSpec, kernels: Mapping[str, Any], kind: Kind = RAGGED, *, is_reference: bool
    ) -> None:
        super().__init__(spec, kernels, kind, is_reference=is_reference)
        self._may_shrink = tuple(each for each in spec.tensors if not all(map(_grows, each.shape)))
        self._checked: set[object] = set()

    def asks_lengths(self, head_dim: HeadDim, tensors: Sequence[Any], most: tuple[int | None, int | None]) -> str:
        """Why the host has to know the lengths of sequences; nothing where it does without."""
        if checks_lengths():
            return f"{CHECK_LENGTHS} is set"
        if self.indices.of(head_dim) or self._may_shrink:
            return "indices of captured tensors are checked for the lengths of each sequence"
        for name, size_name, longest in (("q", "Nq", most[0]), ("k", "Nk", most[1])):
            shapes = (extent for declared in self.spec.tensors for extent in declared.shape)
            if longest is None and any(reads(extent, {size_name}) for extent in shapes):
                return (
                    f"shapes of captured tensors follow from the longest sequence, and max_seqlen_{name} is not given"
                )
        given = tensors[self._captured_end : self._captured_end + len(self.spec.params)]
        by_length = params_by_length(self.spec, given)
        if by_length:
            return f"param '{min(by_length)}' follows from the lengths of each sequence"
        if drops_by_length(self.spec, tensors, by_length):
            return "the probability of dropout follows from the lengths of each sequence"
        return ""

    def check_lengths(
        self, head_dim: HeadDim, whole_sizes: Mapping[str, int], pairs: Sequence[tuple[int, int]]
    ) -> None:
        """Raise ``ValueError`` where an index leaves its tensor at the lengths of a sequence."""
        proofs = self.indices.of(head_dim)
        if not (proofs or self._may_shrink):
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

    @staticmethod
    def check_dims(q: Tensor, k: Tensor, v: Tensor) -> None:
        """Raise ``ValueError`` where q, k and v have no rows of heads."""
        for name, x, form in (("q", q, "[Tq, H, D]"), ("k", k, "[Tk, Hkv, D]"), ("v", v, "[Tk, Hkv, Dv]")):
            if x.dim() != 3:
                raise ValueError(f"'{name}' has shape {list(x.shape)}; {form} is expected, all sequences in a row")

    def check_ragged(
        self, q: Tensor, k: Tensor, v: Tensor, tensors: Sequence[Tensor], numbers: Sequence[Any]
    ) -> tuple[Shard, dict[str, int]]:
        """The shard and the sizes of a batch as long as its longest sequences. Raises ``ValueError``."""
        b_start, h_start, b_total, h_total, max_q, max_k, count = numbers
        for name, tensor in (("k", k), ("v", v)):
            if tensor.device != q.device:
                raise ValueError(f"'{name}' is on {tensor.device}, but 'q' is on {q.device}")
        match("k", k, 2, q.shape[2], "the head dimension of q")
        match("v", v, 1, k.shape[1], "the number of heads of k")
        match("v", v, 0, k.shape[0], "the rows of k")
        heads, kv_heads = q.shape[1], k.shape[1]
        if (kv_heads == 0 and heads > 0) or (kv_heads > 0 and heads % kv_heads):
            raise ValueError(f"q has {heads} heads and k has {kv_heads}; H must be a multiple of Hkv")
        shard = Shard(
            batch=count, heads=heads, kv_heads=kv_heads, q_len=max_q, kv_len=max_k,
            b_start=b_start, h_start=h_start, b_total=b_total, h_total=h_total,
        )  # fmt: skip
        check_shard(self.spec, shard)
        sizes = shard.sizes(q.shape[2], v.shape[2])
        for declared, tensor in zip(self.spec.tensors, tensors, strict=True):
            check_captured(declared, tensor, sizes, q.device)
        return shard, sizes

    def _check(self, q: Tensor, k: Tensor, v: Tensor, tensors: Sequence[Tensor], rest: Rest, threads: int) -> Call:
        numbers: Any = rest[0]
        shard, sizes = self.check_ragged(q, k, v, tensors, numbers)
        _, kernel = self.check_what_runs(q, k, v, tensors)
        call = self._made(q, k, v, tensors, shard, sizes, kernel, rest[1], threads)
        # Sequences may be said to be as long as ever, and have no rows.
        call = replace(call, is_empty=call.is_empty or q.shape[0] == 0 or k.shape[0] == 0)
        if kernel is not None:  # kernels take the rows of all sequences for the length
            settled, layout = list(call.settled), kernel.layout
            of_all = {"q_len": q.shape[0], "kv_len": k.shape[0], "q_most": shard.q_len, "kv_most": shard.kv_len}
            for name, rows in of_all.items():
                if name in layout.slots:
                    settled[layout.slots[name] - layout.varying] = rows
            return replace(call, settled=tuple(settled))
        return call


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
