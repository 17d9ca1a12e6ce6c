"""Device functions against the table: every operator's value, and its range, which must be that of the CPU."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from flashgen.ir.interval import BoolRange, FloatRange, IntRange, Range
from flashgen.ir.operators import NUMPY
from tests.cuda.operators import columns, name_of, run
from tests.ir.cases import BOOL, CASES, FLOAT, INT, INT_MAX, INT_MIN, Case, boxes

every_case = pytest.mark.parametrize("case", CASES, ids=str)
INTS = (INT_MIN, INT_MIN + 1, -33, -7, -2, -1, 0, 1, 2, 3, 31, 32, 33, 1000, 2**24 + 1, INT_MAX)
SPECIAL = (-np.inf, -2.5, -1.0, 0.0, 0.5, 1.0, 2.5, np.inf, np.nan)
# In float32 beside double precision: what cancels or grows on the way.
LOOSE = {"pow": 2e-5, "mod": 2e-5, "floordiv": 2e-5, "gelu": 2e-5, "sin": 1e-5, "cos": 1e-5}

# All but those whose conventions at infinity are those of libm.
OF_FLOATS = [case for case in CASES if FLOAT in case.types and case.row.name not in ("pow", "floordiv", "mod")]


def _points(case: Case) -> list[Any]:
    rng = np.random.default_rng(sum(map(ord, str(case))))
    arguments = []
    for k, scalar in enumerate(case.types):
        if scalar is BOOL:
            arguments.append(rng.random(300) < 0.5)
        elif scalar is INT:
            lo, hi = case.row.samples.ints[k % len(case.row.samples.ints)] if case.row.samples.ints else (-40, 40)
            drawn = rng.integers(lo, hi, 300, endpoint=True)
            arguments.append(np.where(rng.random(300) < 0.3, rng.choice(INTS, 300), drawn))
        else:
            nearby = case.row.samples.floats or ((-9.0, 9.0),)
            arguments.append(rng.uniform(*nearby[k % len(nearby)], 300).astype(np.float32).astype(np.float64))
    return arguments


@every_case
def test_value(case: Case) -> None:
    arguments = _points(case)
    with np.errstate(all="ignore"):
        expected = np.asarray(case.row.meaning(NUMPY, *arguments), dtype=np.float64)
    found = run(f"value_{name_of(case)}", columns(arguments), 1)[:, 0]
    if case.result is FLOAT:
        tolerance = LOOSE.get(case.row.name, 3e-6)
        np.testing.assert_allclose(found, expected, rtol=tolerance, atol=tolerance / 10)
    else:
        np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("case", OF_FLOATS, ids=str)
def test_special_values(case: Case) -> None:
    axes = [(False, True) if scalar is BOOL else SPECIAL for scalar in case.types]
    arguments = [each.ravel() for each in np.meshgrid(*axes)]
    with np.errstate(all="ignore"):
        expected = np.asarray(case.row.meaning(NUMPY, *arguments), dtype=np.float64)
    found = run(f"value_{name_of(case)}", columns(arguments), 1)[:, 0]
    np.testing.assert_array_equal(np.isnan(found), np.isnan(expected))
    np.testing.assert_allclose(found[~np.isnan(found)], expected[~np.isnan(found)], rtol=1e-5, atol=1e-6)


def _flat(r: Range) -> tuple[float, float, float]:
    if isinstance(r, BoolRange):
        return float(r.may_be_false), float(r.may_be_true), 0.0
    return float(r.lo), float(r.hi), float(isinstance(r, FloatRange) and r.may_be_nan)


def _range(case: Case, row: Any) -> Range:
    if case.result is BOOL:
        return BoolRange(bool(row[0]), bool(row[1]))
    if case.result is INT:
        return IntRange(int(row[0]), int(row[1]))
    return FloatRange(float(row[0]), float(row[1]), bool(row[2]))


@every_case
def test_range(case: Case) -> None:
    rng = np.random.default_rng(sum(map(ord, str(case))))
    drawn = boxes(case, rng, 200)
    packed = np.array([[number for r in box for number in _flat(r)] for box in drawn])
    found = [_range(case, row) for row in run(f"range_{name_of(case)}", packed, 3)]
    assert found == [case.row.interval(*box) for box in drawn]
