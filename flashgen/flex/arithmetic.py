"""What PyTorch's arithmetic means in a mod, and its choices between numbers."""

from __future__ import annotations

import math
from typing import Any

import torch

from flashgen.flex.conversions import cast
from flashgen.flex.places import refuse
from flashgen.flex.rules import Rules, common, floats, numbers, reals, swapped
from flashgen.flex.values import (
    FLOAT,
    INT,
    Session,
    Value,
    choice,
    conjunction,
    disjunction,
    node,
    promoted,
    scalar_of,
)
from flashgen.ir.expr import Expr, literal

RULES = Rules()


# -- arithmetic --------------------------------------------------------------------------------------------------------


def _scaled(s: Session, y: object, alpha: object) -> object:
    return y if alpha == 1 else s.symbolic(_multiplied(s, y, alpha))


@RULES.of("add", "__add__", "__radd__")
def _added(s: Session, x: object, y: object, *, alpha: object = 1) -> Value:
    values = s.value(x), s.value(_scaled(s, y, alpha))
    if promoted(*values) is torch.bool:
        return Value(disjunction(values[0].expr, values[1].expr), torch.bool)
    dtype, args = common(*values)
    return Value(node("add", *args), dtype)


@RULES.of("sub", "subtract", "__sub__")
def _subtracted(s: Session, x: object, y: object, *, alpha: object = 1) -> Value:
    return numbers(s, "sub", x, _scaled(s, y, alpha))


@RULES.of("rsub", "__rsub__")
def _subtracted_from(s: Session, x: object, y: object, *, alpha: object = 1) -> Value:
    return numbers(s, "sub", y, _scaled(s, x, alpha))


@RULES.of("mul", "multiply", "__mul__", "__rmul__")
def _multiplied(s: Session, x: object, y: object) -> Value:
    values = s.value(x), s.value(y)
    if promoted(*values) is torch.bool:
        return Value(conjunction(values[0].expr, values[1].expr), torch.bool)
    dtype, args = common(*values)
    return Value(node("mul", *args), dtype)


@RULES.of("div", "divide", "true_divide", "__truediv__", "__div__")
def _divided(s: Session, x: object, y: object, *, rounding_mode: str | None = None) -> Value:
    if rounding_mode is None:
        return floats(s, "div", x, y)
    if rounding_mode == "floor":
        return numbers(s, "floordiv", x, y)
    if rounding_mode != "trunc":
        refuse("E603", f"torch.div has no rounding_mode '{rounding_mode}'")
    return _quotient(s, x, y)


def _quotient(s: Session, x: object, y: object) -> Value:
    """x / y without its fraction."""
    values = s.value(x), s.value(y)
    dtype, (a, b) = common(*values)
    if scalar_of(dtype) is FLOAT:
        return Value(truncated(node("div", a, b)), dtype)
    # Rounding up where the signs differ and something is left.
    left = node("ne", node("mod", a, b), literal(0))
    apart = node("ne", node("lt", a, literal(0)), node("lt", b, literal(0)))
    return Value(node("add", node("floordiv", a, b), node("to_int", node("and", left, apart))), dtype)


def truncated(x: Expr) -> Expr:
    """A float without its fraction."""
    return node("where", node("lt", x, literal(0.0)), node("ceil", x), node("floor", x))


for _name in ("__rtruediv__", "__rdiv__"):
    RULES[_name] = swapped(_divided)


@RULES.of("floor_divide", "__floordiv__")
def _floor_divided(s: Session, x: object, y: object) -> Value:
    return numbers(s, "floordiv", x, y)


@RULES.of("remainder", "__mod__")
def _remainder(s: Session, x: object, y: object) -> Value:
    return numbers(s, "mod", x, y)


@RULES.of("fmod")
def _fmod(s: Session, x: object, y: object) -> Value:
    """What is left of x, with its sign."""
    dtype, (a, b) = common(s.value(x), s.value(y))
    if scalar_of(dtype) is FLOAT:
        size = node("abs", b)
        below = node("neg", node("mod", node("neg", a), size))
        return Value(node("where", node("lt", a, literal(0.0)), below, node("mod", a, size)), dtype)
    quotient = _quotient(s, x, y).expr
    return Value(node("sub", a, node("mul", quotient, b)), dtype)


RULES["__rfloordiv__"] = swapped(_floor_divided)
RULES["__rmod__"] = swapped(_remainder)


