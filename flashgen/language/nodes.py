"""Makes IR nodes for the resolver: types them, folds constants, and keeps expressions within the IR's limits.

In: an operator and typed operands. Out: a node, or None with the reason reported. Operands that are None have been
reported before and make the result None. Constants fold in Python's own arithmetic, ints exactly and floats double;
only what reaches the IR has to fit in 32 bits.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from flashgen.diagnostics import Span
from flashgen.ir.build import TypingError, apply, power
from flashgen.ir.expr import MAX_DEPTH, MAX_SIZE, Apply, Expr, Literal, literal
from flashgen.ir.interval import INT_MAX, INT_MIN
from flashgen.ir.operators import OPERATORS, NoValueError, Operator
from flashgen.ir.operators_base import MOST_BITS, far_too_large
from flashgen.ir.types import ScalarType
from flashgen.language.report import GiveUpError, Report

Value = bool | int | float

FLOAT_MAX = float.fromhex("0x1.fffffep127")

MOST_DIGITS = 400


class ConstantError(Exception):
    """A constant expression without a value; ``code`` is the diagnostic's."""

    def __init__(self, code: str, message: str, hint: str = "") -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.hint = hint


def number(text: str) -> int | float:
    """The value of a number as written; the parser has checked its form."""
    digits = text.replace("_", "")
    if len(digits) > MOST_DIGITS:
        raise ConstantError("E205", "the number is too long to fit in 32 bits")
    if digits[:2].lower() in ("0x", "0b", "0o"):
        return int(digits, 0)
    if digits.isdigit():
        return int(digits)
    value = float(digits)
    if math.isinf(value):
        raise _beyond_floats(text)
    return value


def _beyond_floats(written: str) -> ConstantError:
    return ConstantError("E205", f"{written} does not fit in a 32-bit float", "write 'inf' for infinity")


def fits(value: Value) -> ConstantError | None:
    """Why a constant cannot stand in the IR; None where it can."""
    if isinstance(value, bool):
        return None
    if isinstance(value, int):
        if INT_MIN <= value <= INT_MAX:
            return None
        hint = "ints end at 2147483647; where a float will do, add '.0'"
        return ConstantError("E205", f"{_shown(value)} does not fit in a 32-bit int", hint)
    if math.isinf(value) or abs(value) <= FLOAT_MAX:
        return None
    return _beyond_floats(repr(value))


def _shown(value: int) -> str:
    text = str(value)
    return text if len(text) <= 24 else f"{text[:12]}…{text[-4:]} ({len(text)} digits)"


def fold(op: str, arguments: tuple[Value, ...]) -> Value:
    """The value of an operator of the IR on constants; raises ``ConstantError``."""
    row = OPERATORS[op]
    value: Value
    try:
        on_ints = all(isinstance(argument, int) for argument in arguments)
        takes_ints = row.fold.ints is not None or row.fold.floats is None
        value = _on_ints(row, arguments) if on_ints and takes_ints else _on_floats(row, arguments)
        if isinstance(value, int) and value.bit_length() > MOST_BITS:
            raise far_too_large()
    except NoValueError as error:
        code = "E206" if error.by_zero else "E205" if error.too_large else "E207"
        raise ConstantError(code, error.message) from None
    return value


def _on_ints(row: Operator, arguments: tuple[Value, ...]) -> Value:
    if row.fold.ints is not None:
        value: Value = row.fold.ints(*arguments)
        return value
    for argument in arguments:  # an operator on 32-bit patterns means what its row says
        error = fits(argument)
        if error is not None:
            raise error
    nothing: Any = None  # the row needs no array library for plain ints
    return int(row.meaning(nothing, *arguments))


def _on_floats(row: Operator, arguments: tuple[Value, ...]) -> Value:
    assert row.fold.floats is not None, f"{row.name} takes no floats"
    try:
        value: Value = row.fold.floats(*arguments)
    except OverflowError:
        raise ConstantError("E205", "the constant does not fit in a 32-bit float") from None
    except ValueError:
        raise ConstantError("E207", f"'{row.spelling}' has no value here") from None
    if isinstance(value, float):
        if math.isnan(value):
            raise ConstantError("E207", f"'{row.spelling}' gives no number here")
        if math.isinf(value) and all(math.isfinite(argument) for argument in arguments) and row.fold.overflows:
            raise ConstantError("E205", "the constant does not fit in a 32-bit float")
    return value


MAX_STEPS = 20_000
_ALL_STEPS = 30_000


@dataclass
class Budget:
    """The work that one file may ask for in all."""

    steps: int = 0


