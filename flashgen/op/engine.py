"""Runs one op: fills the arguments of a kernel and calls it, or runs the reference in its place.

In: the positional arguments of the operators that ``registration.py`` defines. Out: fresh tensors. Knows nothing of
autograd or dispatch. Every call passes here, so the way to a kernel is kept short: what shapes determine comes ready
from ``call.py``.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, contiguous_format, empty_like, empty_strided

from flashgen.hosts.kernel import ADDED, Kernel, KernelProvider, Node, NoSuchPassError, Prepared, Stored, Values
from flashgen.ir.spec import AttentionSpec
from flashgen.kinds.cached import CACHED
from flashgen.kinds.dense import DENSE
from flashgen.kinds.eight_bits import EIGHT_BITS
from flashgen.kinds.kind import Kind, PassName
from flashgen.kinds.ragged import RAGGED
from flashgen.op import cached, eight_bits, ragged
from flashgen.op.call import (
    Attended,
    Call,
    CallChecker,
    KindCall,
    Rest,
    Saved,
    Tensors,
    backward_key,
    is_readable,
    readable,
)
from flashgen.op.captured import Captured, CapturedValues, PerSequence
from flashgen.op.formula import Formula
from flashgen.op.signature import Signature
from flashgen.op.tensor_kinds import (
    NoMemoryError,
    address,
    by_axis,
    copied_to,
    in_slices,
    laid,
    packed,
    places_of,
    type_of_sums,
    with_strides,
)
from flashgen.reference import tiled
from flashgen.reference.dense import Dropout

# Workspaces up to this size are kept for the next call: fresh pages cost more than a small kernel.
_SPARE_BYTES = 1 << 22
_MOST_SPARE = 4


class _Workspace(NamedTuple):
    """Memory for one call at a time."""

    address: int
    bytes: int
    memory: Tensor


class Workspaces:
    """The workspaces of an engine: a few small ones are kept between calls."""

    def __init__(self) -> None:
        self._spare: list[_Workspace] = []  # of no call; popping and appending are atomic

    def run(self, call: Call, prepared: Prepared, values: list[float]) -> None:
        """Run one pass with the values that vary. The first, the address of the workspace, is filled in here."""
        if prepared.by_values is not None:
            prepared = prepared.by_values(values)
        size = prepared.workspace_bytes
        if size == 0:
            prepared.run(values)
            return
        keeps = call.is_on_cpu  # on a GPU the memory belongs to the stream, and PyTorch keeps what is freed
        try:
            workspace = self._spare.pop() if keeps else None
        except IndexError:  # to look first would not do: another thread may take the last workspace
            workspace = None
        if workspace is None or workspace.bytes < size:
            memory = torch.empty_strided((size,), (1,), dtype=torch.uint8, device=call.device)
            workspace = _Workspace(memory.data_ptr(), size, memory)
        values[0] = workspace.address
        prepared.run(values)
        if keeps and workspace.bytes <= _SPARE_BYTES and len(self._spare) < _MOST_SPARE:
            self._spare.append(workspace)


@dataclass(frozen=True)
class CallRules:
    """How calls of a kind differ from dense ones.

    ``kind_call`` makes a ``KindCall`` of an operator's arguments; its last argument says whether derivatives are to be
    computed without kernels. ``no_gradients`` and ``no_derivatives`` are error messages of kinds without these.
    """

    kind_call: Callable[[CallChecker, Tensors, Rest, bool], KindCall]
    no_gradients: str = ""
    no_derivatives: str = ""


# By the names of kinds. Kinds that are not here are called as dense ones are.
CALL_RULES: Mapping[str, CallRules] = {
    RAGGED.name: CallRules(ragged.kind_call),
    CACHED.name: CallRules(
        cached.kind_call,
        "decode has no gradients; call it under torch.no_grad(), or train with the op",
        "decode has no derivatives, of neither mode: call the op, or op.reference.decode",
    ),
    EIGHT_BITS.name: CallRules(
        eight_bits.kind_call,
        no_gradients="q, k and v of 8 bits have no gradients; call it under torch.no_grad(), or train in bfloat16",
        no_derivatives="q, k and v of 8 bits have no derivatives, of neither mode: widen them, or call op.reference",
    ),
}


class Instead(Protocol):
    """Kernels of other kinds and specs that run in the place of an engine's own, for calls that these would take."""

    def attend(self, call: Call, tensors: Tensors, rest: Rest, keeps_lse: bool) -> Attended | None:
        """``o``, ``lse`` and its parts; None where the engine's own kernels are to run."""

    def gradients(
        self, call: Call, d_o: Tensor, rows: Saved, tensors: Tensors, rest: Rest, needs: Sequence[bool]
    ) -> list[Tensor] | None:
        """The gradients that are needed, by what ``attend`` left; None as there."""

    def describe(self, call: Call, tensors: Tensors) -> str:
        """Which kernels run, in words; empty: the engine's own."""


