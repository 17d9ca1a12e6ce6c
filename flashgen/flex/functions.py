"""What PyTorch's functions and methods mean in a mod: a table by their names, which functions and methods share.

In: a ``Session`` and the arguments as the mod gave them. Out: a symbolic value. Types and promotion are PyTorch's; an
int has 64 bits there and 32 here, where ``overflow.py`` says whether that makes a difference. Numbers of 16 bits are
computed with in 32.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, TypeVar

import torch

from flashgen.flex.places import refuse
from flashgen.flex.values import (
    BOOL,
    FLOAT,
    INT,
    NARROW,
    Session,
    Symbolic,
    Value,
    choice,
    conjunction,
    convert,
    disjunction,
    node,
    promoted,
    scalar_of,
)
from flashgen.ir.expr import Expr, literal
from flashgen.ir.operators import OPERATORS, Library

Rule = Callable[..., Any]
Choice = Callable[[Expr, Expr], Expr]
RuleOf = TypeVar("RuleOf", bound=Rule)
_RULES: dict[str, Rule] = {}


def _rule(*names: str) -> Callable[[RuleOf], RuleOf]:
    def register(function: RuleOf) -> RuleOf:
        _RULES.update(dict.fromkeys(names, function))
        return function

    return register


# -- parts -------------------------------------------------------------------------------------------------------------


def _common(*operands: Value, wraps: bool = True) -> tuple[torch.dtype, tuple[Expr, ...]]:
    """The type of a result and the operands in it. ``wraps``: the result may leave the range of the type."""
    dtype = promoted(*operands)
    if wraps and dtype in NARROW:
        refuse(
            "E603",
            f"arithmetic in {dtype} wraps at the ends of that type, which kernels do not do",
            hints=("convert what is read first: t[h, kv_idx].int()",),
        )
    return dtype, tuple(convert(each.expr, scalar_of(dtype)) for each in operands)


def _numbers(s: Session, op: str, *operands: object, wraps: bool = True) -> Value:
    """An operator over numbers of one type."""
    dtype, args = _common(*(s.value(each) for each in operands), wraps=wraps)
    if dtype is torch.bool:
        refuse("E603", f"PyTorch has no '{op}' for booleans", hints=("convert one of them: mask.int(), mask.float()",))
    return Value(node(op, *args), dtype)


def _floats(s: Session, op: str, *operands: object) -> Value:
    """An operator over floats; ints and booleans become such, in PyTorch's default type."""
    dtype, args = _reals(s, *operands)
    return Value(node(op, *args), dtype)


def _reals(s: Session, *operands: object) -> tuple[torch.dtype, tuple[Expr, ...]]:
    values = [s.value(each) for each in operands]
    dtype = promoted(*values)
    dtype = dtype if dtype.is_floating_point else torch.get_default_dtype()
    return dtype, tuple(convert(each.expr, FLOAT) for each in values)


def _swapped(rule: Rule) -> Rule:
    return lambda s, x, y: rule(s, y, x)


# -- arithmetic --------------------------------------------------------------------------------------------------------


def _scaled(s: Session, y: object, alpha: object) -> object:
    return y if alpha == 1 else s.symbolic(_multiplied(s, y, alpha))


@_rule("add", "__add__", "__radd__")
def _added(s: Session, x: object, y: object, *, alpha: object = 1) -> Value:
    values = s.value(x), s.value(_scaled(s, y, alpha))
    if promoted(*values) is torch.bool:
        return Value(disjunction(values[0].expr, values[1].expr), torch.bool)
    dtype, args = _common(*values)
    return Value(node("add", *args), dtype)


@_rule("sub", "subtract", "__sub__")
def _subtracted(s: Session, x: object, y: object, *, alpha: object = 1) -> Value:
    return _numbers(s, "sub", x, _scaled(s, y, alpha))


@_rule("rsub", "__rsub__")
def _subtracted_from(s: Session, x: object, y: object, *, alpha: object = 1) -> Value:
    return _numbers(s, "sub", y, _scaled(s, x, alpha))


@_rule("mul", "multiply", "__mul__", "__rmul__")
def _multiplied(s: Session, x: object, y: object) -> Value:
    values = s.value(x), s.value(y)
    if promoted(*values) is torch.bool:
        return Value(conjunction(values[0].expr, values[1].expr), torch.bool)
    dtype, args = _common(*values)
    return Value(node("mul", *args), dtype)


