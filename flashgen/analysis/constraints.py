"""The constraints by which a mask is decided for a tile: alternatives of constraints that hold together.

``kept.py`` writes a mask in this form; ``tiles.py`` decides the constraints over ranges, ``emit/ranges.py`` prints the
same steps. A constraint bounds a ``Form``, a sum of terms of the row alone and of the column alone: j, i - j, i // 64 -
j // 64, doc[b, i] - doc[b, j]. Points are values that are one number for a whole head.

Comparisons of ints become such bounds: their sides, as sums (``ranging.Linear``), equal what kernels compute modulo
2**32. A ``Bound`` or ``Unequal`` over the integers holds where none of the sides leaves 32 bits; None where a part is
neither a row's nor a column's, or where 64 bits would not do.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from flashgen.analysis.levels import Level, level_of
from flashgen.analysis.prover import SIZE_LIMIT
from flashgen.analysis.ranging import Linear, range_of_form
from flashgen.analysis.simplify import make
from flashgen.ir.build import apply
from flashgen.ir.expr import Apply, Expr, Literal, Symbol, SymbolKind, index, literal
from flashgen.ir.interval import INT_MAX, INT_MIN, IntRange
from flashgen.ir.operators import OPERATORS
from flashgen.ir.types import ScalarType

ROW, COLUMN = index("i"), index("j")
ONE = literal(1)
ROW_LESS_COLUMN, COLUMN_LESS_ROW = apply("sub", ROW, COLUMN), apply("sub", COLUMN, ROW)
MOST_COEFFICIENT = 2**20  # of sums over 64 bits


@dataclass(frozen=True)
class Form:
    """Σ coefficient · atom. An atom depends on the row alone or on the column alone; a row's come first."""

    terms: tuple[tuple[Expr, int], ...]

    @property
    def axis(self) -> Symbol | None:
        """i or j, where the form is one of them."""
        atom, coefficient = self.terms[0]
        return atom if len(self.terms) == 1 and coefficient == 1 and isinstance(atom, Symbol) else None

    @property
    def is_distance(self) -> bool:
        return self.terms == ((ROW, 1), (COLUMN, -1))


@dataclass(frozen=True)
class Limit:
    """constant + Σ coefficient · point over the integers. Points are ints of a head, as kernels compute them.

    ``sides`` are the sums whose comparison this limit comes from: it holds where none of them leaves 32 bits.
    """

    constant: int
    points: tuple[tuple[Expr, int], ...] = ()
    sides: tuple[Side, ...] = ()

    @property
    def is_number(self) -> bool:
        """Whether the limit is a known number, without points."""
        return not self.points and not self.sides


@dataclass(frozen=True)
class Side:
    """One side of a comparison that may leave 32 bits: a form, and what is added to it."""

    form: Form
    offset: Limit


@dataclass(frozen=True)
class Bound:
    """least ≤ form ≤ most, for every limit of both."""

    form: Form
    least: tuple[Limit, ...] = ()
    most: tuple[Limit, ...] = ()


@dataclass(frozen=True)
class Unequal:
    """form ≠ limit."""

    form: Form
    limit: Limit


@dataclass(frozen=True)
class Truth:
    """A condition that is decided by its range alone; it has to be ``value``."""

    condition: Expr
    value: bool


@dataclass(frozen=True)
class Term:
    """Constraints that hold together, in the order in which they are checked."""

    bounds: tuple[Bound, ...] = ()
    unequal: tuple[Unequal, ...] = ()
    truths: tuple[Truth, ...] = ()

    def tightens(self, number: int) -> bool:
        """Whether later constraints ask for the ranges of i and j that this bound narrows."""
        later = [atom for bound in self.bounds[number + 1 :] for atom, _ in bound.form.terms]
        later += [atom for each in self.unequal for atom, _ in each.form.terms]
        later += [each.condition for each in self.truths]
        return any(_reads_position(each) for each in later)


def is_point(expr: Expr) -> bool:
    """Whether an expression is one value for a whole head."""
    return level_of(expr) in (Level.LAUNCH, Level.HEAD)


