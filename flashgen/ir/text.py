"""Expressions back to the language's own text, for comments in generated code and for messages.

In: an expression. Out: text that parses to the same expression (``let``s and ``def``s stay expanded).
"""

from flashgen.ir.expr import Apply, Expr, Literal, Load, Symbol
from flashgen.ir.operators import OPERATORS
from flashgen.ir.operators_base import Strength
from flashgen.ir.types import ScalarType


def text(expr: Expr) -> str:
    """The expression as a user would write it."""
    return _text(expr)[0]


def _text(expr: Expr) -> tuple[str, int]:
    match expr:
        case Literal(value=bool() as value):
            return ("true" if value else "false"), Strength.CALL
        case Literal(value=value):
            shown = repr(value)
            return shown, Strength.UNARY if shown.startswith("-") else Strength.CALL
        case Symbol(name=name):
            return name, Strength.CALL
        case Load(tensor=tensor, indices=indices):
            return f"{tensor}[{', '.join(text(index) for index in indices)}]", Strength.CALL
        case Apply(op="to_float" | "to_int" as op, args=(argument,)):
            return f"{OPERATORS[op].spelling}({text(argument)})", Strength.CALL
        case Apply(op="where", args=(condition, yes, no)):
            shown = f"{_within(yes, Strength.OR)} if {_within(condition, Strength.OR)}"
            return f"{shown} else {_within(no, Strength.CONDITIONAL)}", Strength.CONDITIONAL
        case Apply(op=op, args=args):
            return _operation(op, args)
    raise AssertionError(f"no text for {type(expr).__name__}")


def _operation(op: str, args: tuple[Expr, ...]) -> tuple[str, int]:
    """A sign or word between or before its operands, or a call."""
    row = OPERATORS[op]
    sign, strength = row.spelling, row.strength
    if strength is Strength.CALL:
        return f"{op}({', '.join(text(argument) for argument in _without_conversions(op, args))})", strength
    if row.arity == 1:
        return f"{sign}{' ' if sign.isalpha() else ''}{_within(args[0], strength)}", strength
    left, right = _without_conversions(op, args)
    # ** groups to the right and comparisons do not chain; everything else groups to the left.
    left_strength = strength + (1 if strength in (Strength.POWER, Strength.COMPARISON) else 0)
    right_strength = strength + (0 if strength is Strength.POWER else 1)
    return f"{_within(left, left_strength)} {sign} {_within(right, right_strength)}", strength


def _without_conversions(op: str, args: tuple[Expr, ...]) -> tuple[Expr, ...]:
    """The arguments without the conversions that typing the operator puts back: int among floats promotes."""

    def bare(argument: Expr) -> Expr:
        converted = (
            isinstance(argument, Apply) and argument.op == "to_float" and argument.args[0].type is ScalarType.INT
        )
        return argument.children[0] if converted else argument

    types = tuple(argument.type for argument in args)
    found = list(args)
    for position, argument in enumerate(args):
        without = [*found[:position], bare(argument), *found[position + 1 :]]
        if OPERATORS[op].signature(tuple(each.type for each in without)).arguments == types:
            found = without
    return tuple(found)


def _within(expr: Expr, strength: int) -> str:
    shown, own = _text(expr)
    return shown if own >= strength else f"({shown})"