@_rule("div", "divide", "true_divide", "__truediv__", "__div__")
def _divided(s: Session, x: object, y: object, *, rounding_mode: str | None = None) -> Value:
    if rounding_mode is None:
        return _floats(s, "div", x, y)
    if rounding_mode == "floor":
        return _numbers(s, "floordiv", x, y)
    if rounding_mode != "trunc":
        refuse("E603", f"torch.div has no rounding_mode '{rounding_mode}'")
    return _quotient(s, x, y)


def _quotient(s: Session, x: object, y: object) -> Value:
    """x / y without its fraction."""
    values = s.value(x), s.value(y)
    dtype, (a, b) = _common(*values)
    if scalar_of(dtype) is FLOAT:
        return Value(_truncated(node("div", a, b)), dtype)
    # Rounding up where the signs differ and something is left.
    left = node("ne", node("mod", a, b), literal(0))
    apart = node("ne", node("lt", a, literal(0)), node("lt", b, literal(0)))
    return Value(node("add", node("floordiv", a, b), node("to_int", node("and", left, apart))), dtype)


def _truncated(x: Expr) -> Expr:
    return node("where", node("lt", x, literal(0.0)), node("ceil", x), node("floor", x))


for _name in ("__rtruediv__", "__rdiv__"):
    _RULES[_name] = _swapped(_divided)


@_rule("floor_divide", "__floordiv__")
def _floor_divided(s: Session, x: object, y: object) -> Value:
    return _numbers(s, "floordiv", x, y)


@_rule("remainder", "__mod__")
def _remainder(s: Session, x: object, y: object) -> Value:
    return _numbers(s, "mod", x, y)


@_rule("fmod")
def _fmod(s: Session, x: object, y: object) -> Value:
    """What is left of x, with its sign."""
    dtype, (a, b) = _common(s.value(x), s.value(y))
    if scalar_of(dtype) is FLOAT:
        return Value(node("mul", node("sign", a), node("mod", node("abs", a), node("abs", b))), dtype)
    quotient = _quotient(s, x, y).expr
    return Value(node("sub", a, node("mul", quotient, b)), dtype)


_RULES["__rfloordiv__"] = _swapped(_floor_divided)
_RULES["__rmod__"] = _swapped(_remainder)


@_rule("pow", "__pow__", "float_power")
def _power(s: Session, x: object, y: object) -> Value:
    dtype, (a, b) = _common(s.value(x), s.value(y))
    return Value(node("pow", a, b), dtype)


_RULES["__rpow__"] = _swapped(_power)


@_rule("square")
def _squared(s: Session, x: object) -> Value:
    return _multiplied(s, x, x)


@_rule("reciprocal")
def _reciprocal(s: Session, x: object) -> Value:
    return _floats(s, "div", 1.0, x)


@_rule("neg", "negative", "__neg__")
def _negated(s: Session, x: object) -> Value:
    return _numbers(s, "neg", x)


@_rule("abs", "absolute", "__abs__")
def _absolute(s: Session, x: object) -> Value:
    return _numbers(s, "abs", x)


@_rule("sign", "sgn")
def _sign(s: Session, x: object) -> Value:
    return _numbers(s, "sign", x, wraps=False)


@_rule("lerp")
def _interpolated(s: Session, x: object, y: object, weight: object) -> Value:
    step = _multiplied(s, s.symbolic(_subtracted(s, y, x)), weight)
    return _added(s, x, s.symbolic(step))


@_rule("addcmul")
def _with_product(s: Session, x: object, y: object, z: object, *, value: object = 1) -> Value:
    return _added(s, x, s.symbolic(_multiplied(s, y, z)), alpha=value)


# -- choices -----------------------------------------------------------------------------------------------------------


def _chosen(s: Session, op: str, x: object, y: object) -> Value:
    values = s.value(x), s.value(y)
    if promoted(*values) is torch.bool:
        either = conjunction if op == "min" else disjunction
        return Value(either(values[0].expr, values[1].expr), torch.bool)
    dtype, args = _common(*values, wraps=False)
    return Value(node(op, *args), dtype)


@_rule("minimum", "min")
def _minimum(s: Session, x: object, y: object) -> Value:
    return _chosen(s, "min", x, y)


@_rule("maximum", "max")
def _maximum(s: Session, x: object, y: object) -> Value:
    return _chosen(s, "max", x, y)


