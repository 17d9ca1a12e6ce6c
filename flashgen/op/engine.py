"""Runs one op: fills the arguments of a kernel and calls it, or runs the reference in its place.

In: the positional arguments of the operators that ``registration.py`` defines. Out: fresh tensors. Knows nothing of
autograd or dispatch. Every call passes here, so the way to a kernel is kept short: what shapes determine comes ready
from ``call.py``.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, contiguous_format, empty_like, empty_strided

from flashgen.hosts.kernel import (
    ADDED,
    Kernel,
    KernelProvider,
    Node,
    NoSuchPassError,
    Prepared,
    Stored,
    Values,
)
from flashgen.ir.spec import AttentionSpec
from flashgen.kinds.cached import CACHED
from flashgen.kinds.dense import DENSE
from flashgen.kinds.eight_bits import EIGHT_BITS
from flashgen.kinds.kind import Kind, PassName
from flashgen.kinds.ragged import RAGGED
from flashgen.op import cached, f8, ragged
from flashgen.op.call import Attended, Call, CallChecker, Rest, Rows, Tensors, backward_key, is_readable, readable
from flashgen.op.captured import Captured, CapturedValues
from flashgen.op.formula import Formula
from flashgen.op.layouts import laid
from flashgen.op.per_sequence import PerSequence
from flashgen.op.plain import NoMemoryError
from flashgen.op.signature import Signature
from flashgen.op.taken import Taken
from flashgen.op.values import address, by_axis, packed, places_of, put, type_of_sums, with_strides, within
from flashgen.op.workspaces import Workspaces
from flashgen.reference import tiled
from flashgen.reference.dense import Dropout


def _as_they_are(_rows: Sequence[Tensor], _own: Sequence[Tensor], numbers: Sequence[Any]) -> Sequence[Any]:
    return numbers


@dataclass(frozen=True)
class Takes:
    """What calls of a kind are, where they are more than dense ones.

    ``take`` gives the call of an operator's arguments, by its last one of a call to be differentiated, not run by
    kernels. ``whole_numbers`` gives what shapes are checked with, by q, k and v, the kind's own tensors and numbers.
    ``no_gradients`` and ``no_derivatives`` are what is said where there are none.
    """

    take: Callable[[CallChecker, Tensors, Rest, bool], Taken]
    whole_numbers: Callable[[Sequence[Tensor], Sequence[Tensor], Sequence[Any]], Sequence[Any]] = _as_they_are
    no_gradients: str = ""
    no_derivatives: str = ""


# By the names of kinds; calls of others take what dense ones take.
TAKES: Mapping[str, Takes] = {
    RAGGED.name: Takes(ragged.take, ragged.whole_numbers),
    CACHED.name: Takes(
        cached.take,
        cached.whole_numbers,
        "decode has no gradients; call it under torch.no_grad(), or train with the op",
        "decode has no derivatives, of neither mode: call the op, or op.reference.decode",
    ),
    EIGHT_BITS.name: Takes(
        f8.take,
        no_gradients="q, k and v of 8 bits have no gradients; call it under torch.no_grad(), or train in bfloat16",
        no_derivatives="q, k and v of 8 bits have no derivatives, of neither mode: widen them, or call op.reference",
    ),
}


class Engine(Formula):
    """Forward and backward of one spec and kind of call: on kernels, or on the reference.

    ``kernels`` holds a provider for each type of device that there are kernels for; None where the reference stands in,
    in slices of ``pairs``. ``pairs`` None runs the reference densely, on any device. What a kind does not say by
    itself is in ``TAKES``, and in ``CHECKS`` (``checks.py``).
    """

    has_nodes = False  # whether C++ may start its calls (op/node.py)
    last_node: tuple[Rest, Node] | None = None

    def __init__(
        self,
        spec: AttentionSpec,
        kernels: Mapping[str, KernelProvider | None],
        pairs: int | None = tiled.SLICE_PAIRS,
        kind: Kind = DENSE,
    ) -> None:
        self.spec, self.kernels, self.kind, self.pairs = spec, kernels, kind, pairs
        self.signature = Signature.of(spec, kind)
        self._takes = TAKES.get(kind.name)
        self._workspaces = Workspaces()
        self.checker = CallChecker(spec, kernels, kind, is_reference=pairs is None)
        self._values = CapturedValues(spec, self.signature, self.checker)
        varies = bool(spec.tensors) or spec.dropout is not None or any(each.grad for each in spec.params)
        self.has_nodes = self._takes is None and kind.suffix is not None and not varies and pairs is not None

    def forward(self, *args: Any) -> Any:
        """The operator: ``o``, or ``(o, lse, lse_parts)`` where the spec has one."""
        count = self.signature.tensor_arguments
        found = self.attend(args[:count], (args[count:-1], args[-1]))
        return found if self.signature.has_lse else found[0]

    def backward(self, d_o: Tensor, *args: Any) -> list[Tensor]:
        """The operator: the gradients that ``needs``, the last argument, asks for, in the order of the inputs."""
        first = 4 if self.signature.has_lse else 0
        end = first + self.signature.tensor_arguments
        rows: Any = args[:first] or (None,) * 4
        q, wanted = args[first], (*args[first].shape[:-1], args[first + 2].shape[-1])
        dtype = self.signature.o or q.dtype
        for name, x in (("d_o", d_o), ("o", rows[1])):  # kernels read what lies there
            if x is not None and (x.dtype is not dtype or x.shape != wanted):
                raise ValueError(f"'{name}' is {x.dtype} {list(x.shape)}; of q and v it is {dtype} {list(wanted)}")
        return self.gradients(d_o, rows, args[first:end], (args[end:-2], args[-2]), args[-1])

    def resolved(self, tensors: Tensors, rest: Rest) -> tuple[Engine, Tensors]:  # noqa: ARG002 - others look at it
        """The engine whose kernels run, and the tensors that it is given."""
        return self, tensors

    def runs_instead(self, tensors: Tensors, rest: Rest) -> str:  # noqa: ARG002 - others look at it
        """What runs in the place of the kernels that ``resolved`` leads to, in words; nothing where these run."""
        return ""

    def has_kernel(self, q: Tensor, v: Tensor) -> bool:
        """Whether kernels of its kind run for tensors like these."""
        return self.checker.kernel(q, v) is not None

    # Forward ----------------------------------------------------------------------------------------------------------

    def attend(self, tensors: Tensors, rest: Rest, keeps_lse: bool = True, into: Attended | None = None) -> Attended:
        """``o``, ``lse`` and its parts; these are None for pointwise weights, and may be where they are not kept.

        They are written to ``into``, if given: the same rows of tensors that have more, those of lse of contiguous
        ones. For kinds whose kernels write there.
        """
        taken = None
        if self._takes is None:
            call = self.checker.find(tensors, rest)
        else:
            taken = self._taken(tensors, rest)
            call, tensors, rest = taken.call, taken.tensors, taken.rest
        kernel, wanted = call.kernel, call.o
        if kernel is None or call.is_empty:
            found = self._attend_without_kernel(taken or Taken(call, tensors, rest, []), keeps_lse)
            return found if into is None else put(found, into)
        if call.may_copy:
            call, tensors = self._readable(kernel, call, tensors, rest)
        o, lse, parts = into or self._results(call, tensors[0], keeps_lse)
        q_at, k_at, v_at = tensors[0].data_ptr(), tensors[1].data_ptr(), tensors[2].data_ptr()
        if not (q_at and k_at and v_at):
            raise NoMemoryError("q, k or v is zero in name alone")
        lse_at = 0 if lse is None else lse.data_ptr()
        parts_at = 0 if parts is None or not call.writes_parts else parts.data_ptr()
        values: list[float] = [0, q_at, k_at, v_at, o.data_ptr(), lse_at, parts_at, 0, 0, 0, 0, 0]
        drops, captured, _kept = False, None, None
        if self.signature.takes_more:
            captured = self._captured(call, tensors)
            drops = self._values.add(values, call, captured, self._values.no_gradients)
        if taken is not None:
            drops, _kept = self._add_own(values, kernel, taken, captured, drops)
        key: object = drops if into is None else (drops, *places_of(into[:2]))
        prepared = call.forward.get(key)
        if prepared is None:
            settled = call.settled if into is None else within(kernel, call.settled, {"o": o}, lse)
            prepared = call.forward[key] = self._prepared(kernel, "forward", (*values, *settled))
        self._workspaces.run(call, prepared, values)
        if taken is not None:
            taken.finish(o, lse)
        return o if into is not None or call.o is wanted else laid(o, wanted), lse, parts

    def _results(self, call: Call, q: Tensor, keeps_lse: bool) -> Attended:
        """What a kernel fills; parts that it leaves alone are zero."""
        # To ask for what is like a tensor takes half as long.
        o = empty_like(q) if call.o_is_like_q else empty_strided(*call.o, dtype=call.written, device=call.device)
        if not (self.signature.has_lse and (keeps_lse or call.needs_lse)):
            return o, None, None
        lse = empty_strided(*call.lse, dtype=torch.float32, device=call.device)
        if not keeps_lse:
            return o, lse, None
        parts = empty_strided(*call.lse_parts, dtype=torch.float32, device=call.device)
        return o, lse, parts if call.writes_parts else parts.zero_()

    def _attend_without_kernel(self, taken: Taken, keeps_lse: bool) -> Attended:
        wide = self._widened(taken)
        if wide is None:
            return self.attend_by_formula(taken)
        engine, tensors = wide
        o, lse, parts = engine.attend(tensors, taken.rest, keeps_lse)
        return laid(o, taken.call.o).to(taken.call.written), lse, parts

    def _widened(self, taken: Taken) -> tuple[Engine, Tensors] | None:
        """What runs 8 bits that no kernel takes, and parts of 16 bits: numbers of more bits; None for all else."""
        tensors, numbers = taken.tensors, taken.widened(self.checker.dtypes)
        if numbers is not None:
            return self._wide, numbers
        wide = type_of_sums(tensors[0].dtype)
        if not self.kind.parts or wide is tensors[0].dtype:
            return None
        return self, (*(x.to(wide) for x in tensors[:3]), *tensors[3:])

    @functools.cached_property
    def _wide(self) -> Engine:
        return Engine(self.spec, self.kernels, self.pairs)

    # Backward ---------------------------------------------------------------------------------------------------------

    def gradients(
        self,
        d_o: Tensor,
        rows: Rows,
        tensors: Tensors,
        rest: Rest,
        needs: Sequence[bool],
        *,
        is_part: bool = False,
        into: Sequence[Tensor] | None = None,
    ) -> list[Tensor]:
        """The gradients that are needed, in the order of the inputs, each like what it is the gradient of.

        ``is_part``: o and lse are those of rows over more keys than k and v have, and gradients of captured values stay
        float32, as others are added to them. Those of q, k and v are written to ``into``, if given, as by ``attend``,
        whose o, lse and parts ``rows`` has then. Raises ``RuntimeError`` where a kind has none.
        """
        taken = None
        if self._takes is None:
            call = self.checker.find(tensors, rest)
        else:
            taken = self._taken(tensors, rest, self._takes.no_gradients)
            call, tensors, rest = taken.call, taken.tensors, taken.rest
        kernel, wanted = call.kernel, call.gradients
        if kernel is None or call.is_empty:
            taken = taken or Taken(call, tensors, rest, [])
            found = self._gradients_without_kernel(taken, d_o, rows, needs, is_part)
            return found if into is None else [*put(found[:3], into), *found[3:]]
        if self.kind.parts:
            d_o = d_o.to(tensors[0].dtype)
        if call.may_copy:
            call, tensors = self._readable(kernel, call, tensors, rest)
        if not is_readable(kernel, d_o):
            d_o = d_o.clone(memory_format=contiguous_format)
        (d_lse, o, lse, parts), (dq, dk, dv) = (rows, into) if into is not None else _rows_of(call, rows)
        q, k, v = tensors[0], tensors[1], tensors[2]
        d_o_at, strides = d_o.data_ptr(), d_o.stride()
        if not d_o_at:
            raise NoMemoryError("d_o is zero in name alone")
        values = [
            0, q.data_ptr(), k.data_ptr(), v.data_ptr(), address(o), address(lse), address(parts), d_o_at,
            address(d_lse), dq.data_ptr(), dk.data_ptr(), dv.data_ptr(),
        ]  # fmt: skip
        drops, captured, sums, _kept = False, None, [], None
        if self.signature.takes_more:
            captured = self._captured(call, tensors)
            may_store = kernel.stores and not (is_part or rest[1] or self.kind.ragged)
            stored = self._stored(kernel, call) if may_store else ADDED
            sums = self._values.sums(call, captured, needs[3:], stored)
            drops = self._values.add(values, call, captured, self._values.addresses(sums, stored))
        if taken is not None:
            drops, _kept = self._add_own(values, kernel, taken, captured, drops)
        key = backward_key(drops, strides, needs[3:], () if into is None else places_of((o, lse, *into)))
        prepared = call.backward.get(key)
        if prepared is None:
            settled = with_strides(kernel, call.settled, {"d_o": by_axis(strides)})
            larger = {} if into is None else {"o": o, "dq": dq, "dk": dk, "dv": dv}
            settled = within(kernel, settled, larger, None if into is None else lse)
            prepared = call.backward[key] = self._prepared(kernel, "backward", (*values, *settled))
        self._workspaces.run(call, prepared, values)
        if taken is not None:
            taken.finish_gradients(dq, dk, dv)
        found = [dq, dk, dv]
        if call.gradients is not wanted or not all(needs[:3]):
            found = [laid(x, layout) for x, layout, need in zip(found, wanted, needs, strict=False) if need]
        return found + _as_asked(sums, is_part) if sums else found

    def _stored(self, kernel: Kernel, call: Call) -> Stored:
        """How its kernels store gradients of captured tensors, where results need not repeat."""
        if not call.stored:
            names, summed = self._values.stored, self._values.summed
            whole = kernel.stored_whole(call.settled) if names or summed else frozenset()
            call.stored.append(Stored(names | (summed & whole), whole if call.shard.is_whole else frozenset()))
        return call.stored[0]

    def _gradients_without_kernel(
        self, taken: Taken, d_o: Tensor, rows: Rows, needs: Sequence[bool], is_part: bool
    ) -> list[Tensor]:
        wide = self._widened(taken)
        if wide is None:
            return self.gradients_by_formula(taken, d_o, rows, needs, is_part)
        engine, tensors = wide
        return engine.gradients(d_o.to(tensors[0].dtype), rows, tensors, taken.rest, needs, is_part=is_part)

    # What both passes share -------------------------------------------------------------------------------------------

    def _taken(self, tensors: Tensors, rest: Rest, refusal: str = "", *, derives: bool = False) -> Taken:
        """The call, with what its kind has beside a dense one. Raises ``RuntimeError`` where it is refused."""
        if self._takes is None:
            return Taken(self.checker.find(tensors, rest), tensors, rest, [])
        refusal = self._takes.no_derivatives if derives else refusal
        if refusal:
            raise RuntimeError(f"'{self.spec.name}': {refusal}")
        return self._takes.take(self.checker, tensors, rest, derives)

    def _prepared(self, kernel: Kernel, name: PassName, values: Values) -> Prepared:
        try:
            return kernel.prepare(name, values)
        except NoSuchPassError:
            what = (self.kind.suffix or "").strip("_")
            raise ValueError(
                f"'{self.spec.name}': {what} needs kernels for CPUs, which this op does not have: load the spec with "
                "backend='cpu' or backend='reference'; a package of an earlier version has to be built again"
            ) from None

    def _add_own(
        self, values: list[float], kernel: Kernel, taken: Taken, captured: Captured | None, drops: bool
    ) -> tuple[bool, object]:
        """Add the values of the kind's own fields. Whether pairs are dropped; what to keep until the kernel ran."""
        values += taken.pointers
        if captured is None or not self.kind.by_sequence:
            return drops, None
        tables, threshold = PerSequence(self.spec, taken, captured).tables()
        values += [address(x) for x in tables]
        if threshold is not None:  # it says which kernels run
            values[kernel.layout.slots["dropout_threshold"]] = threshold
            drops = threshold > 0
        return drops, tables

    def _readable(self, kernel: Kernel, call: Call, tensors: Tensors, rest: Rest) -> tuple[Call, Tensors]:
        """The call with copies of q, k and v where the kernel cannot read them."""
        q, k, v = tensors[:3]
        if not call.needs_copy and (q.data_ptr() | k.data_ptr() | v.data_ptr()) % kernel.row_alignment == 0:
            return call, tensors
        tensors = (*(readable(kernel, x) for x in (q, k, v)), *tensors[3:])
        return self.checker.find(tensors, rest), tensors

    def _captured(self, call: Call, tensors: Tensors) -> Captured:
        found = self._values.read(call, tensors)
        if self.kind.by_sequence and self.signature.has_dropout and found.dropout is None and tensors[-2] is not None:
            # Sequences may drop pairs where one as long as the longest would not.
            return found._replace(dropout=Dropout(0.0, int(tensors[-2].item()) & 0xFFFF_FFFF_FFFF_FFFF))
        return found


def _rows_of(call: Call, rows: Rows) -> tuple[Rows, list[Tensor]]:
    """Rows as kernels take them, and gradients of q, k and v: they write all three, asked for or not."""
    like_q, like_k, like_v = call.gradients
    fresh = [
        empty_strided(*like_q, dtype=call.written, device=call.device),
        empty_strided(*like_k, dtype=call.written, device=call.device),
        empty_strided(*like_v, dtype=call.written, device=call.device),
    ]
    return (packed(rows[0]), laid(rows[1], call.o), packed(rows[2]), packed(rows[3])), fresh


def _as_asked(sums: Sequence[tuple[Tensor | None, Any]], is_part: bool) -> list[Tensor]:
    """Gradients of captured values, each in the type and on the device of its own; those of parts as they are."""
    return [
        total if is_part or (total.dtype is like.dtype and total.device == like.device) else total.to(like)
        for total, like in sums
        if total is not None
    ]
