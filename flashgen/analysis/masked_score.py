"""Finds masks that are written as scores of -inf.

Stage: analyse. In: the score. Out: a score, and the condition on positions under which a pair is kept. Kernels look at
that condition tile by tile, before there is a score, so that it may read positions, sizes, params and captured tensors
only. A condition on the score itself stays in the score, as -inf.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from flashgen.analysis.simplify import make, simplify
from flashgen.ir.expr import Apply, Expr, Symbol, SymbolKind, literal

_MINUS_INFINITY = literal(-math.inf)
_TRUE, _FALSE = literal(True), literal(False)


def split_masked_score(score: Expr) -> tuple[Expr, Expr]:
    """The score, and the condition on positions under which a pair is kept; where it is false the score was -inf.

    ``where(c, s, -inf)`` is (s, c), at the top, within branches, sums and minima: a sum with -inf is -inf, but for
    +inf and NaN, which are no scores. Where c reads the score, the part of it that does stays, around the whole score,
    and what has to hold of positions for c to hold is the condition. Everything else is (score, true).
    """
    found = _Splitter().split(simplify(score))
    return simplify(make("where", found.by_score, found.score, _MINUS_INFINITY)), simplify(found.keep)


@dataclass(frozen=True)
class _Split:
    """A score that is ``score`` where both conditions hold, else -inf. ``keep`` does not read the score."""

    score: Expr
    by_score: Expr = _TRUE
    keep: Expr = _TRUE


class _Splitter:
    """Splits scores and conditions; parts are cached, as ``let`` shares them."""

    def __init__(self) -> None:
        self._reads: dict[Expr, bool] = {}
        self._splits: dict[Expr, _Split] = {}
        self._needs: dict[tuple[Expr, bool], Expr] = {}

    def split(self, score: Expr) -> _Split:
        """The split of a part of the score."""
        if score not in self._splits:
            self._splits[score] = self._split(score)
        return self._splits[score]

    def _split(self, score: Expr) -> _Split:
        if score == _MINUS_INFINITY:
            return _Split(literal(0.0), keep=_FALSE)
        match score:
            case Apply(op="where", args=(c, x, y)):
                return self._choice(c, self.split(x), self.split(y))
            case Apply(op="add" | "min" as op, args=(x, y)):
                one, other = self.split(x), self.split(y)
                by_score = make("and", one.by_score, other.by_score)
                return _Split(make(op, one.score, other.score), by_score, make("and", one.keep, other.keep))
            case Apply(op="sub", args=(x, y)):
                one = self.split(x)
                return replace(one, score=make("sub", one.score, y))
        return _Split(score)

    def _choice(self, c: Expr, x: _Split, y: _Split) -> _Split:
        if x.keep == _FALSE:
            return self._only(make("not", c), y)
        if y.keep == _FALSE:
            return self._only(c, x)
        score, by_score = make("where", c, x.score, y.score), make("where", c, x.by_score, y.by_score)
        if x.keep == y.keep:
            return _Split(score, by_score, x.keep)
        if not self._reads_score(c):
            return _Split(score, by_score, make("where", c, x.keep, y.keep))
        by_score = make("where", c, make("and", x.keep, x.by_score), make("and", y.keep, y.by_score))
        return _Split(score, by_score, make("or", x.keep, y.keep))

    def _only(self, c: Expr, split: _Split) -> _Split:
        """The score, with -inf where ``c`` does not hold."""
        by_score, keep = split.by_score, split.keep
        for part in reversed(conjuncts(c)):
            keep = make("and", self._needed(part, True), keep)
            if self._reads_score(part):
                by_score = make("and", part, by_score)
        return _Split(split.score, by_score, keep)

    def _needed(self, condition: Expr, value: bool) -> Expr:
        """The condition on positions wherever ``condition`` is ``value``, as far as it is known without the score."""
        wanted = (condition, value)
        if wanted not in self._needs:
            self._needs[wanted] = self._need(condition, value)
        return self._needs[wanted]

    def _need(self, condition: Expr, value: bool) -> Expr:
        if not self._reads_score(condition):
            return condition if value else make("not", condition)
        match condition:
            case Apply(op="not", args=(x,)):
                return self._needed(x, not value)
            case Apply(op="and" | "or" as op, args=(x, y)):
                one, other = self._needed(x, value), self._needed(y, value)
                return make("and" if (op == "and") is value else "or", one, other)
            case Apply(op="where", args=(c, x, y)):
                first = make("and", self._needed(c, True), self._needed(x, value))
                return make("or", first, make("and", self._needed(c, False), self._needed(y, value)))
        return _TRUE

    def _reads_score(self, expr: Expr) -> bool:
        if expr not in self._reads:
            is_score = isinstance(expr, Symbol) and expr.kind is SymbolKind.SCORE
            self._reads[expr] = is_score or any(self._reads_score(child) for child in expr.children)
        return self._reads[expr]


def conjuncts(condition: Expr) -> tuple[Expr, ...]:
    """Conditions whose conjunction is this one."""
    match condition:
        case Apply(op="and", args=(x, y)):
            return (*conjuncts(x), *conjuncts(y))
        case Apply(op="not", args=(Apply(op="or", args=(x, y)),)):
            return (*conjuncts(make("not", x)), *conjuncts(make("not", y)))
    return (condition,)
