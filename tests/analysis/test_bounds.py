"""Ranges of random expressions hold every value, also under conditions; remarkable ranges are as tight as promised."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flashgen.analysis.ranging import bounds
from flashgen.ir.expr import Expr, index, size
from flashgen.ir.interval import FALSE, FULL_BOOL, TRUE, BoolRange, FloatRange, IntRange, Range
from flashgen.ir.interval_float import point
from flashgen.ir.operators import NUMPY, NumpyNamespace
from flashgen.ir.text import text
from tests.ir.cases import holds
from tests.ir.expressions import expr
from tests.ir.strategies import NK, ROW, J, P, S, bools, floats, ints
from tests.ir.values import evaluate

COUNT = 60
NUMPY32 = NumpyNamespace(np.float32)


def _box(seed: int) -> tuple[dict[Expr, Range], dict[Expr, Any]]:
    """Random ranges of the symbols, and points in them; float32 numbers."""
    rng = np.random.default_rng(seed)
    ranges: dict[Expr, Range] = {}
    values: dict[Expr, Any] = {}
    for symbol, high in ((ROW, 200), (J, 200), (NK, 300)):
        lo = int(rng.integers(0, high))
        hi = lo + int(rng.choice((0, 1, 7, 63)))
        ranges[symbol], values[symbol] = IntRange(lo, hi), rng.integers(lo, hi, COUNT, endpoint=True)
    for symbol in (S, P):
        ends = np.sort(rng.normal(size=2).astype(np.float32) * 3)
        inside = ends[0] + (ends[1] - ends[0]) * rng.random(COUNT, dtype=np.float32)
        ranges[symbol] = FloatRange(float(ends[0]), float(ends[1]))
        values[symbol] = np.clip(inside, ends[0], ends[1]).astype(np.float64)
    return ranges, values


TENSORS = {"valid": np.random.default_rng(1).random(300) < 0.5}


def _values(e: Expr, values: dict[Expr, Any], dtype: Any) -> Any:
    xp = NumpyNamespace(dtype)
    typed = {node: each.astype(dtype) if each.dtype == np.float64 else each for node, each in values.items()}
    return np.broadcast_to(evaluate(e, typed, xp, TENSORS), (COUNT,))


@settings(max_examples=600)
@given(ints(4) | floats(4) | bools(4), st.integers(0, 50))
def test_ranges_hold_every_value(e: Expr, seed: int) -> None:
    ranges, values = _box(seed)
    found = bounds(e, ranges)
    for dtype in (np.float64, np.float32):
        got = _values(e, values, dtype)
        inside = holds(found, got)
        assert inside.all(), (text(e), found, got[~inside])


@settings(max_examples=400)
@given(ints(3) | floats(3), bools(3), bools(2), st.integers(0, 50))
def test_ranges_under_conditions_hold_every_value(e: Expr, first: Expr, second: Expr, seed: int) -> None:
    ranges, values = _box(seed)
    found = bounds(e, ranges, (first, second))
    got, kept = _values(e, values, np.float64), np.ones(COUNT, dtype=bool)
    for condition in (first, second):
        kept &= _values(condition, values, np.float64)
    inside = holds(found, got) | ~kept
    assert inside.all(), (text(e), text(first), text(second), found, got[~inside])


@settings(max_examples=300)
@given(ints(2), ints(2), st.sampled_from(["x < y", "x <= y", "x == y", "x != y", "not x < y"]), st.integers(0, 50))
def test_comparisons_of_what_is_asked_for(x: Expr, y: Expr, relation: str, seed: int) -> None:
    """The expressions whose range is asked for are those that the condition bounds."""
    ranges, values = _box(seed)
    condition = expr(relation, x=x, y=y)
    kept = _values(condition, values, np.float64)
    for e in (x, y, expr("x - y", x=x, y=y), expr("y - x + 3", x=x, y=y), expr("abs(x - y)", x=x, y=y)):
        found = bounds(e, ranges, (condition,))
        inside = holds(found, _values(e, values, np.float64)) | ~kept
        assert inside.all(), (text(e), text(condition), found)


I64, J64 = IntRange(64, 127), IntRange(0, 63)


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("j <= i", TRUE),
        ("i < j", FALSE),
        ("i - j < 64", FULL_BOOL),
        ("i - j < 128", TRUE),
        ("i - j < 1", FALSE),
        ("abs(i - j) <= 127", TRUE),
        ("abs(i - j) <= 0", FALSE),
        ("i // 64 == j // 64", FALSE),
        ("i // 128 == j // 128", TRUE),
        ("i % 64", IntRange(0, 63)),
        ("i % 128", IntRange(64, 127)),
        ("i % 100", IntRange(0, 99)),
        ("popcount((i // 64) ^ (j // 64))", IntRange(1, 1)),
        ("popcount(i ^ j)", IntRange(1, 7)),
        ("i & 7", IntRange(0, 7)),
        ("i | 128", IntRange(192, 255)),
        ("clamp(i, 70, 100)", IntRange(70, 100)),
        ("min(i, 100) - max(j, 10)", IntRange(1, 90)),
        ("(i if i < 100 else 5)", IntRange(5, 99)),
        ("(i - 64 if i - 64 < 16 else min(i, 31))", IntRange(0, 31)),
        ("(1 if j < 64 else 2)", IntRange(1, 1)),
        ("hash(1, 2, 3)", IntRange(753655156, 753655156)),
        ("hash(i, 2) >= 0", TRUE),
        ("ceildiv(i, 64)", IntRange(1, 2)),
        ("1024 * 0.25 > 255", TRUE),
        ("float(i)", FloatRange(64.0, 127.0)),
        ("0.1", point(0.1)),
        ("(t if t == 3 else 0)", IntRange(0, 3)),
        ("(i - j if i <= j + 7 else 0)", IntRange(0, 7)),
        ("(j - i if i - j < 8 else 0)", IntRange(-7, 0)),
        ("(i if not (i < 100 or i > 110) else 105)", IntRange(100, 110)),
        ("(i if abs(i - 100) <= 3 else 100)", IntRange(97, 103)),
        ("(i if i // 10 == 8 else 80)", IntRange(80, 89)),
        ("(i if i * 1.0 < 80.5 else 64)", IntRange(64, 127)),
        ("(i if i < 80.5 else 64)", IntRange(64, 80)),
        ("(i if max(i, j) < 80 else 64)", IntRange(64, 79)),
        ("(i < 80 and i > 90)", FALSE),
        ("(i < 80 or i >= 80)", TRUE),
    ],
)
def test_tight(code: str, expected: Range) -> None:
    ranges: dict[Expr, Range] = {index("i"): I64, index("j"): J64, size("Nk"): IntRange(256, 256)}
    assert bounds(expr(code, t=expr("hash(i, j)")), ranges) == expected


def test_t5_buckets_stay_inside_for_all_lengths() -> None:
    n = expr("max(i - j, 0)")
    far = expr("16 + int(log(n / 16) / log(128 / 16) * 16)", n=n)
    bucket = expr("n if n < 16 else min(far, 31)", n=n, far=far)
    ranges: dict[Expr, Range] = {index("i"): IntRange(0, 2**30), index("j"): IntRange(0, 2**30)}
    assert bounds(bucket, ranges) == IntRange(0, 31)


def test_what_may_wrap_is_unknown() -> None:
    ranges: dict[Expr, Range] = {index("i"): IntRange(0, 2**31 - 1)}
    assert bounds(expr("i + 1 > 0"), ranges) == FULL_BOOL
    assert bounds(expr("i - 1 < i"), {index("i"): IntRange(-(2**31), 0)}) == FULL_BOOL


def test_contradictions_are_harmless() -> None:
    ranges: dict[Expr, Range] = {index("i"): I64, index("j"): J64}
    assert isinstance(bounds(expr("i - j"), ranges, (expr("i < j"),)), IntRange)
    assert isinstance(bounds(expr("i < 3"), ranges, (expr("i < 3"), expr("i > 300"))), BoolRange)


def test_nesting_does_not_explode() -> None:
    e = expr("i")
    for k in range(60):
        e = expr("(x + 1 if x % 7 < k else x - 1)", x=e, k=k % 7)
    assert isinstance(bounds(e, {index("i"): I64}), IntRange)


def test_meaning_of_float_conditions() -> None:
    ranges: dict[Expr, Range] = {P: FloatRange(-1.0, 1.0), S: FloatRange(-1.0, 1.0, may_be_nan=True)}
    assert bounds(expr("p if p > 0.5 else 0.5", p=P), ranges) == FloatRange(0.5, 1.0)
    found = bounds(expr("s if s > 0.5 else 0.5"), ranges)
    assert found == FloatRange(0.5, 1.0)
    assert bounds(expr("0.5 if s > 0.5 else s"), ranges) == FloatRange(-1.0, 1.0, may_be_nan=True)


def test_namespaces_agree_on_what_is_sampled() -> None:
    _, values = _box(3)
    e = expr("s * p + 1", p=P)
    np.testing.assert_allclose(_values(e, values, np.float32), evaluate(e, values, NUMPY), rtol=1e-5, atol=1e-6)
