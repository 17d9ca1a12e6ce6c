"""Derivatives of an op's derivatives, for autograd and torch.func: of any order, of both modes, in linear memory.

In: a registered op. Out: autograd functions. The op's own forward and backward passes are its kernels'; whatever else
is asked for (tangents, derivatives of gradients, and so on) is a ``Program`` over slices, which runs on any device in
memory linear in the lengths. A ``Derivative`` differentiates into another one, so that orders and modes mix freely.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._compile import _disable_dynamo
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import get_proxy_mode

from flashgen.op.call import Rest
from flashgen.op.mapping import by_samples, folded_inputs, has_samples, mapped
from flashgen.op.registered import Registered
from flashgen.op.tensor_kinds import refuse_distributed
from flashgen.reference.programs import Program


class How(NamedTuple):
    """What is no tensor of a ``Derivative``: whose program it is, with a call's numbers, and what computes outputs."""

    op: Registered
    program: Program
    rest: Rest
    compute: Callable[..., Sequence[Tensor]]


def derive(op: Registered, program: Program, values: Sequence[Any], rest: Rest) -> tuple[Tensor, ...]:
    """The outputs of a program of ``op.engine``, differentiable any number of times. Refuses DTensors."""
    refuse_distributed("derivatives of gradients, and tangents,", values)
    return differentiable(How(op, program, rest, functools.partial(_by_engine, op, program, rest)), values)


# Dynamo would trace into the formula, and drop tangents of what it compiles. torch.compiler.disable would import it
# here and not when it is called.
@_disable_dynamo
def differentiable(how: How, values: Sequence[Any]) -> tuple[Tensor, ...]:
    """The outputs of a program that ``how`` computes of its inputs, and of what follows from these."""
    if has_samples(values):
        return by_samples(lambda *own: differentiable(how, own), values)
    found: tuple[Tensor, ...] = Derivative.apply(how, *values)  # type: ignore[no-untyped-call]
    return found


def _by_engine(op: Registered, program: Program, rest: Rest, *values: Any) -> list[Tensor]:
    if any(isinstance(x, FakeTensor) for x in values) and get_proxy_mode() is None:
        return [values[0].new_empty(shape, dtype=dtype) for shape, dtype in op.engine.likes(program, values)]
    return op.engine.derive(program, values, rest)


def by_operator(op: Registered, args: Sequence[Any], rest: Rest, needs: Sequence[bool]) -> tuple[Tensor, ...]:
    """What the backward operator gives, differentiable any number of times.

    ``args`` are d_o, then d_lse, o, lse and its parts where there is an lse, and the operator's tensors. o, lse and its
    parts follow from the tensors, so that derivatives by these hold all there is.
    """
    count = len(args)
    first = count - op.signature.tensor_arguments
    arriving = [n for n in range(min(first, 2)) if args[n] is not None]
    program = op.engine.program.reverse([n for n, need in enumerate(needs) if need], arriving)
    order = [*range(first, count), *arriving, *range(2, first)]

    def compute(*values: Any) -> list[Tensor]:
        own = dict(zip(order, values, strict=True))
        return op.backward_below_autograd(*(own.get(n) for n in range(count)), *rest[0], rest[1], needs)

    return differentiable(How(op, program, rest, compute), [args[n] for n in order])


def tangents_of(
    op: Registered, program: Program, values: Sequence[Any], tangents: Sequence[Tensor | None], rest: Rest
) -> tuple[Tensor, ...]:
    """The tangents of a program's outputs, by those of its inputs; a ``jvp`` calls it, where no tangents are seen."""
    moving = [n for n, x in enumerate(tangents) if x is not None]
    with forward_ad._set_fwd_grad_enabled(True):
        tangents = typed_as(values, tangents)
        own = [forward_ad.unpack_dual(x).primal if isinstance(x, Tensor) else x for x in values]  # type: ignore[no-untyped-call]
        return derive(op, program.forward(moving), (*own, *(tangents[n] for n in moving)), rest)


def typed_as(values: Sequence[Any], tangents: Sequence[Tensor | None]) -> list[Tensor | None]:
    """Tangents in the types of what moves by them: PyTorch takes any, and kernels read those of their inputs."""
    return [t if t is None else t.to(x.dtype) for x, t in zip(values, tangents, strict=True)]


class Derivative(torch.autograd.Function):
    """A program. Arguments: a ``How``, the program's inputs, and what its outputs are computed of beside these."""

    @staticmethod
    def forward(how: How, *values: Any) -> tuple[Tensor, ...]:
        return tuple(how.compute(*values))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:  # noqa: ARG004
        how, *values = inputs
        ctx.how = how[:3]  # outputs that are known hold this context: with them in it nothing would ever be freed
        own = values[: len(how.program.places[0])]
        ctx.save_for_backward(*own)
        ctx.save_for_forward(*own)
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, *arriving: Tensor | None) -> Any:
        (op, program, rest), own = ctx.how, ctx.saved_tensors
        wanted = [n for n, need in enumerate(ctx.needs_input_grad[1 : 1 + len(own)]) if need]
        given = [n for n, x in enumerate(arriving) if x is not None]
        found: list[Tensor | None] = [None] * len(ctx.needs_input_grad)
        if wanted and given:
            more = (arriving[n] for n in given)
            for n, x in zip(wanted, derive(op, program.reverse(wanted, given), (*own, *more), rest), strict=True):
                found[1 + n] = x
        return tuple(found)

    @staticmethod
    def jvp(ctx: Any, _: None, *tangents: Tensor | None) -> Any:
        (op, program, rest), own = ctx.how, ctx.saved_tensors
        return tangents_of(op, program, own, tangents[: len(own)], rest)

    @staticmethod
    def vmap(info: Any, in_dims: Any, how: How, *values: Any) -> Any:
        batch, program, axes = how.op.batch, how.program, None
        inputs = folded_inputs(batch, how.op.signature, values, how.rest)
        if inputs is not None:
            ins, outs = program.taken(inputs, batch.outputs[: len(program.outputs)])
            axes = ((*ins, *(0,) * (len(values) - len(ins))), outs)
        return mapped(lambda *own: differentiable(how, own), info, in_dims[1:], values, axes)
