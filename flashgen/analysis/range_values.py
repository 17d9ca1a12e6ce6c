"""Evaluates range programs over many boxes at a time; each step is evaluated when a check first needs it.

Stage: analyse and after. In: a ``RangeProgram``, and ranges of symbols, one for all boxes or one for each. Out: whether
a check passes. Sums of forms are arithmetic on arrays of ends; other operators are evaluated by the operator table,
once for each combination of ranges that occurs. Does NOT know tiles.
"""

from __future__ import annotations

import functools
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flashgen.analysis.range_program import (
    Check,
    Clipped,
    Differs,
    Elements,
    End,
    Fits,
    Left,
    MayBe,
    Offset,
    Point,
    Position,
    RangeProgram,
    Register,
    Rule,
    Some,
    Sum,
)
from flashgen.analysis.ranging import LoadRange, plain_range
from flashgen.ir.build import fold
from flashgen.ir.expr import Apply, Expr, Literal, Load
from flashgen.ir.interval import FULL_FLOAT, INT_MAX, INT_MIN, BoolRange, FloatRange, IntRange, Range, full
from flashgen.ir.operators import OPERATORS
from flashgen.ir.types import ScalarType

Ints = NDArray[np.int64]
Flags = NDArray[np.bool_]
Ends = tuple[Any, Any]  # of a range: numbers, or arrays of them
_Row = tuple[float, ...]
_FAR = 1 << 62  # no limit, as in ranges.h
_MOST_REMEMBERED = 1 << 16  # combinations of ranges, of one operator


@dataclass(frozen=True, eq=False)
class Ranges:
    """A range for each box: ends of ints; whether bools may be false and true; ends of floats, and NaN."""

    type: ScalarType
    columns: tuple[NDArray[np.generic], ...]

    @property
    def keys(self) -> tuple[NDArray[np.generic], ...]:
        """The columns as keys, floats by their bits: 0.0 and -0.0 differ."""
        return tuple(each.view(np.int64) if each.dtype == np.float64 else each for each in self.columns)

    def take(self, chosen: Flags) -> Ranges:
        return Ranges(self.type, tuple(column[chosen] for column in self.columns))


Known = dict[Expr, "Range | Ranges"]


