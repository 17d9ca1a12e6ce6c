"""Ranges of expressions, by interval evaluation that learns from the conditions of branches; int expressions as sums.

Stage: analyse. In: an expression, ranges of its symbols (and, through a function, of its loads), and conditions that
hold. Out: a range that holds every value. Inside ``x if c else y``, ``c and x`` and ``c or x`` the rest is evaluated
under what ``c`` says: comparisons bound their operands, what these are computed from, and differences of ints.
Unknown symbols have every value of their type. Does NOT decide anything; ``bounds.py`` and ``tiles.py`` do.

``linear`` writes an int expression as constant + Σ coefficient · atom, over the integers. A sum, difference, negation
or product with a constant is taken apart only where it surely does not wrap, so that arithmetic modulo 2**32 and over
the integers agree; everything else is an atom. ``ceildiv(x, c)`` is written as ``(x + c - 1) // c``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from flashgen.ir import interval
from flashgen.ir.expr import Apply, Expr, Literal, Load, Symbol, literal
from flashgen.ir.interval import FULL_INT, INF, INT_MAX, INT_MIN, BoolRange, FloatRange, IntRange, Range
from flashgen.ir.interval_float import point
from flashgen.ir.operators import OPERATORS
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


LoadRange = Callable[[Load, tuple[Range, ...]], Range]
_MAX_BRANCHES = 64  # conditions that one evaluator learns from; a guard against exponential nesting
_EXACT_FLOAT = 2**24  # ints up to here are floats


@dataclass(frozen=True, eq=False)
class Facts:
    """Known ranges beyond those of symbols: of nodes, and of linear forms without their constants."""

    nodes: Mapping[Expr, Range] = field(default_factory=dict)
    sums: Mapping[Key, IntRange] = field(default_factory=dict)


NO_FACTS = Facts()


def bounds(
    expr: Expr,
    ranges: Mapping[Expr, Range],
    conditions: Iterable[Expr] = (),
    loads: LoadRange | None = None,
) -> Range:
    """The range of ``expr``, given ranges of symbols and conditions that are true."""
    evaluator = RangeEvaluator(ranges, loads)
    return evaluator.range(expr, evaluator.facts(conditions) or NO_FACTS)


def range_of_number(value: bool | int | float) -> Range:
    """The range of a single value."""
    if isinstance(value, bool):
        return interval.truth(value)
    return IntRange(value, value) if isinstance(value, int) else point(value)


def plain_range(
    node: Expr, ranges: Mapping[Expr, Range], loads: LoadRange | None, children: tuple[Range, ...]
) -> Range:
    """The range of one node over ranges of its children, without conditions."""
    match node:
        case Literal(value=value):
            return range_of_number(value)
        case Symbol():
            return ranges.get(node, interval.full(node.type))
        case Load():
            return interval.full(node.type) if loads is None else loads(node, children)
        case Apply(op=op):
            return OPERATORS[op].interval(*children)
    raise AssertionError(f"no range for {type(node).__name__}")


class RangeEvaluator:
    """Evaluates expressions over one set of ranges; results are cached by the facts that they depend on."""

    def __init__(self, ranges: Mapping[Expr, Range], loads: LoadRange | None = None) -> None:
        self._ranges = ranges
        self._loads = loads
        self._found: dict[Facts, dict[Expr, Range]] = {}
        self._branches = _MAX_BRANCHES

    def range(self, expr: Expr, facts: Facts = NO_FACTS) -> Range:
        """The range of an expression where ``facts`` hold."""
        found = self._found.setdefault(facts, {})
        if expr not in found:
            found[expr] = self._narrowed(expr, self._evaluate(expr, facts), facts)
        return found[expr]

    def _evaluate(self, node: Expr, facts: Facts) -> Range:
        match node:
            case Apply(op="where", args=(c, x, y)):
                return self._choice(self._bool(c, facts), c, x, y, facts)
            case Apply(op="and" | "or" as op, args=(x, y)):
                left = self._bool(x, facts)
                decided = left.is_false if op == "and" else left.is_true
                inside = None if decided else self._branch(facts, x, op == "and")
                if inside is None:
                    return interval.truth(op == "or")
                return OPERATORS[op].interval(left, self.range(y, inside))
        children = tuple(self.range(child, facts) for child in node.children)
        return plain_range(node, self._ranges, self._loads, children)

    def _choice(self, chosen: BoolRange, c: Expr, x: Expr, y: Expr, facts: Facts) -> Range:
        yes = self._branch(facts, c, True) if chosen.may_be_true else None
        no = self._branch(facts, c, False) if chosen.may_be_false else None
        branches = [self.range(arg, inside) for arg, inside in ((x, yes), (y, no)) if inside is not None]
        if not branches:  # the facts contradict each other: nothing comes here
            return self.range(x, facts)
        return branches[0] if len(branches) == 1 else interval.hull(*branches)

    def _branch(self, facts: Facts, condition: Expr, truth: bool) -> Facts | None:
        """The facts inside a branch; None where the branch is never taken."""
        if self._branches <= 0:
            return facts
        self._branches -= 1
        return self.assume(facts, condition, truth)

    def _bool(self, expr: Expr, facts: Facts) -> BoolRange:
        found = self.range(expr, facts)
        assert isinstance(found, BoolRange)
        return found

    def _narrowed(self, node: Expr, found: Range, facts: Facts) -> Range:
        """``found``, intersected with the known ranges of the node and of its linear form."""
        if (known := facts.nodes.get(node)) is not None:
            found = interval.meet(found, known) or known
        if facts.sums and isinstance(found, IntRange) and isinstance(node, Apply):
            own = found
            lo, hi = range_of_form(
                self.linear(node, facts), lambda atom: own if atom == node else self.range(atom, facts), facts.sums
            )
            if lo <= hi and lo >= INT_MIN and hi <= INT_MAX:
                found = interval.meet(found, IntRange(lo, hi)) or found
        return found

    def linear(self, expr: Expr, facts: Facts) -> Linear:
        """The linear form of an int expression where ``facts`` hold."""
        return linear(expr, lambda node: self.range(node, facts))

    # Conditions -------------------------------------------------------------------------------------------------------

    def facts(self, conditions: Iterable[Expr]) -> Facts | None:
        """The facts that follow from all of these conditions; None where they contradict each other."""
        facts: Facts | None = NO_FACTS
        for condition in conditions:
            facts = None if facts is None else self.assume(facts, condition)
        return facts

    def assume(self, facts: Facts, condition: Expr, truth: bool = True) -> Facts | None:
        """``facts`` with ``condition`` being ``truth``; None where they contradict it."""
        already = self._bool(condition, facts)
        if not (already.may_be_true if truth else already.may_be_false):
            return None
        match condition:
            case Apply(op="not", args=(x,)):
                return self.assume(facts, x, not truth)
            case Apply(op="and" | "or" as op, args=(x, y)):
                return self._assume_junction(facts, op, x, y, truth)
            case Apply(op=op, args=(x, y)) if OPERATORS[op].is_comparison:
                learnt = self._assume_comparison(facts, op if truth else OPERATORS[op].opposite, truth, x, y)
                return None if learnt is None else _with(learnt, condition, interval.truth(truth))
        return _with(facts, condition, interval.truth(truth))

    def _assume_junction(self, facts: Facts, op: str, x: Expr, y: Expr, truth: bool) -> Facts | None:
        if truth is (op == "and"):  # both sides are known
            first = self.assume(facts, x, truth)
            return None if first is None else self.assume(first, y, truth)
        # One side at least: known where the other one is excluded.
        excluded = interval.truth(not truth)
        if self._bool(x, facts) == excluded:
            return self.assume(facts, y, truth)
        return self.assume(facts, x, truth) if self._bool(y, facts) == excluded else facts

    def _assume_comparison(self, facts: Facts, op: str, truth: bool, x: Expr, y: Expr) -> Facts | None:
        rx, ry = self.range(x, facts), self.range(y, facts)
        if isinstance(rx, IntRange) and isinstance(ry, IntRange):
            learnt = self._learn(facts, x, _bounded(op, rx, ry))
            learnt = None if learnt is None else self._learn(learnt, y, _bounded(OPERATORS[op].flipped, ry, rx))
            return None if learnt is None else self._learn_difference(learnt, op, x, y)
        if isinstance(rx, FloatRange) and isinstance(ry, FloatRange):
            # A comparison that holds, other than !=, has no NaN on either side.
            ordered = truth or op == "eq" or not (rx.may_be_nan or ry.may_be_nan)
            if op == "ne" or not ordered:
                return facts
            learnt = self._learn(facts, x, _bounded_float(op, ry))
            return None if learnt is None else self._learn(learnt, y, _bounded_float(OPERATORS[op].flipped, rx))
        return facts

    def _learn_difference(self, facts: Facts, op: str, x: Expr, y: Expr) -> Facts:
        """x - y as a linear form, and its negative."""
        lo, hi = {
            "lt": (-INF, -1), "le": (-INF, 0), "gt": (1, INF), "ge": (0, INF), "eq": (0, 0), "ne": (-INF, INF),
        }[op]  # fmt: skip
        return _with_sum(facts, self.linear(x, facts).plus(self.linear(y, facts), -1), lo, hi)

    def _learn(self, facts: Facts, node: Expr, new: Range | None) -> Facts | None:
        """The facts with the node in ``new``, and what follows for the node's arguments."""
        met = None if new is None else interval.meet(self.range(node, facts), new)
        if met is None:
            return None
        if isinstance(node, Literal):
            return facts
        learnt: Facts | None = _with(facts, node, met)
        if isinstance(met, IntRange):
            learnt = _with_sum(_with(facts, node, met), self.linear(node, facts), met.lo, met.hi)
        for inner, implied in self._implied(node, met, facts):
            learnt = None if learnt is None else self._learn(learnt, inner, implied)
        return learnt

    def _implied(self, node: Expr, met: Range, facts: Facts) -> list[tuple[Expr, Range]]:
        """(argument, range) that follow from the node being in ``met``."""
        match node, met:
            case Apply(op="to_float", args=(x,)), FloatRange(lo, hi) if x.type is ScalarType.INT:
                low = math.ceil(lo) if -_EXACT_FLOAT <= lo <= _EXACT_FLOAT else INT_MIN
                high = math.floor(hi) if -_EXACT_FLOAT <= hi <= _EXACT_FLOAT else INT_MAX
                return [(x, IntRange(low, high))] if low <= high else []
            case Apply(op="abs", args=(x,)), IntRange(_, hi) if hi >= 0:
                inside = self.range(x, facts)
                return [(x, IntRange(-hi, hi))] if isinstance(inside, IntRange) and inside.lo > INT_MIN else []
            case Apply(op="max", args=(x, y)), IntRange(_, hi):
                return [(x, IntRange(INT_MIN, hi)), (y, IntRange(INT_MIN, hi))]
            case Apply(op="min", args=(x, y)), IntRange(lo, _):
                return [(x, IntRange(lo, INT_MAX)), (y, IntRange(lo, INT_MAX))]
            case Apply(op="floordiv", args=(x, Literal(value=c))), IntRange(lo, hi) if c > 0:
                ends = (max(lo * int(c), INT_MIN), min(hi * int(c) + int(c) - 1, INT_MAX))
                return [(x, IntRange(*ends))]
            case Apply(op="add" | "sub" as op, args=(x, Literal(value=c))), IntRange(lo, hi):
                shift = -int(c) if op == "add" else int(c)
                unwrapped = OPERATORS[op].interval(self.range(x, facts), IntRange(int(c), int(c))) != FULL_INT
                ends = (max(lo + shift, INT_MIN), min(hi + shift, INT_MAX))
                return [(x, IntRange(*ends))] if unwrapped and ends[0] <= ends[1] else []
        return []


