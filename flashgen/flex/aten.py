"""PyTorch's operators as expressions of the IR: one table, by the names of aten that functions and methods share.

A rule takes the dtype of the result, which PyTorch has determined, and one element of each operand; it returns an
expression. ``FORMULAS`` are operators that are composed of others. PyTorch's ints have 64 bits, the IR's have 32:
``check_ints`` tells whether that makes a difference. 16-bit numbers are computed in 32 bits.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NoReturn

import torch

from flashgen.flex.places import refuse
from flashgen.flex.values import BOOL, FLOAT, INT, Value, choice, conjunction, convert, disjunction, node, scalar_of
from flashgen.ir.expr import Expr, Literal, literal
from flashgen.ir.operators import OPERATORS, Library

_NARROW = frozenset((torch.int8, torch.int16, torch.uint8, torch.uint16, torch.uint32))
_HALVES = (torch.float16, torch.bfloat16)
_TYPES = frozenset((torch.bool, *_NARROW, torch.int32, torch.int64, *_HALVES, torch.float32, torch.float64))
ORDER = {BOOL: 0, INT: 1, FLOAT: 2}  # of promotion


def promoted(*values: Value) -> torch.dtype:
    """The type in which values are compared, by PyTorch's rules for tensors and Python numbers."""
    top = max((scalar_of(value.dtype) for value in values), key=ORDER.__getitem__)
    found: torch.dtype | None = None
    for value in values:
        if not value.weak and scalar_of(value.dtype) is top:
            found = value.dtype if found is None else torch.promote_types(found, value.dtype)
    if found is not None:
        return found
    return {BOOL: torch.bool, INT: torch.int64, FLOAT: torch.get_default_dtype()}[top]


def common(dtype: torch.dtype, *operands: Value, wraps: bool = True) -> tuple[Expr, ...]:
    """The operands converted to the type of a result. ``wraps``: the result may leave the range of the type."""
    if dtype in _NARROW:
        if wraps:
            _refuse_wrapping(f"arithmetic in {dtype}", dtype)
        low, high = _ends(dtype)
        for each in operands:
            # A Python number has to fit the type of the others. If captured, the trace holds for numbers that fit.
            given: Any = each.number
            if given is not None and not low <= given <= high:
                _refuse_wrapping(f"{given} as {dtype}", dtype)
    return tuple(convert(each.expr, scalar_of(dtype)) for each in operands)


def _ends(dtype: torch.dtype) -> tuple[int, int]:
    """The least and the largest value of an integer type."""
    if dtype is torch.bool:
        return 0, 1
    info = torch.iinfo(dtype)
    return info.min, info.max


def _refuse_wrapping(what: str, dtype: torch.dtype) -> NoReturn:
    refuse(
        "E603",
        f"{what} wraps at the ends of that type, {_ends(dtype)[0]} and {_ends(dtype)[1]}, which kernels do not do",
        hint="convert what is read first: t[h, kv_idx].int()",
    )


def cast(value: Value, dtype: torch.dtype) -> Value:
    """The value in another of PyTorch's types."""
    if value.dtype is dtype and not value.weak:
        return value
    if dtype not in _TYPES:
        refuse("E603", f"a mod cannot convert to {dtype}")
    if dtype in _HALVES and scalar_of(value.dtype) is not BOOL and not _is_exact(value, dtype):
        refuse(
            "E603",
            f"converting to {dtype} would round, and a mod is computed in 32 bits",
            hint="leave the conversion out",
        )
    if dtype in _NARROW and not _fits(value, dtype):
        refuse("E603", f"converting to {dtype} would drop bits", hint="convert to torch.int32")
    return Value(convert(value.expr, scalar_of(dtype)), dtype)


def _is_exact(value: Value, dtype: torch.dtype) -> bool:
    """Whether a 16-bit float holds the operand exactly: a constant, or an 8-bit float."""
    if isinstance(value.expr, Literal):
        return torch.tensor(value.expr.value, dtype=dtype).item() == value.expr.value
    return value.dtype.is_floating_point and value.dtype.itemsize == 1


def _fits(value: Value, dtype: torch.dtype) -> bool:
    """Whether an integer type holds every value that the operand may have."""
    low, high = _ends(dtype)
    if isinstance(value.expr, Literal):
        return low <= value.expr.value <= high
    if value.dtype.is_floating_point:
        return False
    least, most = _ends(value.dtype)
    return low <= least and most <= high


