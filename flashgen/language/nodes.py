"""Makes IR nodes for the resolver: types them, folds constants, and keeps expressions within the IR's limits.

In: an operator and typed operands. Out: a node, or None with the reason reported. Operands that are None have been
reported before and make the result None.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from flashgen.diagnostics import Span
from flashgen.ir.build import TypingError, apply, power
from flashgen.ir.expr import MAX_DEPTH, MAX_SIZE, Apply, Expr, Literal, literal
from flashgen.ir.types import ScalarType
from flashgen.language.constants import ConstantError, Value, fits, fold
from flashgen.language.report import GiveUpError, Report

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
