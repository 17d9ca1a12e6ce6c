"""What PyTorch's functions of floats mean in a mod: those of the table of operators, and others made of them."""

from __future__ import annotations

import math
from typing import Any

from flashgen.flex.arithmetic import maximum, truncated
from flashgen.flex.places import refuse
from flashgen.flex.rules import InPlace, Rule, Rules, floats, in_place, reals
from flashgen.flex.values import FLOAT, Session, Value, node, scalar_of
from flashgen.ir.expr import literal
from flashgen.ir.operators import OPERATORS, Library

RULES = Rules()


def _same(op: str) -> Rule:
    return lambda s, x: floats(s, op, x)


for _row in OPERATORS.values():
    if isinstance(_row.meaning, Library):
        RULES.update(dict.fromkeys(_row.meaning.torch, _same(_row.name)))


@RULES.of("silu")
def _silu(s: Session, x: object, inplace: bool = False) -> Value | InPlace:
    return in_place(floats(s, "silu", x), inplace)


@RULES.of("relu")
def _relu(s: Session, x: object, inplace: bool = False) -> Value | InPlace:
    is_float = scalar_of(s.value(x).dtype) is FLOAT
    return in_place(floats(s, "relu", x) if is_float else maximum(s, x, 0), inplace)


@RULES.of("gelu")
def _gelu(s: Session, x: object, approximate: str = "none") -> Value:
    if approximate == "none":
        return floats(s, "gelu", x)
    if approximate != "tanh":
        refuse("E603", f"torch's gelu has no approximate={approximate!r}", hints=("write 'none' or 'tanh'",))
    dtype, (a,) = reals(s, x)
    cube = node("mul", a, node("mul", a, a))
    inner = node("mul", literal(math.sqrt(2 / math.pi)), node("add", a, node("mul", literal(0.044715), cube)))
    return Value(node("mul", node("mul", literal(0.5), a), node("add", literal(1.0), node("tanh", inner))), dtype)


_UNSEEN = 20  # from here on softplus(x) is x in float32


@RULES.of("softplus")
def _softplus(s: Session, x: object, beta: object = 1, threshold: Any = 20) -> Value:
    dtype, (a, b, border) = reals(s, x, beta, threshold)
    scaled = a if beta == 1 else node("mul", a, b)
    smooth = node("softplus", scaled) if beta == 1 else node("div", node("softplus", scaled), b)
    if threshold >= _UNSEEN:
        return Value(smooth, dtype)
    return Value(node("where", node("gt", scaled, border), a, smooth), dtype)


@RULES.of("logsigmoid", "log_sigmoid")
def _logsigmoid(s: Session, x: object) -> Value:
    dtype, (a,) = reals(s, x)
    return Value(node("neg", node("softplus", node("neg", a))), dtype)


@RULES.of("leaky_relu")
def _leaky_relu(s: Session, x: object, negative_slope: object = 0.01, inplace: bool = False) -> Value | InPlace:
    dtype, (a, slope) = reals(s, x, negative_slope)
    return in_place(Value(node("where", node("gt", a, literal(0.0)), a, node("mul", a, slope)), dtype), inplace)


@RULES.of("tan")
def _tan(s: Session, x: object) -> Value:
    dtype, (a,) = reals(s, x)
    return Value(node("div", node("sin", a), node("cos", a)), dtype)


@RULES.of("cosh", "sinh")
def _hyperbolic(_s: Session, _x: object) -> Value:
    return refuse(
        "E602", "flashgen has no hyperbolic sine and cosine", hints=("write (torch.exp(x) + torch.exp(-x)) / 2",)
    )


@RULES.of("log10")
def _log10(s: Session, x: object) -> Value:
    dtype, (a,) = reals(s, x)
    return Value(node("mul", node("log2", a), literal(math.log10(2.0))), dtype)


@RULES.of("hypot")
def _hypot(s: Session, x: object, y: object) -> Value:
    dtype, (a, b) = reals(s, x, y)
    return Value(node("sqrt", node("add", node("mul", a, a), node("mul", b, b))), dtype)


def _rounded(op: str) -> Rule:
    def rule(s: Session, x: object, *, decimals: int = 0) -> Value:
        if decimals != 0:
            refuse("E603", "torch.round with decimals is not supported", hints=("write torch.round(x * 10) / 10",))
        value = s.value(x)
        if scalar_of(value.dtype) is not FLOAT:
            return value
        return Value(truncated(value.expr) if op == "trunc" else node(op, value.expr), value.dtype)

    return rule


for _op in ("floor", "ceil", "round", "trunc"):
    RULES[_op] = _rounded(_op)
RULES["fix"] = RULES["trunc"]


@RULES.of("frac")
def _fraction(s: Session, x: object) -> Value:
    dtype, (a,) = reals(s, x)
    return Value(node("sub", a, truncated(a)), dtype)
