"""Calls of dual tensors: one kernel gives o, lse and their tangents.

In: an op, the tensors of a call, some of them dual. Out: o and lse, dual; None for calls under autocast or under other
transforms, which the op's autograd functions take and compute tangents apart (``derivatives.py``). Under
``torch.func.jvp`` tensors are wrapped once: the kernel runs on the tensors inside, and its results are wrapped again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, is_grad_enabled
from torch._C import _is_any_autocast_enabled
from torch._C._functorch import TransformType, _unwrap_for_grad, _wrap_for_grad, get_interpreter_stack
from torch._compile import _disable_dynamo
from torch._functorch.pyfunctorch import retrieve_current_functorch_interpreter
from torch.autograd import forward_ad

from flashgen.op.call import Rest
from flashgen.op.derivatives import How, differentiable, typed_as
from flashgen.op.registered import Registered
from flashgen.op.tensor_kinds import lies_in_memory, with_memory

# ``Attention.apply``, which makes o and lse differentiable.
Apply = Callable[..., Any]


# Under a transform of a compiled function Dynamo would compile what runs here, and free tensors of which kernels have
# the address alone.
@_disable_dynamo
def attend(op: Registered, tensors: Sequence[Any], rest: Rest, apply: Apply) -> tuple[Tensor, Tensor | None] | None:
    """o and lse (None: there is none) of dual tensors; None where autograd functions have to compute them."""
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
