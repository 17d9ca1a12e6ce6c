"""Derivatives of what an engine runs, of any order: by kernels of forward mode, or over slices of the reference.

In: a ``Program`` made of an engine's, and its values. Out: its outputs.
"""

from __future__ import annotations

import dataclasses
import functools
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from flashgen.hosts.kernel import Kernel, KernelProvider, takes_tangents
from flashgen.ir.spec import AttentionSpec, HeadDim
from flashgen.kinds.dense import DENSE
from flashgen.kinds.forward_mode import FORWARD_MODE, FORWARD_MODE_BACKWARD
from flashgen.kinds.kind import Kind
from flashgen.op.by_kernels import KernelsOfTangents
from flashgen.op.call import Call, CallChecker, Rest, Tensors
from flashgen.op.captured import Captured
from flashgen.op.formula import Formula
from flashgen.op.forward_mode import ForwardMode, Moved
from flashgen.op.modes import autograd_inside, deterministic_algorithms
from flashgen.op.signature import ELEMENTS, Signature
from flashgen.op.taken import Taken, View
from flashgen.reference import tiled
from flashgen.reference.programs import Program


class Derives:
    """What an engine knows of derivatives."""

    spec: AttentionSpec
    kernels: Mapping[str, KernelProvider | None]
    kind: Kind
    signature: Signature
    checker: CallChecker
    formula: Formula

    @abstractmethod
    def _taken(
        self, tensors: Tensors, rest: Rest, *, derives: bool = False
    ) -> tuple[Call, Taken | None, Tensors, Rest]: ...

    @abstractmethod
    def _captured(self, call: Call, tensors: Tensors) -> Captured: ...

    def _dense_kernel(self, q: Tensor, v: Tensor) -> Kernel | None:
        provider, head_dim = self.kernels.get(q.device.type), HeadDim(q.shape[-1], v.shape[-1])
        if provider is None or head_dim not in self.spec.head_dims:
            return None
        return provider(head_dim, q.device.index or 0)

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
        if self.formula.pairs is None:
            return "the dense formula by PyTorch's operators, matrices of all pairs"
        pairs = min(self.formula.pairs, tiled.DERIVATIVE_PAIRS)
        return f"tiled path by PyTorch's operators, slices of {pairs:,} pairs; linear memory"

    @property
    def moves(self) -> str:
        """What computes tangents, in words."""
        return self._said(0, "a kernel of forward mode", "there is no kernel of forward mode for it")

    @property
    def moves_backward(self) -> str:
        """What computes gradients of gradients and of tangents, and tangents of gradients, in words."""
        kernels = "kernels of forward mode and of its backward pass"
        return self._said(1, kernels, "there is no kernel of it")

    def _said(self, which: int, kernels: str, none: str) -> str:
        taken = {device.upper(): takes_tangents(provider)[which] for device, provider in self.kernels.items()}
        said = [f"on {device} {what}" for device, what in taken.items() if what]
        if not said:
            return self.derives if self.formula.pairs is None else f"{self.derives}; {none}"
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
        captured = self._captured(call, tensors)
        problem = self.formula.problem(call, call.shard, tensors, captured, captured.params, captured.drawn)
        moves = tangents[: self.signature.inputs]
        return self.forward_mode.run(kernel, problem, moves, deterministic=rest[1], keeps_o=True)

    def _kernels_of_tangents(self, problem: tiled.Problem, rest: Rest) -> KernelsOfTangents | None:
        """Those of forward mode that take a problem, if there are any."""
        q = problem.q
        kernel = self._dense_kernel(q, problem.v) if q.dtype in ELEMENTS else None
        forward = None if kernel is None else _taking(kernel, FORWARD_MODE, q)
        if kernel is None or forward is None:
            return None
        backward = functools.partial(_taking, kernel, FORWARD_MODE_BACKWARD, q)
        return KernelsOfTangents(self.forward_mode, kernel, forward, backward, rest[1])

    def _viewed(self, tensors: Tensors, rest: Rest) -> Iterator[tuple[tiled.Problem, View]]:
        """The problems of a call in the slices that derivatives take; those of the reference are not cut."""
        call, taken, tensors, _ = self._taken(tensors, rest, derives=True)
        for problem, view in self.formula.problems(call, taken, tensors, self._captured(call, tensors)):
            pairs = None if problem.pairs is None else min(problem.pairs, tiled.DERIVATIVE_PAIRS)
            yield dataclasses.replace(problem, pairs=pairs), view


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
