"""What the tables of PyTorch's functions share: a rule a function, by the names of it, and what rules are made of.

A rule takes a ``Session`` and the arguments as the mod gave them, and gives a symbolic value. Types and promotion are
PyTorch's; an int has 64 bits there and 32 here, where ``overflow.py`` says whether that makes a difference. Numbers of
16 bits are computed with in 32.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NoReturn, TypeVar

import torch

from flashgen.flex.places import refuse
from flashgen.flex.values import FLOAT, NARROW, Session, Value, convert, node, promoted, scalar_of
from flashgen.ir.expr import Expr

Rule = Callable[..., Any]
RuleOf = TypeVar("RuleOf", bound=Rule)


class Rules(dict[str, Rule]):
    """Rules by the names of functions and methods, which share them."""

    def of(self, *names: str) -> Callable[[RuleOf], RuleOf]:
        """Enter the function below under these names."""

        def enter(function: RuleOf) -> RuleOf:
            self.update(dict.fromkeys(names, function))
            return function

        return enter


# What PyTorch calls the operands of its functions where rules call them x, y and z.
_OPERANDS: Mapping[str, str] = MappingProxyType(
    {"input": "x", "self": "x", "other": "y", "exponent": "y", "end": "y", "tensor1": "y", "tensor2": "z"}
)


def by_our_names(
    rule: Rule, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Arguments under the names of a rule's parameters, the first of them at its place."""
    if not kwargs:
        return args, {}
    known = _parameters(rule)
    named = {name if name in known else _OPERANDS.get(name, name): value for name, value in kwargs.items()}
    if not args and len(known) > 1 and known[1] in named:
        args = (named.pop(known[1]),)
    return args, named


@functools.lru_cache(maxsize=512)
def _parameters(rule: Rule) -> tuple[str, ...]:
    return tuple(inspect.signature(rule).parameters)


class Plain:
    """An answer that is no new value: no value of the mod, or the very operand."""

    def __init__(self, answer: object) -> None:
        self.answer = answer


class InPlace:
    """A value that the first argument takes, for all names of it."""

    def __init__(self, value: Value) -> None:
        self.value = value


def in_place(value: Value, is_so: bool) -> Value | InPlace:
    """What a function with an argument ``inplace`` gives."""
    return InPlace(value) if is_so else value


def common(*operands: Value, wraps: bool = True) -> tuple[torch.dtype, tuple[Expr, ...]]:
    """The type of a result and the operands in it. ``wraps``: the result may leave the range of the type."""
    dtype = promoted(*operands)
    if dtype in NARROW:
        if wraps:
            _refuse_wrapping(f"arithmetic in {dtype}", dtype)
        for each in operands:
            _check_fits(each, dtype)
    return dtype, tuple(convert(each.expr, scalar_of(dtype)) for each in operands)


def ends(dtype: torch.dtype) -> tuple[int, int]:
    """The least and the largest value of a type of ints."""
    if dtype is torch.bool:
        return 0, 1
    info = torch.iinfo(dtype)
    return info.min, info.max


def _check_fits(operand: Value, dtype: torch.dtype) -> None:
    """A Python number takes the type of the others. Of a captured one, the trace holds for those that fit."""
    low, high = ends(dtype)
    given: Any = operand.number
    if given is not None and not low <= given <= high:
        _refuse_wrapping(f"{given} as {dtype}", dtype)


def _refuse_wrapping(what: str, dtype: torch.dtype) -> NoReturn:
    refuse(
        "E603",
        f"{what} wraps at the ends of that type, {ends(dtype)[0]} and {ends(dtype)[1]}, which kernels do not do",
        hints=("convert what is read first: t[h, kv_idx].int()",),
    )


def numbers(s: Session, op: str, *operands: object, wraps: bool = True) -> Value:
    """An operator over numbers of one type."""
    dtype, args = common(*(s.value(each) for each in operands), wraps=wraps)
    if dtype is torch.bool:
        refuse("E603", f"PyTorch has no '{op}' for booleans", hints=("convert one of them: mask.int(), mask.float()",))
    return Value(node(op, *args), dtype)


def floats(s: Session, op: str, *operands: object) -> Value:
    """An operator over floats; ints and booleans become such, in PyTorch's default type."""
    dtype, args = reals(s, *operands)
    return Value(node(op, *args), dtype)


def reals(s: Session, *operands: object) -> tuple[torch.dtype, tuple[Expr, ...]]:
    """Operands as floats, and the type of a result."""
    values = [s.value(each) for each in operands]
    dtype = promoted(*values)
    dtype = dtype if dtype.is_floating_point else torch.get_default_dtype()
    return dtype, tuple(convert(each.expr, FLOAT) for each in values)


def swapped(rule: Rule) -> Rule:
    """The same with its operands exchanged, as Python's reflected methods have them."""
    return lambda s, x, y: rule(s, y, x)
