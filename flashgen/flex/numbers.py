"""Captured Python numbers, as a mod sees them while it is traced.

A mod computes with them in Python's own arithmetic, exactly. Each number records how it was computed (its ``Recipe``):
where it meets a symbolic value it becomes a param, which the next call computes again from the values captured then.
Where Python needs the value itself (``if``, ``range``, ``math.sqrt``), the answer is noted among the ``Guards``: the
trace holds as long as the answer stays the same.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from torch import Tensor

# ("leaf", k): what was captured as the k-th; ("extent", k, axis): of a tensor's shape; ("constant", x, repr(x));
# ("attribute", …): what no later call finds again; (operation, recipe, …).
Recipe = tuple[Any, ...]
Host = bool | int | float
Guards = dict[Recipe, Host]  # what Python was told of captured numbers while a mod was traced

_Operations = Mapping[str, Callable[..., Any]]
_BINARY: _Operations = {
    name.strip("_"): getattr(operator, name)
    for name in (
        *("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "lshift", "rshift"),
        *("and_", "or_", "xor"),
    )
}
_UNARY: _Operations = {
    **{name: getattr(operator, name) for name in ("neg", "pos", "abs", "invert")},
    **{name: getattr(math, name) for name in ("floor", "ceil", "trunc")},
    "round": round,
}
_COMPARISONS: _Operations = {name: getattr(operator, name) for name in ("lt", "le", "gt", "ge", "eq", "ne")}
_OPERATIONS: _Operations = MappingProxyType({**_BINARY, **_UNARY, **_COMPARISONS, "bool": bool})


def evaluate(recipe: Recipe, leaves: Sequence[Any]) -> Host:
    """The number that a recipe gives for the values captured now."""
    kind = recipe[0]
    if kind == "leaf":
        return leaves[recipe[1]]  # type: ignore[no-any-return]
    if kind == "extent":
        return leaves[recipe[1]].shape[recipe[2]]  # type: ignore[no-any-return]
    if kind == "constant":
        return recipe[1]  # type: ignore[no-any-return]
    return _OPERATIONS[kind](*(evaluate(part, leaves) for part in recipe[1:]))  # type: ignore[no-any-return]


def as_host(value: object) -> Host | None:
    """A Python number, also of NumPy's, an enum's or another class of numbers; None for anything else."""
    if isinstance(value, np.generic):
        value = value.item()
    kind = type(value)
    if kind in (bool, int, float):
        return value  # type: ignore[return-value]
    if issubclass(kind, int):
        return int.__int__(value)  # type: ignore[arg-type]
    return float.__float__(value) if issubclass(kind, float) else None  # type: ignore[arg-type]


class _Node:
    """The interface by which PyTorch reads a number. Where PyTorch needs the value, the trace depends on it."""

    __slots__ = ("number",)

    def __init__(self, number: Number) -> None:
        self.number = number

    def is_int(self) -> bool:
        return isinstance(self.number.value, int)

    def is_float(self) -> bool:
        return not self.is_int()

    def guard_int(self, file: str, line: int) -> int:  # noqa: ARG002 - PyTorch's arguments
        return int(self.number)

    def guard_float(self, file: str, line: int) -> float:  # noqa: ARG002
        return float(self.number)

    def _no(self) -> bool:
        return False

    def _none(self) -> None:
        return None

    is_bool = is_constant = is_nested_int = _no
    maybe_as_int = constant_int = _none


class Number:
    """A captured Python number. ``isinstance`` says int or float; PyTorch takes it for a symbolic number."""

    value: int | float
    recipe: Recipe
    guards: Guards

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        return type(self.value)

    def settled(self) -> int | float:
        """The plain number, which the trace depends on from now on."""
        return self.guards.setdefault(self.recipe, self.value)

    def __bool__(self) -> bool:
        return bool(self.guards.setdefault(("bool", self.recipe), bool(self.value)))

    def __getattr__(self, name: str) -> Any:
        if not hasattr(type(self.value), name):
            raise AttributeError(name)
        return getattr(self.settled(), name)

    def __divmod__(self, other: Any) -> Any:
        return self // other, self % other

    def __rdivmod__(self, other: Any) -> Any:
        return other // self, other % self


class _Int(Number, torch.SymInt): ...


class _Float(Number, torch.SymFloat): ...


def lifted(value: int | float, recipe: Recipe, guards: Guards) -> Number:
    """A captured number."""
    kind = _Int if isinstance(value, int) else _Float
    made: Number = kind.__new__(kind)
    made.value, made.recipe, made.guards = value, recipe, guards
    made.node = _Node(made)  # type: ignore[attr-defined]
    return made


def as_number(value: object) -> Number | None:
    """A captured number, also in the form in which PyTorch passes it on; None for anything else."""
    kind = type(value)
    if kind in (torch.SymInt, torch.SymFloat):
        return value.node.number  # type: ignore[attr-defined, no-any-return]
    return value if issubclass(kind, Number) else None  # type: ignore[return-value]


def own(value: Any) -> Any:
    """The value; a captured number that PyTorch passes on is unwrapped."""
    number = as_number(value)
    return value if number is None else number


def settled(value: Any) -> Any:
    """The value; a captured number becomes a plain one, for a result that each call computes again."""
    number = as_number(value)
    return value if number is None else number.value


def told(value: Any) -> Any:
    """The value; a captured number becomes a plain one, which the trace depends on from now on."""
    number = as_number(value)
    return value if number is None else number.settled()


def _operand(value: object) -> tuple[Host, Recipe] | None:
    number = as_number(value)
    if number is not None:
        return number.value, number.recipe
    plain = as_host(value)
    # 1, 1.0 and True are equal, and so are 0.0 and -0.0; they are not the same operand.
    return None if plain is None else (plain, ("constant", plain, repr(plain)))


def _made(number: Number, value: Any, recipe: Recipe) -> Any:
    if type(value) in (int, float):
        return lifted(value, recipe, number.guards)
    return value if value is NotImplemented else number.guards.setdefault(recipe, value)


def _binary(name: str, function: Callable[..., Any], *, swapped: bool) -> Callable[[Number, object], Any]:
    def method(self: Number, other: object) -> Any:
        operand = None if isinstance(other, Tensor) else _operand(other)
        if operand is None:
            return NotImplemented  # a tensor's own operator comes next
        mine = (self.value, self.recipe)
        (x, first), (y, second) = (operand, mine) if swapped else (mine, operand)
        return _made(self, function(x, y), (name, first, second))

    return method


def _unary(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    def method(self: Number, *digits: Any) -> Any:
        if digits and digits != (None,):
            return function(self.settled(), *digits)
        return _made(self, function(self.value), (name, self.recipe))

    return method


def _of_value(function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda self, *form: function(self.settled(), *form)


for _function in (int, float, complex, hash, repr, format, operator.index):
    setattr(Number, f"__{_function.__name__}__", _of_value(_function))
for _name, _function in (*_BINARY.items(), *_COMPARISONS.items()):
    setattr(Number, f"__{_name}__", _binary(_name, _function, swapped=False))
for _name, _function in _BINARY.items():
    setattr(Number, f"__r{_name}__", _binary(_name, _function, swapped=True))
for _name, _function in _UNARY.items():
    setattr(Number, f"__{_name}__", _unary(_name, _function))
