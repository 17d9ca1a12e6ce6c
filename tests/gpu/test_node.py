"""The node of autograd in C++ on a GPU: the very bits of the one in Python, streams, graphs, and the host's time."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import flashgen
from flashgen.op import node
from flashgen.op.engine import Engine
from flashgen.op.op import AttentionOp

cuda: Any = torch.cuda
# Gradients are the same bit by bit where they are asked to be.
SPECS = (
    "head_dim 64 mask causal",
    "head_dim 128",
    "head_dim 64 weights sigmoid(s)",
    "head_dim 128 param scaling: f32 scale scaling mask causal",
)


@pytest.fixture(autouse=True)
def _compiled() -> None:
    node.extension.load()
    assert node.extension.module is not None, node.extension.why_not


def operator(text: str) -> AttentionOp:
    return flashgen.loads(f"attention with_node {{ {text} }}", backend="cuda")


def inputs(op: AttentionOp, n: int = 77, dtype: torch.dtype = torch.bfloat16) -> list[Tensor]:
    generator = torch.Generator("cuda").manual_seed(n)
    shape = (2, 4, n, op.spec.head_dims[0].qk)
    return [torch.randn(shape, generator=generator, device="cuda").to(dtype) for _ in range(4)]


def unexpected(*_: Any) -> None:
    raise AssertionError("Python computed gradients")


def both(op: AttentionOp, x: list[Tensor]) -> tuple[str, list[Tensor]]:
    """Whose node it was, and what it gave."""
    leaves = [each.clone().requires_grad_() for each in x[:3]]
    params: dict[str, Any] = {each.name: 0.3 for each in op.spec.params}
    o = op(*leaves, deterministic=True, **params)
    return type(o.grad_fn).__name__, [o, *torch.autograd.grad(o, leaves, x[3])]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("text", SPECS)
def test_the_same_bits(text: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    op = operator(text)
    for n in (77, 640):
        x = inputs(op, n, dtype)
        first, expected = both(op, x)
        assert first == "AttentionBackward"
        for _ in range(3):  # the second gives the pass of its gradients to C++
            second, found = both(op, x)
            assert second != first
            assert all(map(torch.equal, expected, found))
        turned = [*x[:3], x[3].transpose(1, 2).contiguous().transpose(1, 2)]
        for _ in range(3):
            assert all(map(torch.equal, expected, both(op, turned)[1]))
        with monkeypatch.context() as patch:
            patch.setattr(Engine, "gradients", unexpected)
            for each in (x, turned):
                assert all(map(torch.equal, expected, both(op, each)[1]))


def test_on_another_stream_and_in_a_graph() -> None:
    op = operator(SPECS[0])
    x = inputs(op)
    for _ in range(3):
        _, expected = both(op, x)
    stream = cuda.Stream()
    stream.wait_stream(cuda.current_stream())
    with cuda.stream(stream):
        _, found = both(op, x)
        stream.synchronize()
        assert all(map(torch.equal, expected, found))
        graph = cuda.CUDAGraph()
        with cuda.graph(graph, stream=stream):
            _, found = both(op, x)
    cuda.synchronize()
    for each in found:
        each.detach().zero_()
    graph.replay()
    cuda.synchronize()
    assert all(map(torch.equal, expected, found))