@_rule("clamp", "clip")
def _clamped(s: Session, x: object, min: object = None, max: object = None) -> Value:  # noqa: A002 - PyTorch's names
    if min is None and max is None:
        refuse("E603", "torch.clamp needs a bound", hints=("give min=, max= or both",))
    if max is None:
        return _chosen(s, "max", x, min)
    if min is None:
        return _chosen(s, "min", x, max)
    dtype, args = _common(s.value(x), s.value(min), s.value(max), wraps=False)
    return Value(node("clamp", *args), dtype)


@_rule("clamp_min")
def _at_least(s: Session, x: object, min: object) -> Value:  # noqa: A002
    return _chosen(s, "max", x, min)


@_rule("clamp_max")
def _at_most(s: Session, x: object, max: object) -> Value:  # noqa: A002
    return _chosen(s, "min", x, max)


@_rule("where")
def _where(s: Session, condition: object, x: object, y: object) -> Value:
    return _selected(s, s.value(condition), s.value(x), s.value(y))


def _selected(_s: Session, condition: Value, x: Value, y: Value) -> Value:
    if condition.dtype is not torch.bool:
        refuse("E603", f"the condition of torch.where is {condition.dtype}", hints=("compare it: x != 0",))
    dtype, args = _common(x, y, wraps=False)
    return Value(choice(condition.expr, *args), dtype)


@_rule("masked_fill")
def _filled(s: Session, x: object, mask: object, value: object) -> Value:
    kept = s.value(x)
    filled = _selected(s, s.value(mask), s.value(value), kept)
    return Value(convert(filled.expr, scalar_of(kept.dtype)), kept.dtype)


# -- functions of floats -----------------------------------------------------------------------------------------------


def _same(op: str) -> Rule:
    return lambda s, x: _floats(s, op, x)


for _row in OPERATORS.values():
    if isinstance(_row.meaning, Library):
        _RULES.update(dict.fromkeys(_row.meaning.torch, _same(_row.name)))


@_rule("silu")
def _silu(s: Session, x: object, inplace: bool = False) -> Value:  # noqa: ARG001
    return _floats(s, "silu", x)


@_rule("relu")
def _relu(s: Session, x: object, inplace: bool = False) -> Value:  # noqa: ARG001
    value = s.value(x)
    if scalar_of(value.dtype) is FLOAT:
        return _floats(s, "relu", x)
    return _maximum(s, x, 0)


@_rule("gelu")
def _gelu(s: Session, x: object, approximate: str = "none") -> Value:
    if approximate == "none":
        return _floats(s, "gelu", x)
    dtype, (a,) = _reals(s, x)
    cube = node("mul", a, node("mul", a, a))
    inner = node("mul", literal(math.sqrt(2 / math.pi)), node("add", a, node("mul", literal(0.044715), cube)))
    return Value(node("mul", node("mul", literal(0.5), a), node("add", literal(1.0), node("tanh", inner))), dtype)


@_rule("softplus")
def _softplus(s: Session, x: object, beta: object = 1, threshold: object = 20) -> Value:  # noqa: ARG001
    # Beyond the threshold PyTorch takes x itself, which differs by less than float32 shows.
    if beta == 1:
        return _floats(s, "softplus", x)
    dtype, (a, b) = _reals(s, x, beta)
    return Value(node("div", node("softplus", node("mul", a, b)), b), dtype)


@_rule("logsigmoid", "log_sigmoid")
def _logsigmoid(s: Session, x: object) -> Value:
    dtype, (a,) = _reals(s, x)
    return Value(node("neg", node("softplus", node("neg", a))), dtype)


@_rule("leaky_relu")
def _leaky_relu(s: Session, x: object, negative_slope: object = 0.01, inplace: bool = False) -> Value:  # noqa: ARG001
    dtype, (a, slope) = _reals(s, x, negative_slope)
    return Value(node("where", node("gt", a, literal(0.0)), a, node("mul", a, slope)), dtype)


@_rule("tan")
def _tan(s: Session, x: object) -> Value:
    dtype, (a,) = _reals(s, x)
    return Value(node("div", node("sin", a), node("cos", a)), dtype)


@_rule("cosh", "sinh")
def _hyperbolic(_s: Session, _x: object) -> Value:
    return refuse(
        "E602", "flashgen has no hyperbolic sine and cosine", hints=("write (torch.exp(x) + torch.exp(-x)) / 2",)
    )


@_rule("log10")
def _log10(s: Session, x: object) -> Value:
    dtype, (a,) = _reals(s, x)
    return Value(node("mul", node("log2", a), literal(math.log10(2.0))), dtype)