DType = torch.dtype
Rule = Callable[..., Expr]
_INFINITY = literal(math.inf)


# -- operators of one type ---------------------------------------------------------------------------------------------


def _same(op: str, *, wraps: bool = True) -> Rule:
    """The rule of one operator of the IR over one type. ``wraps``: the result may leave the range of the type."""
    return lambda t, *xs: node(op, *common(t, *xs, wraps=wraps))


def _float(op: str) -> Rule:
    """The rule for one operator of the IR over floats."""
    return lambda _t, *xs: node(op, *(convert(x.expr, FLOAT) for x in xs))


def _or_bool(op: str, on_bools: Callable[[Expr, Expr], Expr], *, wraps: bool = True) -> Rule:
    """The rule, with another operator of the IR where the result is bool."""

    def rule(t: DType, x: Value, y: Value) -> Expr:
        return on_bools(x.expr, y.expr) if t is torch.bool else node(op, *common(t, x, y, wraps=wraps))

    return rule


def _compared(op: str) -> Rule:
    def rule(_t: DType, x: Value, y: Value) -> Expr:
        dtype = promoted(x, y)
        a, b = common(dtype, x, y, wraps=False)
        if dtype is torch.bool and op not in ("eq", "ne"):
            a, b = convert(a, INT), convert(b, INT)
        return node(op, a, b)

    return rule


def _of_conditions(connect: Callable[..., Expr]) -> Rule:
    return lambda _t, *xs: connect(*(convert(x.expr, BOOL) for x in xs))


def _tested(test: Callable[[Expr], Expr]) -> Rule:
    """A predicate of floats, which is false for ints."""
    return lambda _t, x: test(x.expr) if scalar_of(x.dtype) is FLOAT else literal(False)


def _rounded(round_: Callable[[Expr], Expr]) -> Rule:
    def rule(_t: DType, x: Value, decimals: Value | None = None) -> Expr:
        if decimals is not None and decimals.number != 0:
            refuse("E603", "torch.round with decimals is not supported", hint="write torch.round(x * 10) / 10")
        return round_(x.expr) if scalar_of(x.dtype) is FLOAT else x.expr

    return rule


def _truncated(x: Expr) -> Expr:
    """A float rounded towards 0."""
    return node("where", node("lt", x, literal(0.0)), node("ceil", x), node("floor", x))


# -- rules of their own ------------------------------------------------------------------------------------------------


def _added(op: str) -> Rule:
    on_bools = _or_bool(op, disjunction)

    def rule(t: DType, x: Value, y: Value, alpha: Value | None = None) -> Expr:
        is_one = alpha is None or alpha.number == 1
        return on_bools(t, x, y if is_one else Value(RULES["mul"](t, y, alpha), t))

    return rule


def _divided(t: DType, x: Value, y: Value, rounding_mode: str | None = None) -> Expr:
    if rounding_mode is None:
        return RULES["true_divide"](t, x, y)
    a, b = common(t, x, y)
    if rounding_mode == "floor":
        return node("floordiv", a, b)
    if scalar_of(t) is FLOAT:
        return _truncated(node("div", a, b))
    # Rounding towards 0 is rounding up where the signs differ and something is left.
    left = node("ne", node("mod", a, b), literal(0))
    apart = node("ne", node("lt", a, literal(0)), node("lt", b, literal(0)))
    return node("add", node("floordiv", a, b), node("to_int", node("and", left, apart)))


def _inverted(t: DType, x: Value) -> Expr:
    if t is torch.bool:
        return node("not", x.expr)
    return node("sub", literal(-1), *common(t, x, wraps=not t.is_signed))


def _clamped(t: DType, x: Value, min: Value | None = None, max: Value | None = None) -> Expr:  # noqa: A002
    if min is not None and max is not None:
        return node("clamp", *common(t, x, min, max, wraps=False))
    return _bounded(t, "max", x, min) if max is None else _bounded(t, "min", x, max)


def _bounded(t: DType, op: str, x: Value, bound: Any) -> Expr:
    """A clamp with one bound. Its derivative at the bound is 1, as with two bounds; that of a maximum is 1/2 there."""
    if scalar_of(t) is not FLOAT:
        return RULES[f"{op}imum"](t, x, bound)
    a, b = common(t, x, bound, wraps=False)
    return node("clamp", a, *((b, _INFINITY) if op == "max" else (literal(-math.inf), b)))


