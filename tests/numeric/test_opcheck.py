"""Every spec of the gallery as a torch operator: schema, autograd registration, fake tensors, AOT dispatch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.library import opcheck

from flashgen.ir.shape import Shape
from flashgen.verification import fitting
from flashgen.verification.inputs import random_inputs
from tests.numeric.helpers import GALLERY, dtypes, operator

# PyTorch warns of its own affairs while it traces.
pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore:.*:UserWarning:torch"),
]

OFFSETS = (0, 0, 0, 0, None, None, None, None, False)


@pytest.mark.parametrize("name", GALLERY)
def test_opcheck(name: str) -> None:
    op = operator(name)
    dtype = getattr(torch, {"f32": "float32", "bf16": "bfloat16", "f16": "float16"}[str(dtypes(op.spec)[0])])
    inputs = random_inputs(op.spec, fitting(op.spec, Shape(2, 4, 2, 12, 12)), op.spec.head_dims[0], dtype)
    arguments: list[Any] = [x.detach().requires_grad_() for x in (inputs.q, inputs.k, inputs.v)]
    arguments += [_leaf(inputs.captured[tensor.name], grad=tensor.grad) for tensor in op.spec.tensors]
    for param in op.spec.params:
        value = inputs.params.get(param.name)
        wanted = torch.float32 if str(param.type) == "float" else torch.int32
        arguments.append(None if value is None else _leaf(torch.as_tensor(value, dtype=wanted), grad=param.grad))
    if op.spec.dropout is not None:
        arguments += [torch.tensor(42), None]
    opcheck(getattr(torch.ops.flashgen, op.name.partition("::")[2]).default, (*arguments, *OFFSETS))


def _leaf(value: Tensor, *, grad: bool) -> Tensor:
    return value.detach().clone().requires_grad_(grad)
