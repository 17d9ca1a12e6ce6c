"""deterministic=True makes every gradient bitwise repeatable, also beside other work on the GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from flashgen.ir.shape import Shape
from tests.gpu.helpers import REPRESENTATIVE, arguments, operator, results

cuda: Any = torch.cuda
REPEATS = 100


@pytest.mark.parametrize("name", REPRESENTATIVE)
def test_a_hundred_repeats_are_equal(name: str) -> None:
    op = operator(name)
    inputs = arguments(op, Shape(2, 4, 2, 700, 700))
    first = results(op, inputs, deterministic=True)
    noise = torch.randn(512, 512, device="cuda")
    beside = cuda.Stream()
    for _ in range(REPEATS):
        with cuda.stream(beside):
            noise = (noise @ noise).clamp(-1, 1)
        again = results(op, inputs, deterministic=True)
        assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))


@pytest.mark.parametrize("name", REPRESENTATIVE)
def test_forward_is_always_repeatable(name: str) -> None:
    op = operator(name)
    inputs = arguments(op, Shape(2, 4, 2, 700, 700))
    first = results(op, inputs)[0]
    assert all(torch.equal(first, results(op, inputs)[0]) for _ in range(10))
