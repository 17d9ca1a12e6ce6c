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
    """What of a tensor belongs to a slice: rows like those of q, like those of k, sums of rows like lse, or all."""

    QUERIES = "queries"
    KEYS = "keys"
    SUMS = "sums"
    WHOLE = "whole"


@dataclass(frozen=True)
class Reverse:
    """Gradients of the inputs ``wanted``, of what arrives at the outputs ``arriving``."""

    wanted: tuple[int, ...]
    arriving: tuple[int, ...]


@dataclass(frozen=True)
class Forward:
    """Tangents of all outputs, of tangents of the inputs ``moving``."""

    moving: tuple[int, ...]


class Of(Enum):
    """What an output of a ``TangentGradient`` belongs to: an input, the tangent of an input, or what arrives."""

    INPUT = "input"
    TANGENT = "tangent"
    ARRIVING = "arriving"


@dataclass(frozen=True)
class TangentGradient:
    """Second order as the gradient of a tangent: of Σ arriving · t(output), as inputs move.

    A gradient's own gradient, in directions gg, is one, as Σ gg · gradient = Σ arriving · t(output) by gg; it moves by
    arriving as t(output). So is the tangent of a gradient, and what arrives may have a tangent there: its own gradient
    is added. ``moving`` and ``arriving`` say where among the values the tangents of inputs lie, by these, and what
    arrives by outputs; ``more`` where the tangents of the latter lie. ``outputs``: what each is of, with its number.
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
        """Its vector-Jacobian product: the inputs, then what arrives, to the gradients of ``wanted``."""
        return Program(self.inputs, self.outputs, (*self.steps, Reverse(tuple(wanted), tuple(arriving))))

    def forward(self, moving: Sequence[int]) -> Program:
        """Its Jacobian-vector product: the inputs, then tangents of ``moving``, to tangents of the outputs."""
        return Program(self.inputs, self.outputs, (*self.steps, Forward(tuple(moving))))

    @property
    def moved(self) -> tuple[int, ...] | None:
        """Where it is forward mode of what nothing else differentiates, the inputs that move; else None."""
        match self.steps:
            case (Forward(moving=moving),):
                return moving
        return None

    @property
    def gradient_of_tangent(self) -> TangentGradient | None:
        """The same program as a gradient of tangents, where its two steps are such; else None."""
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
        """What belongs to all inputs and all outputs, of what belongs to those that nothing differentiates."""
        ins, outs = tuple(of_inputs), tuple(of_outputs)
        for step in self.steps:
            if isinstance(step, Reverse):
                ins, outs = (*ins, *(outs[n] for n in step.arriving)), tuple(ins[n] for n in step.wanted)
            else:
                ins = (*ins, *(ins[n] for n in step.moving))
        return ins, outs

    @property
    def places(self) -> tuple[tuple[Place, ...], tuple[Place, ...]]:
        """The places of all inputs and outputs."""
        return self.taken(self.inputs, self.outputs)

    def run(self, function: Function, values: Values) -> tuple[Tensor, ...]:
        """The outputs of one slice, of which ``function`` is what nothing differentiates."""
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
    """Whether a step above differentiates by any of these."""
    return any(isinstance(x, Tensor) and x.requires_grad for each in values for x in each)


def _leaf(x: Tensor) -> Tensor:
    """Something to differentiate by; ``x`` itself where a step above does so, too. Tangents stay."""
    if x.requires_grad:
        return x
    with torch.no_grad():
        return x.view_as(x).requires_grad_()


@contextlib.contextmanager
def _dual_level() -> Iterator[None]:
    """Dual numbers, on the level that is there, if any: there cannot be another."""
    with forward_ad._set_fwd_grad_enabled(True):
        if forward_ad._current_level >= 0:
            yield
        else:
            with forward_ad.dual_level():
                yield
