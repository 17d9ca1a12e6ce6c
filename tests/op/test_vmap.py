"""Samples of ``torch.vmap``: a part of the batch where they can be, else call by call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from flashgen.op.op import AttentionOp
from tests.op.helpers import CAUSAL, RICH, close, of_rich, op, qkv, random

# PyTorch warns of its own affairs while it traces.
pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore:.*:UserWarning:torch"),
]


def calls_of(attention: AttentionOp, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The batch sizes of the calls of an op from now on."""
    known = attention._registered
    engine, seen = (known.first or known).engine, []  # of several ops of one operator the first one's engine runs
    whole = engine.attend

    def attend(tensors: Any, *others: Any) -> Any:
        seen.append(tensors[0].shape[0])
        return whole(tensors, *others)

    monkeypatch.setattr(engine, "attend", attend)
    return seen


def test_samples_become_a_part_of_the_batch(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    causal, (q, k, v) = op(CAUSAL, backend), (x.detach() for x in qkv(9))
    samples = torch.stack([q, q / 2, q - 1], 1)
    truth = torch.stack([causal(samples[:, n], k, v) for n in range(3)])
    seen = calls_of(causal, monkeypatch)
    close(torch.vmap(causal, (1, None, None))(samples, k, v), truth)
    assert seen == [6]
    o, lse = torch.vmap(lambda x: causal(x, k, v, return_lse=True), 1, (0, 1))(samples)
    close(o, truth)
    assert lse.shape == (2, 3, 4, 9)
    seen.clear()
    close(torch.vmap(causal, (1, None, None), chunk_size=2)(samples, k, v), truth)
    assert seen == [4, 2]


PER_SAMPLE = """attention per_sample {{ head_dim 16  tensor bias: f32[{shape}] grad  tensor doc: i32[B, Nk]
    score s + bias[{index}]  mask doc[b, i] == doc[b, j] }}"""


@pytest.mark.parametrize(
    ("shape", "index", "calls"),
    [("B, H", "b, h", [6]), ("H", "h", [2, 2, 2]), ("B, H", "0, h", [2, 2, 2]), ("B, H", "b * 1 + 0, h", [6])],
)
def test_captured_tensors_of_each_sample(
    shape: str, index: str, calls: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    attention = op(PER_SAMPLE.format(shape=shape, index=index), "tiled")
    q, k, v = (x.detach() for x in qkv(9))
    bias = random(3, *((2, 4) if "B" in shape else (4,)), seed=4)
    doc = (
        torch.arange(9, dtype=torch.int32)
        .expand(3, 2, 9)
        .div(torch.tensor([2, 3, 4]).view(3, 1, 1), rounding_mode="floor")
        .int()
    )

    def loss(x: Tensor, y: Tensor, ids: Tensor) -> Tensor:
        return attention(x, k, v, bias=y, doc=ids).square().sum()

    samples = torch.stack([q, q / 2, q - 1])
    both = torch.func.grad(loss, argnums=(0, 1))
    each = [both(samples[n], bias[n], doc[n]) for n in range(3)]
    seen = calls_of(attention, monkeypatch)
    found = torch.vmap(both)(samples, bias, doc)
    assert seen == calls
    for k_, x in enumerate(found):
        close(x, torch.stack([one[k_] for one in each]))
    # Of what no sample has for itself, each has a gradient for itself.
    found = torch.vmap(both, (0, None, None))(samples, bias[0], doc[0])
    each = [both(samples[n], bias[0], doc[0]) for n in range(3)]
    for k_, x in enumerate(found):
        close(x, torch.stack([one[k_] for one in each]))


@pytest.mark.parametrize("shape", ["B, H", "H"], ids=["a part of the batch", "a loop"])
def test_no_samples_have_empty_results(shape: str, backend: str) -> None:
    attention = op(PER_SAMPLE.format(shape=shape, index="b, h" if "B" in shape else "h"), backend)
    q, k, v = (x.detach() for x in qkv(9))
    bias, doc = random(*((2, 4) if "B" in shape else (4,)), seed=4), torch.zeros(2, 9, dtype=torch.int32)
    none = [x.new_zeros((0, *x.shape)) for x in (q, bias, doc)]

    def attend(x: Tensor, y: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
        found: tuple[Tensor, Tensor] = attention(x, k, v, bias=y, doc=ids, return_lse=True)
        return found

    def loss(*each: Tensor) -> Tensor:
        return attend(*each)[0].square().sum()

    for o, lse in (torch.vmap(attend)(*none), torch.vmap(attend, (2, 0, 0))(none[0].movedim(0, 2), *none[1:])):
        assert (o.shape, lse.shape) == ((0, 2, 4, 9, 16), (0, 2, 4, 9))
    by_sample = torch.vmap(torch.func.grad(loss, argnums=(0, 1)))(*none)
    assert [x.shape for x in by_sample] == [x.shape for x in none[:2]]
    leaves = [x.requires_grad_() for x in (*none[:2], k)]
    o, _ = torch.vmap(attend)(*none)
    gradients = torch.autograd.grad(o.sum(), leaves)
    assert [x.shape for x in gradients] == [x.shape for x in leaves]
    assert not gradients[2].any()


def test_dropout_of_samples_is_that_of_each() -> None:
    arguments, rich = of_rich(), op(RICH, "tiled")
    q, k, v = (x.detach() for x in qkv(9))
    samples = torch.stack([q, q / 2])
    found = torch.vmap(lambda x: rich(x, k, v, **arguments))(samples)
    close(found, torch.stack([rich(x, k, v, **arguments) for x in samples]))


def test_maps_of_derivatives() -> None:
    causal, (q, k, v) = op(CAUSAL, "tiled"), (x.detach() for x in qkv(3))
    q, k, v = q[:1, :2], k[:1, :1], v[:1, :1]

    def number_of(call: Any) -> Callable[[Tensor], Tensor]:
        return lambda x: call(x, k, v).double().square().sum()

    truth = torch.func.hessian(number_of(causal.reference))(q)
    f = number_of(causal)
    for found in (
        torch.func.hessian(f)(q),
        torch.func.jacrev(torch.func.jacrev(f))(q),
        torch.func.jacfwd(torch.func.jacfwd(f))(q),
        torch.func.jacrev(torch.func.jacfwd(f), chunk_size=5)(q),
    ):
        close(found, truth)
