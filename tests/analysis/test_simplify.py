"""``simplify`` keeps values and finds what it should; masks are split from scores, exponentials become softmax."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flashgen.analysis.simplify import canonical_weights, simplify
from flashgen.ir.expr import Expr, literal, walk
from flashgen.ir.text import text
from flashgen.ir.weights import NORMALIZE, POINTWISE, Weights
from tests.ir.expressions import expr
from tests.ir.strategies import NK, ROW, J, P, S, bools, floats, ints
from tests.ir.values import evaluate

COUNT = 40


def values(seed: int = 0) -> dict[Expr, Any]:
    rng = np.random.default_rng(seed)
    return {
        ROW: rng.integers(0, 64, COUNT),
        J: rng.integers(0, 64, COUNT),
        NK: np.full(COUNT, 64),
        S: rng.normal(size=COUNT) * 3,
        P: rng.normal(size=COUNT),
    }


TENSORS = {"valid": np.random.default_rng(1).random(64) < 0.5}


def value(e: Expr) -> Any:
    return np.broadcast_to(evaluate(e, values(), tensors=TENSORS), (COUNT,))


@settings(max_examples=400)
@given(ints(4) | bools(4))
def test_ints_and_bools_keep_their_value(e: Expr) -> None:
    np.testing.assert_array_equal(value(simplify(e)), value(e), err_msg=text(e))


@settings(max_examples=600)
@given(floats(4), st.booleans())
def test_floats_keep_their_value(e: Expr, reciprocals: bool) -> None:
    before, after = value(e), value(simplify(e, reciprocals=reciprocals))
    ordinary = ~(np.abs(before) > 1e100)
    np.testing.assert_allclose(after[ordinary], before[ordinary], rtol=1e-9, atol=1e-12, err_msg=text(e))


@settings(max_examples=200)
@given(floats(4))
def test_nothing_grows_and_a_second_time_changes_nothing(e: Expr) -> None:
    once = simplify(e)
    assert len(list(walk(once))) <= len(list(walk(e))) + 2
    assert simplify(once) == once


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("cap * tanh(0.125 * dot / cap)", "50.0 * tanh(0.0025 * dot)"),
        ("1.4426950408889634 * (0.125 * s)", "0.18033688011112042 * s"),
        ("(2.0 * s) * (3.0 * p)", "6.0 * (s * p)"),
        ("s / 8", "0.125 * s"),
        ("s / 3", "s / 3.0"),
        ("s * 1 + 0", "s"),
        ("s * 0", "0.0 * s"),
        ("--s", "s"),
        ("s - -p", "s + p"),
        ("-(s - p)", "p - s"),
        ("s ** 2", "s * s"),
        ("2.0 ** s", "exp2(s)"),
        ("2 ** -1 * s", "0.5 * s"),
        ("i - j + 7 - 1", "i - j + 6"),
        ("i + 3 - 5", "i - 2"),
        ("i - i", "0"),
        ("(i // 4) // 8", "i // 32"),
        ("i * 0 + j * 1", "j"),
        ("min(min(i, 31), 40)", "min(i, 31)"),
        ("min(s, inf) + max(-inf, p)", "s + p"),
        ("min(s, -inf)", "min(s, -inf)"),
        ("not not i < j", "i < j"),
        ("not i < j", "i >= j"),
        ("not s < p", "not s < p"),
        ("i < j and true", "i < j"),
        ("i < j or true", "true"),
        ("i < j and not i < j", "false"),
        ("i == i and s == s", "s == s"),
        ("s < s", "false"),
        ("s if true else p", "s"),
        ("s if i < j else s", "s"),
        ("(s if i < j else p) if i < j else 0.0", "s if i < j else 0.0"),
        ("(s if i < j else 0.0) + (0.0 if i < j else p)", "s if i < j else p"),
        ("i < j if i < Nk else false", "i < Nk and i < j"),
        ("where(not i < j, s, p)", "s if i >= j else p"),
        ("log(-1.0) + s", "log(-1.0) + s"),
        ("log(0.0)", "-inf"),
        ("2147483647 + 1", "-2147483648"),
        ("hash(1, 2, 3) % 1024", "372"),
    ],
)
def test_rewrites(before: str, after: str) -> None:
    assert text(simplify(expr(before, cap=50.0, p=P))) == after


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("silu(s) / Nk", "1.0 / Nk * silu(s)"),
        ("3 * s / Nk + s / 3", "3.0 * (1.0 / Nk * s) + 0.3333333333333333 * s"),
        ("s / p", "s / p"),
        ("s / (i + 1)", "s / (i + 1)"),
        ("int(i / Nk * 8) + s", "int(8.0 * (i / Nk)) + s"),  # another rounding, another int
    ],
)
def test_divisions_of_pairs_by_what_is_settled(before: str, after: str) -> None:
    assert text(simplify(expr(before, p=P), reciprocals=True)) == after


def test_a_chain_as_deep_as_the_language_allows() -> None:
    e: Expr = S
    for _ in range(40):
        e = expr("tanh(2.0 * (x + p))", x=e, p=P)
    assert simplify(e).depth <= e.depth


# Weights --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("weight", "score"),
    [
        ("exp(s)", "7.0 * tanh(dot)"),
        ("exp(2 * s)", "14.0 * tanh(dot)"),
        ("exp2(s)", f"{7 * math.log(2.0)!r} * tanh(dot)"),
        ("exp(s) * exp(s)", "7.0 * tanh(dot) + 7.0 * tanh(dot)"),
        ("exp(-s)", "-inf if 7.0 * tanh(dot) == -inf else -7.0 * tanh(dot)"),
        ("exp(tanh(s))", "-inf if 7.0 * tanh(dot) == -inf else tanh(7.0 * tanh(dot))"),
    ],
)
def test_normalised_exponentials_are_softmax(weight: str, score: str) -> None:
    weights, found = canonical_weights(Weights(NORMALIZE, expr(weight)), expr("7.0 * tanh(dot)"))
    assert weights == Weights()
    assert text(found) == score


@pytest.mark.parametrize(
    "weight",
    ["exp(s) / 2.0", "3.0 * exp(s)", "exp2(s)", "0.5 * exp(s) * exp(p)", "exp(s * p) / exp(s)", "2.0 / exp(s)"],
)
def test_what_becomes_a_softmax_keeps_its_denominator(weight: str) -> None:
    """A constant factor cancels in the weights, but lse holds it."""
    weights, found = canonical_weights(Weights(NORMALIZE, expr(weight, p=P)), S)
    assert weights == Weights()
    np.testing.assert_allclose(np.exp(value(found)), value(expr(weight, p=P)), rtol=1e-12)


def test_other_weights_stay() -> None:
    s = expr("s")
    for weights in (
        Weights(),
        Weights(POINTWISE, expr("exp(s)")),
        Weights(NORMALIZE, expr("relu(s)")),
        Weights(NORMALIZE, expr("exp(s) + 1")),
    ):
        assert canonical_weights(weights, s) == (weights, s)


def test_literals_know_their_type() -> None:
    assert simplify(expr("1 + 1")) == literal(2)
    assert simplify(expr("1 + 1.0")) == literal(2.0)
    assert simplify(expr("1 < 2")) == literal(True)
