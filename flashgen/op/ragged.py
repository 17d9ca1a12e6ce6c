"""Ragged batches: sequences of any lengths, one behind the other.

On a GPU the host does not read where sequences begin, unless the call needs something that follows from lengths.
Kernels find the sequences by themselves.

In: the arguments of the operators that end in ``_varlen``: q [Tq, H, D], k [Tk, Hkv, D], v [Tk, Hkv, Dv], and where
sequences begin. Out: a ``RaggedCall``, of which an engine computes o [Tq, H, Dv], lse [H, Tq] and gradients. Each
sequence means what a dense call of it alone means: b is its number, i and j count inside of it, Nq and Nk are its
lengths. Captured tensors have the shapes of the longest.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from flashgen.hosts.standalone import Standalone
from flashgen.ir.spec import AttentionSpec
from flashgen.op.call import CallChecker, KindCall, OneProblem, Rest, Tensors
from flashgen.op.checks import check_rows
from flashgen.op.lengths import Lengths, lengths, unseen_lengths
from flashgen.reference import tiled
from flashgen.reference.programs import Place
from flashgen.reference.shard import Shard

_DERIVATIVES = "derivatives of derivatives are computed sequence by sequence"


@dataclass(frozen=True)
class RaggedCall(KindCall):
    """A ragged batch; ``starts`` say where sequences begin, on the device of q."""

    found: Lengths
    starts: tuple[Tensor, Tensor]

    @property
    def pairs(self) -> Sequence[tuple[int, int]]:
        return self.found.pairs

    def problems(self, spec: AttentionSpec) -> Iterator[OneProblem]:
        return problems(spec, self.call.shard, self.found, self.tensors)

    def finish(self, o: Tensor, lse: Tensor | None) -> None:
        """Rows behind the last sequence belong to none."""
        clear_padding_rows(self.found, self.starts, (o,) if lse is None else (o, lse.t()[:, :, None]), ())

    def finish_gradients(self, dq: Tensor, dk: Tensor, dv: Tensor) -> None:
        clear_padding_rows(self.found, self.starts, (dq,), (dk, dv))


def kind_call(checker: CallChecker, tensors: Tensors, rest: Rest, derives: bool) -> RaggedCall:
    """The call of an operator's arguments. ``derives``: no kernel runs, so that the host has to read the lengths.

    Raises ``TypeError`` and ``ValueError``.
    """
    own, (q_starts, k_starts) = tensors[:-2], tensors[-2:]
    if not q_starts.dtype is k_starts.dtype is torch.int32:
        name, x = ("cu_seqlens_k", k_starts) if q_starts.dtype is torch.int32 else ("cu_seqlens_q", q_starts)
        raise TypeError(f"'{name}' is {x.dtype}; the operator takes torch.int32")
    q, k, v = own[:3]
    check_rows(q, k, v)
    most: Any = rest[0][-2:]
    are_seen = True
    if q_starts.is_cuda and k_starts.is_cuda and q.is_cuda and checker.has_kernels:
        are_seen = checker.lengths.are_seen(own, most, "cu_seqlens", _DERIVATIVES if derives else "")
    found = (lengths if are_seen else unseen_lengths)(q_starts, k_starts, (q.size(0), k.size(0)), most)
    numbers: Any = (*rest[0][:4], found.max_q, found.max_k, found.count)
    rest = (numbers, rest[1])
    call = checker.find(own, rest)
    if checker.spec.tensors:
        checker.lengths.check(call.head_dim, call.sizes, found.pairs)
    if q_starts.get_device() != q.get_device() or k_starts.get_device() != q.get_device():
        q_starts, k_starts = q_starts.to(q.device), k_starts.to(q.device)
    q_starts, k_starts = q_starts.contiguous(), k_starts.contiguous()
    return RaggedCall(call, own, rest, [q_starts.data_ptr(), k_starts.data_ptr()], found, (q_starts, k_starts))


def _of_sequence(q_rows: slice, k_rows: slice, place: Place, x: Any) -> Any:
    """The view that the dense problem of a sequence has of a tensor of the call."""
    if place is Place.WHOLE or x is None:
        return x
    if place is Place.SUMS:
        return x[None, :, q_rows]
    return x[q_rows if place is Place.QUERIES else k_rows].transpose(0, 1)[None]


def problems(spec: AttentionSpec, batch: Shard, found: Lengths, tensors: Sequence[Tensor]) -> Iterator[OneProblem]:
    """The dense problem of each sequence whose results are not zero."""
    for number, q_rows, k_rows in found.sequences():
        shard = of_sequence(batch, number, q_rows, k_rows)
        if not tiled.gives_nothing(spec, shard):
            view = functools.partial(_of_sequence, q_rows, k_rows)
            places = (Place.QUERIES, Place.KEYS, Place.KEYS)
            yield number, shard, tuple(view(place, x) for place, x in zip(places, tensors, strict=False)), view


def of_sequence(batch: Shard, number: int, q_rows: slice, k_rows: slice) -> Shard:
    """The shard of one sequence of a batch."""
    b_total, h_total, _, _ = batch.totals()
    return Shard(
        batch=1, heads=batch.heads, kv_heads=batch.kv_heads,
        q_len=q_rows.stop - q_rows.start, kv_len=k_rows.stop - k_rows.start,
        b_start=batch.b_start + number, h_start=batch.h_start, b_total=b_total, h_total=h_total,
    )  # fmt: skip


KERNEL = Standalone("clear_behind")
WARPS = 256  # that share the rows of a tensor


class Behind(ctypes.Structure):
    """``struct Behind``."""

    _fields_ = (
        ("at", ctypes.c_void_p),
        ("end", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("rows", "heads", "width", "by_row", "by_head", "by_x", "bytes")),
    )


class Cleared(ctypes.Structure):
    """``struct Cleared``."""

    _fields_ = (("of", Behind * 3), ("count", ctypes.c_int64), ("warps", ctypes.c_int64))


def clear_padding_rows(
    found: Lengths, starts: tuple[Tensor, Tensor], of_q: Sequence[Tensor], of_k: Sequence[Tensor]
) -> None:
    """Write zeros to the rows behind the last sequence of tensors [rows, H, width], by the starts of q and those of k.

    On a GPU a kernel reads where the last sequence ends, as the host does not know.
    """
    if found.starts is None and starts[0].is_cuda:
        packed = arguments([(x, starts[0]) for x in of_q] + [(x, starts[1]) for x in of_k])
        KERNEL.launch(starts[0].device.index, packed, WARPS)
        return
    known: Sequence[Any] = found.starts or starts
    for own, ends in zip((of_q, of_k), known, strict=True):
        end = max(int(ends[-1]), 0)
        for x in own:
            if end < x.shape[0]:
                x[end:].zero_()


def arguments(cleared: Sequence[tuple[Tensor, Tensor]]) -> Cleared:
    """The arguments of a launch, by tensors, each with the starts of sequences among its rows."""
    layouts = tuple([(x.shape, x.stride(), x.element_size()) for x, _ in cleared])
    packed = Cleared.from_buffer_copy(_fixed(layouts))
    for place, (x, starts) in zip(packed.of, cleared, strict=False):
        place.at, place.end = x.data_ptr(), starts.data_ptr() + 4 * (starts.shape[0] - 1)
    return packed


@functools.lru_cache(maxsize=512)
def _fixed(layouts: tuple[tuple[Sequence[int], Sequence[int], int], ...]) -> bytes:
    """The bytes of ``Cleared`` without addresses."""
    places = [Behind(0, 0, *shape, *strides, size) for shape, strides, size in layouts]
    return bytes(Cleared((Behind * 3)(*places), len(places), WARPS))
