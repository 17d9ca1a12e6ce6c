"""Whether a tile may hold a kept pair, or a dropped one: the mask as unions of constraints on a box.

Stage: analyse and after. In: the condition under which a pair is kept. Out: the condition, or its negation, as
alternatives (``Term``) of constraints that hold together (``constraints.py``). A comparison of int sums, of terms of
the row alone and of the column alone, bounds such a sum (``bound``). Over a box of rows and columns an
alternative narrows i and j, then bounds each form in turn; it is possible where no range becomes empty. Bounds on one
form are intersected first, and the negation of a union is an intersection, so that intervals that abut or overlap
merge. For bounds on i, j and i - j the answer is exact, as every difference between the ends occurs in a box. Other
conditions are evaluated as ranges over the narrowed box.

``tiles.py`` evaluates the steps of a term over ranges, ``emit/ranges.py`` prints them. Neither is ever wrong: where
ints may wrap, the bound is dropped, and an unknown answer means possible.

Of one line, the keys of a row or the queries of a column, alternatives may be ``Run``s, whose ends are sums of values
that are constant along it. Kernels turn runs into bits once a line; a pair of a masked tile then costs one selection.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from itertools import product

from flashgen.analysis.constraints import (
    COLUMN,
    Bound,
    Form,
    Limit,
    Term,
    Truth,
    Unequal,
    block_of,
    bound,
    has_opposite,
    is_point,
    natural_ends,
    remainder,
    sum_of,
)
from flashgen.analysis.levels import Level, level_of
from flashgen.analysis.prover import SIZE_LIMIT
from flashgen.analysis.ranging import Linear
from flashgen.analysis.simplify import make
from flashgen.ir.expr import Apply, Expr, Literal, Symbol
from flashgen.ir.interval import INT_MAX
from flashgen.ir.operators import OPERATORS
from flashgen.ir.types import ScalarType

MOST_TERMS = 12  # alternatives of a condition; beyond it parts are evaluated as ranges
_MOST_SIDES = 6  # of one comparison: each minimum, maximum or choice in it adds one and doubles the alternatives
_HALVES = {"eq": ("le", "ge"), "ne": ("lt", "gt")}


def kept_terms(keep: Expr, value: bool = True) -> tuple[Term, ...]:
    """The alternatives under which a pair is kept; with ``value`` False, those under which it is dropped."""
    whole = _Reader().parts(keep, value)
    split = [part for parts in whole for part in _split(parts)]
    alternatives = split if len(split) <= 2 * MOST_TERMS else whole
    found = dict.fromkeys(term for parts in alternatives if (term := _term(parts)) is not None)
    return (Term(),) if Term() in found else tuple(found)


_Part = Bound | Unequal | Truth
_Parts = tuple[_Part, ...]
_Wanted = tuple[Expr, bool]  # a condition, and what it is to be


class _Reader:
    """Takes a condition apart. Parts are cached, as they may occur with both truth values."""

    def __init__(self) -> None:
        self._found: dict[_Wanted, list[_Parts]] = {}

    def parts(self, condition: Expr, value: bool) -> list[_Parts]:
        """The alternatives, not yet joined to terms, under which ``condition`` is ``value``."""
        wanted = (condition, value)
        if wanted not in self._found:
            parts = self._parts(condition, value)
            # Where there are too many its range has to do.
            self._found[wanted] = parts if len(parts) <= MOST_TERMS else [(Truth(condition, value),)]
        return self._found[wanted]

    def _parts(self, condition: Expr, value: bool) -> list[_Parts]:
        match condition:
            case Literal(value=known):
                return [()] if bool(known) is value else []
            case Apply(op="not", args=(x,)):
                return self.parts(x, not value)
            case Apply(op="and" | "or" as op, args=(x, y)):
                one, other = self.parts(x, value), self.parts(y, value)
                return one + other if (op == "or") is value else self._all(((x, value), (y, value)))
            case Apply(op="where", args=(c, x, y)):
                return self._all(((c, True), (x, value))) + self._all(((c, False), (y, value)))
            case Apply(op="eq" | "ne" as op, args=(x, y)) if x.type is ScalarType.BOOL:
                same = (op == "eq") is value
                return [parts for side in (True, False) for parts in self._all(((x, side), (y, side is same)))]
            case Apply(op=op, args=(x, y)) if (
                OPERATORS[op].is_comparison and x.type is ScalarType.INT and not is_point(condition)
            ):
                found = self._comparison(op if value else OPERATORS[op].opposite, x, y)
                if found is not None:
                    return found
        return [(Truth(condition, value),)]

    def _all(self, wanted: Iterable[_Wanted]) -> list[_Parts]:
        """Each alternative of one condition with each of the next, without those that exclude each other."""
        found: list[_Parts] = [()]
        for condition, value in wanted:
            joined = _joined(found, self.parts(condition, value))
            found = joined if len(joined) <= MOST_TERMS else _joined(found, [(Truth(condition, value),)])
        return found

    # Comparisons of ints

    def _comparison(self, op: str, x: Expr, y: Expr) -> list[_Parts] | None:
        if (found := remainder(op, x, y)) is not None:
            return [(found,)]
        left, right = sum_of(x), sum_of(y)
        return self._compared(op, left.plus(right, -1), (left, right))

    def _compared(self, op: str, total: Linear, sides: tuple[Linear, ...]) -> list[_Parts] | None:
        """The alternatives of ``total op 0``; None where a term belongs neither to the row alone nor to the column
        alone.

        ``sides`` are the sums that kernels compute on the way, modulo 2**32.
        """
        for term, coefficient in total.terms.items():
            choices = _choices(term, downward=(op in ("le", "lt")) is (coefficient > 0))
            if choices is None:
                continue
            if len(sides) >= _MOST_SIDES:
                return None
            if op in ("eq", "ne"):
                one, other = (self._compared(each, total, sides) for each in _HALVES[op])
                return None if one is None or other is None else _joined(one, other) if op == "eq" else one + other
            found: list[_Parts] = [()] if choices.every else []
            for conditions, chosen in choices.options:
                side = sum_of(chosen)
                parts = self._compared(op, total.without(term).plus(side, coefficient), (*sides, side))
                if parts is None:
                    return None
                found = _joined(found, parts) if choices.every else found + _joined(self._all(conditions), parts)
            return found
        found_bound = bound(op, total, sides)
        return None if found_bound is None else [(found_bound,)]


def _split(parts: _Parts) -> list[_Parts]:
    """form ≠ limit as less or greater, where that narrows positions that other parts read."""
    split: list[_Parts] = [()]
    for part in parts:
        if isinstance(part, Unequal) and len(parts) > 1 and all(block_of(atom) for atom, _ in part.form.terms):
            less, greater = (replace(part.limit, constant=part.limit.constant + shift) for shift in (-1, 1))
            split = _joined(split, [(Bound(part.form, most=(less,)),), (Bound(part.form, least=(greater,)),)])
        else:
            split = _joined(split, [(part,)])
    return split if len(split) <= MOST_TERMS else [parts]


def _joined(some: Iterable[_Parts], others: Iterable[_Parts]) -> list[_Parts]:
    """Each of ``some`` with each of ``others``, where both can hold together."""
    return [parts for one, other in product(some, others) if _term(parts := one + other) is not None]


def _term(parts: _Parts) -> Term | None:
    """The parts as a term, with the bounds on each form joined; None where known bounds exclude each other."""
    least: dict[Form, list[Limit]] = {}
    most: dict[Form, list[Limit]] = {}
    for part in parts:
        if isinstance(part, Bound):
            least.setdefault(part.form, []).extend(part.least)
            most.setdefault(part.form, []).extend(part.most)
    bounds = [Bound(form, _tightest(least[form], max), _tightest(most[form], min)) for form in least]
    if any(_is_empty(bound) for bound in bounds):
        return None
    return Term(
        bounds=tuple(sorted(bounds, key=_precedence)),
        unequal=tuple(dict.fromkeys(part for part in parts if isinstance(part, Unequal))),
        truths=tuple(dict.fromkeys(part for part in parts if isinstance(part, Truth))),
    )


def _precedence(bound: Bound) -> tuple[bool, bool, int]:
    """i and j first, then i - j, then other forms: first the bounds that narrow i and j most."""
    form = bound.form
    return form.axis is None, not form.is_distance, sum(block_of(atom) is None for atom, _ in form.terms)


def _tightest(limits: Iterable[Limit], choose: Callable[[Iterable[int]], int]) -> tuple[Limit, ...]:
    """The limits, but of numbers only the tightest."""
    distinct = dict.fromkeys(limits)
    numbers = [limit.constant for limit in distinct if limit.is_number]
    return (*(Limit(choose(numbers)) for _ in numbers[:1]), *(limit for limit in distinct if not limit.is_number))


def _is_empty(bound: Bound) -> bool:
    return any(x.is_number and y.is_number and x.constant > y.constant for x, y in product(bound.least, bound.most))


@dataclass(frozen=True)
class _Choices:
    """The possible values of a minimum, maximum, absolute value or choice: options, each under conditions.

    ``every``: all options have to satisfy the comparison; else one has to.
    """

    options: tuple[tuple[tuple[_Wanted, ...], Expr], ...]
    every: bool


def _choices(term: Expr, *, downward: bool) -> _Choices | None:
    """The options of a term; ``downward``: if the comparison holds for a value, it holds for smaller ones."""
    match term:
        case Apply(op="where", args=(c, x, y)):
            return _Choices(((((c, True),), x), (((c, False),), y)), every=False)
        case Apply(op="abs", args=(x,)) if has_opposite(sum_of(x)):
            return _Choices((((), x), ((), make("neg", x))), every=downward)
        case Apply(op="min" | "max" as op, args=(x, y)) if level_of(term) is Level.PAIR:
            return _Choices((((), x), ((), y)), every=(op == "max") is downward)
        case Apply(op="clamp", args=(x, lo, hi)) if level_of(term) is Level.PAIR:
            return _choices(Apply(ScalarType.INT, op="min", args=(make("max", x, lo), hi)), downward=downward)
    return None


@functools.lru_cache(maxsize=64)
def window_width(keep: Expr) -> int | None:
    """The most keys that a row keeps, where every alternative bounds i - j from both sides by numbers."""
    total = 0
    for term in kept_terms(keep):
        widths = [width for each in term.bounds if each.form.is_distance and (width := _width(each)) is not None]
        if not widths:
            return None
        total += max(0, min(widths))
    return total


def _width(bound: Bound) -> int | None:
    least, most = _numbers(bound.least), _numbers(bound.most)
    return min(most) - max(least) + 1 if least and most else None


def _numbers(limits: tuple[Limit, ...]) -> list[int]:
    return [limit.constant for limit in limits if not limit.points]


# Runs of a line -------------------------------------------------------------------------------------------------------

MOST_RUNS = 3  # of a line; beyond it a look at each pair costs no more


@dataclass(frozen=True)
class Blocks:
    """Positions p with every ``least`` ≤ (p + shift) // size ≤ every ``most``.

    The size is a point, which may be 0 or less, and the shift a sum of points.
    """

    shift: Linear
    size: Expr
    least: tuple[Linear, ...]
    most: tuple[Linear, ...]


@dataclass(frozen=True)
class Run:
    """Positions p in all ``blocks`` with every ``least`` ≤ p ≤ every ``most``, over the integers.

    The run is empty on a line where a sum of ``not_negative`` is below 0, or one of ``truths`` does not hold.
    """

    least: tuple[Linear, ...]
    most: tuple[Linear, ...]
    blocks: tuple[Blocks, ...] = ()
    not_negative: tuple[Linear, ...] = ()
    truths: tuple[Truth, ...] = ()


def kept_runs(keep: Expr, axis: Symbol) -> tuple[Run, ...] | None:
    """The runs along ``axis`` (i or j), for a line of the other axis; None where each pair has to be checked."""
    terms = kept_terms(keep)
    if not 0 < len(terms) <= MOST_RUNS:
        return None
    runs: list[Run] = []
    for term in terms:
        run = _run(term, axis)
        if run is None:
            return None
        runs.append(run)
    return tuple(runs) if any(run.least or run.most or run.blocks for run in runs) else None


def fits_position(end: Linear) -> bool:
    """Whether an end minus a position stays inside 32 bits in any call."""
    lo, hi = natural_ends(end)
    return lo >= -SIZE_LIMIT and hi <= INT_MAX


def _run(term: Term, axis: Symbol) -> Run | None:
    """A term as a run; None where a constraint depends on both positions in another way."""
    least: list[Linear] = []
    most: list[Linear] = []
    blocks: list[Blocks] = []
    not_negative: list[Linear] = []
    line = Level.ROW if axis == COLUMN else Level.COLUMN
    if term.unequal or any(level_of(each.condition) not in (line, Level.HEAD, Level.LAUNCH) for each in term.truths):
        return None
    for part in term.bounds:
        if any(limit.sides for limit in (*part.least, *part.most)):
            return None  # it holds only where nothing wraps
        across = {atom: c for atom, c in part.form.terms if level_of(atom) is line}
        from_least, from_most = (  # less what is the same along the line
            [Linear(each.constant, dict(each.points)).plus(Linear(0, across), -1) for each in limits]
            for limits in (part.least, part.most)
        )
        moving = [(atom, c) for atom, c in part.form.terms if atom not in across]
        if not moving:
            not_negative += [*(Linear().plus(each, -1) for each in from_least), *from_most]
            continue
        atom, along = moving[0]
        divided = _divided(atom, axis)
        if len(moving) > 1 or along not in (-1, 1) or (atom != axis and divided is None):
            return None
        lower, upper = (from_least, from_most) if along > 0 else (from_most, from_least)
        ends = tuple(tuple(Linear().plus(each, along) for each in side) for side in (lower, upper))
        if divided is None:
            least += ends[0]
            most += ends[1]
        else:
            blocks.append(Blocks(*divided, *ends))
    return Run(tuple(least), tuple(most), tuple(blocks), tuple(not_negative), term.truths)


def _divided(atom: Expr, axis: Symbol) -> tuple[Linear, Expr] | None:
    """(s, c) of (p + s) // c, where the sum stays inside 32 bits in any call."""
    match atom:
        case Apply(op="floordiv", args=(x, c)) if is_point(c):
            total = sum_of(x)
            shift = total.without(axis)
            if total.terms.get(axis) == 1 and all(map(is_point, shift.terms)) and fits_position(total):
                return shift, c
    return None
