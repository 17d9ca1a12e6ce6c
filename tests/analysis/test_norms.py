"""Scores without what all keys of a query share of a squared distance: what they are made of adds up to the score."""

from __future__ import annotations

import math
import re
from collections.abc import Callable

import pytest

from flashgen.analysis.norms import NORM_OF_KEY, NORM_OF_ROW, split_norms
from flashgen.analysis.variant import DOT, SQDIST
from flashgen.ir.expr import Apply, Expr, Literal, Load, Symbol, walk
from tests.cuda.helpers import variant_of

# And whether |k|² is multiplied once a key: not where rows have factors of their own.
LINEAR = {
    "-0.5 * sqdist": True,
    "-sqdist / (4 * D)": True,
    "s - 0.01 * sqdist": True,
    "sqdist": True,
    "-(sqdist + s) * 0.3": True,
    "0.5 * (s - (2 * sqdist - 0.1 * (i - j)))": True,
    "sqdist * 2 - sqdist / Nk": True,
    "s - g[h] * sqdist": True,
    "-sqdist / (2 * ell * ell)": True,
    "-sqdist * r[b, i]": False,
    "-exp(r[b, i]) * (sqdist + 1) - sqdist / (1 + i)": False,
    "bias[h, j] - g[h] * sqdist / 7": True,
}
OTHERS = (
    "s",
    "-sqdist * bias[h, j]",  # a softmax sees it
    "-sqdist * (i - j)",
    "-sqdist if i > j else -2 * sqdist",
    "max(-sqdist, -5)",
    "20 * tanh(-sqdist / 20)",
    "floor(sqdist)",
    "-sqdist * sqdist",
    "-sqdist * dot",
    "-sqdist / i",  # of the first row -inf or NaN, not a number less another
    "-sqdist * (1 if i > 3 else inf)",
    "sqdist * 0 + s",
)


DECLARED = {
    "ell": "param ell: f32",
    "g": "tensor g: f32[H]",
    "r": "tensor r: f32[B, Nq]",
    "bias": "tensor bias: f32[H, Nk]",
}


def _score(score: str) -> Expr:
    captured = "  ".join(text for name, text in DECLARED.items() if re.search(rf"\b{name}\b", score))
    return variant_of(f"attention a {{ head_dim 64  {captured}  score {score} }}").score


MEANING: dict[str, Callable[..., float]] = {
    "add": lambda x, y: x + y,
    "sub": lambda x, y: x - y,
    "mul": lambda x, y: x * y,
    "div": lambda x, y: x / y,
    "neg": lambda x: -x,
    "exp": math.exp,
    "to_float": float,
}
PLACES = {"i": 7.0, "j": 3.0, "h": 1.0, "b": 0.0, "Nk": 50.0, "ell": 1.25}


def _value(expr: Expr, numbers: dict[Expr, float]) -> float:
    match expr:
        case _ if expr in numbers:
            return numbers[expr]
        case Literal(value=value):
            return float(value)
        case Symbol(name=name):
            return PLACES[name]
        case Load(tensor=tensor):
            return {"g": 0.4, "r": 0.7, "bias": -0.2}[tensor]
        case Apply(op=op, args=args):
            return MEANING[op](*(_value(each, numbers) for each in args))
    raise AssertionError(expr)


@pytest.mark.parametrize("score", LINEAR)
def test_parts_of_a_score(score: str) -> None:
    whole = _score(score)
    split = split_norms(whole)
    assert split is not None
    assert (split.of_key is not None) == LINEAR[score]
    qq, kk, dot = 3.5, 2.25, -0.75
    exact = _value(whole, {SQDIST: qq + kk - 2 * dot, DOT: dot})
    of_key = 1.0 if split.of_key is None else _value(split.of_key, {})
    pairs, rows = _value(split.pairs, {NORM_OF_KEY: of_key * kk, DOT: dot}), _value(split.rows, {NORM_OF_ROW: qq})
    assert pairs + rows == pytest.approx(exact, rel=1e-12)
    assert {SQDIST, NORM_OF_ROW}.isdisjoint(walk(split.pairs))


@pytest.mark.parametrize("score", OTHERS)
def test_other_scores_are_whole(score: str) -> None:
    assert split_norms(_score(score)) is None
