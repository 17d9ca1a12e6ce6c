"""Masks written as scores of -inf: what positions decide becomes a mask, what the score decides stays in the score."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings

from flashgen.analysis.selection import split_masked_score
from flashgen.analysis.simplify import simplify
from flashgen.ir.expr import Expr, Symbol, SymbolKind, walk
from tests.ir.expressions import expr
from tests.ir.strategies import NK, ROW, J, P, S, bools, floats
from tests.ir.values import evaluate

COUNT = 200
TENSORS = {"valid": np.random.default_rng(1).random(64) < 0.5}


def values(seed: int = 0) -> dict[Expr, Any]:
    rng = np.random.default_rng(seed)
    return {
        ROW: rng.integers(0, 64, COUNT),
        J: rng.integers(0, 64, COUNT),
        NK: np.full(COUNT, 64),
        S: rng.normal(size=COUNT) * 3,
        P: rng.normal(size=COUNT),
    }


def value(e: Expr) -> Any:
    return np.broadcast_to(evaluate(e, values(), tensors=TENSORS), (COUNT,))


@pytest.mark.parametrize(
    ("score", "found", "keep"),
    [
        ("s", "s", "true"),
        ("s if i < j else -inf", "s", "i < j"),
        ("-inf if i < j else s", "s", "i >= j"),
        ("s + (0 if i < j else -inf)", "s", "i < j"),
        ("s + p + (0.0 if i < j else -inf)", "s + p", "i < j"),
        ("(s if i < j else -inf) if j < 4 else -inf", "s", "j < 4 and i < j"),
        ("(s if i < j else -inf) if j < 4 else p", "s if j < 4 else p", "i < j if j < 4 else true"),
        ("-inf + s", "s", "false"),
        ("tanh(s if i < j else -inf)", "tanh(s if i < j else -inf)", "true"),
        ("(s if i < j else -inf) - p", "s - p", "i < j"),
        ("min(s, -inf if i < j else inf)", "s", "i >= j"),
        # The score decides.
        ("s if s > 0.1 else -inf", "s if s > 0.1 else -inf", "true"),
        ("-inf if s > 0.1 else s", "-inf if s > 0.1 else s", "true"),
        ("s if 0 < s < p else -inf", "s if 0 < s and s < p else -inf", "true"),
        ("min(s, -inf if s < p else inf)", "-inf if s < p else s", "true"),
        ("log(s) + (0 if s > 0 else -inf)", "log(s) if s > 0 else -inf", "true"),
        ("(log(s) if s > 0 else -inf) - p", "log(s) - p if s > 0 else -inf", "true"),
        # Both decide.
        ("s if i < j and s > p else -inf", "s if s > p else -inf", "i < j"),
        ("s if s > p and (i < j and j < 4) else -inf", "s if s > p else -inf", "i < j and j < 4"),
        ("-inf if i < j or s > p else s", "-inf if s > p else s", "i >= j"),
        ("s if i < j or s > p else -inf", "s if i < j or s > p else -inf", "true"),
        (
            "s if i < j and s > 0 or j < 4 and s < p else -inf",
            "s if i < j and s > 0 or j < 4 and s < p else -inf",
            "i < j or j < 4",
        ),
        ("s if (i < j if s > 0 else j < 4) else -inf", "s if (i < j if s > 0 else j < 4) else -inf", "i < j or j < 4"),
        ("(s if i < j else -inf) if s > 0 else -inf", "s if s > 0 else -inf", "i < j"),
        ("(s if s > 0 else -inf) if i < j else -inf", "s if s > 0 else -inf", "i < j"),
        ("(s if i < j else -inf) if s > 0 else (p if i < j else -inf)", "s if s > 0 else p", "i < j"),
        (
            "(s if i < j else -inf) if s > 0 else (p if j < 4 else -inf)",
            "(s if s > 0 else p) if (i < j if s > 0 else j < 4) else -inf",
            "i < j or j < 4",
        ),
        ("(s if s > 0 else -inf) if i < j else p", "(s if i < j else p) if s > 0 or i >= j else -inf", "true"),
    ],
)
def test_split_masked_score(score: str, found: str, keep: str) -> None:
    new, kept = split_masked_score(expr(score, p=P))
    assert kept == simplify(expr(keep))
    different = value(new) != value(simplify(expr(found, p=P)))
    assert not different[value(kept) & ~np.isnan(value(new))].any()
    assert new.size <= simplify(expr(found, p=P)).size + 2


@settings(max_examples=300)
@given(floats(3), bools(3), bools(3))
def test_split_keeps_the_score_where_it_is_kept(x: Expr, one: Expr, other: Expr) -> None:
    """Any conditions, whatever they read; conditions of a mask read no score."""
    masked = expr(
        "where(c, x, -inf) if d and i % 3 == 0 else min(x + (-inf if c and j % 2 == 0 else 0.0), inf if d else -inf)",
        c=one,
        d=other,
        x=x,
    )
    score, keep = split_masked_score(masked)
    assert not any(isinstance(node, Symbol) and node.kind is SymbolKind.SCORE for node in walk(keep))
    before, kept = value(masked), value(keep)
    after = np.where(kept, value(score), -np.inf)
    finite = np.isfinite(before)
    np.testing.assert_allclose(after[finite], before[finite], rtol=1e-9, atol=1e-12)
    assert (after[before == -math.inf] == -math.inf).all()