def _with(facts: Facts, node: Expr, known: Range) -> Facts:
    return Facts({**facts.nodes, node: known}, facts.sums)


def _with_sum(facts: Facts, form: Linear, lo: float, hi: float) -> Facts:
    """``facts`` with lo ≤ form ≤ hi, also for the negative form. A single atom has its range as a node."""
    if len(form.terms) < 2:
        return facts
    sums = dict(facts.sums)
    for sign in (1, -1):
        ends = (sign * (lo - form.constant), sign * (hi - form.constant))
        new = IntRange(int(max(min(ends), 8 * INT_MIN)), int(min(max(ends), 8 * INT_MAX)))
        key = Linear().plus(form, sign).key
        met = interval.meet(sums[key], new) if key in sums else new
        if isinstance(met, IntRange):
            sums[key] = met
    return Facts(facts.nodes, sums)


def _bounded(op: str, x: IntRange, y: IntRange) -> IntRange | None:
    """The values that x may have where ``x op y`` holds."""
    lo, hi = {
        "lt": (INT_MIN, y.hi - 1), "le": (INT_MIN, y.hi), "gt": (y.lo + 1, INT_MAX), "ge": (y.lo, INT_MAX),
        "eq": (y.lo, y.hi), "ne": (INT_MIN, INT_MAX),
    }[op]  # fmt: skip
    if op == "ne" and y.is_point:  # an end of x that y excludes
        lo, hi = x.lo + (x.lo == y.lo), x.hi - (x.hi == y.lo)
    return IntRange(lo, hi) if lo <= hi else None


def _bounded_float(op: str, y: FloatRange) -> FloatRange:
    lo = y.lo if op in ("gt", "ge", "eq") else -INF
    hi = y.hi if op in ("lt", "le", "eq") else INF
    return FloatRange(lo, hi)
