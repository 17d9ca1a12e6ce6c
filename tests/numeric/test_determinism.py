"""deterministic=True, or PyTorch's own switch, makes every gradient bitwise repeatable."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from flashgen.ir.shape import Shape
from flashgen.op.signature import TORCH_DTYPES
from flashgen.verification import fitting, random_inputs
from tests.numeric.helpers import GALLERY, dtypes, operator
from tests.slices import one_of


@pytest.mark.parametrize("name", one_of(5, GALLERY))
def test_every_result_is_repeatable(name: str) -> None:
    runs = [results(name, deterministic=True) for _ in range(4)]
    for other in runs[1:]:
        assert all(torch.equal(first, second) for first, second in zip(runs[0], other, strict=True))


@pytest.fixture
def deterministic_algorithms() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.usefixtures("deterministic_algorithms")
def test_the_switch_of_pytorch_does_the_same() -> None:
    runs = [results("t5") for _ in range(4)]
    for other in runs[1:]:
        assert all(torch.equal(first, second) for first, second in zip(runs[0], other, strict=True))


def results(name: str, **arguments: Any) -> list[Tensor]:
    op = operator(name)
    shape = fitting(op.spec, Shape(2, 4, 2, 150, 150))
    inputs = random_inputs(op.spec, shape, op.spec.head_dims[0], TORCH_DTYPES[dtypes(op.spec)[0]])
    leaves = {key: value.detach().requires_grad_() for key, value in inputs.differentiable(op.spec).items()}
    named = {key: leaves.get(key, value) for key, value in inputs.named.items()}
    o = op(leaves["q"], leaves["k"], leaves["v"], seed=3, **named, **arguments)
    return [o.detach(), *torch.autograd.grad(o, list(leaves.values()), inputs.d_o)]
