"""Derivatives of an op's derivatives, for autograd and torch.func: of any order, of both modes, in linear memory.

In: a registered op. Out: autograd functions. The op's own forward and backward passes are its kernels'; whatever else
is asked for (tangents, derivatives of gradients, and so on) is a ``Program`` over slices, which runs on any device in
memory linear in the lengths. A ``Derivative`` differentiates into another one, so that orders and modes mix freely.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch._compile import _disable_dynamo
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import get_proxy_mode

from flashgen.op.call import Rest
from flashgen.op.mapping import by_samples, folds, has_samples, mapped
from flashgen.op.plain import refuse_distributed
from flashgen.op.registered import Registered
from flashgen.reference.programs import Program


# Dynamo would trace into the formula, and drop tangents of what it compiles. torch.compiler.disable would import it
# here and not when it is called.
@_disable_dynamo
def _apply(how: tuple[Registered, Program, Rest], values: Sequence[Any]) -> Any:
    return Derivative.apply(how, *values)  # type: ignore[no-untyped-call]


def derive(op: Registered, program: Program, values: Sequence[Any], rest: Rest) -> tuple[Tensor, ...]:
    """The outputs of a program of ``op.engine``, differentiable any number of times. Refuses DTensors."""
    refuse_distributed("derivatives of gradients, and tangents,", values)
    if has_samples(values):
        return by_samples(lambda *own: derive(op, program, own, rest), values)
    found: tuple[Tensor, ...] = _apply((op, program, rest), values)
    return found


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


def gradients_of(
    op: Registered,
    program: Program,
    values: Sequence[Any],
    arriving: Sequence[Tensor | None],
    needs: Sequence[bool],
    rest: Rest,
) -> list[Tensor | None]:
    """The gradient of each of a program's inputs that needs one, by those of its outputs."""
    wanted = [n for n, need in enumerate(needs) if need]
    given = [n for n, x in enumerate(arriving) if x is not None]
    found: list[Tensor | None] = [None] * len(needs)
    if wanted and given:
        more = (arriving[n] for n in given)
        for n, x in zip(wanted, derive(op, program.reverse(wanted, given), (*values, *more), rest), strict=True):
            found[n] = x
    return found


class Derivative(torch.autograd.Function):
    """A program. Arguments: the op, the program and the call's numbers, as one, and the program's inputs."""

    @staticmethod
    def forward(how: tuple[Registered, Program, Rest], *values: Any) -> tuple[Tensor, ...]:
        op, program, rest = how
        if any(isinstance(x, FakeTensor) for x in values) and get_proxy_mode() is None:
            return tuple(values[0].new_empty(shape, dtype=dtype) for shape, dtype in op.engine.likes(program, values))
        return tuple(op.engine.derive(program, values, rest))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:  # noqa: ARG004
        how, *values = inputs
        ctx.how = how[:3]  # outputs that are known hold this context: with them in it nothing would ever be freed
        ctx.save_for_backward(*values)
        ctx.save_for_forward(*values)
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, *arriving: Tensor | None) -> Any:
        op, program, rest = ctx.how
        return (None, *gradients_of(op, program, ctx.saved_tensors, arriving, ctx.needs_input_grad[1:], rest))

    @staticmethod
    def jvp(ctx: Any, _: None, *tangents: Tensor | None) -> Any:
        op, program, rest = ctx.how
        return tangents_of(op, program, ctx.saved_tensors, tangents, rest)

    @staticmethod
    def vmap(info: Any, in_dims: Any, how: tuple[Registered, Program, Rest], *values: Any) -> Any:
        op, program, rest = how[:3]
        tensors = values[: op.signature.tensor_arguments]
        axes = None
        if folds(op.batch, op.signature, tensors, rest):
            axes = program.taken(op.batch.inputs or (), op.batch.outputs[: len(program.outputs)])
        return mapped(lambda *own: derive(op, program, own, rest), info, in_dims[1:], values, axes)


class Known(Derivative):
    """The same of outputs that have been computed: they stand behind the rest."""

    @staticmethod
    def forward(how: tuple[Registered, Program, Rest, tuple[Tensor, ...]], *_: Any) -> tuple[Tensor, ...]:  # type: ignore[override]
        return how[3]


def known(
    op: Registered, program: Program, values: Sequence[Any], rest: Rest, outputs: tuple[Tensor, ...]
) -> tuple[Tensor, ...]:
    """The outputs of a program, differentiable any number of times."""
    found: tuple[Tensor, ...] = Known.apply((op, program, rest, outputs), *values)  # type: ignore[no-untyped-call]
    return found


class AttentionBackward(torch.autograd.Function):
    """The backward operator, whose derivatives are programs.

    Arguments: the op, what is no tensor, and which gradients are needed, as one; d_o, then d_lse, o, lse and its parts
    where there is an lse; the operator's tensors. o, lse and its parts follow from the tensors, so that derivatives by
    these hold all there is.
    """

    @staticmethod
    def forward(how: tuple[Registered, Rest, Sequence[bool]], *args: Any) -> tuple[Tensor, ...]:
        op, rest, needs = how
        return tuple(op.backward_below_autograd(*args, *rest[0], rest[1], needs))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:  # noqa: ARG004
        ctx.how, *args = inputs
        ctx.save_for_backward(*args)
        ctx.save_for_forward(*args)
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, *arriving: Tensor | None) -> Any:
        op, rest, needs = ctx.how
        program, order = _of_gradients(op, needs, ctx.saved_tensors)
        asked = ctx.needs_input_grad[1:]
        values = [ctx.saved_tensors[n] for n in order]
        by_value = gradients_of(op, program, values, arriving, [asked[n] for n in order], rest)
        found: list[Tensor | None] = [None] * len(asked)
        for n, x in zip(order, by_value, strict=True):
            found[n] = x
        return (None, *found)

    @staticmethod
    def jvp(ctx: Any, _: None, *tangents: Tensor | None) -> Any:
        op, rest, needs = ctx.how
        saved = ctx.saved_tensors
        program, order = _of_gradients(op, needs, saved)
        return tangents_of(op, program, [saved[n] for n in order], [tangents[n] for n in order], rest)

    @staticmethod
    def vmap(info: Any, in_dims: Any, how: tuple[Registered, Rest, Sequence[bool]], *args: Any) -> Any:
        op, rest, needs = how
        first = len(args) - op.signature.tensor_arguments
        axes = None
        if op.batch.inputs is not None and folds(op.batch, op.signature, args[first:], rest):
            wanted = [axis for axis, need in zip(op.batch.inputs, needs, strict=False) if need]
            axes = ((*(0,) * first, *op.batch.inputs), wanted)

        def call(*own: Any) -> tuple[Tensor, ...]:
            found: tuple[Tensor, ...] = AttentionBackward.apply(how, *own)  # type: ignore[no-untyped-call]
            return found

        return mapped(call, info, in_dims[1:], args, axes)


def _of_gradients(op: Registered, needs: Sequence[bool], args: Sequence[Any]) -> tuple[Program, list[int]]:
    """What the backward operator computes, as a program, and which of the operator's arguments are its inputs."""
    first = len(args) - op.signature.tensor_arguments
    arriving = [n for n in range(min(first, 2)) if args[n] is not None]
    wanted = [n for n, need in enumerate(needs) if need]
    return op.engine.program.reverse(wanted, arriving), [*range(first, len(args)), *arriving]
