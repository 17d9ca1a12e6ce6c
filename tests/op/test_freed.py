"""What a call made is freed with the last of it, whatever was differentiated: no cycle that Python cannot see."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad

import flashgen

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


def backward(attend: Attend, q: Tensor, k: Tensor, v: Tensor) -> list[Tensor]:
    o = attend(q, k, v)
    o.square().sum().backward()  # type: ignore[no-untyped-call]
    return [o]


def twice(attend: Attend, q: Tensor, k: Tensor, v: Tensor) -> list[Tensor]:
    o = attend(q, k, v)
    found = torch.autograd.grad(o.square().sum(), (q, k, v), create_graph=True)
    more = torch.autograd.grad(found[0].square().sum(), (q, k, v), create_graph=True)
    return [o, *found, *more]


def tangent(attend: Attend, q: Tensor, k: Tensor, v: Tensor) -> list[Tensor]:
    o, moved = torch.func.jvp(lambda q: attend(q, k, v), (q.detach(),), (torch.ones_like(q),))  # type: ignore[misc]
    (o.square().sum() + moved.square().sum()).backward()
    return [o, moved]


def dual(attend: Attend, q: Tensor, k: Tensor, v: Tensor) -> list[Tensor]:
    with forward_ad.dual_level():
        given = forward_ad.make_dual(q, torch.ones_like(q))  # type: ignore[no-untyped-call]
        o, moved = forward_ad.unpack_dual(attend(given, k, v))  # type: ignore[no-untyped-call]
        moved.square().sum().backward()
        return [o, moved]


@pytest.mark.parametrize("backend", ["cpu", "reference"])
@pytest.mark.parametrize("use", [backward, twice, tangent, dual])
def test_nothing_is_left(use: Callable[..., list[Tensor]], backend: str) -> None:
    op = flashgen.loads("attention plain { head_dim 16 mask causal }", backend=backend)
    inputs = [torch.randn(1, 2, 9, 16, requires_grad=True) for _ in range(3)]
    made = [weakref.ref(x) for x in use(op, *inputs)]
    held = [weakref.ref(x.grad) for x in inputs if x.grad is not None]
    del inputs
    gc.collect()
    assert made
    assert not any(each() is not None for each in (*made, *held))
