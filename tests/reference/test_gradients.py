"""The reference differentiates: checked against differences in float64, and slices against the whole."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from flashgen.reference import tiled
from flashgen.reference.dense import Dropout, attention, param_values
from flashgen.reference.programs import Program
from flashgen.reference.shard import Shard
from tests.reference.helpers import differentiable, qkv, random, spec

SINK = "tensor sink: f32[H] grad\nmask causal and i > 0\nweights softmax(sink = sink[h])"
# Statements, shapes of captured tensors by name, values of params.
CASES: dict[str, tuple[str, dict[str, tuple[int, ...]], dict[str, float]]] = {
    "plain": ("", {}, {}),
    "causal, first row masked": ("mask j < i", {}, {}),
    "softcap in a window": ("score softcap(s, 2.0)\nmask causal and window_left(3)", {}, {}),
    "slopes": ("tensor slope: f32[H] grad\nscore s - slope[h] * log(i - j)\nmask j < i", {"slope": (2,)}, {}),
    "relative table": (
        "tensor t: f32[H, 2 * Nk - 1] grad\nscore s + t[h, i - j + Nk - 1] * t[h, 0]",
        {"t": (2, 9)},
        {},
    ),
    "sink": (SINK, {"sink": (2,)}, {}),
    "bandwidth": ("param ell: f32 grad\nscore -sqdist / (2 * ell * ell)\nmask causal", {}, {"ell": 1.5}),
    "sigmoid": ("param bias: f32 = -log(Nk) grad\nscore s + bias\nweights sigmoid(s)", {}, {"bias": -1.0}),
    "normalize": ("mask causal\nweights normalize(softplus(s))", {}, {}),
    "learned scale": ("param tau: f32 grad\nscale tau\nscore s * dot / 4", {}, {"tau": 0.7}),
    "forgetting": (
        "tensor f: f32[B, H, Nk] grad\nscore s + f[b, h, i] - f[b, h, j]\nmask causal",
        {"f": (2, 2, 5)},
        {},
    ),
    "dropout": ("dropout 0.4", {}, {}),
}


def arguments(name: str) -> tuple[list[Tensor], list[str], list[str]]:
    """q, k, v, then tensors and params, and the names of these."""
    _, shapes, params = CASES[name]
    tensors = [random(*shape, seed=n) for n, shape in enumerate(shapes.values())]
    scalars = [torch.tensor(value, dtype=torch.float64) for value in params.values()]
    q, k, v = qkv(heads=2, kv_heads=1, q_len=5, kv_len=5)
    return differentiable(q, k, v, *tensors, *scalars), list(shapes), list(params)


def run(name: str, inputs: tuple[Tensor, ...], tensors: list[str], params: list[str]) -> tuple[Tensor, ...]:
    q, k, v, *captured = inputs
    o, lse = attention(
        spec(CASES[name][0]),
        q,
        k,
        v,
        tensors=dict(zip(tensors, captured, strict=False)),
        params=dict(zip(params, captured[len(tensors) :], strict=True)),
        dropout=Dropout(0.4, 3) if name == "dropout" else None,
    )
    # A row that keeps nothing has lse -inf, which differences cannot take.
    return (o,) if lse is None else (o, torch.where(lse == -torch.inf, 0.0, lse))


@pytest.mark.parametrize("name", CASES)
def test_gradcheck(name: str) -> None:
    inputs, tensors, params = arguments(name)
    function = functools.partial(run, name, tensors=tensors, params=params)
    assert torch.autograd.gradcheck(lambda *x: function(x), inputs, fast_mode=True, check_forward_ad=True)


@pytest.mark.parametrize("name", CASES)
def test_second_derivatives(name: str) -> None:
    """Reverse over reverse and forward over reverse."""
    inputs, tensors, params = arguments(name)
    function = functools.partial(run, name, tensors=tensors, params=params)
    assert torch.autograd.gradgradcheck(lambda *x: function(x), inputs, fast_mode=True, check_fwd_over_rev=True)


STEPS: dict[str, Callable[[Program, int], Program]] = {
    "jvp": lambda program, count: program.forward(range(count)),
    "forward over reverse": lambda program, count: program.reverse(range(count), (0,)).forward(range(count + 1)),
    "reverse over forward": lambda program, count: program.forward(range(count)).reverse(range(2 * count), (0,)),
    "reverse over reverse": lambda program, count: program.reverse(range(count), (0,)).reverse(
        range(count + 1), (0, 2)
    ),
    "forward over forward": lambda program, count: program.forward(range(count)).forward(range(2 * count)),
}


@pytest.mark.parametrize("pairs", [7, 20])
@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("name", CASES)
def test_slices_of_derivatives_are_the_whole(name: str, step: str, pairs: int) -> None:
    inputs, tensors, params = arguments(name)
    q, k, v, *captured = (x.detach() for x in inputs)
    whole = tiled.Problem(
        spec(CASES[name][0]),
        q,
        k,
        v,
        dict(zip(tensors, captured, strict=False)),
        dict(zip(params, captured[len(tensors) :], strict=True)),
        Shard.whole(q.shape, k.shape),
        Dropout(0.4, 3) if name == "dropout" else None,
        None,
    )
    program = STEPS[step](tiled.program_of(whole.spec, len(inputs)), len(inputs))
    shapes = [x.shape for x in inputs], [torch.Size((*q.shape[:3], v.shape[3])), q.shape[:3]]
    of_inputs, of_outputs = program.taken(shapes[0], shapes[1][: len(program.outputs)])
    values = [*inputs, *(random(*shape, seed=20 + n) for n, shape in enumerate(of_inputs[len(inputs) :]))]
    found = []
    for problem in (whole, dataclasses.replace(whole, pairs=pairs)):
        totals = [torch.zeros(shape, dtype=torch.float64) for shape in of_outputs]
        tiled.derive(problem, program, values, totals)
        found.append(totals)
    torch.testing.assert_close(*found)


@pytest.mark.parametrize("pairs", [1, 7, 20, 50, None])
@pytest.mark.parametrize("name", CASES)
def test_slices_are_the_whole(name: str, pairs: int | None) -> None:
    inputs, tensors, params = arguments(name)
    whole = run(name, tuple(inputs), tensors, params)
    towards = [random(*output.shape, seed=8 + n) for n, output in enumerate(whole)]
    expected = torch.autograd.grad(whole, inputs, towards)

    q, k, v, *captured = (x.detach() for x in inputs)
    problem = tiled.Problem(
        spec(CASES[name][0]),
        q,
        k,
        v,
        dict(zip(tensors, captured, strict=False)),
        dict(zip(params, captured[len(tensors) :], strict=True)),
        Shard.whole(q.shape, k.shape),
        Dropout(0.4, 3) if name == "dropout" else None,
        pairs,
    )
    o, lse = tiled.forward(problem)
    torch.testing.assert_close(o, whole[0])
    if lse is not None:
        empty = lse == -torch.inf
        torch.testing.assert_close(torch.where(empty, 0.0, lse), whole[1])
        towards[1] = torch.where(empty, 0.0, towards[1])
    found = tiled.backward(problem, towards[0], None if lse is None else towards[1], [True] * len(inputs))
    torch.testing.assert_close(found, list(expected))


def test_slices_give_only_the_gradients_that_are_asked_for() -> None:
    q, k, v = qkv()
    problem = tiled.Problem(spec("mask causal"), q, k, v, {}, {}, Shard.whole(q.shape, k.shape))
    found = tiled.backward(problem, torch.ones_like(q), None, [False, True, False])
    assert [gradient is None for gradient in found] == [True, False, True]


def test_slices_of_half_precision_accumulate_in_float32() -> None:
    q, k, v = (x.bfloat16() for x in qkv(q_len=64, kv_len=64))
    problem = tiled.Problem(spec(""), q, k, v, {}, {}, Shard.whole(q.shape, k.shape), pairs=64)
    o, lse = tiled.forward(problem)
    truth, _ = attention(spec(""), q, k, v, dtype=torch.float64)
    assert o.dtype is torch.bfloat16
    assert lse is not None
    assert lse.dtype is torch.float32
    torch.testing.assert_close(o, truth.bfloat16(), rtol=1e-2, atol=1e-3)
    found = tiled.backward(problem, torch.ones_like(o), None, [True] * 3)
    assert all(gradient is not None and gradient.dtype is torch.float32 for gradient in found)


def test_defaults_are_float32() -> None:
    values = param_values(spec("param bias: f32 = -log(Nk) grad\nscore s + bias"), {}, {"Nk": 9})
    assert values["bias"] == torch.tensor(9.0, dtype=torch.float64).log().neg().float().item()