@_rule("hypot")
def _hypot(s: Session, x: object, y: object) -> Value:
    dtype, (a, b) = _reals(s, x, y)
    return Value(node("sqrt", node("add", node("mul", a, a), node("mul", b, b))), dtype)


def _rounded(op: str) -> Rule:
    def rule(s: Session, x: object, *, decimals: int = 0) -> Value:
        if decimals != 0:
            refuse("E603", "torch.round with decimals is not supported", hints=("write torch.round(x * 10) / 10",))
        value = s.value(x)
        if scalar_of(value.dtype) is not FLOAT:
            return value
        return Value(_truncated(value.expr) if op == "trunc" else node(op, value.expr), value.dtype)

    return rule


for _op in ("floor", "ceil", "round", "trunc"):
    _RULES[_op] = _rounded(_op)
_RULES["fix"] = _RULES["trunc"]


@_rule("frac")
def _fraction(s: Session, x: object) -> Value:
    dtype, (a,) = _reals(s, x)
    return Value(node("sub", a, _truncated(a)), dtype)


# -- comparisons and logic ---------------------------------------------------------------------------------------------


def _comparison(op: str) -> Rule:
    def rule(s: Session, x: object, y: object) -> Value:
        dtype, (a, b) = _common(s.value(x), s.value(y), wraps=False)
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
    _RULES.update(dict.fromkeys(_names, _comparison(_op)))


def _condition(s: Session, x: object) -> Expr:
    return convert(s.value(x).expr, BOOL)


@_rule("logical_and")
def _both(s: Session, x: object, y: object) -> Value:
    return Value(conjunction(_condition(s, x), _condition(s, y)), torch.bool)


@_rule("logical_or")
def _either(s: Session, x: object, y: object) -> Value:
    return Value(disjunction(_condition(s, x), _condition(s, y)), torch.bool)


@_rule("logical_xor")
def _one_of(s: Session, x: object, y: object) -> Value:
    return Value(node("ne", _condition(s, x), _condition(s, y)), torch.bool)


@_rule("logical_not")
def _not(s: Session, x: object) -> Value:
    return Value(node("not", _condition(s, x)), torch.bool)


@_rule("bitwise_not", "__invert__")
def _inverted(s: Session, x: object) -> Value:
    value = s.value(x)
    if value.dtype is torch.bool:
        return Value(node("not", value.expr), torch.bool)
    _ints_only("~", value)
    return Value(node("sub", literal(-1), value.expr), value.dtype)


_ON_BOOLS: Mapping[str, Choice] = {"bitand": conjunction, "bitor": disjunction, "bitxor": lambda x, y: node("ne", x, y)}


def _bitwise(op: str) -> Rule:
    on_bools = _ON_BOOLS[op]

    def rule(s: Session, x: object, y: object) -> Value:
        values = s.value(x), s.value(y)
        dtype, (a, b) = _common(*values, wraps=False)
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
    _RULES.update(dict.fromkeys(_names, _bitwise(_op)))


@_rule("bitwise_left_shift", "__lshift__")
def _shifted_left(s: Session, x: object, y: object) -> Value:
    _ints_only("<<", s.value(x), s.value(y))
    return _numbers(s, "shl", x, y)


@_rule("bitwise_right_shift", "__rshift__")
def _shifted_right(s: Session, x: object, y: object) -> Value:
    _ints_only(">>", s.value(x), s.value(y))
    return _numbers(s, "shr", x, y, wraps=False)


_RULES["__rlshift__"] = _swapped(_shifted_left)
_RULES["__rrshift__"] = _swapped(_shifted_right)


def _infinite(test: Callable[[Expr], Expr], on_ints: bool = False) -> Rule:
    def rule(s: Session, x: object) -> Value:
        value = s.value(x)
        if scalar_of(value.dtype) is not FLOAT:
            return Value(literal(on_ints), torch.bool)
        return Value(test(value.expr), torch.bool)

    return rule


_INFINITY = literal(math.inf)
_RULES["isinf"] = _infinite(lambda x: node("eq", node("abs", x), _INFINITY))
_RULES["isposinf"] = _infinite(lambda x: node("eq", x, _INFINITY))
_RULES["isneginf"] = _infinite(lambda x: node("eq", x, literal(-math.inf)))
_RULES["isfinite"] = _infinite(lambda x: node("lt", node("abs", x), _INFINITY), on_ints=True)
_RULES["isnan"] = _infinite(lambda x: node("not", node("le", x, _INFINITY)))