def _gelu(_t: DType, x: Value, approximate: str = "none") -> Expr:
    if approximate == "none":
        return node("gelu", x.expr)
    a = x.expr
    cube = node("mul", a, node("mul", a, a))
    inner = node("mul", literal(math.sqrt(2 / math.pi)), node("add", a, node("mul", literal(0.044715), cube)))
    return node("mul", node("mul", literal(0.5), a), node("add", literal(1.0), node("tanh", inner)))


_UNSEEN = 20  # from here on softplus(x) is x in float32


def _softplus(_t: DType, x: Value, beta: Value | None = None, threshold: Value | None = None) -> Expr:
    scaled, smooth = x.expr, node("softplus", x.expr)
    if beta is not None and beta.number != 1:
        factor = convert(beta.expr, FLOAT)
        scaled = node("mul", x.expr, factor)
        smooth = node("div", node("softplus", scaled), factor)
    border: Any = _UNSEEN if threshold is None else threshold.number
    if border >= _UNSEEN:
        return smooth
    assert threshold is not None
    return node("where", node("gt", scaled, convert(threshold.expr, FLOAT)), x.expr, smooth)


RULES: Mapping[str, Rule] = MappingProxyType(
    {
        **{row.meaning.torch[0]: _float(row.name) for row in OPERATORS.values() if isinstance(row.meaning, Library)},
        **{op: _compared(op) for op in ("lt", "le", "gt", "ge", "eq", "ne")},
        # arithmetic
        "add": _added("add"),
        "sub": _added("sub"),
        "rsub": lambda t, x, y, alpha=None: RULES["sub"](t, y, x, alpha),
        "mul": _or_bool("mul", conjunction),
        "true_divide": _float("div"),
        "div": _divided,
        "floor_divide": _same("floordiv"),
        "remainder": _same("mod"),
        "pow": _same("pow"),
        "reciprocal": lambda _t, x: node("div", literal(1.0), convert(x.expr, FLOAT)),
        "neg": _same("neg"),
        "abs": _same("abs"),
        "sign": _same("sign", wraps=False),
        "sgn": _same("sign", wraps=False),
        # choices
        "minimum": _or_bool("min", conjunction, wraps=False),
        "maximum": _or_bool("max", disjunction, wraps=False),
        "clamp": _clamped,
        "clamp_min": lambda t, x, bound: _bounded(t, "max", x, bound),
        "clamp_max": lambda t, x, bound: _bounded(t, "min", x, bound),
        "where": lambda t, condition, x, y: choice(condition.expr, *common(t, x, y, wraps=False)),
        "masked_fill": lambda t, x, mask, value: choice(mask.expr, cast(value, t).expr, x.expr),
        # floats
        "silu": _float("silu"),
        "relu": lambda t, x: node("relu", x.expr) if scalar_of(t) is FLOAT else node("max", x.expr, literal(0)),
        "gelu": _gelu,
        "softplus": _softplus,
        **{op: _rounded(functools.partial(node, op)) for op in ("floor", "ceil", "round")},
        "trunc": _rounded(_truncated),
        # logic and bits
        "logical_and": _of_conditions(conjunction),
        "logical_or": _of_conditions(disjunction),
        "logical_xor": _of_conditions(functools.partial(node, "ne")),
        "logical_not": _of_conditions(lambda x: node("not", x)),
        "bitwise_not": _inverted,
        "bitwise_and": _or_bool("bitand", conjunction, wraps=False),
        "bitwise_or": _or_bool("bitor", disjunction, wraps=False),
        "bitwise_xor": _or_bool("bitxor", functools.partial(node, "ne"), wraps=False),
        "bitwise_left_shift": _same("shl"),
        "bitwise_right_shift": _same("shr", wraps=False),
        "__lshift__": _same("shl"),
        "__rshift__": _same("shr", wraps=False),
        "isinf": _tested(lambda x: node("eq", node("abs", x), _INFINITY)),
        "isposinf": _tested(lambda x: node("eq", x, _INFINITY)),
        "isneginf": _tested(lambda x: node("eq", x, literal(-math.inf))),
        "isnan": _tested(lambda x: node("not", node("le", x, _INFINITY))),
        # copies
        "_to_copy": lambda t, x, **_: cast(x, t).expr,
        "clone": lambda _t, x, **_: x.expr,
    }
)

