"""Views that PyTorch has only noted down: kernels read memory, so negation, conjugation and zeros are done first."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.op.helpers import CAUSAL, RICH, captured, error, op, qkv, random

BACKENDS = ["cpu", "tiled", "reference", "emulator"]


def negated(x: Tensor) -> Tensor:
    """The same numbers, stored with the other sign."""
    view: Tensor = torch._neg_view(-x)
    assert view.is_neg()
    return view


def imaginary(x: Tensor) -> Tensor:
    """The same numbers, as the imaginary part of a conjugate."""
    view = torch.complex(torch.ones_like(x), -x).conj().imag
    assert view.is_neg()
    return view


def gradients(call: Callable[..., Any], inputs: list[Tensor], **arguments: Any) -> list[Tensor]:
    leaves = [x.detach().requires_grad_() for x in inputs]
    o, lse = call(*leaves, return_lse=True, **arguments)
    return [o.detach(), lse.detach(), *torch.autograd.grad([o.sum(), lse.sum()], leaves)]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("view", [negated, imaginary])
@pytest.mark.parametrize("position", [0, 1, 2])
def test_queries_keys_and_values(backend: str, view: Callable[[Tensor], Tensor], position: int) -> None:
    inputs = [x.detach() for x in qkv(9)]
    expected = gradients(op(CAUSAL, backend), inputs)
    given = list(inputs)
    given[position] = view(inputs[position])
    causal = op(CAUSAL, backend)
    assert torch.equal(causal(*given), expected[0])
    assert all(torch.equal(a, b) for a, b in zip(gradients(causal, given), expected, strict=True))
    run = getattr(torch.ops.flashgen, causal.name.partition("::")[2])
    rest = (0, 0, 0, 0, None, None, None, None, False)
    direct = gradients(lambda *x, return_lse: run(*x, *rest)[:2], given)
    assert all(torch.equal(a, b) for a, b in zip(direct, expected, strict=True))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("view", [negated, imaginary])
def test_arriving_gradients(backend: str, view: Callable[[Tensor], Tensor]) -> None:
    inputs = qkv(9)
    towards = [random(2, 4, 9, 16, seed=7), random(2, 4, 9, seed=8)]
    o, lse = op(CAUSAL, backend)(*inputs, return_lse=True)
    truth = torch.autograd.grad([o, lse], inputs, towards, retain_graph=True)
    found = torch.autograd.grad([o, lse], inputs, [view(x) for x in towards])
    assert all(torch.equal(a, b) for a, b in zip(found, truth, strict=True))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("view", [negated, imaginary])
def test_captured_tensors_and_params(backend: str, view: Callable[[Tensor], Tensor]) -> None:
    inputs, given = [x.detach() for x in qkv(9)], captured(9)
    given |= {"ell": torch.tensor(1.25), "bias": torch.tensor(0.5), "slope": given["slope"].detach()}
    expected = op(RICH, backend)(*inputs, **given)
    for name in ("slope", "ell", "bias"):
        assert torch.equal(op(RICH, backend)(*inputs, **{**given, name: view(given[name])}), expected)
    seed = torch._neg_view(torch.tensor(-given["seed"]))
    assert torch.equal(op(RICH, backend)(*inputs, **{**given, "seed": seed}), expected)


def test_zeros_without_memory(backend: str) -> None:
    inputs = [x.detach() for x in qkv(9)]
    zero = torch._efficientzerotensor(inputs[0].shape)
    assert torch.equal(
        op(CAUSAL, backend)(zero, *inputs[1:]), op(CAUSAL, backend)(torch.zeros(2, 4, 9, 16), *inputs[1:])
    )
    leaves = qkv(9)
    found = torch.autograd.grad(op(CAUSAL, backend)(*leaves), leaves, zero)
    assert all(x.count_nonzero() == 0 for x in found)
    given = captured(9)
    given["slope"] = torch._efficientzerotensor((4,))
    expected = op(RICH, backend)(*inputs, **{**given, "slope": torch.zeros(4)})
    assert torch.equal(op(RICH, backend)(*inputs, **given), expected)


def test_compiled(backend: str) -> None:
    torch._dynamo.reset()
    inputs, causal = [x.detach() for x in qkv(9)], op(CAUSAL, backend)

    @torch.compile(backend="aot_eager", fullgraph=True)
    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        o: Tensor = causal(torch._neg_view(q), k, v)
        return o

    q, k, v = inputs
    # A compiled call keeps what a backward pass would need; without it few rows are summed up in another order.
    assert torch.equal(run(-q, k, v), causal(q, k, v, return_lse=True)[0])
    assert error(run(negated(-q), k, negated(v)), causal(q, k, v)) < 1e-6


def test_of_subclasses_and_after_transforms(backend: str) -> None:
    inputs = [x.detach() for x in qkv(9)]
    given = [negated(inputs[0]), *inputs[1:]]
    found = torch.func.grad(lambda k: op(CAUSAL, backend)(given[0], k, given[2]).sum())(given[1])
    truth = torch.func.grad(lambda k: op(CAUSAL, backend)(inputs[0], k, inputs[2]).sum())(inputs[1])
    assert torch.equal(found, truth)


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_nested_tensors_of_another_layout_are_refused_by_name(backend: str) -> None:
    q = torch.nested.nested_tensor([torch.randn(2, 5, 16), torch.randn(2, 7, 16)])
    for call in (op(CAUSAL, backend), op(CAUSAL, backend).reference):
        with pytest.raises(TypeError, match=r"'q' is a NestedTensor of layout.*layout=torch.jagged"):
            call(q, q, q)


@pytest.mark.parametrize("change", [Tensor.to_sparse, lambda x: x[0, 0].to_sparse_csr(), Tensor.to_mkldnn])
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_other_layouts_are_refused_by_name(backend: str, change: Callable[[Tensor], Tensor]) -> None:
    inputs = [x.detach() for x in qkv(9)]
    op(CAUSAL, backend)(*inputs)
    for position, name in enumerate("qkv"):
        given = list(inputs)
        given[position] = change(inputs[position])
        for call in (op(CAUSAL, backend), op(CAUSAL, backend).reference):
            with pytest.raises(TypeError, match=rf"'{name}' has layout torch\.\w+; a dense tensor"):
                call(*given)


def test_none_is_no_tensor(backend: str) -> None:
    k = qkv(9)[1]
    with pytest.raises(TypeError, match="'q' must be a tensor, not NoneType"):
        op(CAUSAL, backend)(None, k, k)  # type: ignore[call-overload]
