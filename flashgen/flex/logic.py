"""What PyTorch's comparisons, logic and bits mean in a mod."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import torch

from flashgen.flex.places import refuse
from flashgen.flex.rules import Rule, Rules, common, numbers, reals, swapped
from flashgen.flex.values import BOOL, FLOAT, INT, Session, Value, conjunction, convert, disjunction, node, scalar_of
from flashgen.ir.expr import Expr, literal

Choice = Callable[[Expr, Expr], Expr]

RULES = Rules()


def _comparison(op: str) -> Rule:
    def rule(s: Session, x: object, y: object) -> Value:
        dtype, (a, b) = common(s.value(x), s.value(y), wraps=False)
        if dtype is torch.bool and op not in ("eq", "ne"):
            a, b = convert(a, INT), convert(b, INT)
        return Value(node(op, a, b), torch.bool)

    return rule


for _op, _names in {
    "lt": ("lt", "less", "__lt__"),
    "le": ("le", "less_equal", "__le__"),
    "gt": ("gt", "greater", "__gt__"),
    "ge": ("ge", "greater_equal", "__ge__"),
    "eq": ("eq", "__eq__"),
    "ne": ("ne", "not_equal", "__ne__"),
}.items():
    RULES.update(dict.fromkeys(_names, _comparison(_op)))


def _condition(s: Session, x: object) -> Expr:
    return convert(s.value(x).expr, BOOL)


@RULES.of("logical_and")
def _both(s: Session, x: object, y: object) -> Value:
    return Value(conjunction(_condition(s, x), _condition(s, y)), torch.bool)


@RULES.of("logical_or")
def _either(s: Session, x: object, y: object) -> Value:
    return Value(disjunction(_condition(s, x), _condition(s, y)), torch.bool)


@RULES.of("logical_xor")
def _one_of(s: Session, x: object, y: object) -> Value:
    return Value(node("ne", _condition(s, x), _condition(s, y)), torch.bool)


@RULES.of("logical_not")
def _not(s: Session, x: object) -> Value:
    return Value(node("not", _condition(s, x)), torch.bool)


@RULES.of("bitwise_not", "__invert__")
def _inverted(s: Session, x: object) -> Value:
    value = s.value(x)
    if value.dtype is torch.bool:
        return Value(node("not", value.expr), torch.bool)
    _ints_only("~", value)
    dtype, (a,) = common(value, wraps=not value.dtype.is_signed)
    return Value(node("sub", literal(-1), a), dtype)


_ON_BOOLS: Mapping[str, Choice] = {"bitand": conjunction, "bitor": disjunction, "bitxor": lambda x, y: node("ne", x, y)}


def _bitwise(op: str) -> Rule:
    on_bools = _ON_BOOLS[op]

    def rule(s: Session, x: object, y: object) -> Value:
        values = s.value(x), s.value(y)
        dtype, (a, b) = common(*values, wraps=False)
        if dtype is torch.bool:
            return Value(on_bools(a, b), dtype)
        _ints_only({"bitand": "&", "bitor": "|", "bitxor": "^"}[op], *values)
        return Value(node(op, a, b), dtype)

    return rule


def _ints_only(sign: str, *values: Value) -> None:
    for value in values:
        if scalar_of(value.dtype) is FLOAT:
            refuse(
                "E603",
                f"'{sign}' takes ints and booleans, not {value.dtype}",
                hints=("compare the score first: score > 0",),
            )


for _op, _names in {
    "bitand": ("bitwise_and", "__and__", "__rand__"),
    "bitor": ("bitwise_or", "__or__", "__ror__"),
    "bitxor": ("bitwise_xor", "__xor__", "__rxor__"),
}.items():
    RULES.update(dict.fromkeys(_names, _bitwise(_op)))


@RULES.of("bitwise_left_shift", "__lshift__")
def _shifted_left(s: Session, x: object, y: object) -> Value:
    _ints_only("<<", s.value(x), s.value(y))
    return numbers(s, "shl", x, y)


@RULES.of("bitwise_right_shift", "__rshift__")
def _shifted_right(s: Session, x: object, y: object) -> Value:
    _ints_only(">>", s.value(x), s.value(y))
    return numbers(s, "shr", x, y, wraps=False)


RULES["__rlshift__"] = swapped(_shifted_left)
RULES["__rrshift__"] = swapped(_shifted_right)


def _infinite(test: Callable[[Expr], Expr], on_ints: bool = False) -> Rule:
    def rule(s: Session, x: object) -> Value:
        value = s.value(x)
        if scalar_of(value.dtype) is not FLOAT:
            return Value(literal(on_ints), torch.bool)
        return Value(test(value.expr), torch.bool)

    return rule


_INFINITY = literal(math.inf)
RULES["isinf"] = _infinite(lambda x: node("eq", node("abs", x), _INFINITY))
RULES["isposinf"] = _infinite(lambda x: node("eq", x, _INFINITY))
RULES["isneginf"] = _infinite(lambda x: node("eq", x, literal(-math.inf)))
RULES["isfinite"] = _infinite(lambda x: node("lt", node("abs", x), _INFINITY), on_ints=True)
RULES["isnan"] = _infinite(lambda x: node("not", node("le", x, _INFINITY)))


@RULES.of("isclose")
def _is_close(s: Session, x: object, y: object, rtol: object = 1e-5, atol: object = 1e-8) -> Value:
    _, (a, b, relative, absolute) = reals(s, x, y, rtol, atol)
    apart = node("abs", node("sub", a, b))
    allowed = node("add", absolute, node("abs", node("mul", relative, b)))
    near = conjunction(node("lt", apart, _INFINITY), node("le", apart, allowed))
    return Value(disjunction(node("eq", a, b), near), torch.bool)