class RangeValues:
    """The values of a program's steps over some boxes: one range for all boxes, or one for each.

    ``known`` are the ranges of symbols; without ``loads`` captured tensors are unknown. With ``computed``, a value
    without rows and columns is the number that a kernel computes, not a range that covers every machine.
    """

    def __init__(self, program: RangeProgram, known: Known, loads: LoadRange | None, *, computed: bool = False) -> None:
        self._program, self._known, self._loads, self._computed = program, known, loads, computed
        self._values: dict[Register, Any] = {}  # ranges; of Fits flags

    def of(self, chosen: Flags) -> RangeValues:
        """The values over some of the boxes."""
        known: Known = {expr: _some(found, chosen) for expr, found in self._known.items()}
        some = RangeValues(self._program, known, self._loads, computed=self._computed)
        some._values = {register: _some(found, chosen) for register, found in self._values.items()}
        return some

    def passes(self, check: Check) -> Any:
        """Whether a check passes: a bool, or one for each box."""
        match check:
            case Some(of=of):
                lo, hi = self._ends(of)
                return lo <= hi
            case Differs(of=of, end=end):
                (lo, hi), (least, most) = self._ends(of), self._ends(end.offset)
                is_it = (lo == hi) & (least == most) & (lo == least)
                return (is_it & self._fits(end)) ^ True
            case MayBe(condition=condition, value=value):
                return _may_be(self._value(condition), value)

    def _value(self, register: Register) -> Any:
        if register not in self._values:
            self._values[register] = self._evaluated(register)
        return self._values[register]

    def _ends(self, register: Register) -> Ends:
        return _ends(self._value(register))

    def _fits(self, end: End) -> Any:
        return True if end.fits is None else self._value(end.fits)

    def _evaluated(self, register: Register) -> Any:
        match self._program.steps[register]:
            case Position(symbol=symbol):
                return self._known[symbol]
            case Point(expr=expr):
                return self._point(expr)
            case Elements(load=load, indices=indices):
                return self._elements(load, tuple(self._value(each) for each in indices))
            case Rule(op=op, type=scalar, args=args):
                return _by_rows(scalar, tuple(self._value(each) for each in args), op)
            case Sum(terms=terms):
                return _of_ends(*self._total(terms))
            case Offset(constant=constant, points=points):
                lo, hi = self._total(points)
                return _of_ends(lo + constant, hi + constant)
            case Fits() as step:
                return self._all_fit(step)
            case Clipped() as step:
                return self._clipped(step)
            case Left() as step:
                return self._left(step)

    def _all_fit(self, step: Fits) -> Any:
        flag: Any = True
        for form, offset in step.sides:
            lo, hi = self._total(((offset, 1),) if form is None else ((form, 1), (offset, 1)))
            flag = flag & (lo >= INT_MIN) & (hi <= INT_MAX)
        return flag

    def _clipped(self, step: Clipped) -> Range | Ranges:
        lo, hi = self._ends(step.of)
        for end in step.least:
            lo = _chosen(self._fits(end), np.maximum(lo, self._ends(end.offset)[0]), lo)
        for end in step.most:
            hi = _chosen(self._fits(end), np.minimum(hi, self._ends(end.offset)[1]), hi)
        return _of_ends(lo, hi)

    def _left(self, step: Left) -> Range | Ranges:
        low, high = self._total(((step.form, 1), *((other, -k) for other, k in step.others)))
        low, high = (low, high) if step.sign > 0 else (-high, -low)
        if step.block is not None:
            low, high = _of_blocks((low, high), self._ends(step.block))
        first, last = self._ends(step.position)
        return _of_ends(np.maximum(first, low), np.minimum(last, high))

    def _total(self, terms: tuple[tuple[Register, int], ...]) -> Ends:
        least, most = 0, 0
        for register, coefficient in terms:
            lo, hi = self._ends(register)
            least = least + coefficient * (lo if coefficient > 0 else hi)
            most = most + coefficient * (hi if coefficient > 0 else lo)
        return least, most

    def _point(self, expr: Expr) -> Range | Ranges:
        if expr not in self._known:
            children = tuple(self._point(each) for each in expr.children)
            match expr:
                case Load():
                    self._known[expr] = self._elements(expr, children)
                case Apply(op=op):
                    rule = functools.partial(_number, op) if self._computed else op
                    self._known[expr] = _by_rows(expr.type, children, rule)
                case Literal(type=ScalarType.FLOAT, value=value) if self._computed:
                    self._known[expr] = _single(value)
                case _:
                    self._known[expr] = plain_range(expr, {}, None, ())
        return self._known[expr]

    def _elements(self, load: Load, indices: tuple[Range | Ranges, ...]) -> Range | Ranges:
        loads = self._loads
        if loads is None:
            return full(load.type)
        return _by_rows(load.type, indices, lambda *ranges: loads(load, ranges))


def _of_ends(lo: Ints, hi: Ints) -> Range | Ranges:
    lo, hi = np.broadcast_arrays(lo, hi)
    return Ranges(ScalarType.INT, (lo, hi)) if lo.ndim else IntRange(int(lo), int(hi))


def _of_blocks(x: Ends, size: Ends) -> Ends:
    """The ends of p with x = p // size in a range, within 32 bits; every p where the size is not known."""
    lo, hi = (np.clip(end, INT_MIN, INT_MAX) for end in x)
    least, most = size
    any_ = np.where((least == 0) & (lo <= 0) & (hi >= 0), _FAR, 0)  # p // 0 = 0
    first = np.where(least < 0, hi * least + least + 1, lo * least) - any_
    last = np.where(least < 0, lo * least, hi * least + least - 1) + any_
    return np.where(least == most, first, -_FAR), np.where(least == most, last, _FAR)


def _chosen(flag: Flags | bool, x: Ints, y: Ints) -> Ints:
    return x if flag is True else np.where(flag, x, y)


def _some(found: Any, chosen: Flags) -> Any:
    """The values of some boxes, from one value for all or one for each."""
    if isinstance(found, Ranges):
        return found.take(chosen)
    return found[chosen] if isinstance(found, np.ndarray) and found.ndim else found


