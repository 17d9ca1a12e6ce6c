"""Derivatives of any order and both modes, as programs over slices.

In: a function of one slice of a problem, and its inputs. Out: what a ``Program`` makes of it: vector-Jacobian products,
Jacobian-vector products, and these of one another. Every input and output has a ``Place``, which says what of it
belongs to a slice; derivatives have the places of what they are derivatives of, so that a derivative is a function of
slices again, whatever was differentiated before. Nothing here knows what is differentiated.

    attention                   q, k, v, …  →  o, lse
    .reverse((0, 2), (0,))      q, k, v, …, d_o  →  dq, dv
    .forward((1,))              q, k, v, …, d_o, t_k  →  the tangents of dq and dv

Reverse steps are by autograd. The first forward step is by dual numbers; PyTorch has one level of these, so that
further ones differentiate a reverse step, which is linear in what arrives, by what arrives.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad


class Place(Enum):
    """How a tensor is divided into slices: by rows like q, by rows like k, by sums of rows like lse, or not at all."""

    QUERIES = "queries"
    KEYS = "keys"
    SUMS = "sums"
    WHOLE = "whole"


@dataclass(frozen=True)
class Reverse:
    """A reverse step: gradients of the inputs ``wanted``, from gradients of the outputs ``arriving``."""

    wanted: tuple[int, ...]
    arriving: tuple[int, ...]


@dataclass(frozen=True)
class Forward:
    """A forward step: tangents of all outputs, from tangents of the inputs ``moving``."""

    moving: tuple[int, ...]


class Of(Enum):
    """The input, tangent of an input, or arriving gradient by which an output of ``TangentGradient`` differentiates."""

    INPUT = "input"
    TANGENT = "tangent"
    ARRIVING = "arriving"


@dataclass(frozen=True)
class TangentGradient:
    """Second derivatives as the gradient of a tangent: of Σ arriving · t(output), for inputs with tangents.

    The gradient of a gradient in directions gg is of this form, as Σ gg · gradient = Σ arriving · t(output) where gg
    are the tangents. So is the tangent of a gradient; arriving gradients may have tangents there, whose own gradient is
    added. ``moving`` and ``arriving`` are the indices, among the values, of the tangents of inputs and of the arriving
    gradients; ``more`` those of the tangents of the latter. ``outputs``: what each output is the gradient of, with its
    number.
    """

    moving: Mapping[int, int]
    arriving: Mapping[int, int]
    outputs: tuple[tuple[Of, int], ...]
    more: Mapping[int, int] = field(default_factory=dict)


# The inputs of a slice; None where a call leaves one out, and numbers that nobody differentiates by.
Values = Sequence[Any]
Function = Callable[[Values], tuple[Tensor, ...]]


@dataclass(frozen=True)
class Program:
    """A function of slices with these inputs and outputs, differentiated by ``steps``, the first one first."""

    inputs: tuple[Place, ...]
    outputs: tuple[Place, ...]
    steps: tuple[Reverse | Forward, ...] = ()

    def reverse(self, wanted: Sequence[int], arriving: Sequence[int]) -> Program:
        """The vector-Jacobian product: from the inputs and arriving gradients to the gradients of ``wanted``."""
        return Program(self.inputs, self.outputs, (*self.steps, Reverse(tuple(wanted), tuple(arriving))))

    def forward(self, moving: Sequence[int]) -> Program:
        """The Jacobian-vector product: from the inputs and tangents of ``moving`` to tangents of the outputs."""
        return Program(self.inputs, self.outputs, (*self.steps, Forward(tuple(moving))))

    @property
    def moved(self) -> tuple[int, ...] | None:
        """The inputs with tangents, if the program is forward mode of the undifferentiated function; else None."""
        match self.steps:
            case (Forward(moving=moving),):
                return moving
        return None

    @property
    def gradient_of_tangent(self) -> TangentGradient | None:
        """The program as the gradient of a tangent, if its two steps are of that form; else None."""
        count = len(self.inputs)

        def of(n: int, behind: Of, names: Sequence[int]) -> tuple[Of, int]:
            return (Of.INPUT, n) if n < count else (behind, names[n - count])

        def places(names: Sequence[int], first: int) -> dict[int, int]:
            return {name: first + n for n, name in enumerate(names)}

        match self.steps:
            case (Reverse(wanted=first, arriving=arriving), Reverse(wanted=wanted, arriving=given)):
                moving = places([first[n] for n in given], count + len(arriving))
                outputs = tuple(of(n, Of.ARRIVING, arriving) for n in wanted)
                return TangentGradient(moving, places(arriving, count), outputs)
            case (Forward(moving=moves), Reverse(wanted=wanted, arriving=arriving)):
                outputs = tuple(of(n, Of.TANGENT, moves) for n in wanted)
                return TangentGradient(places(moves, count), places(arriving, count + len(moves)), outputs)
            case (Reverse(wanted=first, arriving=arriving), Forward(moving=moves)):
                at = places(moves, count + len(arriving))
                moving = {n: place for n, place in at.items() if n < count}
                more = {arriving[n - count]: place for n, place in at.items() if n >= count}
                return TangentGradient(moving, places(arriving, count), tuple((Of.INPUT, n) for n in first), more)
        return None

    def taken(self, of_inputs: Sequence[Any], of_outputs: Sequence[Any]) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        """The inputs and outputs of the program, from those of the undifferentiated function."""
        ins, outs = tuple(of_inputs), tuple(of_outputs)
        for step in self.steps:
            if isinstance(step, Reverse):
                ins, outs = (*ins, *(outs[n] for n in step.arriving)), tuple(ins[n] for n in step.wanted)
            else:
                ins = (*ins, *(ins[n] for n in step.moving))
        return ins, outs

    @property
    def places(self) -> tuple[tuple[Place, ...], tuple[Place, ...]]:
        return self.taken(self.inputs, self.outputs)

    def run(self, function: Function, values: Values) -> tuple[Tensor, ...]:
        """The outputs for one slice; ``function`` is the undifferentiated function."""
        return _run(self.steps, function, values)


def _run(steps: tuple[Reverse | Forward, ...], function: Function, values: Values) -> tuple[Tensor, ...]:
    if not steps:
        return function(values)
    *before, step = steps
    below = tuple(before)
    more = len(step.arriving if isinstance(step, Reverse) else step.moving)
    own, given = list(values[: len(values) - more]), values[len(values) - more :]
    if isinstance(step, Reverse):
        return _reverse(below, step, function, own, given)
    if any(isinstance(each, Forward) for each in below):
        return _forward_by_reverse(below, step, function, own, given)
    return _forward(below, step, function, own, given)


def _reverse(
    below: tuple[Reverse | Forward, ...], step: Reverse, function: Function, own: list[Any], arriving: Values
) -> tuple[Tensor, ...]:
    is_watched = _is_watched(own, arriving)
    for n in step.wanted:
        own[n] = _leaf(own[n])
    with torch.enable_grad():
        outputs = _run(below, function, own)
        reached = [(outputs[n], x) for n, x in zip(step.arriving, arriving, strict=True) if outputs[n].requires_grad]
        wanted = [own[n] for n in step.wanted]
        if not reached:
            return tuple(torch.zeros_like(x) for x in wanted)
        ends, gradients = zip(*reached, strict=True)
        found: tuple[Tensor, ...] = torch.autograd.grad(
            ends, wanted, gradients, create_graph=is_watched, materialize_grads=True
        )
    return found


def _forward(
    below: tuple[Reverse | Forward, ...], step: Forward, function: Function, own: list[Any], tangents: Values
) -> tuple[Tensor, ...]:
    with _dual_level():
        for n, tangent in zip(step.moving, tangents, strict=True):
            # PyTorch copies a tangent to the layout of its primal, which has to be one that can be written to.
            own[n] = forward_ad.make_dual(own[n].contiguous(), tangent)  # type: ignore[no-untyped-call]
        outputs = _run(below, function, own)
        found = [forward_ad.unpack_dual(x) for x in outputs]  # type: ignore[no-untyped-call]
    return tuple(torch.zeros_like(x.primal) if x.tangent is None else x.tangent for x in found)


def _forward_by_reverse(
    below: tuple[Reverse | Forward, ...], step: Forward, function: Function, own: list[Any], tangents: Values
) -> tuple[Tensor, ...]:
    is_watched = _is_watched(own, tangents)
    for n in step.moving:
        own[n] = _leaf(own[n])
    with torch.enable_grad():
        outputs = _run(below, function, own)
        reached = [x for x in outputs if x.requires_grad]
        arriving = [torch.zeros_like(x).requires_grad_() for x in reached]
        tangents_of: list[Tensor | None] = [None] * len(reached)
        if reached:
            moving = [own[n] for n in step.moving]
            gradients = torch.autograd.grad(reached, moving, arriving, create_graph=True, materialize_grads=True)
            linear = [(x, t) for x, t in zip(gradients, tangents, strict=True) if x.requires_grad]
            if linear:
                ends, moves = zip(*linear, strict=True)
                tangents_of = list(
                    torch.autograd.grad(ends, arriving, moves, create_graph=is_watched, allow_unused=True)
                )
    each = iter(tangents_of)
    found = [next(each) if x.requires_grad else None for x in outputs]
    return tuple(torch.zeros_like(x) if t is None else t for x, t in zip(outputs, found, strict=True))


def _is_watched(*values: Values) -> bool:
    """Whether an outer step differentiates by any of these tensors."""
    return any(isinstance(x, Tensor) and x.requires_grad for each in values for x in each)


def _leaf(x: Tensor) -> Tensor:
    """A leaf of autograd; ``x`` itself where an outer step differentiates by it, too. Tangents are kept."""
    if x.requires_grad:
        return x
    with torch.no_grad():
        return x.view_as(x).requires_grad_()


@contextlib.contextmanager
def _dual_level() -> Iterator[None]:
    """The level of dual numbers, an open one if there is any: PyTorch has only one."""
    with forward_ad._set_fwd_grad_enabled(True):
        if forward_ad._current_level >= 0:
            yield
        else:
            with forward_ad.dual_level():
                yield
