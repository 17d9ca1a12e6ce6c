"""Derivatives of an op's derivatives, for autograd and torch.func: of any order, of both modes, in linear memory.

In: a registered op. Out: autograd functions. The op's own forward and backward passes are its kernels'; whatever else
is asked for (tangents, derivatives of gradients, and so on) is a ``Program`` over slices, which runs on any device in
memory linear in the lengths. A ``Derivative`` differentiates into another one, so that orders and modes mix freely. Of
dual tensors one kernel gives o, lse and their tangents (``attend_duals``).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, is_grad_enabled
from torch._C import _is_any_autocast_enabled
from torch._C._functorch import TransformType, _unwrap_for_grad, _wrap_for_grad, get_interpreter_stack
from torch._compile import _disable_dynamo
from torch._functorch.pyfunctorch import retrieve_current_functorch_interpreter
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import get_proxy_mode

from flashgen.op.call import Rest
from flashgen.op.registered import Registered, by_samples, folded_inputs, has_samples, mapped
from flashgen.op.tensor_kinds import lies_in_memory, refuse_distributed, with_memory
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


# ``Attention.apply``, which makes o and lse differentiable.
Apply = Callable[..., Any]


# Under a transform of a compiled function Dynamo would compile what runs here, and free tensors of which kernels have
# the address alone.
@_disable_dynamo
def attend_duals(
    op: Registered, tensors: Sequence[Any], rest: Rest, apply: Apply
) -> tuple[Tensor, Tensor | None] | None:
    """o and lse (None: there is none), dual, of tensors some of which are dual.

    None for calls under autocast or under other transforms, which the op's autograd functions take, and compute
    tangents apart. Under ``torch.func.jvp`` tensors are wrapped once: the kernel runs on the tensors inside, and its
    results are wrapped again.
    """
    if _is_any_autocast_enabled():
        return None
    stack = get_interpreter_stack()
    if stack and (len(stack) > 1 or stack[0].key() != TransformType.Jvp):
        return None
    interpreter = retrieve_current_functorch_interpreter() if stack else None
    own, tangents = _unpacked(tensors)
    if all(tangent is None for tangent in tangents):
        return None
    if interpreter is None:
        found = _attended(op, own, tangents, rest, apply)
    else:
        level = interpreter.level()
        own, tangents = _below(own, level), _below(tangents, level)
        with interpreter.lower():
            found = _attended(op, own, tangents, rest, apply)
    if found is None:
        return None
    if interpreter is not None:
        found = [None if x is None else _wrap_for_grad(x, level) for x in found]
    o, t_o, lse, t_lse = found
    with forward_ad._set_fwd_grad_enabled(True), torch.enable_grad():
        return _dual(o, t_o), lse if t_lse is None else _dual(lse, t_lse)


def _attended(
    op: Registered, own: Sequence[Any], tangents: Sequence[Tensor | None], rest: Rest, apply: Apply
) -> Sequence[Any] | None:
    """o and its tangent, lse and its tangent, differentiable by all tensors that require gradients."""
    own, tangents = with_memory(own), with_memory(typed_as(own, tangents))
    if not lies_in_memory((*own, *tangents)):
        return None
    found = op.engine.attend_tangents(own, tangents, rest)
    if found is None or found.o is None:
        return None
    watched = is_grad_enabled() and any(isinstance(x, Tensor) and x.requires_grad for x in (*own, *tangents))
    if not watched:
        return found.o, found.t_o, found.lse, found.t_lse
    attended = (found.o, found.lse, found.lse_parts)
    results = apply((op, lambda *_: attended, rest, op.signature.has_lse), *own)
    o, lse = results[:2] if op.signature.has_lse else (results, None)
    moving = [n for n, x in enumerate(tangents) if x is not None]
    values = (*own, *(tangents[n] for n in moving))
    moved = (found.t_o,) if found.t_lse is None else (found.t_o, found.t_lse)
    t_o, *t_lse = differentiable(How(op, op.engine.program.forward(moving), rest, lambda *_: moved), values)
    return o, t_o, lse, t_lse[0] if t_lse else None


# As ``forward_ad`` does it, without its checks, which were made when the duals were made.


def _unpacked(tensors: Sequence[Any]) -> tuple[list[Any], list[Tensor | None]]:
    own, level = list(tensors), forward_ad._current_level
    tangents: list[Tensor | None] = [None] * len(own)
    with forward_ad._set_fwd_grad_enabled(True):
        for n, x in enumerate(tensors):
            if isinstance(x, Tensor) and x.is_floating_point():
                own[n], tangents[n] = torch._VF._unpack_dual(x, level=level)
    return own, tangents


def _dual(x: Tensor, tangent: Tensor) -> Any:
    return torch._VF._make_dual(x, tangent, level=forward_ad._current_level)


def _below(tensors: Sequence[Any], level: int) -> list[Any]:
    return [_unwrap_for_grad(x, level) if isinstance(x, Tensor) else x for x in tensors]
