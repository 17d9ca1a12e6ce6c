"""Int expressions as linear forms: constant + Σ coefficient · atom, over the integers.

Stage: analyse. In: int expressions, and a function that bounds them. Out: ``Linear``. A sum, difference, negation or
product with a constant is taken apart only where it surely does not wrap, so that arithmetic modulo 2**32 and over the
integers agree; everything else is an atom. ``ceildiv(x, c)`` is written as ``(x + c - 1) // c``. Proves nothing itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from flashgen.ir.expr import Apply, Expr, Literal, literal
from flashgen.ir.interval import INT_MAX, INT_MIN, IntRange, Range
from flashgen.ir.types import ScalarType

RangeOf = Callable[[Expr], Range]
Key = frozenset[tuple[Expr, int]]


@dataclass(frozen=True)
class Linear:
    """constant + Σ terms[atom] · atom; no coefficient is 0."""

    constant: int = 0
    terms: Mapping[Expr, int] = field(default_factory=dict)

    def plus(self, other: Linear, factor: int = 1) -> Linear:
        terms = dict(self.terms)
        for atom, coefficient in other.terms.items():
            terms[atom] = terms.get(atom, 0) + factor * coefficient
        kept = {atom: coefficient for atom, coefficient in terms.items() if coefficient}
        return Linear(self.constant + factor * other.constant, kept)

    def without(self, atom: Expr) -> Linear:
        return Linear(self.constant, {a: c for a, c in self.terms.items() if a != atom})

    @property
    def key(self) -> Key:
        """The terms as a key, for facts about their sum."""
        return frozenset(self.terms.items())


def linear(expr: Expr, range_of: RangeOf) -> Linear:
    """The linear form of an int expression."""
    if isinstance(expr, Literal):
        return Linear(int(expr.value))
    if isinstance(expr, Apply) and expr.type is ScalarType.INT:
        form = _linear_apply(expr, range_of)
        if form is not None:
            return form
    return Linear(0, {expr: 1})


def _linear_apply(expr: Apply, range_of: RangeOf) -> Linear | None:
    match expr.op, expr.args:
        case ("add" | "sub" as op, (x, y)) if not wraps(expr, range_of):
            return linear(x, range_of).plus(linear(y, range_of), 1 if op == "add" else -1)
        case ("neg", (x,)) if not wraps(expr, range_of):
            return Linear().plus(linear(x, range_of), -1)
        case ("mul", (Literal(value=c), x)) | ("mul", (x, Literal(value=c))) if not wraps(expr, range_of):
            return Linear().plus(linear(x, range_of), int(c))
        case ("ceildiv", (x, Literal(value=c))) if c > 0:
            padded = Apply(ScalarType.INT, op="add", args=(x, literal(int(c) - 1)))
            if not wraps(padded, range_of):
                return Linear(0, {Apply(ScalarType.INT, op="floordiv", args=(padded, literal(int(c)))): 1})
    return None


def wraps(expr: Apply, range_of: RangeOf) -> bool:
    """Whether a sum, difference, negation or product of ints may leave 32 bits."""
    ends = [(r.lo, r.hi) for r in map(range_of, expr.args) if isinstance(r, IntRange)]
    values: Iterable[int]
    match expr.op:
        case "add":
            values = (ends[0][0] + ends[1][0], ends[0][1] + ends[1][1])
        case "sub":
            values = (ends[0][0] - ends[1][1], ends[0][1] - ends[1][0])
        case "neg":
            values = (-ends[0][1], -ends[0][0])
        case "mul":
            values = [a * b for a in ends[0] for b in ends[1]]
        case _:
            raise ValueError(f"'{expr.op}' is no sum")
    return any(not INT_MIN <= value <= INT_MAX for value in values)


def range_of_form(form: Linear, range_of: RangeOf, known: Mapping[Key, IntRange]) -> tuple[int, int]:
    """(lo, hi) over the integers, from the ranges of the atoms and from known ranges of the same sum."""
    lo = hi = form.constant
    for atom, coefficient in form.terms.items():
        r = range_of(atom)
        assert isinstance(r, IntRange)
        ends = (coefficient * r.lo, coefficient * r.hi)
        lo, hi = lo + min(ends), hi + max(ends)
    if (same := known.get(form.key)) is not None:
        lo, hi = max(lo, form.constant + same.lo), min(hi, form.constant + same.hi)
    return lo, hi
