"""Runs an op over ragged batches: sequences of any lengths, one behind the other.

On a GPU the host knows neither where these begin nor how long they are, unless a call asks for what follows from
lengths: its kernels find their sequences by themselves.

In: the arguments of the operators that end in ``_varlen``: q [Tq, H, D], k [Tk, Hkv, D], v [Tk, Hkv, Dv], and where
sequences begin. Out: o [Tq, H, Dv], lse [H, Tq], gradients. Each sequence means what a dense call of it alone means:
b is its number, i and j count inside of it, Nq and Nk are its lengths. Captured tensors have the shapes of the longest.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, contiguous_format, empty_like

from flashgen.hosts.kernel import Kernel, Prepared
from flashgen.ir.spec import HeadDim
from flashgen.kinds.kind import Kind, PassName
from flashgen.kinds.ragged import RAGGED
from flashgen.op.behind import clear_behind
from flashgen.op.call import Call, CallChecker, Rest, backward_key, is_readable
from flashgen.op.captured import Captured
from flashgen.op.engine import Attended, Engine, Rows, Tensors, View, for_derivatives
from flashgen.op.layouts import laid, layout_like
from flashgen.op.lengths import Lengths, lengths, unseen_lengths
from flashgen.op.modes import autograd_inside, deterministic_algorithms
from flashgen.op.per_sequence import PerSequence
from flashgen.op.plain import NoMemoryError
from flashgen.op.ragged_checks import RaggedChecker, checks_lengths
from flashgen.op.values import address, packed, with_strides
from flashgen.reference import tiled
from flashgen.reference.dense import Dropout
from flashgen.reference.programs import Place
from flashgen.reference.shard import Shard


class RaggedEngine(Engine):
    """Forward and backward of one spec over ragged batches: on kernels, or on the reference, sequence by sequence."""

    kind: Kind = RAGGED
    checks: ClassVar[type[CallChecker]] = RaggedChecker

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # Whether there is more than q, k and v, which kernels are told of.
        self._varies = self.signature.takes_more
        self._last: tuple[object, Any, Any] = (None, None, None)  # a call whose lengths nobody has looked at

    def attend(self, tensors: Tensors, rest: Rest, keeps_lse: bool = True) -> Attended:
        """``o``, ``lse`` and its parts, as of a dense call."""
        found, call, own, starts = self._read(tensors, rest)
        q, k, v = own[0], own[1], own[2]
        kernel = call.kernel
        if call.is_empty or kernel is None:
            o, lse, parts = self._attend_each(call, found, own)
            _clear_behind(found, starts, o, lse)
            return o, lse, parts
        o = empty_like(q) if call.o_is_like_q else torch.empty_strided(*call.o, dtype=q.dtype, device=call.device)
        lse = parts = None
        if self.signature.has_lse and (keeps_lse or kernel.needs_lse):
            lse = torch.empty_strided(*call.lse, dtype=torch.float32, device=call.device)
        if self.signature.has_lse and keeps_lse:
            parts = torch.empty_strided(*call.lse_parts, dtype=torch.float32, device=call.device)
        values: list[float] = [
            0, q.data_ptr(), k.data_ptr(), v.data_ptr(), o.data_ptr(), address(lse), address(parts), 0, 0, 0, 0, 0
        ]  # fmt: skip
        each = None
        if self._varies:
            captured = self._captured(call, own)
            self._values.add(values, call, captured, self._values.no_gradients)
            each = PerSequence(self.spec, call, found.pairs, own, captured)
        drops, _kept = self._add_sequences(values, call, starts, each)
        prepared = call.forward.get(drops)
        if prepared is None:
            prepared = call.forward[drops] = self._prepare(kernel, "forward", (*values, *call.settled))
        self._workspaces.run(call, prepared, values)
        _clear_behind(found, starts, o, lse)
        return o if q is tensors[0] else laid(o, layout_like(tensors[0], o.shape)), lse, parts

    def gradients(self, d_o: Tensor, rows: Rows, tensors: Tensors, rest: Rest, needs: Sequence[bool]) -> list[Tensor]:
        """The gradients that are needed, in the order of the inputs, each like what it is the gradient of."""
        return self._of_rows(d_o, rows, tensors, rest, needs, is_part=False)

    def gradients_of_part(
        self, d_o: Tensor, rows: Rows, tensors: Tensors, rest: Rest, needs: Sequence[bool]
    ) -> list[Tensor]:
        """The same, but for those of captured values, which stay float32: others are added to them."""
        return self._of_rows(d_o, rows, tensors, rest, needs, is_part=True)

    def _of_rows(
        self, d_o: Tensor, rows: Rows, tensors: Tensors, rest: Rest, needs: Sequence[bool], *, is_part: bool
    ) -> list[Tensor]:
        found, call, own, starts = self._read(tensors, rest)
        q, k, v = own[0], own[1], own[2]
        kernel = call.kernel
        if call.is_empty or kernel is None:
            return self._gradients_of_each(call, found, d_o, rows[0], own, needs, is_part=is_part)
        d_o = readable(kernel, d_o)
        check_memory(d_o)
        d_lse, o, lse, parts = packed(rows[0]), laid(rows[1], call.o), packed(rows[2]), packed(rows[3])
        dq, dk, dv = (torch.empty_strided(*each, dtype=q.dtype, device=call.device) for each in call.gradients)
        values: list[float] = [
            0, q.data_ptr(), k.data_ptr(), v.data_ptr(), address(o), address(lse), address(parts), d_o.data_ptr(),
            address(d_lse), dq.data_ptr(), dk.data_ptr(), dv.data_ptr(),
        ]  # fmt: skip
        each, sums = None, []
        if self._varies:
            captured = self._captured(call, own)
            sums = self._values.sums(call, captured, needs[3:])
            self._values.add(values, call, captured, self._values.addresses(sums))
            each = PerSequence(self.spec, call, found.pairs, own, captured)
        strides = (0, d_o.stride(1), d_o.stride(0))
        drops, _kept = self._add_sequences(values, call, starts, each)
        key = backward_key(drops, strides, needs[3:])
        prepared = call.backward.get(key)
        if prepared is None:
            settled = with_strides(kernel, call.settled, {"d_o": strides})
            prepared = call.backward[key] = self._prepare(kernel, "backward", (*values, *settled))
        self._workspaces.run(call, prepared, values)
        clear_behind(found, starts, (dq,), (dk, dv))
        found_rows = [dq, dk, dv]
        if not (q is tensors[0] and k is tensors[1] and v is tensors[2]):
            found_rows = [laid(x, layout_like(of, x.shape)) for x, of in zip(found_rows, tensors, strict=False)]
        results = [x for x, need in zip(found_rows, needs, strict=False) if need]
        return results + [
            total if is_part or (total.dtype is like.dtype and total.device == like.device) else total.to(like)
            for total, like in sums
            if total is not None
        ]

    def _read(self, tensors: Tensors, rest: Rest) -> tuple[Lengths, Call, Tensors, tuple[Tensor, Tensor]]:
        """What ``_found`` says, with copies of q, k and v where the kernel cannot read them.

        A call like the last one asks for nothing again, where only the device knows the sequences.
        """
        q, k, v, q_starts, k_starts = tensors[0], tensors[1], tensors[2], tensors[-2], tensors[-1]
        # A number of a device is there at once, the device itself is not.
        key: tuple[object, ...] = tuple(
            [(x.shape, x.dtype, x.is_contiguous() or x.stride(), x.get_device()) for x in (q, k, v, q_starts, k_starts)]
        )
        key += (rest, *[x is None or (x.shape, x.stride(), x.get_device()) for x in tensors[3:-2]])
        last, found, call = self._last
        if key == last and not checks_lengths():
            addresses = q.data_ptr(), k.data_ptr(), v.data_ptr()
            if all(addresses) and not (addresses[0] | addresses[1] | addresses[2]) % call.kernel.row_alignment:
                return found, call, tensors[:-2], (q_starts, k_starts)
        found, call, own, starts = self._found(tensors, rest)
        kernel = call.kernel
        if call.is_empty or kernel is None:
            return found, call, own, starts
        read = tuple([readable(kernel, x) for x in own[:3]])
        check_memory(*read)
        is_same = all(map(operator.is_, (*read, *starts), (q, k, v, q_starts, k_starts)))
        if is_same and found.starts is None:
            self._last = (key, found, call)
        if not is_same:
            own = (*read, *own[3:])
            call = self.checker.find(own, _rest(found, rest))
        return found, call, own, starts

    def _found(
        self, tensors: Tensors, rest: Rest, *, asks: bool = False
    ) -> tuple[Lengths, Call, Tensors, tuple[Tensor, Tensor]]:
        """The sequences, the call, its tensors but for those that say where sequences begin, and these.

        ``asks``: the host has to know the lengths, as what runs is no kernel.
        """
        *own, q_starts, k_starts = tensors
        for name, x in (("cu_seqlens_q", q_starts), ("cu_seqlens_k", k_starts)):
            if x.dtype is not torch.int32:
                raise TypeError(f"'{name}' is {x.dtype}; the operator takes torch.int32")
        q, k = own[0], own[1]
        checker = self.checker
        assert isinstance(checker, RaggedChecker)
        checker.check_dims(q, k, own[2])
        most: Any = rest[0][-2:]
        look = lengths
        if q_starts.is_cuda and k_starts.is_cuda and q.is_cuda and self.kernels:
            why = checker.asks_lengths(HeadDim(q.shape[2], own[2].shape[2]), own, most)
            if asks:
                why = why or "derivatives of derivatives are computed sequence by sequence"
            if why and torch.cuda.is_current_stream_capturing():
                raise ValueError(
                    f"'{self.spec.name}': {why}, so that the host has to wait for cu_seqlens, which it cannot while a "
                    "graph is captured"
                )
            look = lengths if why else unseen_lengths
        found = look(q_starts, k_starts, (q.shape[0], k.shape[0]), most)
        call = checker.find(own, _rest(found, rest))
        checker.check_lengths(call.head_dim, call.sizes, found.pairs)
        placed = (q_starts.to(q.device).contiguous(), k_starts.to(q.device).contiguous())
        return found, call, tuple(own), placed

    def _add_sequences(
        self, values: list[float], call: Call, starts: tuple[Tensor, Tensor], each: PerSequence | None
    ) -> tuple[bool, list[Tensor]]:
        """Add what kernels take beside the values of a dense call. Whether pairs are dropped; what to keep."""
        kernel = call.kernel
        assert kernel is not None, "there is one"
        if each is None:
            values += [x.data_ptr() for x in starts]
            return False, list(starts)
        arrays = each.arrays()
        tables = [None if x is None else torch.from_numpy(x).to(call.device) for x in arrays]
        values += [address(x) for x in (*starts, *tables)]
        drops = False
        if self.spec.dropout is not None:
            slot = kernel.layout.slots["dropout_threshold"]
            if arrays[0] is not None:  # it says which kernels run
                values[slot] = int(arrays[0].max(initial=0))
            drops = values[slot] > 0
        return drops, [x for x in (*starts, *tables) if x is not None]

    def _captured(self, call: Call, tensors: Tensors) -> Captured:
        found = super()._captured(call, tensors)
        if found.dropout is None and self.signature.has_dropout and tensors[-2] is not None:
            # Sequences may drop pairs where one as long as the longest would not.
            return found._replace(dropout=Dropout(0.0, int(tensors[-2].item()) & 0xFFFF_FFFF_FFFF_FFFF))
        return found

    def _prepare(self, kernel: Kernel, name: PassName, values: Sequence[float]) -> Prepared:
        try:
            return kernel.prepare(name, values)
        except LookupError:
            raise no_ragged_kernels(self.spec.name) from None

    # Without kernels ------------------------------------------------------------------------------------------------

    def _attend_each(self, call: Call, found: Lengths, tensors: Tensors) -> Attended:
        q, has_lse, captured = tensors[0], self.signature.has_lse, self._captured(call, tensors)
        dtype = torch.float64 if q.dtype is torch.float64 else torch.float32
        o = q.new_empty_strided(*call.o).zero_()
        lse = q.new_full(call.lse[0], -math.inf, dtype=dtype) if has_lse else None
        for problem, q_rows, _ in self._problems(call, found, tensors, captured):
            own, own_lse = tiled.forward(problem)
            o[q_rows] = own[0].transpose(0, 1)
            if lse is not None and own_lse is not None:
                lse[:, q_rows] = own_lse[0].to(dtype)
        return o, lse, q.new_zeros(call.lse_parts[0], dtype=torch.float32) if has_lse else None

    def _gradients_of_each(
        self,
        call: Call,
        found: Lengths,
        d_o: Tensor,
        d_lse: Tensor | None,
        tensors: Tensors,
        needs: Sequence[bool],
        *,
        is_part: bool,
    ) -> list[Tensor]:
        inputs, captured = tensors[: self.signature.inputs], self._captured(call, tensors)
        wide = torch.promote_types(tensors[0].dtype, torch.float32)
        sums = [
            torch.zeros(x.shape, dtype=wide, device=call.device) if need else None
            for x, need in zip(inputs, needs, strict=True)
        ]
        with deterministic_algorithms(call.deterministic), autograd_inside():
            for problem, q_rows, k_rows in self._problems(call, found, tensors, captured):
                gradients = tiled.backward(
                    problem,
                    d_o[q_rows].transpose(0, 1)[None],
                    None if d_lse is None else d_lse[None, :, q_rows],
                    needs,
                )
                for n, (total, gradient) in enumerate(zip(sums, gradients, strict=True)):
                    if total is None or gradient is None:
                        continue
                    if n < 3:
                        total[q_rows if n == 0 else k_rows] = gradient[0].transpose(0, 1)
                    else:
                        total.add_(gradient)
        rows = zip(sums, call.gradients, strict=False)
        others = zip(sums[3:], inputs[3:], strict=True)
        return [
            *(laid(total.to(tensors[0]), layout) for total, layout in rows if total is not None),
            *(total if is_part else total.to(x) for total, x in others if total is not None),
        ]

    def _viewed(self, tensors: Tensors, rest: Rest) -> Iterator[tuple[tiled.Problem, View]]:
        found, call, own, _ = self._found(tensors, rest, asks=True)
        for problem, q_rows, k_rows in self._problems(call, found, own, self._captured(call, own)):
            yield for_derivatives(problem), functools.partial(_of_sequence, q_rows, k_rows)

    def _problems(
        self, call: Call, found: Lengths, tensors: Tensors, captured: Captured
    ) -> Iterator[tuple[tiled.Problem, slice, slice]]:
        """Each sequence that gives anything, as a dense problem."""
        sequences = PerSequence(self.spec, call, found.pairs, tensors, captured)
        names = [param.name for param in self.spec.params]
        for number, q_rows, k_rows in found.sequences():
            shard = of_sequence(call.shard, number, q_rows, k_rows)
            if tiled.gives_nothing(self.spec, shard):
                continue
            params = sequences.params_of(number)
            yield (
                tiled.Problem(
                    spec=self.spec,
                    q=tensors[0][q_rows].transpose(0, 1)[None],
                    k=tensors[1][k_rows].transpose(0, 1)[None],
                    v=tensors[2][k_rows].transpose(0, 1)[None],
                    tensors={each.name: x for each, x in zip(self.spec.tensors, captured.tensors, strict=True)},
                    params={
                        name: value if x is None else x
                        for name, value, x in zip(names, params, captured.given, strict=True)
                    },
                    shard=shard,
                    dropout=sequences.dropout_of(number),
                    pairs=self._pairs,
                ),
                q_rows,
                k_rows,
            )


def no_ragged_kernels(name: str, what: str = "varlen") -> ValueError:
    """What to say where there are other kernels, but none for ragged batches."""
    return ValueError(
        f"'{name}': {what} needs kernels for CPUs, which this op does not have: load the spec with backend='cpu' or "
        "backend='reference'; a package of an earlier version has to be built again"
    )


def _clear_behind(found: Lengths, starts: tuple[Tensor, Tensor], o: Tensor, lse: Tensor | None) -> None:
    clear_behind(found, starts, (o,) if lse is None else (o, lse.t()[:, :, None]), ())


def _of_sequence(q_rows: slice, k_rows: slice, place: Place, x: Any) -> Any:
    """What the dense problem of a sequence sees of a tensor of the call."""
    if place is Place.WHOLE or x is None:
        return x
    if place is Place.SUMS:
        return x[None, :, q_rows]
    return x[q_rows if place is Place.QUERIES else k_rows].transpose(0, 1)[None]


def of_sequence(shard: Shard, number: int, q_rows: slice, k_rows: slice) -> Shard:
    """One sequence of a batch of them."""
    b_total, h_total, _, _ = shard.totals()
    return Shard(
        batch=1, heads=shard.heads, kv_heads=shard.kv_heads,
        q_len=q_rows.stop - q_rows.start, kv_len=k_rows.stop - k_rows.start,
        b_start=shard.b_start + number, h_start=shard.h_start, b_total=b_total, h_total=h_total,
    )  # fmt: skip


def _rest(found: Lengths, rest: Rest) -> Rest:
    numbers: Any = (*rest[0][:4], found.max_q, found.max_k, found.count)
    return numbers, rest[1]


def readable(kernel: Kernel, x: Tensor) -> Tensor:
    """A tensor that the kernel can read."""
    return x if is_readable(kernel, x) else x.clone(memory_format=contiguous_format)


def check_memory(*tensors: Tensor) -> None:
    """Raise ``NoMemoryError`` where there is nothing to read."""
    if not all(x.data_ptr() for x in tensors):
        raise NoMemoryError("q, k, v or d_o is zero in name alone")
