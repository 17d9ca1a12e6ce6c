"""What an engine computes without kernels of its kind: calls on the reference, and derivatives of any order.

In: a ``KindCall``, or a ``Program`` made of the engine's own program, and its values. Out: fresh tensors. The dense
problems of a call are computed one after another, by PyTorch's operators. Derivatives are computed by kernels of
forward mode where there are some.
"""

from __future__ import annotations

import contextlib
import functools
import math
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from flashgen.hosts.kernel import Kernel, KernelProvider, takes_tangents
from flashgen.ir.spec import AttentionSpec
from flashgen.kinds.dense import DENSE
from flashgen.kinds.forward_mode import FORWARD_MODE, FORWARD_MODE_BACKWARD
from flashgen.kinds.kind import Kind
from flashgen.op.call import Attended, Call, CallChecker, KindCall, Rest, Saved, Tensors, View
from flashgen.op.captured import Captured, PerSequence
from flashgen.op.forward_mode import ForwardMode, KernelsOfTangents, Tangents, as_kernels_read
from flashgen.op.selected import check_selection
from flashgen.op.signature import ELEMENTS, Signature
from flashgen.op.tensor_kinds import laid, type_of_sums
from flashgen.reference import tiled
from flashgen.reference.programs import Place, Program

_PLACES = (Place.QUERIES, Place.KEYS, Place.KEYS)  # of the gradients of q, k and v


class Formula:
    """The part of an engine that evaluates the formula of its spec, in slices of ``pairs``; None: densely."""

    spec: AttentionSpec
    kernels: Mapping[str, KernelProvider | None]
    kind: Kind
    signature: Signature
    checker: CallChecker
    pairs: int | None

    @abstractmethod
    def _kind_call(self, tensors: Tensors, rest: Rest, *, derives: bool = False) -> KindCall: ...

    @abstractmethod
    def _captured(self, call: Call, tensors: Tensors) -> Captured: ...

    def attend_by_formula(self, kind_call: KindCall) -> Attended:
        """``o``, ``lse`` and its parts."""
        call, q = kind_call.call, kind_call.tensors[0]
        o = q.new_empty_strided(*call.o).zero_()
        lse = parts = None
        if self.signature.has_lse:
            dtype = torch.float64 if q.dtype is torch.float64 else torch.float32
            lse = q.new_full(call.lse[0], -math.inf, dtype=dtype)
            parts = q.new_zeros(call.lse_parts[0], dtype=torch.float32)
        for problem, view in self.problems(kind_call):
            own_o, own_lse = tiled.forward(problem)
            view(Place.QUERIES, o).copy_(own_o)
            if lse is not None and own_lse is not None:
                view(Place.SUMS, lse).copy_(own_lse)
        kind_call.finish(o, lse)
        return o, lse, parts

    def gradients_by_formula(
        self, kind_call: KindCall, d_o: Tensor, rows: Saved, needs: Sequence[bool], is_part: bool
    ) -> list[Tensor]:
        """The gradients that are needed, in the order of the inputs. ``is_part``: as ``Engine.gradients`` says."""
        call, inputs = kind_call.call, kind_call.tensors[: self.signature.inputs]
        whole = (rows[1], rows[2]) if is_part and not self.kind.by_sequence else None
        dtype = type_of_sums(inputs[0].dtype)
        sums = [
            torch.zeros(x.shape, dtype=dtype, device=call.device) if need else None
            for x, need in zip(inputs, needs, strict=True)
        ]
        with deterministic_algorithms(call.deterministic), autograd_inside():
            for problem, view in self.problems(kind_call):
                arriving = view(Place.QUERIES, d_o), view(Place.SUMS, rows[0])
                gradients = tiled.backward(problem, *arriving, needs, whole)
                for n, (total, gradient) in enumerate(zip(sums, gradients, strict=True)):
                    if total is not None and gradient is not None:
                        part = view(_PLACES[n] if n < 3 else Place.WHOLE, total)
                        part.copy_(gradient) if n < 3 else part.add_(gradient)
        found = []
        for n, (total, like) in enumerate(zip(sums, inputs, strict=True)):
            if total is not None:
                own = total.to(like.device, type_of_sums(like.dtype) if n > 2 and is_part else like.dtype)
                found.append(laid(own, call.gradients[n]) if n < 3 else own)
        return found

    def problems(self, kind_call: KindCall, most: float = math.inf) -> Iterator[tuple[tiled.Problem, View]]:
        """The dense problems of a call, each with its view of the call's tensors.

        A slice of a problem has so many pairs at ``most``. An engine without ``pairs`` does not slice.
        """
        if kind_call.call.threads != torch.get_num_threads():
            torch.set_num_threads(1)  # in a forked child, where PyTorch's own threads are missing just the same
        captured = self._captured(kind_call.call, kind_call.tensors)
        check_selection(self.spec, captured.tensors, kind_call.call.sizes)
        sequences = PerSequence(self.spec, kind_call, captured)
        tensors = {declared.name: x for declared, x in zip(self.spec.tensors, captured.tensors, strict=True)}
        for number, shard, rows, view in kind_call.problems(self.spec):
            each = zip(self.spec.params, sequences.params_of(number), captured.given, strict=True)
            problem = tiled.Problem(
                spec=self.spec,
                q=rows[0],
                k=rows[1],
                v=rows[2],
                tensors=tensors,
                params={param.name: value if x is None else x for param, value, x in each},
                shard=shard,
                dropout=sequences.dropout_of(number),
                pairs=None if self.pairs is None else int(min(self.pairs, most)),
            )
            yield problem, view

    @functools.cached_property
    def program(self) -> Program:
        """The program from all of the op's tensors to o and lse, of which derivatives are made."""
        return tiled.program_of(self.spec, self.signature.tensor_arguments)

    @functools.cached_property
    def forward_mode(self) -> ForwardMode:
        """The kernels of tangents."""
        return ForwardMode(self.spec)

    @property
    def derives(self) -> str:
        """How programs run without kernels, in words."""
        if self.pairs is None:
            return "the dense formula by PyTorch's operators, matrices of all pairs"
        pairs = min(self.pairs, tiled.DERIVATIVE_PAIRS)
        return f"tiled path by PyTorch's operators, slices of {pairs:,} pairs; linear memory"

    @property
    def tangents(self) -> str:
        """What computes tangents, in words."""
        return self._said(0, "a kernel of forward mode", "there is no kernel of forward mode for it")

    @property
    def tangent_gradients(self) -> str:
        """What computes gradients of gradients and of tangents, and tangents of gradients, in words."""
        kernels = "kernels of forward mode and of its backward pass"
        return self._said(1, kernels, "there is no kernel of it")

    def _said(self, which: int, kernels: str, none: str) -> str:
        kernels_of = {device.upper(): takes_tangents(provider)[which] for device, provider in self.kernels.items()}
        said = [f"on {device} {what}" for device, what in kernels_of.items() if what]
        if not said:
            return self.derives if self.pairs is None else f"{self.derives}; {none}"
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
            kind_call = self._kind_call(tensors, rest, derives=True)
            for problem, view in self.problems(kind_call, tiled.DERIVATIVE_PAIRS):
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

    def attend_tangents(self, tensors: Tensors, tangents: Sequence[Tensor | None], rest: Rest) -> Tangents | None:
        """``o``, ``lse``, its parts, and the tangents, by one kernel; None where none takes the call."""
        if self.kind is not DENSE or all(x is None for x in tangents[: self.signature.inputs]):
            return None
        kind_call = self._kind_call(tensors, rest)
        call = kind_call.call
        kernel = None if call.kernel is None or call.is_empty else _taking(call.kernel, FORWARD_MODE, tensors[0])
        if kernel is None:
            return None
        problem, _ = next(self.problems(kind_call))
        moves = tangents[: self.signature.inputs]
        return self.forward_mode.run(kernel, as_kernels_read(problem), moves, deterministic=rest[1], keeps_o=True)

    def _kernels_of_tangents(self, problem: tiled.Problem, rest: Rest) -> KernelsOfTangents | None:
        """The kernels of forward mode that take a problem, if there are any."""
        q = problem.q
        kernel = self.checker.dense_kernel(q, problem.v) if q.dtype in ELEMENTS else None
        forward = None if kernel is None else _taking(kernel, FORWARD_MODE, q)
        if kernel is None or forward is None:
            return None
        backward = functools.partial(_taking, kernel, FORWARD_MODE_BACKWARD, q)
        return KernelsOfTangents(self.forward_mode, kernel, forward, backward, rest[1])


