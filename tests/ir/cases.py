"""Each operator at each type that it takes, with random boxes and points in them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from flashgen.ir.interval import BoolRange, FloatRange, IntRange, Range
from flashgen.ir.interval_float import down
from flashgen.ir.operators import OPERATORS, Operator, TypingError
from flashgen.ir.types import ScalarType

BOOL, INT, FLOAT = ScalarType.BOOL, ScalarType.INT, ScalarType.FLOAT
INT_MIN, INT_MAX = -(2**31), 2**31 - 1
INF = float("inf")

_INTS = (INT_MIN, INT_MIN + 1, -64, -33, -8, -3, -2, -1, 0, 1, 2, 3, 7, 8, 31, 32, 33, 64, 1000, INT_MAX - 1, INT_MAX)
_FLOATS = (
    -INF, -3e38, -2.5e9, -2147483648.0, -100.0, -20.0, -1.5, -1.0, -0.75, -0.5, -1e-30, 0.0, 1e-30, 0.25, 0.5, 1.0, 1.5,
    2.0, 3.0, 20.0, 88.0, 100.0, 2147483648.0, 3e38, INF,
)  # fmt: skip


@dataclass(frozen=True)
class Case:
    """An operator at one tuple of operand types."""

    row: Operator
    types: tuple[ScalarType, ...]

    @property
    def result(self) -> ScalarType:
        return self.row.signature(self.types).result

    def __str__(self) -> str:
        return f"{self.row.name}-{self.types[-1]}"


def _cases() -> Iterator[Case]:
    for row in OPERATORS.values():
        arity = 3 if row.arity < 0 else row.arity
        for scalar in (BOOL, INT, FLOAT):
            types = (BOOL, scalar, scalar) if row.name == "where" else (scalar,) * arity
            try:
                promoted = row.signature(types).arguments
            except TypingError:
                continue
            if promoted == types:
                yield Case(row, types)


CASES = tuple(_cases())


def boxes(case: Case, rng: np.random.Generator, count: int) -> list[tuple[Range, ...]]:
    """Random ranges of the arguments: between remarkable numbers, and around the samples of the row."""
    return [tuple(_box(case, k, rng) for k in range(len(case.types))) for _ in range(count)]


def _box(case: Case, k: int, rng: np.random.Generator) -> Range:
    scalar = case.types[k]
    if scalar is BOOL:
        return (BoolRange(True, False), BoolRange(False, True), BoolRange(True, True))[rng.integers(3)]
    if scalar is INT:
        near = case.row.samples.ints[k % len(case.row.samples.ints)] if case.row.samples.ints else (-40, 40)
        a = int(rng.choice(_INTS) if rng.random() < 0.4 else rng.integers(near[0], near[1], endpoint=True))
        width = int(rng.choice((0, 0, 1, 2, 5, 17, 100)))
        b = int(rng.choice(_INTS)) if rng.random() < 0.3 else min(a + width, INT_MAX)
        return IntRange(min(a, b), max(a, b))
    nearby = case.row.samples.floats[k % len(case.row.samples.floats)] if case.row.samples.floats else (-9.0, 9.0)
    c = float(rng.choice(_FLOATS) if rng.random() < 0.4 else rng.uniform(*nearby))
    d = float(rng.choice(_FLOATS)) if rng.random() < 0.3 else c + float(rng.choice((0.0, 0.0, 1e-4, 0.1, 2.0, 30.0)))
    lo, hi = down(min(c, d)), down(max(c, d))
    return FloatRange(lo, hi, bool(rng.random() < 0.1))


def points(box: Sequence[Range], rng: np.random.Generator, count: int) -> list[Any]:
    """Arrays of values inside the box, ends and remarkable numbers among them; one array an argument."""
    return [_inside(r, rng, count) for r in box]


def _inside(r: Range, rng: np.random.Generator, count: int) -> Any:
    if isinstance(r, BoolRange):
        return rng.choice([t for t in (False, True) if (r.may_be_true if t else r.may_be_false)], count)
    if isinstance(r, IntRange):
        known = [r.lo, r.hi, *(v for v in _INTS if r.lo <= v <= r.hi)]
        picked = rng.choice(np.array(known, dtype=np.int64), count)
        return np.where(rng.random(count) < 0.5, picked, rng.integers(r.lo, r.hi, count, endpoint=True))
    finite = (max(r.lo, -3.4e38), min(r.hi, 3.4e38))
    values = np.array([r.lo, r.hi, *(v for v in _FLOATS if r.lo <= v <= r.hi)])
    spread = finite[0] + (finite[1] / 2 - finite[0] / 2) * 2 * rng.random(count) if finite[0] <= finite[1] else r.lo
    picked = np.where(rng.random(count) < 0.5, rng.choice(values, count), spread)
    picked = np.clip(picked.astype(np.float32).astype(np.float64), r.lo, r.hi)
    return np.where(rng.random(count) < 0.2, np.nan, picked) if r.may_be_nan else picked


def holds(r: Range, values: Any) -> Any:
    """Which of the values the range holds."""
    if isinstance(r, BoolRange):
        return np.where(values.astype(bool), r.may_be_true, r.may_be_false)
    if isinstance(r, IntRange):
        return (values >= r.lo) & (values <= r.hi)
    return np.where(np.isnan(values), r.may_be_nan, (values >= r.lo) & (values <= r.hi))
