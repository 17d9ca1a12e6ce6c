"""A call that is to be explained, not run: what kernels would be told of it.

In: the arguments of an op, of which tensors on ``meta`` and fake ones may hold no numbers. Out: ``Asked``. Checks are
those of a call, and raise what it raises.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from flashgen.hosts.asked import AskedCall
from flashgen.op.call import Call, Rest
from flashgen.op.engine import Engine
from flashgen.op.signature import ELEMENTS, TORCH_DTYPES
from flashgen.plan.arguments import gradient_field, param_field
from flashgen.reference.philox import drop_threshold

_TYPES = {dtype: element for element, dtype in TORCH_DTYPES.items()}


@dataclass(frozen=True)
class Asked:
    """A call to explain, and what hosts are told of it."""

    call: Call
    told: AskedCall


def ask(engine: Engine, tensors: Sequence[Any], rest: Rest, dropout_p: Any, device: torch.device) -> Asked:
    """The call of q, k, v, captured tensors and params; tensors on ``meta`` are taken to be on ``device``."""
    engine, tensors = engine.resolved(tuple(placed(x, device) for x in tensors), rest)
    spec, end = engine.spec, 3 + len(engine.spec.tensors)
    inputs = tensors[:end]
    call = engine.checker.find(inputs, rest)
    given = tensors[end : engine.signature.inputs]
    known = _params(engine, call, given)
    values: dict[str, float] = {"deterministic": float(rest[1]), "element": ELEMENTS.get(inputs[0].dtype, 0)}
    if call.kernel is not None:
        layout = call.kernel.layout
        values |= layout.named([*([0] * layout.varying), *call.settled])
    values |= {param_field(name): value for name, value in known.items()}
    values["dropout_threshold"] = _threshold(engine, call, dropout_p, known)
    wanted = [isinstance(x, Tensor) and x.requires_grad for x in tensors]
    declared = [*((each.name, each.grad) for each in spec.tensors), *((each.name, each.grad) for each in spec.params)]
    for (name, is_learned), asks in zip(declared, wanted[3:], strict=False):
        if is_learned:
            values[gradient_field(name)] = float(asks or not any(wanted))
    told = AskedCall(
        head_dim=call.head_dim,
        element=_TYPES[inputs[0].dtype],
        shard=call.shard,
        sizes=call.sizes,
        index=call.device.index or 0,
        threads=call.threads,
        values=values,
        params=known,
    )
    return Asked(call, told)


def ask_of_cache(
    engine: Engine,
    tensors: Sequence[Any],
    block_table: Tensor | None,
    numbers: Sequence[int | None],
    splits: int,
    device: torch.device,
) -> Asked:
    """The same of a call over a cache, whose ``engine`` this is. ``numbers`` place it in the whole."""
    k = tensors[1]
    if block_table is not None and block_table.dim() != 2:
        raise ValueError(f"'block_table' has shape {list(block_table.shape)}; i32[B, P] is expected")
    columns = 0 if block_table is None else block_table.shape[1]
    rest: Any = (*numbers, k.shape[2] * max(columns, 1), columns, splits), False
    return ask(engine, tensors, rest, 0.0 if engine.signature.has_dropout else None, device)


def placed(x: Any, device: torch.device) -> Any:
    """A tensor without memory on the device, in the place of one on ``meta``."""
    if not isinstance(x, Tensor) or not x.is_meta or isinstance(x, FakeTensor):
        return x
    with FakeTensorMode():
        return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=device)


def _params(engine: Engine, call: Call, given: Sequence[Any]) -> Mapping[str, float]:
    """Those whose numbers lie on the host; the others are known to kernels alone."""
    names = [param.name for param in engine.spec.params]
    holds = [x is None or (x.device.type == "cpu" and not isinstance(x, FakeTensor)) for x in given]
    if all(holds):
        return dict(zip(names, engine.checker.params(call, given), strict=True)) if names else {}
    found = zip(names, given, holds, strict=True)
    return {name: x.item() for name, x, is_known in found if is_known and x is not None}


def _threshold(engine: Engine, call: Call, dropout_p: Any, params: Mapping[str, float]) -> int:
    """As kernels get it; 0 where nothing is dropped."""
    if not engine.signature.has_dropout:
        return 0
    if dropout_p is None:
        if len(params) < len(engine.spec.params):
            return 1  # it may depend on what only kernels know: as if it dropped
        return drop_threshold(engine.checker.drop_probability(call, None, tuple(params.values())))
    return drop_threshold(float(dropout_p))
