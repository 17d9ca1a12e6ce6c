"""Expressions back to the language's own text, for comments in generated code and for messages.

In: an expression. Out: text that parses to the same expression (``let``s and ``def``s stay expanded).
"""

from flashgen.ir.expr import Apply, Expr, Literal, Load, Symbol
from flashgen.ir.operators import OPERATORS
from flashgen.ir.types import ScalarType

# Binding strength as in Python, weakest first; the IR's operator names to their infix spelling.
_INFIX = {
    "or": ("or", 1),
    "and": ("and", 2),
    "lt": ("<", 4),
    "le": ("<=", 4),
    "gt": (">", 4),
    "ge": (">=", 4),
    "eq": ("==", 4),
    "ne": ("!=", 4),
    "bitor": ("|", 5),
    "bitxor": ("^", 6),
    "bitand": ("&", 7),
    "shl": ("<<", 8),
    "shr": (">>", 8),
    "add": ("+", 9),
    "sub": ("-", 9),
    "mul": ("*", 10),
    "div": ("/", 10),
    "floordiv": ("//", 10),
    "mod": ("%", 10),
    "pow": ("**", 12),
    "ipow": ("**", 12),
}
_CONDITIONAL, _NOT, _UNARY, _ATOM = 0, 3, 11, 13


def text(expr: Expr) -> str:
    """The expression as a user would write it."""
    return _text(expr)[0]


def _text(expr: Expr) -> tuple[str, int]:
    match expr:
        case Literal(value=bool() as value):
            return ("true" if value else "false"), _ATOM
        case Literal(value=value):
            shown = repr(value)
            return shown, _UNARY if shown.startswith("-") else _ATOM
        case Symbol(name=name):
            return name, _ATOM
        case Load(tensor=tensor, indices=indices):
            return f"{tensor}[{', '.join(text(index) for index in indices)}]", _ATOM
        case Apply(op="to_float" | "to_int" as op, args=(argument,)):
            return f"{'float' if op == 'to_float' else 'int'}({text(argument)})", _ATOM
        case Apply(op="neg", args=(argument,)):
            return f"-{_within(argument, _UNARY)}", _UNARY
        case Apply(op="not", args=(argument,)):
            return f"not {_within(argument, _NOT)}", _NOT
        case Apply(op="where", args=(condition, yes, no)):
            shown = f"{_within(yes, 1)} if {_within(condition, 1)} else {_within(no, _CONDITIONAL)}"
            return shown, _CONDITIONAL
        case Apply(op=op, args=args) if op in _INFIX:
            symbol, strength = _INFIX[op]
            left, right = _without_conversions(op, args)
            # ** groups to the right and comparisons do not chain; everything else groups to the left.
            left_strength = strength + (1 if symbol == "**" or strength == 4 else 0)
            right_strength = strength + (0 if symbol == "**" else 1)
            return f"{_within(left, left_strength)} {symbol} {_within(right, right_strength)}", strength
        case Apply(op=op, args=args):
            return f"{op}({', '.join(text(argument) for argument in _without_conversions(op, args))})", _ATOM
    raise AssertionError(f"no text for {type(expr).__name__}")


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