class TooLargeError(Exception):
    """The expression being built exceeds a limit; the message says which."""


class Nodes:
    """Builds the nodes of one statement, counting its operations and those of the whole file."""

    def __init__(self, report: Report, budget: Budget) -> None:
        self.report = report
        self.budget = budget
        self.steps = 0

    def step(self, span: Span | None) -> None:
        """Count one operation, folded or not."""
        self.steps += 1
        self.budget.steps += 1
        if self.steps > MAX_STEPS:
            raise TooLargeError(f"takes more than {MAX_STEPS:,} operations")
        if self.budget.steps > _ALL_STEPS:
            message = f"the expressions of the file take more than {_ALL_STEPS:,} operations once they are written out"
            self.report.add("E308", message, span)
            raise GiveUpError

    def operation(
        self,
        op: str,
        operands: Sequence[Expr | None],
        span: Span,
        spans: Sequence[Span] = (),
        notes: Callable[[], tuple[str, ...]] = tuple,
        written: str = "",
    ) -> Expr | None:
        """``op(operands)``; ``spans`` are the places of the operands, ``written`` the user's form of the operator;
        ``notes`` is asked only when there is something to report.
        """
        self.step(span)
        known = [operand for operand in operands if operand is not None]
        if len(known) < len(operands):
            return None
        try:
            node = power(known[0], known[1], span) if op == "pow" else apply(op, *known, span=span)
        except TypingError as error:
            culprit = error.argument is not None and len(operands) <= 3 and error.argument < len(spans)
            place = spans[error.argument] if culprit and error.argument is not None else span
            hints = (error.hint,) if error.hint else ()
            message = error.message.replace(f"'{op}'", f"'{written}'") if written else error.message
            self.report.add("E201", message, place, notes=notes(), hints=hints)
            return None
        try:
            folded = self._folded(node, span)
        except ConstantError as error:
            place = spans[-1] if error.code == "E206" and len(spans) == 2 else span
            self.constant_error(error, place, notes())
            return None
        if folded is not None:
            return folded
        if any(self.settled(operand, notes) is None for operand in known):
            return None
        self.within_limits(node)
        return node

    def _folded(self, node: Expr, span: Span) -> Literal | None:
        """The literal that the node stands for, where its operands are literals."""
        if isinstance(node, Literal):
            return literal(node.value, span)
        if not isinstance(node, Apply):
            return None
        values: list[Value] = []
        for argument in node.args:
            inner: Expr | None = argument
            if isinstance(argument, Apply) and all(isinstance(each, Literal) for each in argument.args):
                inner = self._folded(argument, span)
            if not isinstance(inner, Literal):
                _refuse_division_by_zero(node)
                return None
            values.append(inner.value)
        value = fold(node.op, tuple(values))
        if node.type is ScalarType.FLOAT:
            value = float(value)
        elif node.type is ScalarType.BOOL:
            value = bool(value)
        return literal(value, span)

    def settled(self, node: Expr | None, notes: Callable[[], tuple[str, ...]] = tuple) -> Expr | None:
        """The node, once it is sure that the IR can hold it."""
        if isinstance(node, Literal):
            error = fits(node.value)
            if error is not None:
                self.constant_error(error, node.span, notes())
                return None
        return node

    def constant_error(self, error: ConstantError, span: Span | None, notes: tuple[str, ...] = ()) -> None:
        """Report a constant without a value."""
        self.report.add(error.code, error.message, span, notes=notes, hints=(error.hint,) if error.hint else ())

    def within_limits(self, node: Expr) -> None:
        """Leave the expression where it is too large for the IR."""
        if node.size > MAX_SIZE:
            raise TooLargeError(f"has more than {MAX_SIZE:,} parts")
        if node.depth > MAX_DEPTH:
            raise TooLargeError(f"is more than {MAX_DEPTH} operations deep")

    def converted(self, node: Expr | None, scalar: ScalarType, span: Span) -> Expr | None:
        """The node as a float where it is an int and a float is wanted; otherwise as it is."""
        if node is None or scalar is not ScalarType.FLOAT or node.type is not ScalarType.INT:
            return node
        if isinstance(node, Literal):
            return literal(float(node.value), node.span)
        return self.operation("to_float", (node,), span)


def _refuse_division_by_zero(node: Apply) -> None:
    divisor = node.args[-1]
    if node.op in ("div", "floordiv", "mod", "ceildiv") and isinstance(divisor, Literal) and divisor.value == 0:
        raise ConstantError("E206", "division by zero")
