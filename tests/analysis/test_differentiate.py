"""Derivatives against torch.autograd on random expressions, and their size."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings

from flashgen.analysis.differentiate import derivative
from flashgen.ir.expr import Expr, Load, index, literal, substitute, walk
from flashgen.ir.text import text
from flashgen.ir.types import ScalarType
from flashgen.reference.namespace import TorchNamespace
from tests.analysis.test_simplify import COUNT, TENSORS, values
from tests.ir.expressions import expr
from tests.ir.strategies import P, S, floats
from tests.ir.values import evaluate

TORCH = TorchNamespace(torch.float64)


@settings(max_examples=500)
@given(floats(4, steps=False))
def test_derivative_against_autograd(e: Expr) -> None:
    given_values = {node: torch.tensor(each) for node, each in values().items()}
    s = given_values[S].requires_grad_()
    torch_tensors = {name: torch.tensor(each) for name, each in TENSORS.items()}
    in_torch: dict[Expr, torch.Tensor] = dict(given_values)
    for node in walk(e):
        if node.type is ScalarType.FLOAT and not node.children and node not in in_torch:
            in_torch[node] = torch.tensor(getattr(node, "value"), dtype=torch.float64)  # noqa: B009
        if isinstance(node, Load):
            in_torch[node] = torch_tensors[node.tensor][in_torch[node.indices[0]]]
        elif not node.children and node not in in_torch:
            in_torch[node] = torch.tensor(getattr(node, "value"))  # noqa: B009
    found = evaluate(e, in_torch, TORCH)
    assume(found.requires_grad)
    (expected,) = torch.autograd.grad(found.expand(COUNT).sum(), s)
    ours = np.broadcast_to(evaluate(derivative(e, S), values(), tensors=TENSORS), (COUNT,))
    # Autograd multiplies the branch that was not taken by 0, and inf by 0: what is infinite on the way says nothing.
    ordinary = [
        np.isfinite(evaluate(node, values(), tensors=TENSORS)) for node in walk(e) if node.type is ScalarType.FLOAT
    ]
    known = np.logical_and.reduce(np.broadcast_arrays(*ordinary)) & (np.abs(expected.numpy()) < 1e8)
    np.testing.assert_allclose(ours[known], expected.numpy()[known], rtol=1e-7, atol=1e-9, err_msg=text(e))


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("s", "1.0"),
        ("p", "0.0"),
        ("50.0 * tanh(0.0025 * s)", "0.125 * (1.0 - tanh(0.0025 * s) * tanh(0.0025 * s))"),
        ("s * s", "s + s"),
        ("s if i < j else p", "1.0 if i < j else 0.0"),
        ("p * log(s) if i < j else 0.0", "p * (1.0 / s) if i < j else 0.0"),
        ("floor(s) + sign(s)", "0.0"),
        ("float(int(s))", "0.0"),
        ("max(s, 0.0)", "0.5 if s == 0.0 else 0.0 if s < 0.0 else 1.0"),
        ("s ** 3", "3.0 * (s * s)"),
        ("-s / (2 * p * p)", "-(0.5 / (p * p))"),
    ],
)
def test_formulas(code: str, expected: str) -> None:
    assert text(derivative(expr(code, p=P), S)) == expected


def test_by_a_load() -> None:
    tensors = {"slope": ("f32", ("H",))}
    score = expr("s - slope[h] * (i - j) + slope[0]", tensors)
    slope = Load(ScalarType.FLOAT, tensor="slope", indices=(index("h"),))
    assert text(derivative(score, slope)) == "-float(i - j)"
    assert derivative(score, expr("slope[0]", tensors)) == literal(1.0)
    assert derivative(score, expr("slope[1]", tensors)) == literal(0.0)


@pytest.mark.parametrize(
    "step", ["tanh(x + p)", "x * x + p", "x / (1 + x * x)", "where(i < j, x * p, -x)", "min(x, p) * x"]
)
def test_size_stays_linear(step: str) -> None:
    sizes = []
    for length in (10, 20):
        e: Expr = S
        for _ in range(length):
            e = expr(step, x=e, p=P)
        sizes.append(len(list(walk(derivative(e, S)))))
    assert sizes[1] <= 2.2 * sizes[0]


def test_a_chain_as_deep_as_the_language_allows() -> None:
    e: Expr = S
    while e.depth < 118:
        e = expr("sigmoid(x / 2)", x=e)
    d = derivative(e, S)
    found, x = evaluate(d, {S: np.array(0.3)}), 0.3
    slope = 1.0
    for _ in range((e.depth - 1) // 2):
        y = 1 / (1 + math.exp(-x / 2))
        slope, x = slope * y * (1 - y) / 2, y
    np.testing.assert_allclose(found, slope, rtol=1e-12)


def test_substituted_nodes_do_not_matter() -> None:
    e = expr("exp(s * p)", p=P)
    assert text(derivative(substitute(e, {P: literal(3.0)}), S)) == "3.0 * exp(3.0 * s)"
