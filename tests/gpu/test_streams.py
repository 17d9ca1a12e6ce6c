"""PyTorch's streams, graphs and devices: an op is one more operator on them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import flashgen
from flashgen.ir.shape import Shape
from tests.gpu.helpers import REPRESENTATIVE, arguments, operator, results

cuda: Any = torch.cuda
SHAPE = Shape(2, 4, 2, 300, 300)


@pytest.mark.parametrize("name", REPRESENTATIVE)
def test_graphs(name: str) -> None:
    """Forward and backward captured once, replayed on other values."""
    op = operator(name)
    inputs, other = (arguments(op, SHAPE, seed=seed) for seed in (0, 1))
    beside = cuda.Stream()
    beside.wait_stream(cuda.current_stream())
    with cuda.stream(beside):
        for _ in range(3):
            results(op, inputs)
    cuda.current_stream().wait_stream(beside)
    graph = cuda.CUDAGraph()
    with cuda.graph(graph):
        captured = results(op, inputs, deterministic=True)
    for own, new in zip((inputs.q, inputs.k, inputs.v), (other.q, other.k, other.v), strict=True):
        own.copy_(new)
    graph.replay()
    torch.cuda.synchronize()
    for replayed, expected in zip(captured, results(op, inputs, deterministic=True), strict=True):
        assert torch.equal(replayed, expected)


def test_a_graph_sees_new_params_and_draws_new_seeds() -> None:
    """Kernels fetch both from the GPU's memory at each replay."""
    op = flashgen.loads(
        "attention drawn { head_dim 64  dtype f16  param ell: f32 = 1.0  score ell * s  mask causal  dropout 0.5 }",
        backend="cuda",
    )
    inputs = arguments(op, SHAPE)
    ell = torch.tensor(1.0, device="cuda")
    seed = torch.tensor(7, device="cuda")

    def run(**options: Any) -> torch.Tensor:
        found: torch.Tensor = op(inputs.q, inputs.k, inputs.v, ell=ell, **options)
        return found

    beside = cuda.Stream()
    beside.wait_stream(cuda.current_stream())
    with cuda.stream(beside):
        run(dropout_p=0.5), run(dropout_p=0.5, seed=seed)
    cuda.current_stream().wait_stream(beside)
    drawn, seeded = cuda.CUDAGraph(), cuda.CUDAGraph()
    with cuda.graph(drawn):
        by_chance = run(dropout_p=0.5)
    with cuda.graph(seeded):
        chosen = run(dropout_p=0.5, seed=seed)
    drawn.replay()
    first = by_chance.clone()
    drawn.replay()
    assert not torch.equal(first, by_chance), "another seed"
    for scale, number in ((1.0, 7), (0.25, 7), (0.25, 8)):
        ell.fill_(scale), seed.fill_(number)
        seeded.replay()
        assert torch.equal(chosen, run(dropout_p=0.5, seed=number)), (scale, number)


def test_autocast() -> None:
    op = operator("causal")
    inputs = arguments(op, SHAPE)
    q, k, v = (x.float().requires_grad_() for x in (inputs.q, inputs.k, inputs.v))
    with torch.autocast("cuda", torch.float16):
        o = op(q, k, v)
        found = torch.autograd.grad(o.sum(), (q, k, v))
    assert o.dtype is torch.float16
    assert all(x.dtype is torch.float32 for x in found)
    assert torch.equal(o, op(q.half(), k.half(), v.half()))


def test_two_streams() -> None:
    """Work follows the stream that is current, and is not in order with another one's."""
    op = operator("causal")
    inputs = [arguments(op, Shape(1, 8, 8, 2000, 2000), seed=seed) for seed in range(2)]
    expected = [results(op, each, deterministic=True) for each in inputs]
    streams = [cuda.Stream() for _ in inputs]
    torch.cuda.synchronize()
    found = []
    for _ in range(5):
        for stream, each in zip(streams, inputs, strict=True):
            with cuda.stream(stream):
                found.append(results(op, each, deterministic=True))
    torch.cuda.synchronize()
    for n, own in enumerate(found):
        assert all(torch.equal(a, b) for a, b in zip(own, expected[n % 2], strict=True))


def test_a_side_stream_waits_for_nothing() -> None:
    """A call does not wait for the device: it returns while an earlier kernel still runs."""
    op = operator("causal")
    inputs = arguments(op, SHAPE)
    results(op, inputs)
    torch.cuda.synchronize()
    cuda._sleep(1_000_000_000)  # about half a second
    done = cuda.Event()
    results(op, inputs)
    done.record()
    assert not done.query()
    torch.cuda.synchronize()


def test_two_devices() -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    op = operator("causal")
    inputs = arguments(op, SHAPE)
    first = results(op, inputs, deterministic=True)
    with torch.cuda.device(0):  # tensors decide, not the current device
        second = results(op, inputs.to("cuda:1"), deterministic=True)
    assert second[0].device == torch.device("cuda:1")
    for a, b in zip(first, second, strict=True):
        torch.testing.assert_close(a.cpu(), b.cpu())


@pytest.mark.filterwarnings("ignore::DeprecationWarning:torch")  # inductor's own, of PyTorch's own
def test_compile() -> None:
    op = operator("causal")
    inputs = arguments(op, SHAPE)

    @torch.compile(fullgraph=True)
    def step(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return op(2 * q, k, v).sin()

    torch.testing.assert_close(
        step(inputs.q, inputs.k, inputs.v), op(2 * inputs.q, inputs.k, inputs.v).sin(), rtol=2e-2, atol=2e-2
    )
