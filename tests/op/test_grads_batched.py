"""``is_grads_batched`` and ``vectorize=True``: PyTorch's first vmap, which torch.func's is not."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd.functional import hessian, jacobian

import flashgen
from flashgen.op.op import AttentionOp

SPECS = {
    "plain": "attention plain { head_dim 8 }",
    "captured": """attention captured {
        head_dim 8
        tensor bias: f32[H] grad
        score softcap(s, 3.0) + bias[h]
        mask causal
    }""",
    "by entry": "attention by_entry { head_dim 8  score s * (1.0 + 0.1 * b)  mask causal }",
    "dropped": "attention dropped { head_dim 8  dropout 0.3 }",
    "pointwise": "attention pointwise { head_dim 8  weights sigmoid(s) }",
}


def _inputs(op: AttentionOp) -> tuple[tuple[Tensor, Tensor, Tensor], dict[str, Any]]:
    generator = torch.Generator().manual_seed(5)
    q, k, v = (torch.randn(2, 2, 5, 8, generator=generator).requires_grad_() for _ in range(3))
    more: dict[str, Any] = {}
    if op.spec.tensors:
        more["bias"] = torch.randn(2, generator=generator).requires_grad_()
    if op.spec.dropout is not None:
        more["seed"] = 7
    return (q, k, v), more


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_gradients_are_those_of_one_after_the_other(spec: str, backend: str) -> None:
    op = flashgen.loads(SPECS[spec], backend=backend)
    tensors, more = _inputs(op)
    wanted = (*tensors, *(x for x in more.values() if isinstance(x, Tensor)))
    o = op(*tensors, **more)
    arriving = torch.randn(3, *o.shape)
    for create in (False, True):
        found = torch.autograd.grad(o, wanted, arriving, is_grads_batched=True, retain_graph=True, create_graph=create)
        each = [torch.autograd.grad(o, wanted, x, retain_graph=True) for x in arriving]
        for ours, theirs in zip(found, zip(*each, strict=True), strict=True):
            torch.testing.assert_close(ours, torch.stack(theirs))
            assert ours.requires_grad == create


def test_an_lse_may_be_asked_for_as_well() -> None:
    op = flashgen.loads(SPECS["captured"], backend="cpu")
    tensors, more = _inputs(op)
    found = op(*tensors, return_lse=True, **more)
    arriving = [torch.randn(3, *x.shape) for x in found]
    ours = torch.autograd.grad(found, tensors, arriving, is_grads_batched=True, retain_graph=True)
    each = [torch.autograd.grad(found, tensors, [x[n] for x in arriving], retain_graph=True) for n in range(3)]
    for own, theirs in zip(ours, zip(*each, strict=True), strict=True):
        torch.testing.assert_close(own, torch.stack(theirs))


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("strategy", ["reverse-mode", "forward-mode"])
def test_jacobians(spec: str, strategy: str) -> None:
    op = flashgen.loads(SPECS[spec], backend="cpu")
    (q, k, v), more = _inputs(op)
    tensors = tuple(x[:1, :, :3].detach() for x in (q, k, v))

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        found: Tensor = op(q, k, v, **more)
        return found

    found = jacobian(call, tensors, vectorize=True, strategy=strategy)  # type: ignore[no-untyped-call]
    for ours, theirs in zip(found, jacobian(call, tensors), strict=True):  # type: ignore[no-untyped-call]
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("outer", ["reverse-mode", "forward-mode"])
def test_hessians(outer: str) -> None:
    op = flashgen.loads(SPECS["captured"], backend="cpu")
    (q, k, v), more = _inputs(op)
    q, k, v = (x[:1, :, :3].detach() for x in (q, k, v))

    def call(x: Tensor) -> Tensor:
        found: Tensor = op(x, k, v, **more).square().sum()
        return found

    found = hessian(call, q, vectorize=True, outer_jacobian_strategy=outer)  # type: ignore[no-untyped-call]
    torch.testing.assert_close(found, hessian(call, q), rtol=1e-4, atol=1e-5)  # type: ignore[no-untyped-call]


def test_one_within_another_says_what_to_do() -> None:
    op = flashgen.loads(SPECS["plain"], backend="cpu")
    (q, k, v), _ = _inputs(op)
    o = op(q, k, v)

    def outer(arriving: Tensor) -> Tensor:
        (found,) = torch.autograd.grad(o, q, arriving[None], is_grads_batched=True, retain_graph=True)
        return found

    with pytest.raises(NotImplementedError, match=r"use torch\.func\.vmap"):
        torch._vmap_internals._vmap(outer)(torch.randn(3, *o.shape))
