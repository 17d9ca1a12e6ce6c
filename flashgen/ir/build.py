"""Builds typed nodes: looks up the operator's row, promotes the operands, refuses what has no type.

Stage: IR. In: an operator's name and operands. Out: an ``Expr``, or ``TypingError``. Does NOT simplify.
"""

from __future__ import annotations

from functools import reduce

import numpy as np

from flashgen.diagnostics.diagnostic import Span
from flashgen.ir.expr import Apply, Expr, Literal, literal, walk
from flashgen.ir.interval import INT_MAX, INT_MIN
from flashgen.ir.operators import NUMPY, OPERATORS, TypingError
from flashgen.ir.types import ScalarType

__all__ = ["TypingError", "apply", "conjunction", "constant", "constant_value", "disjunction", "fold", "power"]


def apply(op: str, *args: Expr, span: Span | None = None) -> Expr:
    """The node ``op(args)``; ints among floats are converted; raises ``TypingError``.

    ``min`` and ``max``, which take two operands in the table, nest to the left. ``**`` goes through ``power``.
    Converting a value to the type that it has returns it as it is.
    """
    if op in ("min", "max") and len(args) > 2:
        return reduce(lambda x, y: apply(op, x, y, span=span), args)
    row = OPERATORS[op]
    signature = row.signature(tuple(arg.type for arg in args))
    if op in ("to_float", "to_int") and args[0].type is signature.result:
        return args[0]
    promoted = tuple(_promote(arg, wanted) for arg, wanted in zip(args, signature.arguments, strict=True))
    return Apply(signature.result, op=op, args=promoted, span=span)


def _promote(arg: Expr, wanted: ScalarType) -> Expr:
    if arg.type is wanted:
        return arg
    if isinstance(arg, Literal):
        return literal(float(arg.value), span=arg.span)
    return Apply(ScalarType.FLOAT, op="to_float", args=(arg,), span=arg.span)


def power(base: Expr, exponent: Expr, span: Span | None = None) -> Expr:
    """``base ** exponent``: an int for ints, except with a constant negative exponent; otherwise a float."""
    if base.type is ScalarType.INT and exponent.type is ScalarType.INT:
        value = constant_value(exponent)
        if value is None or value >= 0:
            return apply("ipow", base, exponent, span=span)
    return apply("pow", base, exponent, span=span)


def constant(value: bool | int | float, span: Span | None = None) -> Literal:
    """A literal; an int outside 32 bits raises ``TypingError``."""
    if isinstance(value, int) and not INT_MIN <= value <= INT_MAX:
        hint = "ints end at 2147483647; where a float will do, add '.0'"
        raise TypingError(f"{value} does not fit in a 32-bit int", hint=hint)
    return literal(value, span=span)


def conjunction(*conditions: Expr) -> Expr:
    """All of ``conditions``; of none: true."""
    return reduce(lambda x, y: apply("and", x, y), conditions) if conditions else literal(True)


def disjunction(*conditions: Expr) -> Expr:
    """Any of ``conditions``; of none: false."""
    return reduce(lambda x, y: apply("or", x, y), conditions) if conditions else literal(False)


def fold(op: str, *values: bool | int | float) -> bool | int | float:
    """The operator's value on constants: ints exactly, floats in double precision."""
    with np.errstate(all="ignore"):
        return np.asarray(OPERATORS[op].meaning(NUMPY, *(np.asarray(value) for value in values))).item()  # type: ignore[no-any-return]


def constant_value(expr: Expr) -> bool | int | float | None:
    """The value of an expression without symbols and loads; None where there is one."""
    values: dict[Expr, bool | int | float] = {}
    for node in walk(expr):
        if isinstance(node, Literal):
            values[node] = node.value
        elif isinstance(node, Apply):
            values[node] = fold(node.op, *(values[arg] for arg in node.args))
        else:
            return None
    return values[expr]