class Engine(Formula):
    """Forward and backward of one spec and kind of call: on kernels, or on the reference.

    ``kernels`` holds a provider for each type of device that there are kernels for; None where the reference stands in,
    in slices of ``pairs``. ``pairs`` None runs the reference densely, on any device. ``CALL_RULES`` and ``CHECKS``
    (``checks.py``) say how kinds differ. ``has_nodes``: C++ may start calls (``node.py``). Kernels read bits in the
    place of lists of selected keys (``selected.py``), the reference the lists themselves.
    """

    last_node: tuple[Rest, Node] | None = None

    def __init__(
        self,
        spec: AttentionSpec,
        kernels: Mapping[str, KernelProvider | None],
        pairs: int | None = tiled.SLICE_PAIRS,
        kind: Kind = DENSE,
        instead: Instead | None = None,
    ) -> None:
        self.spec, self.kernels, self.kind, self.pairs, self.instead = spec, kernels, kind, pairs, instead
        self.signature = Signature.of(spec, kind)
        self._rules = CALL_RULES.get(kind.name)
        self._workspaces = Workspaces()
        self.checker = CallChecker(spec, kernels, kind, is_reference=pairs is None)
        self._values = CapturedValues(spec, self.signature, self.checker)
        varies = bool(spec.tensors) or spec.dropout is not None or any(each.grad for each in spec.params)
        self.has_nodes = self._rules is None and kind.suffix is not None and not varies and pairs is not None

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

    def has_kernel(self, q: Tensor, v: Tensor) -> bool:
        """Whether kernels of the engine's kind run for tensors like these."""
        return self.checker.kernel(q, v) is not None

    # Forward ----------------------------------------------------------------------------------------------------------

    def attend(self, tensors: Tensors, rest: Rest, keeps_lse: bool = True, into: Attended | None = None) -> Attended:
        """``o``, ``lse`` and its parts. Pointwise weights have no lse; without ``keeps_lse`` it may be None, too.

        Results are written to ``into``, if given: slices of larger tensors, of contiguous ones for lse. Only kinds
        whose kernels write slices take ``into``.
        """
        kind_call = None
        if self._rules is None:
            call = self.checker.find(tensors, rest)
        else:
            kind_call = self._kind_call(tensors, rest)
            call, tensors, rest = kind_call.call, kind_call.tensors, kind_call.rest
        kernel, wanted = call.kernel, call.o
        if kernel is None or call.is_empty:
            found = self._attend_without_kernel(kind_call or KindCall(call, tensors, rest, []), keeps_lse)
            return found if into is None else copied_to(found, into)
        if self.instead is not None and (other := self.instead.attend(call, tensors, rest, keeps_lse)) is not None:
            return other
        if call.may_copy:
            call, tensors = self._readable(kernel, call, tensors, rest)
        o, lse, parts = into or self._results(call, tensors[0], keeps_lse)
        q_at, k_at, v_at = tensors[0].data_ptr(), tensors[1].data_ptr(), tensors[2].data_ptr()
        if not (q_at and k_at and v_at):
            raise NoMemoryError("q, k or v is zero in name alone")
        lse_at = 0 if lse is None else lse.data_ptr()
        parts_at = 0 if parts is None or not call.writes_parts else parts.data_ptr()
        values: list[float] = [0, q_at, k_at, v_at, o.data_ptr(), lse_at, parts_at, 0, 0, 0, 0, 0]
        drops, captured, _read, _kept = False, None, None, None
        if self.signature.takes_more:
            captured = self._captured(call, tensors)
            drops, _read = self._values.add(values, call, captured, self._values.no_gradients)
        if kind_call is not None:
            drops, _kept = self._add_own(values, kernel, kind_call, captured, drops)
        key: object = drops if into is None else (drops, *places_of(into[:2]))
        prepared = call.forward.get(key)
        if prepared is None:
            fixed = call.fixed if into is None else in_slices(kernel, call.fixed, {"o": o}, lse)
            prepared = call.forward[key] = self._prepared(kernel, "forward", (*values, *fixed))
        self._workspaces.run(call, prepared, values)
        if kind_call is not None:
            kind_call.finish(o, lse)
        return o if into is not None or call.o is wanted else laid(o, wanted), lse, parts

    def _results(self, call: Call, q: Tensor, keeps_lse: bool) -> Attended:
        """Fresh o, lse and its parts for a kernel to fill; parts that it does not write are zero."""
        # empty_like takes half of the time.
        o = empty_like(q) if call.o_is_like_q else empty_strided(*call.o, dtype=call.written, device=call.device)
        if not (self.signature.has_lse and (keeps_lse or call.needs_lse)):
            return o, None, None
        lse = empty_strided(*call.lse, dtype=torch.float32, device=call.device)
        if not keeps_lse:
            return o, lse, None
        parts = empty_strided(*call.lse_parts, dtype=torch.float32, device=call.device)
        return o, lse, parts if call.writes_parts else parts.zero_()

    def _attend_without_kernel(self, kind_call: KindCall, keeps_lse: bool) -> Attended:
        wide = self._widened(kind_call)
        if wide is None:
            return self.attend_by_formula(kind_call)
        engine, tensors = wide
        o, lse, parts = engine.attend(tensors, kind_call.rest, keeps_lse)
        return laid(o, kind_call.call.o).to(kind_call.call.written), lse, parts

    def _widened(self, kind_call: KindCall) -> tuple[Engine, Tensors] | None:
        """The engine and wider tensors for a call on 8 bits that no kernel takes, or on parts of 16 bits; else None."""
        tensors, numbers = kind_call.tensors, kind_call.widened(self.checker.dtypes)
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
        rows: Saved,
        tensors: Tensors,
        rest: Rest,
        needs: Sequence[bool],
        *,
        is_part: bool = False,
        into: Sequence[Tensor] | None = None,
    ) -> list[Tensor]:
        """The gradients that are needed, in the order of the inputs, each in the layout of its input.

        ``is_part``: o and lse cover more keys than k and v have. Gradients of captured values then stay float32, as
        those of other parts are added to them. dq, dk and dv are written to ``into``, if given, slices as ``attend``
        takes them; then ``rows`` has o, lse and parts that ``attend`` wrote. Raises ``RuntimeError`` for a kind without
        gradients.
        """
        kind_call = None
        if self._rules is None:
            call = self.checker.find(tensors, rest)
        else:
            kind_call = self._kind_call(tensors, rest, self._rules.no_gradients)
            call, tensors, rest = kind_call.call, kind_call.tensors, kind_call.rest
        kernel, wanted = call.kernel, call.gradients
        if kernel is None or call.is_empty:
            kind_call = kind_call or KindCall(call, tensors, rest, [])
            found = self._gradients_without_kernel(kind_call, d_o, rows, needs, is_part)
            return found if into is None else [*copied_to(found[:3], into), *found[3:]]
        instead = None if is_part else self.instead
        if instead is not None and (others := instead.gradients(call, d_o, rows, tensors, rest, needs)) is not None:
            return others
        d_o = d_o.to(tensors[0].dtype) if self.kind.parts else d_o
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
        drops, captured, sums, _read, _kept = False, None, [], None, None
        if self.signature.takes_more:
            captured = self._captured(call, tensors)
            may_store = kernel.stores and not (is_part or rest[1] or self.kind.ragged)
            stored = self._stored(kernel, call) if may_store else ADDED
            sums = self._values.sums(call, captured, needs[3:], stored)
            drops, _read = self._values.add(values, call, captured, self._values.addresses(sums, stored))
        if kind_call is not None:
            drops, _kept = self._add_own(values, kernel, kind_call, captured, drops)
        key = backward_key(drops, strides, needs[3:], () if into is None else places_of((o, lse, *into)))
        prepared = call.backward.get(key)
        if prepared is None:
            fixed = with_strides(kernel, call.fixed, {"d_o": by_axis(strides)})
            larger = {} if into is None else {"o": o, "dq": dq, "dk": dk, "dv": dv}
            fixed = in_slices(kernel, fixed, larger, None if into is None else lse)
            prepared = call.backward[key] = self._prepared(kernel, "backward", (*values, *fixed))
        self._workspaces.run(call, prepared, values)
        if kind_call is not None:
            kind_call.finish_gradients(dq, dk, dv)
        found = [dq, dk, dv]
        if call.gradients is not wanted or not all(needs[:3]):
            found = [laid(x, layout) for x, layout, need in zip(found, wanted, needs, strict=False) if need]
        return found + _as_asked(sums, is_part) if sums else found

    def _stored(self, kernel: Kernel, call: Call) -> Stored:
        """How kernels of a call store gradients of captured tensors, where results need not repeat."""
        if not call.stored:
            names, summed = self._values.stored, self._values.summed
            whole = kernel.stored_whole(call.fixed) if names or summed else frozenset()
            call.stored.append(Stored(names | (summed & whole), whole if call.shard.is_whole else frozenset()))
        return call.stored[0]

    def _gradients_without_kernel(
        self, kind_call: KindCall, d_o: Tensor, rows: Saved, needs: Sequence[bool], is_part: bool
    ) -> list[Tensor]:
        wide = self._widened(kind_call)
        if wide is None:
            return self.gradients_by_formula(kind_call, d_o, rows, needs, is_part)
        engine, tensors = wide
        return engine.gradients(d_o.to(tensors[0].dtype), rows, tensors, kind_call.rest, needs, is_part=is_part)

    # What both passes share -------------------------------------------------------------------------------------------

    def _kind_call(self, tensors: Tensors, rest: Rest, refusal: str = "", *, derives: bool = False) -> KindCall:
        """The call with the tensors and numbers of its kind. Raises ``RuntimeError`` with a ``refusal``."""
        if self._rules is None:
            return KindCall(self.checker.find(tensors, rest), tensors, rest, [])
        refusal = self._rules.no_derivatives if derives else refusal
        if refusal:
            raise RuntimeError(f"'{self.spec.name}': {refusal}")
        return self._rules.kind_call(self.checker, tensors, rest, derives)

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
        self, values: list[float], kernel: Kernel, kind_call: KindCall, captured: Captured | None, drops: bool
    ) -> tuple[bool, object]:
        """Add the values of the kind's fields. Returns whether pairs are dropped, and tables to hold while it runs."""
        values += kind_call.pointers
        if captured is None or not self.kind.by_sequence:
            return drops, None
        tables, threshold = PerSequence(self.spec, kind_call, captured).tables()
        values += [address(x) for x in tables]
        if threshold is not None:  # the launches depend on it
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


def _rows_of(call: Call, rows: Saved) -> tuple[Saved, list[Tensor]]:
    """Rows as kernels read them, and fresh dq, dk and dv: kernels write all three, asked for or not."""
    like_q, like_k, like_v = call.gradients
    fresh = [
        empty_strided(*like_q, dtype=call.written, device=call.device),
        empty_strided(*like_k, dtype=call.written, device=call.device),
        empty_strided(*like_v, dtype=call.written, device=call.device),
    ]
    return (packed(rows[0]), laid(rows[1], call.o), packed(rows[2]), packed(rows[3])), fresh


def _as_asked(sums: Sequence[tuple[Tensor | None, Any]], is_part: bool) -> list[Tensor]:
    """Gradients of captured values, in the types and on the devices of the values; those of parts stay as they are."""
    return [
        total if is_part or (total.dtype is like.dtype and total.device == like.device) else total.to(like)
        for total, like in sums
        if total is not None
    ]