def _number(op: str, *operands: Range) -> Range:
    """The single value, in float32, where all operands are single values; else the operator's range."""
    found = OPERATORS[op].interval(*operands)
    if isinstance(found, FloatRange) and all(_is_number(each) for each in operands):
        return _single(
            float(fold(op, *(each.may_be_true if isinstance(each, BoolRange) else each.lo for each in operands)))
        )
    return found


def _is_number(found: Range) -> bool:
    if isinstance(found, FloatRange) and found.may_be_nan:
        return False
    return found.is_true or found.is_false if isinstance(found, BoolRange) else found.lo == found.hi


def _single(value: float) -> FloatRange:
    with np.errstate(all="ignore"):
        number = float(np.float32(value))
    return FULL_FLOAT if np.isnan(number) else FloatRange(number, number)


# Ranges of expressions ------------------------------------------------------------------------------------------------


def _by_rows(
    scalar: ScalarType, children: Sequence[Range | Ranges], rule: str | Callable[..., Range]
) -> Range | Ranges:
    """The range of an operator of the table, or of a function, box by box where operands vary."""
    if not any(isinstance(each, Ranges) for each in children):
        return (OPERATORS[rule].interval if isinstance(rule, str) else rule)(*children)
    arguments = tuple(each.type if isinstance(each, Ranges) else each for each in children)
    rows = _rule(rule, arguments, repr(arguments)) if isinstance(rule, str) else _Rule(rule, arguments)
    varying = [column.tolist() for each in children if isinstance(each, Ranges) for column in each.keys]
    results = [rows[row] for row in zip(*varying, strict=True)]
    columns = zip(*results, strict=True) if results else ((),) * _MAKERS[scalar][1]
    dtype = np.float64 if scalar is ScalarType.FLOAT else np.int64
    return Ranges(scalar, tuple(np.array(column, dtype) for column in columns))


class _Rule(dict[_Row, _Row]):
    """The cached ranges of a rule; arguments are types where they vary over boxes, else ranges."""

    def __init__(self, interval: Callable[..., Range], arguments: Sequence[ScalarType | Range]) -> None:
        super().__init__()
        self.interval, self._arguments = interval, arguments

    def __missing__(self, row: _Row) -> _Row:
        place, ranges = 0, []
        for each in self._arguments:
            if isinstance(each, ScalarType):
                make, width = _MAKERS[each]
                ranges.append(make(*row[place : place + width]))
                place += width
            else:
                ranges.append(each)
        if len(self) >= _MOST_REMEMBERED:
            self.clear()
        self[row] = found = _row(self.interval(*ranges))
        return found


@functools.lru_cache(maxsize=256)
def _rule(op: str, arguments: tuple[ScalarType | Range, ...], spelling: str) -> _Rule:
    """The rule of an operator, cached; ``spelling`` of the arguments distinguishes -0.0 from 0.0."""
    assert spelling
    return _Rule(OPERATORS[op].interval, arguments)


def _float_range(lo: int, hi: int, may_be_nan: int) -> FloatRange:
    """A range of floats from the bits of its ends."""
    first, last = struct.unpack("dd", struct.pack("qq", lo, hi))
    return FloatRange(first, last, bool(may_be_nan))


_MAKERS: Mapping[ScalarType, tuple[Callable[..., Range], int]] = {
    ScalarType.INT: (IntRange, 2),
    ScalarType.BOOL: (BoolRange, 2),
    ScalarType.FLOAT: (_float_range, 3),
}


def _row(found: Range) -> _Row:
    match found:
        case BoolRange():
            return found.may_be_false, found.may_be_true
        case FloatRange():
            return found.lo, found.hi, found.may_be_nan
    return found.lo, found.hi


def _ends(found: Range | Ranges) -> tuple[Ints, Ints]:
    if isinstance(found, Ranges):
        lo, hi = found.columns
        return lo.astype(np.int64, copy=False), hi.astype(np.int64, copy=False)
    assert isinstance(found, IntRange)
    return np.asarray(found.lo), np.asarray(found.hi)


def _may_be(found: Range | Ranges, value: bool) -> Flags:
    if isinstance(found, Ranges):
        return found.columns[int(value)].astype(np.bool_)
    assert isinstance(found, BoolRange)
    return np.asarray(found.may_be_true if value else found.may_be_false)
