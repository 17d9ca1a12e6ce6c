"""Every row of the operator table: typing, meaning, derivative, range and C++ spelling agree with each other."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
import torch

from flashgen.ir.expr import Expr, Symbol, SymbolKind
from flashgen.ir.interval import FloatRange
from flashgen.ir.operators import NUMPY, OPERATORS, NumpyNamespace, Operator
from flashgen.reference.evaluate import TorchNamespace
from tests.ir.cases import BOOL, CASES, FLOAT, INT, INT_MAX, INT_MIN, Case, boxes, holds, points
from tests.ir.conftest import Compiled
from tests.ir.values import evaluate

NUMPY32 = NumpyNamespace(np.float32)
TORCH = TorchNamespace(torch.float64)

INTS = np.array(
    [INT_MIN, INT_MIN + 1, -33, -7, -2, -1, 0, 1, 2, 3, 31, 32, 33, 1000, 2**24 + 1, INT_MAX], dtype=np.int64
)
FLOATS = np.array([-np.inf, -3e9, -7.5, -2.5, -1.0, -0.5, 0.0, 0.5, 1.0, 1.5, 2.0, 2.5, 9.0, 3e9, np.inf, np.nan])

differentiable = pytest.mark.parametrize(
    "row", [row for row in OPERATORS.values() if row.derivative is not None], ids=lambda row: row.name
)
every_case = pytest.mark.parametrize("case", CASES, ids=str)


def _rng(name: str) -> np.random.Generator:
    return np.random.default_rng(sum(map(ord, name)))


def _arguments(row: Operator, count: int) -> list[Any]:
    """Random float64 points of the domain, away from kinks; the condition of ``where`` is a bool."""
    rng = _rng(row.name)
    drawn = [rng.uniform(lo, hi, 4 * count) for lo, hi in row.samples.floats]
    kept = np.array([row.kink(*map(float, point)) > 2e-3 for point in zip(*drawn, strict=True)])
    arguments = [each[kept][:count] for each in drawn]
    assert len(arguments[0]) >= count // 2, "the samples of the row lie on kinks"
    return [arguments[0] > 0.5, *arguments[1:]] if row.name == "where" else arguments


def _symbols(row: Operator) -> tuple[Expr, ...]:
    types = (BOOL, FLOAT, FLOAT) if row.name == "where" else (FLOAT,) * row.arity
    return tuple(Symbol(t, name=f"x{k}", kind=SymbolKind.PARAM) for k, t in enumerate(types))


def _derivatives(row: Operator, arguments: list[Any]) -> dict[int, Any]:
    """By float argument, the value of the derivative that the row states."""
    symbols = _symbols(row)
    values = dict(zip(symbols, arguments, strict=True))
    assert row.derivative is not None
    return {
        k: np.broadcast_to(evaluate(row.derivative(symbols, k), values), arguments[-1].shape)
        for k, symbol in enumerate(symbols)
        if symbol.type is FLOAT
    }


@differentiable
def test_derivative_against_differences(row: Operator) -> None:
    arguments = _arguments(row, 60)
    step = 1e-4
    for k, found in _derivatives(row, arguments).items():

        def shifted(by: float, k: int = k) -> Any:
            moved = [each + by * step if n == k else each for n, each in enumerate(arguments)]
            with np.errstate(all="ignore"):
                return row.meaning(NUMPY, *moved)

        expected = (8 * (shifted(1) - shifted(-1)) - (shifted(2) - shifted(-2))) / (12 * step)
        np.testing.assert_allclose(found, expected, rtol=2e-7, atol=2e-9)


# Points at which the language follows PyTorch's convention, besides the samples.
TIES: dict[str, tuple[tuple[float, ...], ...]] = {
    "abs": ((0.0,),),
    "sign": ((0.0,),),
    "relu": ((0.0,),),
    "softplus": ((0.0,),),
    "floor": ((2.0,),),
    "ceil": ((2.0,),),
    "round": ((2.5,),),
    "min": ((1.5, 1.5), (0.0, 0.0)),
    "max": ((1.5, 1.5), (0.0, 0.0)),
    "clamp": (
        (-1.0, -1.0, 1.0),
        (1.0, -1.0, 1.0),
        (0.0, 2.0, -2.0),
        (0.5, 0.5, 0.5),
        (3.0, 2.0, -2.0),
        (-3.0, 2.0, -2.0),
    ),
    "pow": ((0.0, 2.0), (2.0, 0.0), (0.0, 0.0), (3.0, 1.0), (-2.0, 2.0)),
    "div": ((0.0, 2.0),),
    "mod": ((6.0, 3.0), (-7.0, 3.0), (7.0, -3.0)),
    "sqrt": ((4.0,),),
}


@differentiable
def test_derivative_against_autograd(row: Operator) -> None:
    arguments = _arguments(row, 60)
    if row.name in TIES:
        ties = np.array(TIES[row.name]).T
        arguments = [np.concatenate([each, tie]) for each, tie in zip(arguments, ties, strict=True)]
    expected = _autograd(row, arguments)
    for k, found in _derivatives(row, arguments).items():
        if row.name == "pow" and k == 1:  # PyTorch: the derivative by the exponent of a negative base is NaN too
            np.testing.assert_allclose(found[arguments[0] > 0], expected[k][arguments[0] > 0], rtol=1e-12, atol=1e-14)
            continue
        np.testing.assert_allclose(found, expected[k], rtol=1e-10, atol=1e-14)


def _autograd(row: Operator, arguments: list[Any]) -> dict[int, Any]:
    tensors = [torch.tensor(each) for each in arguments]
    floats = {k: each.requires_grad_() for k, each in enumerate(tensors) if each.is_floating_point()}
    value = row.meaning(TORCH, *tensors)
    if not value.requires_grad:
        return {k: np.zeros(len(arguments[0])) for k in floats}
    gradients = torch.autograd.grad(value.sum(), list(floats.values()), materialize_grads=True)
    return {k: gradient.numpy() for k, gradient in zip(floats, gradients, strict=True)}


def _grid(case: Case) -> list[Any]:
    """All tuples of remarkable values."""
    known = {BOOL: np.array([False, True]), INT: INTS, FLOAT: FLOATS}
    return [each.ravel() for each in np.meshgrid(*(known[t] for t in case.types), indexing="ij")]


@every_case
def test_numpy_and_torch_mean_the_same(case: Case) -> None:
    rng = _rng(str(case))
    drawn = points(boxes(case, rng, 1)[0], rng, 1)
    for box in boxes(case, rng, 60):
        drawn = [np.concatenate(pair) for pair in zip(drawn, points(box, rng, 20), strict=True)]
    for arguments in (_grid(case), drawn):
        with np.errstate(all="ignore"):
            found = case.row.meaning(NUMPY, *arguments)
        expected = case.row.meaning(TORCH, *map(torch.tensor, arguments)).numpy()
        assert found.dtype == expected.dtype
        if case.result is FLOAT:
            np.testing.assert_allclose(found, expected, rtol=1e-13, atol=1e-300)
        else:
            np.testing.assert_array_equal(found, expected)


@every_case
def test_cpp_means_the_same(case: Case, compiled: Compiled) -> None:
    rng = _rng(str(case))
    # Quotients are rounded before they are floored; everything else is the exact value, rounded once (or a few times).
    xp = NUMPY32 if case.row.name in ("floordiv", "mod") else NUMPY
    for arguments in (_grid(case), *(points(box, rng, 20) for box in boxes(case, rng, 40))):
        rounded = [each.astype(np.float32).astype(xp.dtype) if each.dtype == np.float64 else each for each in arguments]
        with np.errstate(all="ignore"):
            expected = case.row.meaning(xp, *rounded)
        found = compiled.values(case, arguments)
        if case.result is not FLOAT:
            np.testing.assert_array_equal(found, expected)
            continue
        with np.errstate(over="ignore"):
            expected = expected.astype(np.float32)
        # Far left 1 + erf(x) cancels to a unit of the formula's float64; the kernel computes it otherwise.
        smallest = 1e-15 if case.row.name == "gelu" else 1e-37
        np.testing.assert_allclose(found, expected, rtol=6e-7, atol=smallest)


@every_case
def test_results_have_the_type_of_the_table(case: Case) -> None:
    with np.errstate(all="ignore"):
        found = case.row.meaning(NUMPY, *_grid(case))
    assert found.dtype == {BOOL: np.bool_, INT: np.int64, FLOAT: np.float64}[case.result]
    if case.result is INT:
        assert found.min() >= INT_MIN
        assert found.max() <= INT_MAX


@every_case
def test_range_holds_every_value(case: Case, compiled: Compiled) -> None:
    rng = _rng(str(case))
    tried = boxes(case, rng, 400)
    in_cpp = compiled.ranges(case, tried)
    for box, cpp in zip(tried, in_cpp, strict=True):
        arguments = points(box, rng, 12)
        with np.errstate(all="ignore"):
            exact = case.row.meaning(NUMPY, *arguments)
            rounded = case.row.meaning(
                NUMPY32, *(each.astype(np.float32) if each.dtype == np.float64 else each for each in arguments)
            )
        for values in (exact, rounded, compiled.values(case, arguments)):
            for found in (case.row.interval(*box), cpp):
                inside = holds(found, values)
                assert inside.all(), (box, found, [each[~inside] for each in arguments], values[~inside])


@every_case
def test_range_rules_agree(case: Case, compiled: Compiled) -> None:
    tried = boxes(case, _rng(str(case)), 400)
    for box, cpp in zip(tried, compiled.ranges(case, tried), strict=True):
        python = case.row.interval(*box)
        if isinstance(python, FloatRange) and isinstance(cpp, FloatRange):
            assert python.may_be_nan == cpp.may_be_nan, box
            np.testing.assert_allclose((python.lo, python.hi), (cpp.lo, cpp.hi), rtol=1e-6, err_msg=str(box))
        else:
            assert python == cpp, box


def test_rows_are_found_by_their_names() -> None:  # which ones there are: ``test_the_table_is_complete``
    assert all(row.name == name for name, row in OPERATORS.items())
    assert all(re.fullmatch(r"[a-z_0-9]+|[-+*/&|^!]+", row.c) for row in OPERATORS.values())
