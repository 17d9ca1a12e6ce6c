"""A call that is to be explained, not run: the arguments that kernels would get.

In: the arguments of an op; tensors on ``meta`` and fake ones hold no numbers. Out: an ``ExplainedCall``. Arguments are
checked as those of a call, with the same errors.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from flashgen.hosts.explained_call import ExplainedCall
from flashgen.op.call import Call, Rest
from flashgen.op.engine import Engine
from flashgen.op.signature import ELEMENTS, TORCH_DTYPES
from flashgen.plan.arguments import gradient_field, param_field
from flashgen.reference.philox import drop_threshold

_TYPES = {dtype: element for element, dtype in TORCH_DTYPES.items()}


def explained_call(
    engine: Engine, tensors: Sequence[Any], rest: Rest, dropout_p: Any, device: torch.device
) -> tuple[Call, ExplainedCall]:
    """The call of q, k, v, captured tensors and params, and its record for hosts. ``device`` stands for ``meta``."""
    tensors = tuple(with_device(x, device) for x in tensors)
    spec, end = engine.spec, 3 + len(engine.spec.tensors)
    inputs = tensors[:end]
    call = engine.checker.find(inputs, rest)
    given = tensors[end : engine.signature.inputs]
    known = _params(engine, call, given)
    values: dict[str, float] = {"deterministic": float(rest[1]), "element": ELEMENTS.get(inputs[0].dtype, 0)}
    if call.kernel is not None:
        layout = call.kernel.layout
        values |= layout.named([*([0] * layout.varying), *call.fixed])
    values |= {param_field(name): value for name, value in known.items()}
    values["dropout_threshold"] = _threshold(engine, call, dropout_p, known)
    wanted = [isinstance(x, Tensor) and x.requires_grad for x in tensors]
    declared = [*((each.name, each.grad) for each in spec.tensors), *((each.name, each.grad) for each in spec.params)]
    for (name, is_learned), asks in zip(declared, wanted[3:], strict=False):
        if is_learned:
            values[gradient_field(name)] = float(asks or not any(wanted))
    return call, ExplainedCall(
        kind=engine.kind,
        head_dim=call.head_dim,
        element=_TYPES[inputs[0].dtype],
        shard=call.shard,
        sizes=call.sizes,
        index=call.device.index or 0,
        threads=call.threads,
        values=values,
        params=known,
    )


def with_device(x: Any, device: torch.device) -> Any:
    """A tensor without memory on the device, in the place of one on ``meta``."""
    if not isinstance(x, Tensor) or not x.is_meta or isinstance(x, FakeTensor):
        return x
    with FakeTensorMode():
        return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=device)


def _params(engine: Engine, call: Call, given: Sequence[Any]) -> Mapping[str, float]:
    """The params whose numbers lie on the host; kernels alone know the others."""
    names = [param.name for param in engine.spec.params]
    holds = [x is None or (x.device.type == "cpu" and not isinstance(x, FakeTensor)) for x in given]
    if all(holds):
        return dict(zip(names, engine.checker.params(call, given), strict=True)) if names else {}
    found = zip(names, given, holds, strict=True)
    return {name: x.item() for name, x, is_known in found if is_known and x is not None}


def _threshold(engine: Engine, call: Call, dropout_p: Any, params: Mapping[str, float]) -> int:
    """The threshold of dropout as kernels get it; 0 where nothing is dropped."""
    if not engine.signature.has_dropout:
        return 0
    if dropout_p is None:
        if len(params) < len(engine.spec.params):
            return 1  # it may depend on what only kernels know: as if it dropped
        return drop_threshold(engine.checker.drop_probability(call, None, tuple(params.values())))
    return drop_threshold(float(dropout_p))
