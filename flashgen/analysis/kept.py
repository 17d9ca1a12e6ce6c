"""Whether a tile may hold a kept pair, or one that is not: the mask as unions of constraints on a box.

Stage: analyse and after. In: the condition under which a pair is kept. Out: ``KeptPairs``: the condition and its
negation, each as alternatives (``Term``) of constraints that hold together. A comparison of ints that are sums of what
depends on the row alone and on the column alone bounds such a sum (``Form``): j, i - j, i // 64 - j // 64,
doc[b, i] - doc[b, j]. Over a box of rows and columns an alternative restricts i and j, then bounds every form in turn;
it is possible where no range comes out empty. Bounds on one form meet before they are asked for, and the negation of a
union is an intersection: intervals that abut or overlap merge by themselves. With bounds on i, j, i - j the answer is
exact, as every difference between the ends occurs in a box. The rest is evaluated as a range over what is left.

``tiles.py`` evaluates the steps of a term over ranges, ``emit/ranges.py`` prints them. Neither is ever wrong: where
ints may wrap the bound is dropped, and what is not known is possible.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from itertools import product

from flashgen.analysis.identities import make
from flashgen.analysis.levels import Level, level_of
from flashgen.analysis.linear import Linear
from flashgen.analysis.prover import SIZE_LIMIT
from flashgen.ir.build import apply
from flashgen.ir.expr import Apply, Expr, Literal, Symbol, SymbolKind, index, literal
from flashgen.ir.interval import INT_MAX, INT_MIN
from flashgen.ir.types import ScalarType

ROW, COLUMN = index("i"), index("j")
ROW_LESS_COLUMN, COLUMN_LESS_ROW = apply("sub", ROW, COLUMN), apply("sub", COLUMN, ROW)
MOST_TERMS = 12  # alternatives of a condition; beyond it parts are evaluated as ranges
_MOST_COEFFICIENT, _MOST_CONSTANT = 2**20, 2**40  # of sums over 64 bits
_MOST_SIDES = 6  # of one comparison: each minimum, maximum or choice in it adds one and doubles the alternatives
_OPPOSITE = {"lt": "ge", "le": "gt", "gt": "le", "ge": "lt", "eq": "ne", "ne": "eq"}
_FLIPPED = {"lt": "gt", "le": "ge", "gt": "lt", "ge": "le"}
_HALVES = {"eq": ("le", "ge"), "ne": ("lt", "gt")}
_ORDER = {Level.ROW: 0, Level.COLUMN: 1}


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
        """Whether it is i - j."""
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
        """Whether it is known now."""
        return not self.points and not self.sides


@dataclass(frozen=True)
class Side:
    """One side of a comparison that may leave 32 bits: a form, and what is added to it."""

    form: Form
    offset: Limit


@dataclass(frozen=True)
class Bound:
    """least ≤ form ≤ most, every one of both."""

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
    """A condition that only its range decides: it is to be ``value``."""

    condition: Expr
    value: bool


@dataclass(frozen=True)
class Term:
    """Constraints that hold together, in the order in which they are asked for."""

    bounds: tuple[Bound, ...] = ()
    unequal: tuple[Unequal, ...] = ()
    truths: tuple[Truth, ...] = ()

    def tightens(self, number: int) -> bool:
        """Whether what the bound of this number leaves of i and j is asked for later."""
        later = [atom for bound in self.bounds[number + 1 :] for atom, _ in bound.form.terms]
        later += [atom for each in self.unequal for atom, _ in each.form.terms]
        later += [each.condition for each in self.truths]
        return any(_reads_position(each) for each in later)


@dataclass(frozen=True)
class KeptPairs:
    """A pair is kept where one of ``kept`` holds, and is not kept where one of ``dropped`` does."""

    kept: tuple[Term, ...]
    dropped: tuple[Term, ...]


def kept_pairs(keep: Expr) -> KeptPairs:
    """Both sides of the condition under which a pair is kept."""
    reader = _Reader()
    return KeptPairs(reader.terms(keep, True), reader.terms(keep, False))


def block_of(atom: Expr) -> tuple[Symbol, int] | None:
    """(i, c) of i // c, likewise of j; (i, 1) of i: atoms that a bound on them turns into a bound on the position."""
    match atom:
        case Symbol(kind=SymbolKind.INDEX, name="i" | "j") as position:
            return position, 1
        case Apply(op="floordiv", args=(Symbol(kind=SymbolKind.INDEX, name="i" | "j") as position, Literal(value=c))):
            return (position, int(c)) if 0 < c <= _MOST_COEFFICIENT else None
    return None


