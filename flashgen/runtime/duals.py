"""A call of tensors with tangents: one kernel gives o, lse and what both change by.

In: an op, the tensors of a call, some of them dual. Out: o and lse, dual; None where a call is not as plain as that,
and is left to the op's autograd functions, which compute tangents apart (``derivatives.py``). Those of
``torch.func.jvp`` are of one level above plain tensors: what is computed below it is lifted.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, is_grad_enabled
from torch._C import _is_any_autocast_enabled
from torch._C._functorch import TransformType, _unwrap_for_grad, _wrap_for_grad, get_interpreter_stack
from torch._functorch.pyfunctorch import retrieve_current_functorch_interpreter
from torch.autograd import forward_ad

from flashgen.runtime.call import Rest
from flashgen.runtime.derivatives import known
from flashgen.runtime.plain import lies_in_memory, with_memory

if TYPE_CHECKING:
    from flashgen.runtime.registration import Registered

# ``Attention.apply`` of an op, what computes o, lse and its parts, and the rest of a call.
Apply = Callable[..., Any]


def attend(op: Registered, tensors: Sequence[Any], rest: Rest, apply: Apply) -> tuple[Tensor, Tensor | None] | None:
    """o and lse (None: there is none) of dual tensors; None where others have to compute them."""
    if _is_any_autocast_enabled():
        return None
    stack = get_interpreter_stack() or []
    if len(stack) > 1 or any(each.key() != TransformType.Jvp for each in stack):
        return None
    interpreter = retrieve_current_functorch_interpreter() if stack else None
    with forward_ad._set_fwd_grad_enabled(True):
        pairs = [_unpacked(x) for x in tensors]
    if all(tangent is None for _, tangent in pairs):
        return None
    own, tangents = ([_below(interpreter, x) for x in each] for each in zip(*pairs, strict=True))
    with contextlib.nullcontext() if interpreter is None else interpreter.lower():
        found = _attended(op, own, tangents, rest, apply)
    if found is None:
        return None
    o, lse = (_dual(interpreter, *each) for each in found)
    return o, lse


def _attended(
    op: Registered, own: Sequence[Any], tangents: Sequence[Tensor | None], rest: Rest, apply: Apply
) -> tuple[tuple[Tensor, Tensor], tuple[Tensor | None, Tensor | None]] | None:
    """o and lse, each with its tangent, differentiable by all that requires it."""
    own, tangents = with_memory(own), with_memory(tangents)
    if not lies_in_memory((*own, *tangents)):
        return None
    found = op.engine.attend_and_move(own, tangents, rest)
    if found is None or found.o is None:
        return None
    watched = is_grad_enabled() and any(isinstance(x, Tensor) and x.requires_grad for x in (*own, *tangents))
    if not watched:
        return (found.o, found.t_o), (found.lse, found.t_lse)
    attended = (found.o, found.lse, found.lse_parts)
    results = apply((op, lambda *_: attended, rest), *own)
    o, lse = results[:2] if op.signature.has_lse else (results, None)
    moving = [n for n, x in enumerate(tangents) if x is not None]
    values = (*own, *(tangents[n] for n in moving))
    moved = (found.t_o,) if found.t_lse is None else (found.t_o, found.t_lse)
    t_o, *t_lse = known(op, op.engine.program.forward(moving), values, rest, moved)
    return (o, t_o), (lse, t_lse[0] if t_lse else None)


def _unpacked(x: Any) -> tuple[Any, Tensor | None]:
    if not isinstance(x, Tensor) or not x.is_floating_point():
        return x, None
    found = forward_ad.unpack_dual(x)  # type: ignore[no-untyped-call]
    return found.primal, found.tangent


def _below(interpreter: Any, x: Any) -> Any:
    return _unwrap_for_grad(x, interpreter.level()) if interpreter is not None and isinstance(x, Tensor) else x


def _dual(interpreter: Any, x: Tensor | None, tangent: Tensor | None) -> Any:
    if x is None or tangent is None:
        return x
    if interpreter is not None:
        x, tangent = (_wrap_for_grad(each, interpreter.level()) for each in (x, tangent))
    with forward_ad._set_fwd_grad_enabled(True), torch.enable_grad():
        return forward_ad.make_dual(x, tangent)  # type: ignore[no-untyped-call]
