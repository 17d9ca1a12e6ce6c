"""Scores that are linear in a squared distance, split into a part of the pair and a part of the row.

Stage: analyse. In: a score. Out: ``SplitNorms``, if there is one. With |q - k|² = |q|² + |k|² - 2 q·k, f |q - k|² is f
|k|² - 2 f q·k + f |q|². f |k|² is computed once a key; f |q|² cancels in a softmax where f is the same for all keys of
a query. The distance is not clamped at 0 then. Does NOT know of weights; its caller does.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from flashgen.analysis.levels import Level, level_of
from flashgen.analysis.ranging import bounds
from flashgen.analysis.simplify import simplify
from flashgen.analysis.variant import DOT, SQDIST
from flashgen.ir.build import apply
from flashgen.ir.expr import Apply, Expr, Symbol, SymbolKind, index, literal, walk
from flashgen.ir.interval import FloatRange, IntRange, Range, full
from flashgen.ir.types import ScalarType

# What code has at hand of a pair's row and column: |q|², and ``of_key`` times |k|².
NORM_OF_ROW, NORM_OF_KEY = (
    Apply(ScalarType.FLOAT, op=op, args=(index("i"), index("j"))) for op in ("row_norm", "key_norm")
)
_SHARED = (Level.LAUNCH, Level.HEAD, Level.ROW)
_MANY = 2**30


@dataclass(frozen=True)
class SplitNorms:
    """The score as ``pairs`` + ``rows``; ``rows``, ``factor`` times |q|², is the same for all keys of a query.

    ``of_key`` is the factor by which |k|² is multiplied once a key, the same for all rows of a head; None: no factor.
    """

    pairs: Expr
    rows: Expr
    factor: Expr
    of_key: Expr | None


def split_norms(score: Expr) -> SplitNorms | None:
    """The split; None where a score is not linear in ‖q - k‖², or its factor may be infinite."""
    parts = _parts(score)
    if parts is None or parts.factor is None or not _is_finite(parts.factor):
        return None
    factor = simplify(parts.factor)
    if factor == literal(0.0):
        return None
    of_key = None if level_of(factor) is Level.ROW else factor
    if of_key is None:
        pairs = apply("mul", factor, apply("sub", NORM_OF_KEY, apply("mul", literal(2.0), DOT)))
    else:
        by_dot = simplify(apply("mul", literal(-2.0), factor))
        pairs = apply("add", DOT if by_dot == literal(1.0) else apply("mul", by_dot, DOT), NORM_OF_KEY)
    pairs = pairs if parts.rest is None else apply("add", parts.rest, pairs)
    return SplitNorms(pairs, apply("mul", factor, NORM_OF_ROW), factor, of_key)


@dataclass(frozen=True)
class _Parts:
    """``factor`` |q - k|² + ``rest``; each may be absent."""

    factor: Expr | None
    rest: Expr | None

    def each(self, op: str, *by: Expr, first: bool = True) -> _Parts:
        """An operation that is linear, with ``by`` behind or in front."""

        def change(part: Expr | None) -> Expr | None:
            return None if part is None else apply(op, *((part, *by) if first else (*by, part)))

        return _Parts(change(self.factor), change(self.rest))


def _parts(expr: Expr) -> _Parts | None:
    """None where an expression is not linear."""
    if SQDIST not in walk(expr):
        return _Parts(None, expr)
    if expr == SQDIST:
        return _Parts(literal(1.0), None)
    match expr:
        case Apply(op="add" | "sub" as op, args=(first, second)):
            left, right = _parts(first), _parts(second)
            return None if left is None or right is None else _sum(op, left, right)
        case Apply(op="neg", args=(x,)):
            parts = _parts(x)
            return None if parts is None else parts.each("neg")
        case Apply(op="mul" | "div" as op, args=(x, factor)) if _is_factor(factor):
            parts = _parts(x)
            return None if parts is None else parts.each(op, factor)
        case Apply(op="mul", args=(factor, x)) if _is_factor(factor):
            parts = _parts(x)
            return None if parts is None else parts.each("mul", factor, first=False)
    return None


def _is_factor(expr: Expr) -> bool:
    return level_of(expr) in _SHARED


def _sum(op: str, left: _Parts, right: _Parts) -> _Parts:
    def add(x: Expr | None, y: Expr | None) -> Expr | None:
        if y is None:
            return x
        return apply(op, x, y) if x is not None else y if op == "add" else apply("neg", y)

    return _Parts(add(left.factor, right.factor), add(left.rest, right.rest))


def _is_finite(factor: Expr) -> bool:
    """Whether a factor is finite at every row, for ordinary captured values."""
    ranges: dict[Expr, Range] = {}
    for node in walk(factor):
        if isinstance(node, Symbol) and node.type is ScalarType.INT:
            ranges[node] = IntRange(int(node.kind is SymbolKind.SIZE), _MANY)
        elif isinstance(node, Symbol):
            ranges[node] = _ordinary(node.type)
    found = bounds(factor, ranges, loads=lambda load, _: _ordinary(load.type))
    assert isinstance(found, FloatRange)
    return math.isfinite(found.lo) and math.isfinite(found.hi) and not found.may_be_nan


def _ordinary(scalar: ScalarType) -> Range:
    ranges: Mapping[ScalarType, Range] = {ScalarType.FLOAT: FloatRange(1.0, 2.0), ScalarType.INT: IntRange(1, 2)}
    return ranges.get(scalar, full(scalar))