def _reads_position(expr: Expr) -> bool:
    """Whether i or j occurs outside the indices of loads, which are observed over the whole tile."""
    if isinstance(expr, Symbol):
        return expr in (ROW, COLUMN)
    return isinstance(expr, Apply) and any(_reads_position(each) for each in expr.args)


# From conditions to alternatives --------------------------------------------------------------------------------------

_Part = Bound | Unequal | Truth
_Parts = tuple[_Part, ...]
_Wanted = tuple[Expr, bool]  # a condition, and what it is to be


class _Reader:
    """Takes a condition apart; remembers the parts, which may occur under both truth values."""

    def __init__(self) -> None:
        self._found: dict[_Wanted, list[_Parts]] = {}

    def terms(self, keep: Expr, value: bool) -> tuple[Term, ...]:
        """The alternatives under which ``keep`` is ``value``."""
        whole = self.parts(keep, value)
        split = [part for parts in whole for part in _split(parts)]
        alternatives = split if len(split) <= 2 * MOST_TERMS else whole
        found = dict.fromkeys(term for parts in alternatives if (term := _term(parts)) is not None)
        return (Term(),) if Term() in found else tuple(found)

    def parts(self, condition: Expr, value: bool) -> list[_Parts]:
        """The same, not yet joined to terms."""
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
            case Apply(op=op, args=(x, y)) if op in _OPPOSITE and x.type is ScalarType.INT and not _is_point(condition):
                found = self._comparison(op if value else _OPPOSITE[op], x, y)
                if found is not None:
                    return found
        return [(Truth(condition, value),)]

    def _all(self, wanted: Iterable[_Wanted]) -> list[_Parts]:
        """Each alternative of one with each of the next, but for those that exclude each other."""
        found: list[_Parts] = [()]
        for condition, value in wanted:
            joined = _joined(found, self.parts(condition, value))
            found = joined if len(joined) <= MOST_TERMS else _joined(found, [(Truth(condition, value),)])
        return found

    # Comparisons of ints

    def _comparison(self, op: str, x: Expr, y: Expr) -> list[_Parts] | None:
        if (remainder := _remainder(op, x, y)) is not None:
            return [(remainder,)]
        left, right = _sum(x), _sum(y)
        return self._compared(op, left.plus(right, -1), (left, right))

    def _compared(self, op: str, total: Linear, sides: tuple[Linear, ...]) -> list[_Parts] | None:
        """The alternatives under which ``total op 0``; None where a part is neither a row's nor a column's.

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
                side = _sum(chosen)
                parts = self._compared(op, total.without(term).plus(side, coefficient), (*sides, side))
                if parts is None:
                    return None
                found = _joined(found, parts) if choices.every else found + _joined(self._all(conditions), parts)
            return found
        return _bound(op, total, sides)


def _split(parts: _Parts) -> list[_Parts]:
    """form ≠ limit as less or greater, where that says something about positions that other parts read."""
    split: list[_Parts] = [()]
    for part in parts:
        if isinstance(part, Unequal) and len(parts) > 1 and all(block_of(atom) for atom, _ in part.form.terms):
            less, greater = (replace(part.limit, constant=part.limit.constant + shift) for shift in (-1, 1))
            split = _joined(split, [(Bound(part.form, most=(less,)),), (Bound(part.form, least=(greater,)),)])
        else:
            split = _joined(split, [(part,)])
    return split if len(split) <= MOST_TERMS else [parts]


def _joined(some: Iterable[_Parts], others: Iterable[_Parts]) -> list[_Parts]:
    """Both at once, where that can be."""
    return [parts for one, other in product(some, others) if _term(parts := one + other) is not None]


def _term(parts: _Parts) -> Term | None:
    """The parts as a term, bounds on one form joined; None where known bounds exclude each other."""
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
    """i and j first, then i - j, then other forms: those first that leave less of i and j."""
    form = bound.form
    return form.axis is None, not form.is_distance, sum(block_of(atom) is None for atom, _ in form.terms)


def _tightest(limits: Iterable[Limit], choose: Callable[[Iterable[int]], int]) -> tuple[Limit, ...]:
    """Of limits that are numbers only the tightest."""
    distinct = dict.fromkeys(limits)
    numbers = [limit.constant for limit in distinct if limit.is_number]
    return (*(Limit(choose(numbers)) for _ in numbers[:1]), *(limit for limit in distinct if not limit.is_number))


def _is_empty(bound: Bound) -> bool:
    return any(x.is_number and y.is_number and x.constant > y.constant for x, y in product(bound.least, bound.most))


def _is_point(expr: Expr) -> bool:
    """Whether it is one value for a whole head."""
    return level_of(expr) in (Level.LAUNCH, Level.HEAD)


def _remainder(op: str, x: Expr, y: Expr) -> Truth | None:
    """x % m == k as (x - k) % m == 0, which a range decides: one that passes a multiple of m begins again at 0."""
    match x, y:
        case Apply(op="mod", args=(inner, Literal(value=m))), Literal(value=k) if op in ("eq", "ne") and 0 < k < m:
            moved = make("mod", make("sub", inner, y), literal(int(m)))
            return Truth(Apply(ScalarType.BOOL, op="eq", args=(moved, literal(0))), op == "eq")
    return None


def _sum(expr: Expr) -> Linear:
    """The sum that equals ``expr`` modulo 2**32; what belongs to a head is one point."""
    match expr:
        case Literal(value=value):
            return Linear(int(value))
        case _ if _is_point(expr):
            return Linear(0, {expr: 1})
        case Apply(op="add" | "sub" as op, args=(x, y)):
            return _sum(x).plus(_sum(y), 1 if op == "add" else -1)
        case Apply(op="neg", args=(x,)):
            return Linear().plus(_sum(x), -1)
        case Apply(op="mul", args=(Literal(value=c), x) | (x, Literal(value=c))) if abs(c) <= _MOST_COEFFICIENT:
            return Linear().plus(_sum(x), int(c))
    return Linear(0, {expr: 1})


@dataclass(frozen=True)
class _Choices:
    """What a minimum, a maximum, an absolute value or a choice may be: options, each under conditions.

    ``every``: all options have to satisfy the comparison; otherwise one.
    """

    options: tuple[tuple[tuple[_Wanted, ...], Expr], ...]
    every: bool


def _choices(term: Expr, *, downward: bool) -> _Choices | None:
    """The options of a term; ``downward``: where the comparison holds for a value it holds for smaller ones."""
    match term:
        case Apply(op="where", args=(c, x, y)):
            return _Choices(((((c, True),), x), (((c, False),), y)), every=False)
        case Apply(op="abs", args=(x,)) if _has_opposite(_sum(x)):
            return _Choices((((), x), ((), make("neg", x))), every=downward)
        case Apply(op="min" | "max" as op, args=(x, y)) if level_of(term) is Level.PAIR:
            return _Choices((((), x), ((), y)), every=(op == "max") is downward)
        case Apply(op="clamp", args=(x, lo, hi)) if level_of(term) is Level.PAIR:
            return _choices(Apply(ScalarType.INT, op="min", args=(make("max", x, lo), hi)), downward=downward)
    return None


def _bound(op: str, total: Linear, sides: tuple[Linear, ...]) -> list[_Parts] | None:
    """``total op 0`` as a bound on a form."""
    varying, points = _divided(total)
    if not varying or any(level_of(atom) is Level.PAIR for atom in varying):
        return None
    if not all(_fits_64_bits(each) for each in (total, *sides)):
        return None
    form = Form(_ordered(varying))
    sign = 1 if form.terms[0][1] > 0 else -1  # the first coefficient comes out positive
    form = Form(tuple((atom, sign * c) for atom, c in form.terms))
    op = _FLIPPED.get(op, op) if sign < 0 else op
    offset = _ordered({point: -sign * c for point, c in points.items()})
    unsure = tuple(dict.fromkeys(_side(each) for each in sides if not _fits(each)))

    def limit(shift: int = 0) -> Limit:
        return Limit(shift - sign * total.constant, offset, unsure)

    if op in ("eq", "ne") and not offset and (end := _end_of(form, limit().constant)) is not None:
        op = end[op == "ne"]
    if op == "ne":
        return [(Unequal(form, limit()),)]
    least = {"ge": (limit(),), "gt": (limit(1),), "eq": (limit(),)}.get(op, ())
    most = {"le": (limit(),), "lt": (limit(-1),), "eq": (limit(),)}.get(op, ())
    return [(_on_position(Bound(form, least, most)),)]


def _end_of(form: Form, value: int) -> tuple[str, str] | None:
    """(what equality comes to, what inequality does) where the value is an end of what the form may be."""
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
    position, c = inner
    if any(abs(k) * c > _MOST_COEFFICIENT for limit in (*bound.least, *bound.most) for _, k in limit.points):
        return bound

    def moved(limit: Limit, shift: int) -> Limit:
        return Limit(limit.constant * c + shift, tuple((point, k * c) for point, k in limit.points), limit.sides)

    least, most = (moved(each, 0) for each in bound.least), (moved(each, c - 1) for each in bound.most)
    return Bound(Form(((position, 1),)), tuple(least), tuple(most))


def _divided(total: Linear) -> tuple[dict[Expr, int], dict[Expr, int]]:
    """The terms that vary in a tile, and those that are points."""
    points = {term: c for term, c in total.terms.items() if _is_point(term)}
    return {term: c for term, c in total.terms.items() if term not in points}, points


def _ordered(terms: Mapping[Expr, int]) -> tuple[tuple[Expr, int], ...]:
    """Rows' before columns', i and j before others, what is added before what is taken away, otherwise as written."""

    def place(term: tuple[Expr, int]) -> tuple[int, bool, bool]:
        return _ORDER.get(level_of(term[0]), 2), term[0] not in (ROW, COLUMN), term[1] < 0

    return tuple(sorted(terms.items(), key=place))


# What may leave 32 bits -----------------------------------------------------------------------------------------------


def _side(total: Linear) -> Side:
    varying, points = _divided(total)
    return Side(Form(_ordered(varying)), Limit(total.constant, _ordered(points)))


def _fits_64_bits(total: Linear) -> bool:
    """Whether sums of 32-bit values with these factors do."""
    return abs(total.constant) <= _MOST_CONSTANT and all(abs(c) <= _MOST_COEFFICIENT for c in total.terms.values())


def _fits(total: Linear) -> bool:
    """Whether the sum stays inside 32 bits whatever the call: it is one value, or its parts are small enough."""
    if total.constant == 0 and list(total.terms.values()) in ([], [1]):
        return True
    lo, hi = _ends(total)
    return lo >= INT_MIN and hi <= INT_MAX


def _has_opposite(total: Linear) -> bool:
    """Whether it stays inside 32 bits and is not -2**31, which has no absolute value."""
    lo, hi = _ends(total)
    return lo > INT_MIN and hi <= INT_MAX


def _ends(total: Linear) -> tuple[int, int]:
    lo = hi = total.constant
    for term, c in total.terms.items():
        ends = [c * end for end in _natural_range(term)]
        lo, hi = lo + min(ends), hi + max(ends)
    return lo, hi


def _natural_range(atom: Expr) -> tuple[int, int]:
    """What the atom may be in any call."""
    match atom:
        case Symbol(kind=SymbolKind.INDEX | SymbolKind.SIZE):
            return 0, SIZE_LIMIT - 1
        case Apply(op="floordiv", args=(inner, Literal(value=c))) if c > 0 and _natural_range(inner)[0] >= 0:
            return 0, _natural_range(inner)[1] // int(c)
        case Apply(op="mod", args=(_, Literal(value=c))) if c > 0:
            return 0, int(c) - 1
        case Apply(op="clamp", args=(_, Literal(value=lo), Literal(value=hi))) if lo <= hi:
            return int(lo), int(hi)
    return INT_MIN, INT_MAX
