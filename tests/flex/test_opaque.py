"""What a mod calls whose code nobody sees is refused by its name, wherever it is called and whatever it is called."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from flashgen.diagnostics import SpecError
from flashgen.flex import create_block_mask, flex_attention
from tests.flex.helpers import assert_close, inputs

DEFINED = "flashgen_tests_opaque"
_LIBRARY: Any = torch.library.Library


class Cap(torch.autograd.Function):
    """A tanh, as users write one."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return torch.tanh(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0]


capped: Any = Cap.apply


@pytest.fixture(scope="module")
def operators() -> Iterator[Any]:
    library: Any = _LIBRARY(DEFINED, "DEF")
    library.define("tanh(Tensor x) -> Tensor")
    library.impl("tanh", torch.exp, "CompositeExplicitAutograd")
    yield getattr(torch.ops, DEFINED)
    library._destroy()


def test_functions_of_autograd() -> None:
    q, k, v = inputs()
    message = (
        r"E602.*'Cap' is an autograd\.Function, whose code a kernel cannot call(.|\n)*write its formula in the mod"
    )
    with pytest.raises(SpecError, match=message):
        flex_attention(q, k, v, lambda s, b, h, i, j: 20 * capped(s / 20), backend="reference")
    with torch.no_grad():  # its formula, without the derivative that nobody asks for
        found = flex_attention(q, k, v, lambda s, b, h, i, j: 20 * capped(s / 20), backend="reference")
        right = flex_attention(q, k, v, lambda s, b, h, i, j: 20 * torch.tanh(s / 20), backend="reference")
    assert_close(found, right)


@pytest.mark.parametrize("overload", [False, True])
def test_operators_of_a_library(operators: Any, overload: bool) -> None:
    """Also one that is called like PyTorch's, and means something else."""
    q, k, v = inputs()
    tanh = operators.tanh.default if overload else operators.tanh
    message = f"'{DEFINED}::tanh' is an operator of torch.library, whose code a kernel cannot call"
    with pytest.raises(SpecError, match=message):
        flex_attention(q, k, v, lambda s, b, h, i, j: tanh(s), backend="reference")
    mask = create_block_mask(lambda b, h, i, j: tanh(i) > 0, None, None, 24, 24)
    with pytest.raises(SpecError, match=message):
        flex_attention(q, k, v, None, mask, backend="reference")


def test_operators_of_pytorch_are_functions() -> None:
    q, k, v = inputs()
    found = flex_attention(q, k, v, lambda s, b, h, i, j: torch.ops.aten.tanh(s), backend="reference")
    assert_close(found, flex_attention(q, k, v, lambda s, b, h, i, j: torch.tanh(s), backend="reference"))