@_rule("isclose")
def _is_close(s: Session, x: object, y: object, rtol: object = 1e-5, atol: object = 1e-8) -> Value:
    _, (a, b, relative, absolute) = _reals(s, x, y, rtol, atol)
    return Value(
        node(
            "le",
            node("abs", node("sub", a, b)),
            node("add", absolute, node("mul", relative, node("abs", b))),
        ),
        torch.bool,
    )


# -- types -------------------------------------------------------------------------------------------------------------

_BITS = {
    torch.bool: 1, torch.int8: 7, torch.uint8: 8, torch.int16: 15, torch.uint16: 16, torch.int32: 31, torch.uint32: 32,
    torch.int64: 63, torch.float16: 16, torch.bfloat16: 16, torch.float32: 32, torch.float64: 64,
}  # fmt: skip
_CASTS = {
    "float": torch.float32,
    "double": torch.float64,
    "half": torch.float16,
    "bfloat16": torch.bfloat16,
    "int": torch.int32,
    "long": torch.int64,
    "short": torch.int16,
    "char": torch.int8,
    "byte": torch.uint8,
    "bool": torch.bool,
}


def cast(value: Value, dtype: torch.dtype) -> Value:
    """The value in another of PyTorch's types."""
    if value.dtype is dtype:
        return value
    if dtype not in _BITS:
        refuse("E603", f"a mod cannot convert to {dtype}")
    before, after = scalar_of(value.dtype), scalar_of(dtype)
    loses = _BITS[dtype] < _BITS.get(value.dtype, 0) or (before is FLOAT and after is INT)
    if after is FLOAT and dtype in (torch.float16, torch.bfloat16) and (loses or before is INT):
        refuse(
            "E603",
            f"converting to {dtype} would round, and a mod is computed in 32 bits",
            hints=("leave the conversion out",),
        )
    if after is INT and dtype in NARROW and loses:
        refuse("E603", f"converting to {dtype} would drop bits", hints=("convert to torch.int32",))
    return Value(convert(value.expr, after), dtype)


def _caster(dtype: torch.dtype) -> Rule:
    return lambda s, x, memory_format=None: cast(s.value(x), dtype)  # noqa: ARG005


for _name, _dtype in _CASTS.items():
    _RULES[_name] = _caster(_dtype)


@_rule("to", "type", "type_as", "_to_copy")
def _converted(s: Session, x: object, *targets: object, dtype: object = None, **_others: object) -> Value:
    """``x.to(dtype)``, ``x.to(other)``; a device, ``copy`` and ``non_blocking`` change nothing here."""
    value = s.value(x)
    for target in (*targets, dtype):
        if isinstance(target, torch.dtype):
            value = cast(value, target)
        elif isinstance(target, torch.Tensor):
            value = cast(value, target.held if isinstance(target, Symbolic) else target.dtype)
    return value


@_rule("clone", "contiguous", "__pos__", "positive", "alias", "view_as_real", "__deepcopy__")
def _itself(s: Session, x: object, *_: object, memory_format: object = None) -> Value:  # noqa: ARG001
    return s.value(x)


@_rule("detach")
def _detached(s: Session, x: object) -> Value:
    value = s.value(x)
    if scalar_of(value.dtype) is FLOAT:
        refuse(
            "E602",
            "a mod cannot detach a value from the gradient",
            hints=("detach the captured tensor outside of the mod",),
        )
    return value


# -- values made anew --------------------------------------------------------------------------------------------------


def _alone(size: object) -> None:
    if isinstance(size, (tuple, list, torch.Size)) and len(size) == 0:
        return
    refuse("E603", "a mod makes numbers, not tensors with dimensions", hints=("give the size ()",))


def _made(s: Session, value: object, dtype: object, otherwise: torch.dtype) -> Value:
    made = s.value(value)
    return cast(made._replace(weak=False), dtype if isinstance(dtype, torch.dtype) else otherwise)


@_rule("new_full")
def _new_full(s: Session, x: object, size: object, fill_value: object, *, dtype: object = None, **_: object) -> Value:
    _alone(size)
    return _made(s, fill_value, dtype, s.value(x).dtype)


def _new(value: int) -> Rule:
    def rule(s: Session, x: object, *sizes: object, size: object = (), dtype: object = None, **_: object) -> Value:
        for each in (*sizes, size):
            _alone(each)
        return _made(s, value, dtype, s.value(x).dtype)

    return rule


_RULES["new_zeros"], _RULES["new_ones"] = _new(0), _new(1)


