"""Derivatives against torch.autograd on random expressions, and their size."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings

from flashgen.analysis.diagonals import over_diagonals
from flashgen.analysis.differentiate import derivative, derivatives
from flashgen.analysis.variant import analyse
from flashgen.ir.expr import Expr, Load, index, literal, substitute, walk
from flashgen.ir.text import text
from flashgen.ir.types import ScalarType
from flashgen.language import parse_text
from flashgen.reference.evaluate import TorchNamespace
from flashgen.targets.cpu.device import GENERIC_CPU
from flashgen.targets.cpu.target import CpuTarget
from tests.analysis.test_simplify import COUNT, TENSORS, values
from tests.ir.expressions import expr
from tests.ir.strategies import ROW, J, P, S, floats
from tests.ir.values import evaluate

TORCH = TorchNamespace(torch.float64)


@settings(max_examples=500)
@given(floats(4, steps=False))
def test_derivative_against_autograd(e: Expr) -> None:
    given_values = {node: torch.tensor(each) for node, each in values().items()}
    variables = {variable: given_values[variable].requires_grad_() for variable in (S, P)}
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
    by_torch = torch.autograd.grad(found.expand(COUNT).sum(), list(variables.values()), materialize_grads=True)
    # Autograd multiplies the branch that was not taken by 0, and inf by 0: what is infinite on the way says nothing.
    ordinary = [
        np.isfinite(evaluate(node, values(), tensors=TENSORS)) for node in walk(e) if node.type is ScalarType.FLOAT
    ]
    finite = np.logical_and.reduce(np.broadcast_arrays(*ordinary))
    both = derivatives(e, (S, P))
    for variable, expected in zip(variables, by_torch, strict=True):
        known = finite & (np.abs(expected.numpy()) < 1e8)
        for each in (derivative(e, variable), both[variable]):
            ours = np.broadcast_to(evaluate(each, values(), tensors=TENSORS), (COUNT,))
            np.testing.assert_allclose(
                ours[known], expected.numpy()[known], rtol=1e-7, atol=1e-9, err_msg=f"{text(e)}, by {text(variable)}"
            )


@settings(max_examples=500)
@given(floats(4, steps=False))
def test_by_several_at_once_is_finite_where_by_one_is(e: Expr) -> None:
    for variable, joint in derivatives(e, (S, P)).items():
        alone, together = (
            np.broadcast_to(evaluate(each, values(), tensors=TENSORS), (COUNT,))
            for each in (derivative(e, variable), joint)
        )
        known = np.abs(alone) < 1e8
        np.testing.assert_allclose(together[known], alone[known], rtol=1e-6, atol=1e-8, err_msg=text(e))


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


@pytest.mark.parametrize(
    "code",
    [
        "sqrt(max(s, 0.0))",
        "sqrt(clamp(s, 0.0, 4.0))",
        "sqrt(max(s, 0.0) + max(p, 0.0))",
        "max(s, 0.0) / max(p, 0.0) if p > 0 else 0.0",
        "sqrt(relu(s) * p) if p > 1e3 else p",
        "(sqrt(x) + p if i < 0 else 0.0) + (sqrt(x) * p if j < 0 else 0.0)",
        "where(i < 0, max(x, sqrt(x * p)), 1.0) * p",
    ],
)
def test_what_is_infinite_in_a_branch_not_taken_adds_nothing(code: str) -> None:
    e = expr(code, x=expr("s + 0.5"), p=P)
    point: dict[Expr, np.ndarray] = {S: np.array(-0.5), P: np.array(-1.0), ROW: np.array(3), J: np.array(3)}
    for variable in (S, P):
        for each in (derivative(e, variable), derivatives(e, (S, P))[variable]):
            assert np.isfinite(evaluate(each, point)), f"{text(each)}, by {text(variable)}"


TERMS: dict[str, Callable[[int], str]] = {
    "max": lambda n: f"max({', '.join(f's + t[{k}]' for k in range(n))})",
    "sum": lambda n: f"s + ({' + '.join(f'j * t[{k}]' for k in range(n))})",
    "products": lambda n: " + ".join(f"tanh(s * t[{k}])" for k in range(n)),
    "one under another": lambda n: "".join(f"tanh(t[{k}] + " for k in range(n // 2)) + "s" + ")" * (n // 2),
    "choices": lambda n: "".join(f"t[{k}] * relu(t[{k}] * " for k in range(n // 4)) + "s" + ")" * (n // 4),
}


@pytest.mark.parametrize("kind", TERMS)
def test_the_work_is_proportional_to_the_score(kind: str) -> None:
    """Counted in calls of Python functions: of reading, analysis and planning, and of the kernels' expressions."""

    def calls(n: int) -> int:
        count = 0

        def counted(_frame: object, event: str, _arg: object) -> None:
            nonlocal count
            count += event == "call"

        code = f"attention many {{ head_dim 64  tensor t: f32[{n}] grad  score {TERMS[kind](n)} }}"
        before = sys.getprofile()
        sys.setprofile(counted)
        try:
            (spec,) = parse_text(code).specs
            variant = analyse(spec, spec.head_dims[0])
            CpuTarget(GENERIC_CPU).plan(variant)
            over_diagonals(variant)
        finally:
            sys.setprofile(before)
        return count

    calls(8)  # what is made once a process
    once, twice = calls(48), calls(96)
    assert twice < 2.3 * once, f"{once} calls for 48 reads, {twice} for 96"


def test_equal_graphs_are_compared_at_once() -> None:
    one: Expr = S
    other = expr("s")
    for _ in range(200):
        one, other = (expr("x * x + x", x=each) for each in (one, other))
    assert one is not other
    assert one == other
    assert derivative(one, S) == derivative(other, S)


def test_substituted_nodes_do_not_matter() -> None:
    e = expr("exp(s * p)", p=P)
    assert text(derivative(substitute(e, {P: literal(3.0)}), S)) == "3.0 * exp(3.0 * s)"
