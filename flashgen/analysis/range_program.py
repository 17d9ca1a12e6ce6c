"""A mask as a program over ranges: the steps that tell whether a tile may hold a kept pair, or one that is not.

Stage: analyse and after. In: the condition under which a pair is kept. Out: a ``RangeProgram``: the alternatives of
``kept.py`` as steps in single assignment, each the range of something over what earlier steps left of a tile, and
checks of these ranges. It is lowered once. ``range_values.py`` evaluates it over many tiles
at a time; ``emit/ranges.py`` prints it for kernels. A step means something where the checks before it
in its alternative have passed: evaluators ask for it no earlier.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

from flashgen.analysis.constraints import (
    COLUMN,
    COLUMN_LESS_ROW,
    ONE,
    ROW,
    ROW_LESS_COLUMN,
    Bound,
    Form,
    Limit,
    Term,
    block_of,
    is_point,
)
from flashgen.analysis.kept import kept_terms
from flashgen.ir.expr import Apply, Expr, Load, Symbol
from flashgen.ir.types import ScalarType

Register = int  # the number of a step


@dataclass(frozen=True)
class Position:
    """i or j over the whole tile."""

    symbol: Symbol


@dataclass(frozen=True)
class Point:
    """What is one value for a whole head."""

    expr: Expr


@dataclass(frozen=True)
class Elements:
    """The elements of a captured tensor that the pairs of the whole tile read."""

    load: Load
    indices: tuple[Register, ...]


@dataclass(frozen=True)
class Rule:
    """The range of an operator over ranges."""

    op: str
    type: ScalarType
    args: tuple[Register, ...]


@dataclass(frozen=True)
class Sum:
    """Σ coefficient · range over the integers."""

    terms: tuple[tuple[Register, int], ...]


@dataclass(frozen=True)
class Offset:
    """constant + Σ coefficient · point over the integers."""

    constant: int
    points: tuple[tuple[Register, int], ...]


@dataclass(frozen=True)
class Fits:
    """Whether every one of some ranges, each moved by an offset, stays inside 32 bits; None is no range but zero."""

    sides: tuple[tuple[Register | None, Register], ...]


@dataclass(frozen=True)
class End:
    """An offset at which a range ends, if ``fits`` holds; None: always."""

    offset: Register
    fits: Register | None


@dataclass(frozen=True)
class Clipped:
    """The intersection of a range with ends."""

    of: Register
    least: tuple[End, ...]
    most: tuple[End, ...]


@dataclass(frozen=True)
class Left:
    """The range of ``position`` where sign · (position // block) + Σ coefficient · other lies in ``form``.

    ``block`` is a point, which may be 0 or less; None: 1.
    """

    position: Register
    form: Register
    others: tuple[tuple[Register, int], ...]
    sign: int
    block: Register | None


Step = Position | Point | Elements | Rule | Sum | Offset | Fits | Clipped | Left


@dataclass(frozen=True)
class Some:
    """A check: the range holds a value."""

    of: Register


@dataclass(frozen=True)
class Differs:
    """A check: the range is not this one value."""

    of: Register
    end: End


@dataclass(frozen=True)
class MayBe:
    """A check: a condition may have this value."""

    condition: Register
    value: bool


Check = Some | Differs | MayBe
Alternative = tuple[Check, ...]  # a pair may satisfy it where all checks pass, asked for in this order


@dataclass(frozen=True)
class RangeProgram:
    """A pair of a tile may be kept if one of ``kept`` passes, and may be dropped if one of ``dropped`` does."""

    steps: tuple[Step, ...]
    kept: tuple[Alternative, ...]
    dropped: tuple[Alternative, ...]


def reads(step: Step) -> tuple[Register, ...]:
    """The steps whose values a step reads."""
    match step:
        case Elements(indices=found) | Rule(args=found):
            return found
        case Sum(terms=terms) | Offset(points=terms):
            return tuple(register for register, _ in terms)
        case Fits(sides=sides):
            return tuple(register for side in sides for register in side if register is not None)
        case Clipped(of=of, least=least, most=most):
            return (of, *(register for end in (*least, *most) for register in _of_end(end)))
        case Left(position=position, form=form, others=others, block=block):
            return (position, form, *(register for register, _ in others), *(() if block is None else (block,)))
    return ()


def asks(check: Check) -> tuple[Register, ...]:
    """The steps whose values a check reads."""
    match check:
        case Differs(of=of, end=end):
            return (of, *_of_end(end))
        case Some(of=register) | MayBe(condition=register):
            return (register,)


def _of_end(end: End) -> tuple[Register, ...]:
    return (end.offset,) if end.fits is None else (end.offset, end.fits)


# A tile takes less time than its mask takes to be read; callers ask about many tiles of a few masks.
@functools.lru_cache(maxsize=32)
def range_program(keep: Expr) -> RangeProgram:
    """The program of a mask."""
    lowering = _Lowering()
    dropped = tuple(lowering.alternative(term) for term in kept_terms(keep, False))
    kept = tuple(lowering.alternative(term) for term in kept_terms(keep))
    return RangeProgram(lowering.steps, kept, dropped)


@dataclass(frozen=True)
class _Box:
    """The narrowed tile: the ranges of i and j, and of i - j where that is narrower than their difference."""

    i: Register
    j: Register
    distance: Register | None = None

    def of(self, position: Symbol) -> Register:
        return self.i if position == ROW else self.j

    def with_position(self, position: Symbol, register: Register) -> _Box:
        """The box with another range of i or j."""
        return _Box(register, self.j, self.distance) if position == ROW else _Box(self.i, register, self.distance)


class _Lowering:
    """Writes steps; equal steps are written once."""

    def __init__(self) -> None:
        self._numbers: dict[Step, Register] = {}
        self._whole = _Box(self._step(Position(ROW)), self._step(Position(COLUMN)))

    @property
    def steps(self) -> tuple[Step, ...]:
        return tuple(self._numbers)

    def _step(self, step: Step) -> Register:
        return self._numbers.setdefault(step, len(self._numbers))

    def alternative(self, term: Term) -> Alternative:
        """The checks of a term."""
        box, checks = self._whole, list[Check]()
        for number, bound in enumerate(term.bounds):
            box = self._bound(bound, box, checks, is_needed=term.tightens(number))
        checks += [Differs(self._measure(each.form, box), self._end(each.limit)) for each in term.unequal]
        checks += [MayBe(self._range(each.condition, box), each.value) for each in term.truths]
        return tuple(checks)

    def _bound(self, bound: Bound, box: _Box, checks: list[Check], *, is_needed: bool) -> _Box:
        """Add the check of a bound; returns the box that the bound leaves, if later checks need it."""
        measured = self._measure(bound.form, box)
        least = tuple(self._end(each) for each in bound.least)
        most = tuple(self._end(each) for each in bound.most)
        left = self._step(Clipped(measured, least, most))
        checks.append(Some(left))
        return self._restricted(bound.form, left, box, checks) if is_needed else box

    def _restricted(self, form: Form, left: Register, box: _Box, checks: list[Check]) -> _Box:
        """The box with i and j narrowed by the range of a form: each atom gets what the other atoms leave of it."""
        if form.axis is not None:
            return box.with_position(form.axis, left)
        if form.is_distance:
            box = _Box(box.i, box.j, left)
        for number, (atom, coefficient) in enumerate(form.terms):
            inner = block_of(atom)
            if inner is None or abs(coefficient) != 1:
                continue
            position, size = inner
            block = None if size == ONE else self._step(Point(size))
            others = tuple((self._range(each, box), k) for n, (each, k) in enumerate(form.terms) if n != number)
            rest = self._step(Left(box.of(position), left, others, coefficient, block))
            if not form.is_distance:  # there is a pair at any distance that is left
                checks.append(Some(rest))
            box = box.with_position(position, rest)
        return box

    def _measure(self, form: Form, box: _Box) -> Register:
        """The range of a form, over the integers."""
        if form.axis is not None:
            return box.of(form.axis)
        if form.is_distance and box.distance is not None:
            return box.distance
        terms = tuple((self._range(atom, box), coefficient) for atom, coefficient in form.terms)
        return terms[0][0] if len(terms) == 1 and terms[0][1] == 1 else self._step(Sum(terms))

    def _end(self, limit: Limit) -> End:
        sides = [
            (self._measure(side.form, self._whole) if side.form.terms else None, self._offset(side.offset))
            for side in limit.sides
        ]
        fits = self._step(Fits(tuple(sides))) if sides else None
        return End(self._offset(limit), fits)

    def _offset(self, limit: Limit) -> Register:
        points = tuple((self._step(Point(point)), coefficient) for point, coefficient in limit.points)
        return self._step(Offset(limit.constant, points))

    def _range(self, node: Expr, box: _Box) -> Register:
        """The step of an expression's range over the narrowed tile; elements are those of the whole tile."""
        if is_point(node):
            return self._step(Point(node))
        if box.distance is not None and node in (ROW_LESS_COLUMN, COLUMN_LESS_ROW):
            return box.distance if node == ROW_LESS_COLUMN else self._step(Sum(((box.distance, -1),)))
        match node:
            case Symbol():
                return box.of(node)
            case Load():
                return self._step(Elements(node, tuple(self._range(each, self._whole) for each in node.indices)))
            case Apply(op=op, args=args):
                return self._step(Rule(op, node.type, tuple(self._range(each, box) for each in args)))
        raise AssertionError(f"no range of {type(node).__name__}")