def _taking(kernel: Kernel, kind: Kind, q: Tensor) -> Kernel | None:
    """The kernel of forward mode, or of its backward pass, if there is one that takes the type of q."""
    found = kernel.of(kind)
    return found if found is not None and ELEMENTS.get(q.dtype) in found.elements else None


def _zeros(likes: Sequence[tuple[Sequence[int], Any]], dtype: torch.dtype, values: Sequence[Any]) -> list[Tensor]:
    """Zeros to add a program's outputs up in.

    They are made of the program's last input, a tangent or an arriving gradient: torch.func.linearize takes tensors
    that follow from primals alone for constants, and would lose what is written to them.
    """
    last = next(x for x in reversed(values) if isinstance(x, Tensor))
    return [last.new_zeros(shape, dtype=dtype, device=values[0].device) for shape, _ in likes]


def autograd_inside() -> contextlib.AbstractContextManager[None]:
    """Lets the reference use autograd inside an operator, where the dispatcher has left autograd behind."""
    exclude = torch._C._dispatch_tls_local_exclude_set()
    for key in ("AutogradFunctionality", "AutogradOther", "AutogradNestedTensor"):
        exclude = exclude.remove(getattr(torch._C.DispatchKey, key))
    include = torch._C._dispatch_tls_local_include_set()
    guard: contextlib.AbstractContextManager[None] = torch._C._ForceDispatchKeyGuard(include, exclude)
    return guard


@contextlib.contextmanager
def deterministic_algorithms(wanted: bool) -> Iterator[None]:
    """PyTorch's deterministic algorithms for the reference, which gathers and scatters by its operators."""
    before = torch.are_deterministic_algorithms_enabled()
    if before or not wanted:
        yield
        return
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)