def block_of(atom: Expr) -> tuple[Symbol, Expr] | None:
    """(i, c) of i // c, likewise of j; (i, 1) of i: atoms that a bound on them turns into a bound on the position.

    c is a point: where it is a param, a call may give any int.
    """
    match atom:
        case Symbol(kind=SymbolKind.INDEX, name="i" | "j") as position:
            return position, ONE
        case Apply(op="floordiv", args=(Symbol(kind=SymbolKind.INDEX, name="i" | "j") as position, c)) if is_point(c):
            return position, c
    return None


def _reads_position(expr: Expr) -> bool:
    """Whether i or j occurs outside of the indices of loads, which are ranges over the whole tile."""
    if isinstance(expr, Symbol):
        return expr in (ROW, COLUMN)
    return isinstance(expr, Apply) and any(_reads_position(each) for each in expr.args)


# Comparisons of ints --------------------------------------------------------------------------------------------------

_MOST_CONSTANT = 2**40  # of sums over 64 bits
_ORDER = {Level.ROW: 0, Level.COLUMN: 1}


def remainder(op: str, x: Expr, y: Expr) -> Truth | None:
    """x % m == k as (x - k) % m == 0: a range of x that passes a multiple of m begins again at 0."""
    match x, y:
        case Apply(op="mod", args=(inner, Literal(value=m))), Literal(value=k) if op in ("eq", "ne") and 0 < k < m:
            moved = make("mod", make("sub", inner, y), literal(int(m)))
            return Truth(Apply(ScalarType.BOOL, op="eq", args=(moved, literal(0))), op == "eq")
    return None


def sum_of(expr: Expr) -> Linear:
    """The sum that equals ``expr`` modulo 2**32; values of a head are one point."""
    match expr:
        case Literal(value=value):
            return Linear(int(value))
        case _ if is_point(expr):
            return Linear(0, {expr: 1})
        case Apply(op="add" | "sub" as op, args=(x, y)):
            return sum_of(x).plus(sum_of(y), 1 if op == "add" else -1)
        case Apply(op="neg", args=(x,)):
            return Linear().plus(sum_of(x), -1)
        case Apply(op="mul", args=(Literal(value=c), x) | (x, Literal(value=c))) if abs(c) <= MOST_COEFFICIENT:
            return Linear().plus(sum_of(x), int(c))
    return Linear(0, {expr: 1})


def bound(op: str, total: Linear, sides: tuple[Linear, ...]) -> Bound | Unequal | None:
    """``total op 0`` as a bound on a form."""
    varying, points = _divided(total)
    if not varying or any(level_of(atom) is Level.PAIR for atom in varying):
        return None
    if not all(_fits_64_bits(each) for each in (total, *sides)):
        return None
    form = Form(_ordered(varying))
    sign = 1 if form.terms[0][1] > 0 else -1  # the first coefficient comes out positive
    form = Form(tuple((atom, sign * c) for atom, c in form.terms))
    op = OPERATORS[op].flipped if sign < 0 else op
    offset = _ordered({point: -sign * c for point, c in points.items()})
    unsure = tuple(dict.fromkeys(_side(each) for each in sides if not _fits(each)))

    def limit(shift: int = 0) -> Limit:
        return Limit(shift - sign * total.constant, offset, unsure)

    if op in ("eq", "ne") and not offset and (end := _end_of(form, limit().constant)) is not None:
        op = end[op == "ne"]
    if op == "ne":
        return Unequal(form, limit())
    least = {"ge": (limit(),), "gt": (limit(1),), "eq": (limit(),)}.get(op, ())
    most = {"le": (limit(),), "lt": (limit(-1),), "eq": (limit(),)}.get(op, ())
    return _on_position(Bound(form, least, most))


def _end_of(form: Form, value: int) -> tuple[str, str] | None:
    """The results of == and of != where the value is an end of the range of the form."""
    (atom, c), *more = form.terms
    lo, hi = _natural_range(atom)
    if more or c != 1 or value not in (lo, hi):
        return None
    return ("le", "gt") if value == lo else ("ge", "lt")


