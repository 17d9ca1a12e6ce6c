"""Calls over all keys of some heads, whose gradients of captured values are later summed over calls and ranks.

In: an engine and the tensors of its operator; captured values may be float32 where the spec declares 16 bits. Out: o
and lse. Kernels get captured values in the declared types. Gradients of values that came wider stay wide, so that their
sum is rounded once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from flashgen.distributed.exchange import once
from flashgen.op.call import Rest, Tensors
from flashgen.op.engine import Engine
from flashgen.op.signature import Signature
from flashgen.op.tensor_kinds import with_memory


def attend_whole(engine: Engine, tensors: Sequence[Any], rest: Rest) -> tuple[Tensor, Tensor | None]:
    """``o`` and ``lse``, as the engine's operator has them; None for pointwise weights."""
    found: tuple[Tensor, Tensor | None] = _WholeAttention.apply(engine, rest, *tensors)  # type: ignore[no-untyped-call]
    return found


def as_declared(signature: Signature, tensors: Sequence[Any]) -> Tensors:
    """The operator's tensors, with captured values rounded to the types that the spec declares."""
    found = list(with_memory(tensors))
    for n, dtype in enumerate(signature.dtypes, start=3):
        if found[n] is not None and dtype.is_floating_point and dtype.itemsize < found[n].dtype.itemsize == 4:
            found[n] = found[n].to(dtype)
    return tuple(found)


class _WholeAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, engine: Engine, rest: Rest, *tensors: Any) -> tuple[Tensor, Tensor | None]:
        own = as_declared(engine.signature, tensors)
        o, lse, parts = engine.attend(own, rest)
        ctx.engine, ctx.rest = engine, rest
        ctx.is_wide = any(x is not None and x.dtype is not y.dtype for x, y in zip(tensors, own, strict=True))
        ctx.save_for_backward(*own, o, lse, parts)
        ctx.set_materialize_grads(False)
        return o, lse

    @staticmethod
    @once
    def backward(ctx: Any, d_o: Tensor | None, d_lse: Tensor | None = None) -> Any:
        engine: Engine = ctx.engine
        *tensors, o, lse, parts = ctx.saved_tensors
        needs = ctx.needs_input_grad[2 : 2 + engine.signature.inputs]
        d_o, d_lse = with_memory((torch.zeros_like(o) if d_o is None else d_o, d_lse))
        rows = (d_lse, o, lse, parts) if engine.signature.has_lse else (None,) * 4
        found = iter(engine.gradients(d_o, rows, tuple(tensors), ctx.rest, needs, is_part=ctx.is_wide))
        rest = len(tensors) - len(needs)
        return (None, None, *(next(found) if need else None for need in needs), *(None,) * rest)
