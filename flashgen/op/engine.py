"""Runs one op: fills the arguments of a kernel and calls it, or runs the reference in its place.

In: the positional arguments of the operators that ``registration.py`` defines. Out: fresh tensors. Knows nothing of
autograd or dispatch. Every call passes here, so the way to a kernel is kept short: what shapes determine comes ready
from ``call.py``.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, contiguous_format, empty_like, empty_strided

from flashgen.hosts.kernel import (
    ADDED,
    Kernel,
    KernelProvider,
    Node,
    Stored,
    takes_tangents,
    takes_tangents_backward,
)
from flashgen.ir.spec import AttentionSpec, HeadDim
from flashgen.kinds.dense import DENSE
from flashgen.kinds.forward_mode import FORWARD_MODE, FORWARD_MODE_BACKWARD
from flashgen.kinds.kind import Kind
from flashgen.op.by_kernels import KernelsOfTangents
from flashgen.op.call import ELEMENTS, Call, CallChecker, Rest, backward_key, is_readable
from flashgen.op.captured import Captured, CapturedValues
from flashgen.op.forward_mode import ForwardMode, Moved
from flashgen.op.layouts import laid
from flashgen.op.modes import autograd_inside, deterministic_algorithms
from flashgen.op.plain import NoMemoryError
from flashgen.op.signature import Signature
from flashgen.op.values import address, packed, places_of, put, type_of_sums, with_strides, within
from flashgen.op.workspaces import Workspaces
from flashgen.reference import tiled
from flashgen.reference.programs import Place, Program

# The first arguments of the operators: q, k, v, captured tensors, params, seed and dropout_p.
Tensors = tuple[Any, ...]
# d_lse, o, lse and its parts.
Rows = tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]
# o, lse and its parts, [B, H, Nq, 2]: what lse cannot hold of rows whose scores are extreme, a maximum of these and the
# logarithm in base 2 of the sum of what exp gives of them less that. 0 and 0 for other rows. Only kernels read it.
Attended = tuple[Tensor, Tensor | None, Tensor | None]
# What one problem of a call sees of a tensor that has a place: a view.
View = Callable[[Place, Any], Any]


class Engine:
    """Forward and backward of one spec: on kernels, or on the reference.

    ``kernels`` holds a provider for each type of device that there are kernels for; None where the reference stands in,
    in slices of ``pairs``. ``pairs`` None runs the reference densely, on any device.
    """

    kind: Kind = DENSE
    checks: ClassVar[type[CallChecker]] = CallChecker
    has_nodes = False  # whether C++ may start its calls (op/node.py)
    last_node: tuple[Rest, Node] | None = None

    def __init__(
        self,
        spec: AttentionSpec,
        kernels: Mapping[str, KernelProvider | None],
        pairs: int | None = tiled.SLICE_PAIRS,
        kind: Kind | None = None,
    ) -> None:
        self.spec, self.kernels, self.kind = spec, kernels, kind or type(self).kind
        self.signature = Signature.of(spec, self.kind)
        self._pairs = pairs
        self._workspaces = Workspaces()
        self.checker = self.checks(spec, kernels, self.kind, is_reference=pairs is None)
        self._values = CapturedValues(spec, self.signature, self.checker)
        varies = bool(spec.tensors) or spec.dropout is not None or any(each.grad for each in spec.params)
        self.has_nodes = type(self) is Engine and not varies and pairs is not None

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

    def attend(self, tensors: Tensors, rest: Rest, keeps_lse: bool = True) -> Attended:
        """``o``, ``lse`` and its parts; these are None for pointwise weights, and may be where they are not kept."""
        return self._attend(tensors, rest, keeps_lse, None)

    def attend_into(self, into: Attended, tensors: Tensors, rest: Rest) -> None:
        """The same, written to ``into``: the same rows of tensors that have more, lse and its parts of contiguous ones.

        For engines whose kernels write there.
        """
        self._attend(tensors, rest, True, into)

    def _attend(self, tensors: Tensors, rest: Rest, keeps_lse: bool, into: Attended | None) -> Attended:
        call = self.checker.find(tensors, rest)
        kernel = call.kernel
        if kernel is None or call.is_empty:
            found = self._attend_without_kernel(call, tensors)
            return found if into is None else put(found, into)
        wanted = call.o
        if call.may_copy:
            call, tensors = self._readable(kernel, call, tensors, rest)
        q, k, v = tensors[0], tensors[1], tensors[2]
        # To ask for what is like a tensor takes half as long.
        lse = parts = None
        if into is not None:
            o, lse, parts = into
        elif call.o_is_like_q:
            o = empty_like(q)
        else:
            o = empty_strided(*call.o, dtype=call.written, device=call.device)
        if self.signature.has_lse and into is None and (keeps_lse or kernel.needs_lse):
            lse = torch.empty_strided(*call.lse, dtype=torch.float32, device=call.device)
            if keeps_lse:
                parts = torch.empty_strided(*call.lse_parts, dtype=torch.float32, device=call.device)
        q_at, k_at, v_at = q.data_ptr(), k.data_ptr(), v.data_ptr()
        if not (q_at and k_at and v_at):
            raise NoMemoryError("q, k or v is zero in name alone")
        lse_at, parts_at = (0, 0) if lse is None else (lse.data_ptr(), address(parts))
        values = [0, q_at, k_at, v_at, o.data_ptr(), lse_at, parts_at, 0, 0, 0, 0, 0]
        drops = False
        if self.signature.takes_more:
            captured = self._captured(call, tensors)
            drops = self._values.add(values, call, captured, self._values.no_gradients)
        key: object = drops if into is None else (drops, *places_of(into[:2]))
        prepared = call.forward.get(key)
        if prepared is None:
            settled = call.settled if into is None else within(kernel, call.settled, {"o": o}, lse)
            prepared = call.forward[key] = kernel.prepare("forward", (*values, *settled))
        self._workspaces.run(call, prepared, values)
        return o if into is not None or call.o is wanted else laid(o, wanted), lse, parts

    def _attend_without_kernel(self, call: Call, tensors: Tensors) -> Attended:
        q, has_lse, captured = tensors[0], self.signature.has_lse, self._captured(call, tensors)
        dtype = torch.float64 if q.dtype is torch.float64 else torch.float32
        parts = q.new_zeros(call.lse_parts[0], dtype=torch.float32) if has_lse else None
        if tiled.gives_nothing(self.spec, call.shard):
            o = q.new_empty_strided(*call.o).zero_()
            return o, q.new_full(call.lse[0], -math.inf, dtype=dtype) if has_lse else None, parts
        o, lse = tiled.forward(self._problem(call, tensors, captured))
        return laid(o, call.o), None if lse is None else lse.to(dtype), parts

    def gradients(self, d_o: Tensor, rows: Rows, tensors: Tensors, rest: Rest, needs: Sequence[bool]) -> list[Tensor]:
        """The gradients that are needed, in the order of the inputs, each like what it is the gradient of."""
        return self._gradients(d_o, rows, tensors, rest, needs, is_part=False)

    def gradients_of_part(
        self, d_o: Tensor, rows: Rows, tensors: Tensors, rest: Rest, needs: Sequence[bool]
    ) -> list[Tensor]:
        """The same, where o and lse are those of rows over more keys than k and v have.

        Those of captured values stay float32: others are added to them.
        """
        return self._gradients(d_o, rows, tensors, rest, needs, is_part=True)

    def gradients_into(
        self, into: Sequence[Tensor], d_o: Tensor, rows: Rows, tensors: Tensors, rest: Rest, needs: Sequence[bool]
    ) -> list[Tensor]:
        """The same, those of q, k and v, which ``needs`` names, written to ``into``: of q, and in ``rows``, the same
        rows of tensors that have more, those that are one number a row of contiguous ones.

        For engines whose kernels write there.
        """
        return self._gradients(d_o, rows, tensors, rest, needs, is_part=True, into=into)

    def _gradients(
        self,
        d_o: Tensor,
        rows: Rows,
        tensors: Tensors,
        rest: Rest,
        needs: Sequence[bool],
        *,
        is_part: bool,
        into: Sequence[Tensor] | None = None,
    ) -> list[Tensor]:
        call = self.checker.find(tensors, rest)
        kernel = call.kernel
        if kernel is None or call.is_empty:
            whole = (rows[1], rows[2]) if is_part else None
            found = self._gradients_without_kernel(call, d_o, rows[0], tensors, needs, whole)
            return found if into is None else [*put(found[:3], into), *found[3:]]
        wanted = call.gradients
        if call.may_copy:
            call, tensors = self._readable(kernel, call, tensors, rest)
        q, k, v = tensors[0], tensors[1], tensors[2]
        if not is_readable(kernel, d_o):
            d_o = d_o.clone(memory_format=contiguous_format)
        # Kernels write all three, asked for or not.
        if into is None:
            d_lse, o, lse, parts = packed(rows[0]), laid(rows[1], call.o), packed(rows[2]), packed(rows[3])
            like_q, like_k, like_v = call.gradients
            dq = empty_strided(*like_q, dtype=call.written, device=call.device)
            dk = empty_strided(*like_k, dtype=call.written, device=call.device)
            dv = empty_strided(*like_v, dtype=call.written, device=call.device)
        else:
            (d_lse, o, lse, parts), (dq, dk, dv) = rows, into
        d_o_at = d_o.data_ptr()
        if not d_o_at:
            raise NoMemoryError("d_o is zero in name alone")
        values = [
            0, q.data_ptr(), k.data_ptr(), v.data_ptr(), address(o), address(lse), address(parts), d_o_at,
            address(d_lse), dq.data_ptr(), dk.data_ptr(), dv.data_ptr(),
        ]  # fmt: skip
        drops, sums = False, []
        if self.signature.takes_more:
            captured = self._captured(call, tensors)
            stored = self._stored(kernel, call) if kernel.stores and not (is_part or rest[1]) else ADDED
            sums = self._values.sums(call, captured, needs[3:], stored)
            drops = self._values.add(values, call, captured, self._values.addresses(sums, stored))
        strides = d_o.stride()
        key = backward_key(drops, strides, needs[3:], () if into is None else places_of((o, lse, *into)))
        prepared = call.backward.get(key)
        if prepared is None:
            settled = with_strides(kernel, call.settled, {"d_o": strides})
            if into is not None:
                settled = within(kernel, settled, {"o": o, "dq": dq, "dk": dk, "dv": dv}, lse)
            prepared = call.backward[key] = kernel.prepare("backward", (*values, *settled))
        self._workspaces.run(call, prepared, values)
        found = [dq, dk, dv]
        if call.gradients is not wanted or not all(needs[:3]):
            found = [laid(x, layout) for x, layout, need in zip(found, wanted, needs, strict=False) if need]
        for total, like in sums:
            if total is not None:
                is_alike = is_part or (total.dtype is like.dtype and total.device == like.device)
                found.append(total if is_alike else total.to(like))
        return found

    def _stored(self, kernel: Kernel, call: Call) -> Stored:
        """How its kernels store gradients of captured tensors, where results need not repeat."""
        if not call.stored:
            names, summed = self._values.stored, self._values.summed
            whole = kernel.stored_whole(call.settled) if names or summed else frozenset()
            call.stored.append(Stored(names | (summed & whole), whole if call.shard.is_whole else frozenset()))
        return call.stored[0]

    def _gradients_without_kernel(
        self,
        call: Call,
        d_o: Tensor,
        d_lse: Tensor | None,
        tensors: Tensors,
        needs: Sequence[bool],
        whole: tuple[Tensor | None, Tensor | None] | None = None,
    ) -> list[Tensor]:
        inputs, captured = tensors[: self.signature.inputs], self._captured(call, tensors)
        if tiled.gives_nothing(self.spec, call.shard):
            gradients = [torch.zeros_like(x) if need else None for x, need in zip(inputs, needs, strict=True)]
        else:
            with deterministic_algorithms(call.deterministic), autograd_inside():
                gradients = tiled.backward(self._problem(call, tensors, captured), d_o, d_lse, needs, whole)
        found = []
        for n, (x, like) in enumerate(zip(gradients, inputs, strict=True)):
            if x is not None:
                dtype = type_of_sums(like.dtype) if n > 2 and whole is not None else like.dtype
                found.append(x.to(like.device, dtype))
                if n < 3:
                    found[-1] = laid(found[-1], call.gradients[n])
        return found

    # Derivatives of derivatives ---------------------------------------------------------------------------------------

    @functools.cached_property
    def program(self) -> Program:
        """The op as what derivatives are made of: its tensors, those without gradients too, to o and lse."""
        return tiled.program_of(self.spec, self.signature.tensor_arguments)

    @functools.cached_property
    def forward_mode(self) -> ForwardMode:
        """What runs kernels of tangents."""
        return ForwardMode(self.spec)

    @property
    def derives(self) -> str:
        """What runs programs that no kernel does, in words."""
        if self._pairs is None:
            return "the dense formula by PyTorch's operators, matrices of all pairs"
        pairs = min(self._pairs, tiled.DERIVATIVE_PAIRS)
        return f"tiled path by PyTorch's operators, slices of {pairs:,} pairs; linear memory"

    @property
    def moves(self) -> str:
        """What computes tangents, in words."""
        return self._said(takes_tangents, "a kernel of forward mode", "there is no kernel of forward mode for it")

    @property
    def moves_backward(self) -> str:
        """What computes gradients of gradients and of tangents, and tangents of gradients, in words."""
        kernels = "kernels of forward mode and of its backward pass"
        return self._said(takes_tangents_backward, kernels, "there is no kernel of it")

    def _said(self, takes: Callable[[KernelProvider | None], str], kernels: str, none: str) -> str:
        taken = {device.upper(): takes(provider) for device, provider in self.kernels.items()}
        said = [f"on {device} {what}" for device, what in taken.items() if what]
        if not said:
            return self.derives if self._pairs is None else f"{self.derives}; {none}"
        return f"{kernels}, compiled when first asked for: {'; '.join(said)}; else the {self.derives}"

    def likes(self, program: Program, values: Sequence[Any]) -> list[tuple[Sequence[int], torch.dtype]]:
        """The shapes and types of a program's outputs."""
        q, v = values[0], values[2]
        o = ((*q.shape[:-1], v.shape[-1]), q.dtype)
        lse = (tuple(self.kind.rows(q)), torch.float64 if q.dtype is torch.float64 else torch.float32)
        count = self.signature.tensor_arguments
        inputs = [None if x is None else (tuple(x.shape), x.dtype) for x in values[:count]]
        return list(program.taken(inputs, (o, lse)[: len(program.outputs)])[1])

    def derive(self, program: Program, values: Sequence[Any], rest: Rest) -> list[Tensor]:
        """The outputs of a program made of ``self.program``, slice by slice on the reference, on any device."""
        tensors = tuple(values[: self.signature.tensor_arguments])
        likes = self.likes(program, values)
        compute = torch.promote_types(tensors[0].dtype, torch.float32)
        with (
            torch.autocast(tensors[0].device.type, enabled=False),
            deterministic_algorithms(rest[1]),
            autograd_inside(),
        ):
            totals: list[Tensor] = []
            of_inputs, of_outputs = program.places
            for problem, view in self._viewed(tensors, rest):
                own = [view(place, x) for place, x in zip(of_inputs, values, strict=True)]
                kernels = self._kernels_of_tangents(problem, rest)
                found = None if kernels is None else kernels.compute(problem, program, own)
                if found is not None and self.kind is DENSE:  # there is one problem
                    totals = found
                    break
                totals = totals or _zeros(likes, compute, values)
                parts = [view(place, x) for place, x in zip(of_outputs, totals, strict=True)]
                if found is None:
                    tiled.derive(problem, program, own, parts)
                else:
                    for part, x in zip(parts, found, strict=True):
                        part.add_(x)
            totals = totals or _zeros(likes, compute, values)
        return [total.to(dtype) for total, (_, dtype) in zip(totals, likes, strict=True)]

    def attend_and_move(self, tensors: Tensors, tangents: Sequence[Tensor | None], rest: Rest) -> Moved | None:
        """``o``, ``lse``, its parts, and the tangents, by one kernel; None where none takes the call."""
        if self.kind is not DENSE or all(x is None for x in tangents[: self.signature.inputs]):
            return None
        call = self.checker.find(tensors, rest)
        kernel = None if call.kernel is None or call.is_empty else _taking(call.kernel, FORWARD_MODE, tensors[0])
        if kernel is None:
            return None
        problem = self._problem(call, tensors, self._captured(call, tensors))
        moves = tangents[: self.signature.inputs]
        return self.forward_mode.run(kernel, problem, moves, deterministic=rest[1], keeps_o=True)

    def _kernels_of_tangents(self, problem: tiled.Problem, rest: Rest) -> KernelsOfTangents | None:
        """Those of forward mode that take a problem, if there are any."""
        q = problem.q
        provider = self.kernels.get(q.device.type)
        if provider is None or q.dtype not in ELEMENTS:
            return None
        kernel = provider(HeadDim(q.shape[-1], problem.v.shape[-1]), q.device.index or 0)
        forward = None if kernel is None else _taking(kernel, FORWARD_MODE, q)
        if kernel is None or forward is None:
            return None
        backward = functools.partial(_taking, kernel, FORWARD_MODE_BACKWARD, q)
        return KernelsOfTangents(self.forward_mode, kernel, forward, backward, rest[1])

    def _viewed(self, tensors: Tensors, rest: Rest) -> Iterator[tuple[tiled.Problem, View]]:
        """The dense problems of a call that give anything, and what each of them sees of a tensor of the call."""
        call = self.checker.find(tensors, rest)
        if not tiled.gives_nothing(self.spec, call.shard):
            problem = self._problem(call, tensors, self._captured(call, tensors))
            yield for_derivatives(problem), _all_of

    def _readable(self, kernel: Kernel, call: Call, tensors: Tensors, rest: Rest) -> tuple[Call, Tensors]:
        """The call with copies of q, k and v where the kernel cannot read them."""
        q, k, v = tensors[:3]
        if not call.needs_copy and (q.data_ptr() | k.data_ptr() | v.data_ptr()) % kernel.row_alignment == 0:
            return call, tensors
        own = (x if is_readable(kernel, x) else x.clone(memory_format=contiguous_format) for x in (q, k, v))
        tensors = (*own, *tensors[3:])
        return self.checker.find(tensors, rest), tensors

    def _captured(self, call: Call, tensors: Tensors) -> Captured:
        return self._values.read(call, tensors)

    def _problem(self, call: Call, tensors: Tensors, captured: Captured) -> tiled.Problem:
        if call.threads != torch.get_num_threads():
            torch.set_num_threads(1)  # in a forked child, where PyTorch's own threads are missing just the same
        params = zip(self.spec.params, captured.params, captured.given, strict=True)
        return tiled.Problem(
            spec=self.spec,
            q=tensors[0],
            k=tensors[1],
            v=tensors[2],
            tensors={declared.name: x for declared, x in zip(self.spec.tensors, captured.tensors, strict=True)},
            params={param.name: value if x is None else x for param, value, x in params},
            shard=call.shard,
            dropout=captured.drawn,
            pairs=self._pairs,
        )


def _taking(kernel: Kernel, kind: Kind, q: Tensor) -> Kernel | None:
    """The kernel of forward mode, or of its backward pass, if there is one that takes the type of q."""
    found = kernel.of(kind)
    return found if found is not None and ELEMENTS.get(q.dtype) in found.elements else None


def _zeros(likes: Sequence[tuple[Sequence[int], Any]], dtype: torch.dtype, values: Sequence[Any]) -> list[Tensor]:
    """What a program's outputs are added up in.

    They are made of the last of its inputs, a tangent or what arrives: torch.func.linearize folds what follows from
    nothing, or from primals alone, and would lose what is written to it.
    """
    last = next(x for x in reversed(values) if isinstance(x, Tensor))
    return [last.new_zeros(shape, dtype=dtype, device=values[0].device) for shape, _ in likes]


def for_derivatives(problem: tiled.Problem) -> tiled.Problem:
    """The same problem in the slices that derivatives take; those of the reference are not cut."""
    if problem.pairs is None:
        return problem
    return dataclasses.replace(problem, pairs=min(problem.pairs, tiled.DERIVATIVE_PAIRS))


def _all_of(place: Place, x: Any) -> Any:  # noqa: ARG001
    return x
