"""The constraints by which a mask is decided for a tile: alternatives of constraints that hold together.

``kept.py`` writes a mask in this form; ``tiles.py`` decides the constraints over ranges, ``emit/ranges.py`` prints the
same steps. A constraint bounds a ``Form``, a sum of terms of the row alone and of the column alone: j, i - j, i // 64 -
j // 64, doc[b, i] - doc[b, j]. Points are values that are one number for a whole head.
"""

from __future__ import annotations

from dataclasses import dataclass

from flashgen.analysis.levels import Level, level_of
from flashgen.ir.build import apply
from flashgen.ir.expr import Apply, Expr, Symbol, SymbolKind, index, literal

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