def _on_position(bound: Bound) -> Bound:
    """lo ≤ i // c ≤ hi as c · lo ≤ i ≤ c · hi + c - 1."""
    atom, coefficient = bound.form.terms[0]
    inner = block_of(atom)
    if len(bound.form.terms) > 1 or coefficient != 1 or inner is None:
        return bound
    position, block = inner
    if not isinstance(block, Literal) or not 0 < block.value <= MOST_COEFFICIENT:
        return bound
    c = int(block.value)
    if any(abs(k) * c > MOST_COEFFICIENT for limit in (*bound.least, *bound.most) for _, k in limit.points):
        return bound

    def moved(limit: Limit, shift: int) -> Limit:
        return Limit(limit.constant * c + shift, tuple((point, k * c) for point, k in limit.points), limit.sides)

    least, most = (moved(each, 0) for each in bound.least), (moved(each, c - 1) for each in bound.most)
    return Bound(Form(((position, 1),)), tuple(least), tuple(most))


def _divided(total: Linear) -> tuple[dict[Expr, int], dict[Expr, int]]:
    """The terms that vary in a tile, and the points."""
    points = {term: c for term, c in total.terms.items() if is_point(term)}
    return {term: c for term, c in total.terms.items() if term not in points}, points


def _ordered(terms: Mapping[Expr, int]) -> tuple[tuple[Expr, int], ...]:
    """The terms in order: rows before columns, i and j first, added before subtracted, otherwise as written."""

    def place(term: tuple[Expr, int]) -> tuple[int, bool, bool]:
        return _ORDER.get(level_of(term[0]), 2), term[0] not in (ROW, COLUMN), term[1] < 0

    return tuple(sorted(terms.items(), key=place))


# What may leave 32 bits -----------------------------------------------------------------------------------------------


def _side(total: Linear) -> Side:
    varying, points = _divided(total)
    return Side(Form(_ordered(varying)), Limit(total.constant, _ordered(points)))


def _fits_64_bits(total: Linear) -> bool:
    """Whether a sum of 32-bit values with these factors fits in 64 bits."""
    return abs(total.constant) <= _MOST_CONSTANT and all(abs(c) <= MOST_COEFFICIENT for c in total.terms.values())


def _fits(total: Linear) -> bool:
    """Whether the sum stays inside 32 bits in any call: it is a single value, or its parts are small enough."""
    if total.constant == 0 and list(total.terms.values()) in ([], [1]):
        return True
    lo, hi = natural_ends(total)
    return lo >= INT_MIN and hi <= INT_MAX


def has_opposite(total: Linear) -> bool:
    """Whether the sum stays inside 32 bits and is never -2**31, which has no absolute value."""
    lo, hi = natural_ends(total)
    return lo > INT_MIN and hi <= INT_MAX


def natural_ends(total: Linear) -> tuple[int, int]:
    """The least and the largest value of a sum in any call."""
    return range_of_form(total, lambda atom: IntRange(*_natural_range(atom)), {})


def _natural_range(atom: Expr) -> tuple[int, int]:
    """The range of an atom in any call."""
    match atom:
        case Symbol(kind=SymbolKind.INDEX | SymbolKind.SIZE):
            return 0, SIZE_LIMIT - 1
        case Apply(op="floordiv", args=(inner, Literal(value=c))) if c > 0 and _natural_range(inner)[0] >= 0:
            return 0, _natural_range(inner)[1] // int(c)
        case Apply(op="floordiv", args=(inner, _)) if _natural_range(inner)[0] >= 0:
            most = _natural_range(inner)[1]
            return -most, most
        case Apply(op="mod", args=(_, Literal(value=c))) if c > 0:
            return 0, int(c) - 1
        case Apply(op="clamp", args=(_, Literal(value=lo), Literal(value=hi))) if lo <= hi:
            return int(lo), int(hi)
    return INT_MIN, INT_MAX