@_rule("new_tensor")
def _new_tensor(s: Session, x: object, data: object, *, dtype: object = None, **_: object) -> Value:
    return _made(s, data, dtype, s.value(x).dtype)


@_rule("full_like")
def _full_like(s: Session, x: object, fill_value: object, *, dtype: object = None, **_: object) -> Value:
    return _made(s, fill_value, dtype, s.value(x).dtype)


def _like(value: int) -> Rule:
    return lambda s, x, *, dtype=None, **_: _made(s, value, dtype, s.value(x).dtype)


_RULES["zeros_like"], _RULES["ones_like"] = _like(0), _like(1)


@_rule("tensor", "as_tensor", "scalar_tensor", "asarray")
def _tensor(s: Session, data: object, *, dtype: object = None, **_: object) -> Value:
    return _made(s, data, dtype, s.value(data).dtype)


@_rule("full")
def _full(s: Session, size: object, fill_value: object, *, dtype: object = None, **_: object) -> Value:
    _alone(size)
    return _made(s, fill_value, dtype, s.value(fill_value).dtype)


# -- what is asked of a value ------------------------------------------------------------------------------------------


_RULES.update(
    {
        "get:dtype": lambda s, x: _Plain(s.value(x).dtype),
        "get:device": lambda s, _: _Plain(s.device),
        "get:is_cuda": lambda s, _: _Plain(s.device.type == "cuda"),
        "get:is_cpu": lambda s, _: _Plain(s.device.type == "cpu"),
        "get:shape": lambda *_: _Plain(torch.Size(())),
        "get:ndim": lambda *_: _Plain(0),
        "get:requires_grad": lambda *_: _Plain(False),
        "get:layout": lambda *_: _Plain(torch.strided),
        "dim": lambda *_: _Plain(0),
        "numel": lambda *_: _Plain(1),
        "size": lambda *_: _Plain(torch.Size(())),
        "is_floating_point": lambda s, x: _Plain(s.value(x).dtype.is_floating_point),
        "is_complex": lambda *_: _Plain(False),
        "is_contiguous": lambda *_: _Plain(True),
    }
)


class _Plain:
    """An answer that is no value of the mod."""

    def __init__(self, answer: object) -> None:
        self.answer = answer


Plain = _Plain
FUNCTIONS: Mapping[str, Rule] = MappingProxyType(_RULES)

# What Python asks of a value to decide by it, and how the user put it.
DECISIONS: Mapping[str, str] = MappingProxyType(
    {
        "__bool__": "a Python condition ('if', 'and', 'or', 'not', 'while', 'assert', min, max)",
        "__int__": "int()",
        "__float__": "float(), or a function of Python's math,",
        "__index__": "a Python index ('range', a slice, a list)",
        "__len__": "len()",
        "__iter__": "a loop",
        "item": "'.item()'",
        "tolist": "'.tolist()'",
        "__array__": "NumPy",
        "numpy": "NumPy",
        "__array_wrap__": "NumPy",
        "__format__": "a text",
        "__repr__": "a text",
        "__contains__": "'in'",
        "nonzero": "'.nonzero()'",
    }
)
INSTEAD: Mapping[str, str] = MappingProxyType(
    {
        "__bool__": "write torch.where(condition, x, y), and '&', '|', '~' for 'and', 'or', 'not'",
        "__int__": "write x.int()",
        "__float__": "write x.float(), and torch's functions instead of math's",
        "item": "leave it out: a value without dimensions is a number here",
        "__array__": "write torch's functions instead of NumPy's",
        "__array_wrap__": "write torch's functions instead of NumPy's",
        "numpy": "write torch's functions instead of NumPy's",
    }
)
MISSING: Mapping[str, str] = MappingProxyType(
    {
        "expm1": "write torch.exp(x) - 1",
        "stack": "write the values one by one: a mod computes one number for one pair",
        "cat": "write the values one by one: a mod computes one number for one pair",
        "any": "write '|' between the conditions",
        "all": "write '&' between the conditions",
        "sum": "write '+' between the values",
        "gather": "index the tensor: t[h, kv_idx]",
        "index_select": "index the tensor: t[h, kv_idx]",
        "take": "index the tensor: t[h, kv_idx]",
        "nan_to_num": "write torch.where(torch.isnan(x), 0.0, x)",
        "isin": "compare with each value and write '|' between the conditions",
        "bucketize": "count the borders that are passed: (x > b0).int() + (x > b1).int()",
    }
)