@RULES.of("pow", "__pow__")
def _power(s: Session, x: object, y: object) -> Value:
    exponent = s.value(y)
    dtype, (a, b) = common(s.value(x), exponent)
    number: Any = exponent.number
    if scalar_of(dtype) is INT and number is not None and number < 0:
        refuse("E603", f"PyTorch takes no int to the power of {number}", hints=("make it a float: x.float() ** n",))
    return Value(node("pow", a, b), dtype)


@RULES.of("float_power")
def _float_power(s: Session, x: object, y: object) -> Value:
    _, (a, b) = reals(s, x, y)
    return Value(node("pow", a, b), torch.float64)


RULES["__rpow__"] = swapped(_power)


@RULES.of("square")
def _squared(s: Session, x: object) -> Value:
    return _multiplied(s, x, x)


@RULES.of("reciprocal")
def _reciprocal(s: Session, x: object) -> Value:
    return floats(s, "div", 1.0, x)


@RULES.of("neg", "negative", "__neg__")
def _negated(s: Session, x: object) -> Value:
    return numbers(s, "neg", x)


@RULES.of("abs", "absolute", "__abs__")
def _absolute(s: Session, x: object) -> Value:
    return numbers(s, "abs", x)


@RULES.of("sign", "sgn")
def _sign(s: Session, x: object) -> Value:
    return numbers(s, "sign", x, wraps=False)


@RULES.of("lerp")
def _interpolated(s: Session, x: object, y: object, weight: object) -> Value:
    step = _multiplied(s, s.symbolic(_subtracted(s, y, x)), weight)
    return _added(s, x, s.symbolic(step))


@RULES.of("addcmul")
def _with_product(s: Session, x: object, y: object, z: object, *, value: object = 1) -> Value:
    return _added(s, x, s.symbolic(_multiplied(s, y, z)), alpha=value)


# -- choices -----------------------------------------------------------------------------------------------------------


def _chosen(s: Session, op: str, x: object, y: object) -> Value:
    values = s.value(x), s.value(y)
    if promoted(*values) is torch.bool:
        either = conjunction if op == "min" else disjunction
        return Value(either(values[0].expr, values[1].expr), torch.bool)
    dtype, args = common(*values, wraps=False)
    return Value(node(op, *args), dtype)


@RULES.of("minimum", "min")
def _minimum(s: Session, x: object, y: object) -> Value:
    return _chosen(s, "min", x, y)


@RULES.of("maximum", "max")
def maximum(s: Session, x: object, y: object) -> Value:
    """The larger one; of booleans either."""
    return _chosen(s, "max", x, y)


@RULES.of("clamp", "clip")
def _clamped(s: Session, x: object, min: object = None, max: object = None) -> Value:  # noqa: A002 - PyTorch's names
    if min is None and max is None:
        refuse("E603", "torch.clamp needs a bound", hints=("give min=, max= or both",))
    if max is None:
        return _bounded(s, "max", x, min)
    if min is None:
        return _bounded(s, "min", x, max)
    dtype, args = common(s.value(x), s.value(min), s.value(max), wraps=False)
    return Value(node("clamp", *args), dtype)


def _bounded(s: Session, op: str, x: object, bound: object) -> Value:
    """A clamp with one bound. At the bound its derivative is 1, as of one with two; that of a maximum is 1/2 there."""
    dtype, (a, b) = common(s.value(x), s.value(bound), wraps=False)
    if scalar_of(dtype) is not FLOAT:
        return _chosen(s, op, x, bound)
    ends = (b, literal(math.inf)) if op == "max" else (literal(-math.inf), b)
    return Value(node("clamp", a, *ends), dtype)


@RULES.of("clamp_min")
def _at_least(s: Session, x: object, min: object) -> Value:  # noqa: A002
    return _bounded(s, "max", x, min)


@RULES.of("clamp_max")
def _at_most(s: Session, x: object, max: object) -> Value:  # noqa: A002
    return _bounded(s, "min", x, max)


@RULES.of("where")
def _where(s: Session, condition: object, x: object, y: object) -> Value:
    return _selected(s, s.value(condition), s.value(x), s.value(y))


def _selected(_s: Session, condition: Value, x: Value, y: Value) -> Value:
    if condition.dtype is not torch.bool:
        refuse("E603", f"the condition of torch.where is {condition.dtype}", hints=("compare it: x != 0",))
    dtype, args = common(x, y, wraps=False)
    return Value(choice(condition.expr, *args), dtype)


@RULES.of("masked_fill")
def _filled(s: Session, x: object, mask: object, value: object) -> Value:
    kept = s.value(x)
    filled = _selected(s, s.value(mask), s.value(value), kept)
    return cast(filled, kept.dtype)