# The argument that a new tensor is filled with, or the number that it is filled with.
FILLED: Mapping[str, int] = MappingProxyType({"full_like": 1, "new_full": 2, "fill": 1, "copy": 1})
CONSTANT: Mapping[str, int] = MappingProxyType(
    {"zeros_like": 0, "new_zeros": 0, "zero": 0, "ones_like": 1, "new_ones": 1}
)


# -- formulas ----------------------------------------------------------------------------------------------------------


def _norm(x: Any, order: float = 2, dim: Any = None, keepdim: bool = False, *, dtype: Any = None) -> Any:
    """The norm of any order. Its derivative at 0 is 0, as in PyTorch."""
    size = (x if dtype is None else x.to(dtype)).abs()
    options = {"dim": list(range(x.dim())) if dim is None else dim, "keepdim": keepdim}
    if order == math.inf:
        return size.amax(**options)
    total = (size**order).sum(**options)
    if order == 1:
        return total
    some = total > 0
    return torch.where(some, torch.where(some, total, 1.0) ** (1 / order), 0.0)


def _product(x: Any, y: Any) -> Any:
    if y.dim() == 1:
        return (x * y).sum(-1)
    return (x.unsqueeze(-1) * (y if x.dim() == 1 else y.unsqueeze(-3))).sum(-2)


def _mean(x: Any, dim: Any = None, keepdim: bool = False, *, dtype: Any = None) -> Any:
    dims = list(range(x.dim())) if dim is None or dim == [] else dim
    return x.sum(dims, keepdim, dtype=dtype) / math.prod(x.shape[each] for each in dims)


FORMULAS: Mapping[str, Callable[..., Any]] = MappingProxyType(
    {
        "square": lambda x: x * x,
        "lerp": lambda x, y, weight: x + (y - x) * weight,
        "addcmul": lambda x, y, z, value=1: torch.add(x, y * z, alpha=value),
        "fmod": lambda x, y: torch.where(x < 0, -(-x % abs(y)), x % abs(y)),
        "frac": lambda x: x - x.trunc(),
        "tan": lambda x: x.sin() / x.cos(),
        "log10": lambda x: x.log2() * math.log10(2.0),
        "hypot": lambda x, y: (x * x + y * y).sqrt(),
        "leaky_relu": lambda x, slope=0.01: torch.where(x > 0, x, x * slope),
        "log_sigmoid_forward": lambda x: (-torch.nn.functional.softplus(-x), x),
        "isfinite": lambda x: x.abs() < math.inf,
        **dict.fromkeys(("dot", "vdot", "mv", "mm", "bmm", "matmul"), _product),
        "mean": _mean,
        "linalg_vector_norm": _norm,
    }
)


# -- reductions --------------------------------------------------------------------------------------------------------


def _pairwise(name: str) -> Rule:
    """A reduction by a binary operator in a balanced tree, in the type of the result."""

    def rule(t: DType, values: list[Value]) -> Expr:
        left = [cast(each, t) for each in values]
        while len(left) > 1:
            last = left[len(left) & ~1 :]
            left = [Value(RULES[name](t, x, y), t) for x, y in zip(left[::2], left[1::2], strict=False)] + last
        return left[0].expr

    return rule


def _first(is_before: str) -> Rule:
    """The index of the extreme element, the first one among equal ones."""

    def rule(_t: DType, values: list[Value]) -> Expr:
        best, place = values[0], literal(0)
        for number, each in enumerate(values[1:], start=1):
            wins = RULES[is_before](torch.bool, each, best)
            best = best._replace(expr=choice(wins, each.expr, best.expr))
            place = choice(wins, literal(number), place)  # type: ignore[assignment]
        return place

    return rule


REDUCTIONS: Mapping[str, Rule] = MappingProxyType(
    {
        "sum": _pairwise("add"), "prod": _pairwise("mul"), "argmax": _first("gt"), "argmin": _first("lt"),
        **dict.fromkeys(("amax", "max"), _pairwise("maximum")), **dict.fromkeys(("amin", "min"), _pairwise("minimum")),
        "any": _pairwise("logical_or"), "all": _pairwise("logical_and"),
    }
)  # fmt: skip
