"""Symbolic values of a mod, and the contents of a trace: nodes of the IR, captured tensors, params.

In: the operands of a mod's operators. Out: nodes of the IR, with PyTorch's types and promotion.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor

from flashgen.flex.numbers import Guards, Host, Number, Recipe, as_host, as_number, lifted
from flashgen.flex.places import current_place, refuse
from flashgen.flex.stand_ins import Cell, Cells, Symbolic, TensorRow, array_of, symbolic
from flashgen.ir.build import TypingError, apply, power
from flashgen.ir.expr import MAX_DEPTH, MAX_SIZE, Apply, Expr, Literal, Load, Symbol, SymbolKind, literal, walk
from flashgen.ir.types import ElementType, ScalarType
from flashgen.language.nodes import ConstantError, fits, fold

BOOL, INT, FLOAT = ScalarType.BOOL, ScalarType.INT, ScalarType.FLOAT

# What a captured tensor is declared as; the others are converted when the op is called, float64 by the op.
_ELEMENTS = {
    torch.float32: ElementType.F32,
    torch.float64: ElementType.F32,
    torch.float16: ElementType.F16,
    torch.bfloat16: ElementType.BF16,
    torch.int32: ElementType.I32,
    torch.int64: ElementType.I64,
    torch.bool: ElementType.BOOL,
}
_CONVERTED = {
    **dict.fromkeys(
        (torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz), torch.float32
    ),
    **dict.fromkeys((torch.int8, torch.int16, torch.uint8, torch.uint16), torch.int32),
    torch.uint32: torch.int64,
}
MOST_TERMS = 256  # of a row, and of what is computed of it


class Value(NamedTuple):
    """An operand: its expression, its type in PyTorch, and, if it is one, the Python number, whose type yields."""

    expr: Expr
    dtype: torch.dtype
    number: Number | Host | None = None

    @property
    def weak(self) -> bool:
        """Whether its type yields to those of tensors."""
        return self.number is not None


Kind = TypeVar("Kind", ElementType, ScalarType)


@dataclass(frozen=True)
class Slot(Generic[Kind]):
    """A captured tensor, or a captured number as a param: its name, its value, and how a later call finds it."""

    name: str
    type: Kind
    value: Any
    recipe: Recipe

    @property
    def learned(self) -> bool:
        return isinstance(self.value, Tensor) and self.value.requires_grad


@dataclass
class Session:
    """The state of one trace.

    ``dispatch`` answers operators of symbolic tensors; ``function`` is the last one that the mod called. ``leaves`` are
    the captured tensors by identity, with their index among all captured values; ``names`` their names. ``settled``:
    nothing was computed of captured tensors alone, so that a later call may skip the trace. ``alive`` keeps tensors
    whose identity is a key.
    """

    device: torch.device
    dispatch: Any
    guards: Guards
    leaves: dict[int, int]
    names: dict[int, str]
    tensors: list[Slot[ElementType]] = field(default_factory=list)
    params: list[Slot[ScalarType]] = field(default_factory=list)
    settled: bool = True
    constants: dict[int, bool | int | float] = field(default_factory=dict)
    function: str = ""
    is_over: bool = False
    alive: list[Tensor] = field(default_factory=list)
    _slots: dict[int, int] = field(default_factory=dict)
    _by_recipe: dict[Recipe, int] = field(default_factory=dict)

    # -- operands

    def value(self, x: object) -> Value:
        """The value of a number, or of a tensor without dimensions."""
        if isinstance(x, Symbolic):
            return Value(x.expr, x.dtype)
        number = as_number(x)
        if number is not None:
            return self._number(number)
        plain = as_host(x)
        if plain is not None:
            return Value(constant(plain), _weak_dtype(plain), plain)
        if isinstance(x, Tensor):
            return self._scalar(x)
        return refuse(
            "E603", f"'{type(x).__name__}' cannot enter the arithmetic of a mod", hint="it takes tensors and numbers"
        )

    def symbolic(self, value: Value) -> Symbolic:
        """The value as a mod sees it."""
        return symbolic(self, value.dtype, (), array_of([Cell(self.checked(value.expr))]))

    def row(self, row: TensorRow, cells: Cells | None = None) -> Symbolic:
        """A captured tensor with some of its dimensions indexed."""
        with torch._C.DisableTorchFunction():
            shape = row.left(row.captured.shape)
        return symbolic(self, row.captured.dtype, shape, cells, row)

    def stand_in(self, x: Tensor) -> Symbolic:
        """A captured tensor in the form in which PyTorch's operators take it beside symbolic ones."""
        cells = None if x.dim() else array_of([Cell(self._scalar(x).expr)])
        return self.row(TensorRow(x, (None,) * x.dim()), cells)

    def elements(self, row: TensorRow) -> Cells:
        """The elements of a row of a captured tensor; the trace depends on the length."""
        shape = list(map(int, row.left(self.lengths(row.captured))))
        if math.prod(shape) > MOST_TERMS:
            size = " × ".join(map(str, shape))
            what = self.called(row.captured)
            message = f"a row of {what} has {size} entries; a mod computes with at most {MOST_TERMS}"
            refuse("E603", message, hint="compute with it outside of the mod, and index the result")
        found = []
        for each in np.ndindex(*shape):
            left = iter(each)
            places = [literal(next(left)) if place is None else place for place in row.places]
            found.append(Cell(self.load(row.captured, places).expr))
        return array_of(found, shape)

    def lengths(self, tensor: Tensor) -> tuple[Any, ...]:
        """The lengths of a captured tensor, as numbers that a later call finds again with the tensor."""
        leaf = self.leaves.get(id(tensor))
        with torch._C.DisableTorchFunction():
            found = tuple(tensor.shape)
        if leaf is None:
            return found
        return tuple(lifted(length, ("extent", leaf, axis), self.guards) for axis, length in enumerate(found))

    def checked(self, expr: Expr) -> Expr:
        if expr.depth > MAX_DEPTH or expr.size > MAX_SIZE:
            deep, large = f"more than {MAX_DEPTH} operations deep", f"of more than {MAX_SIZE:,} parts"
            message = f"the expression of the mod becomes one {deep if expr.depth > MAX_DEPTH else large}"
            refuse("E606", message, hint="look values up in a tensor instead")
        return expr

    def remember(self, x: Tensor, value: bool | int | float) -> None:
        """A tensor without dimensions that the mod made of a constant."""
        self.constants[id(x)] = value
        self.alive.append(x)

    def check_detached(self, x: Symbolic, way: str) -> None:
        """Refuse to drop the gradient of a value that has one: kernels differentiate every term."""
        if x.row is not None:
            has_one = x.row.captured.requires_grad
        else:
            has_one = any(map(self._learns, walk(*(cell.expr for cell in x.cells.flat if cell.expr.type is FLOAT))))
        if has_one:
            message = f"'{way}' takes a value out of the gradient, which kernels do not do within a mod"
            refuse("E602", message, hint="detach the captured tensor outside of the mod")

    def _learns(self, node: Expr) -> bool:
        match node:
            case Load(tensor=tensor):
                return self.tensors[int(tensor[1:])].learned
            case Symbol(name=name, kind=SymbolKind.PARAM):
                return self.params[int(name[1:])].learned
            case Symbol(kind=SymbolKind.SCORE):
                return True
        return False

    def number_of(self, symbol: Symbol) -> Number | None:
        """The captured number of a param; None for other expressions, and for params that are tensors."""
        if symbol.kind is not SymbolKind.PARAM:
            return None
        slot = self.params[int(symbol.name[1:])]
        return None if isinstance(slot.value, Tensor) else lifted(slot.value, slot.recipe, self.guards)

    def _number(self, x: Number) -> Value:
        if isinstance(x.value, float) and not math.isfinite(x.value):
            return Value(constant(x.settled()), torch.get_default_dtype(), x)
        scalar = INT if isinstance(x.value, int) else FLOAT
        constant(x.value)  # refuses ints that do not fit
        if x.recipe not in self._by_recipe:
            name = self.names.get(-1 - x.recipe[1], "") if x.recipe[0] == "leaf" else ""
            name = x.recipe[2] if x.recipe[0] == "attribute" else name
            self._by_recipe[x.recipe] = len(self.params)
            self.params.append(Slot(name, scalar, x.value, x.recipe))
        return Value(param_symbol(self._by_recipe[x.recipe], scalar), _weak_dtype(x.value), x)

    def _scalar(self, x: Tensor) -> Value:
        known = self.constants.get(id(x))
        if known is not None:
            return Value(convert(constant(known), scalar_of(x.dtype)), x.dtype)
        self._check_readable(x)
        scalar = FLOAT if x.dtype.is_floating_point else INT
        symbol = param_symbol(self._number_among(self.params, x, scalar), scalar)
        return Value(convert(symbol, BOOL) if x.dtype is torch.bool else symbol, x.dtype)

    def _number_among(self, slots: list[Slot[Kind]], x: Tensor, kind: Kind) -> int:
        """The number of a captured tensor, which is declared at its first read."""
        if id(x) not in self._slots:
            leaf = self.leaves.get(id(x))
            self.alive.append(x)
            self.settled &= leaf is not None
            self._slots[id(x)] = len(slots)
            recipe = ("derived", id(x)) if leaf is None else ("leaf", leaf)
            slots.append(Slot(self.names.get(id(x), ""), kind, x, recipe))
        return self._slots[id(x)]

    # -- captured tensors

    def load(self, tensor: Tensor, indices: Sequence[Expr]) -> Value:
        number = self.slot(tensor)
        element = self.tensors[number].type
        load = Load(element.scalar, tensor=f"t{number}", indices=tuple(indices), span=current_place())
        return Value(load, tensor.dtype)

    def slot(self, tensor: Tensor) -> int:
        """The number of a captured tensor that has dimensions."""
        self._check_readable(tensor)
        return self._number_among(self.tensors, tensor, _ELEMENTS[_CONVERTED.get(tensor.dtype, tensor.dtype)])

    def called(self, tensor: Tensor) -> str:
        known = self.names.get(id(tensor))
        return f"'{known}'" if known else "a tensor that the mod makes"

    def _check_readable(self, tensor: Tensor) -> None:
        name = self.called(tensor)
        if tensor.dtype not in _ELEMENTS and tensor.dtype not in _CONVERTED:
            refuse(
                "E605", f"{name} holds {tensor.dtype}, which kernels do not read", hint="convert it outside of the mod"
            )
        if 0 in tensor.shape:
            refuse("E605", f"{name} has shape {list(tensor.shape)}: there is nothing to read")


def readable(tensor: Tensor) -> Tensor:
    """A captured tensor in the type that it is declared with."""
    wanted = _CONVERTED.get(tensor.dtype)
    return tensor if wanted is None else tensor.to(wanted)


# -- nodes -------------------------------------------------------------------------------------------------------------


def param_symbol(number: int, scalar: ScalarType) -> Symbol:
    """The param of this number."""
    return Symbol(scalar, name=f"p{number}", kind=SymbolKind.PARAM)


def extent_symbol(slot: int, axis: int) -> Symbol:
    """The length of a dimension of a captured tensor, as a size that the declaration later replaces."""
    return Symbol(INT, name=f"t{slot}.{axis}", kind=SymbolKind.SIZE)


def constant(value: bool | int | float) -> Literal:
    """A literal that fits in 32 bits."""
    if isinstance(value, float) and math.isnan(value):
        refuse("E603", "a constant of the mod is NaN")
    if isinstance(value, int) and fits(value) is not None:
        refuse(
            "E604",
            f"{value} does not fit in 32 bits, which ints of flashgen have",
            hint="make it a float where one will do",
        )
    if isinstance(value, float) and fits(value) is not None:
        return literal(math.copysign(math.inf, value))  # as PyTorch's float32
    return literal(value)


def node(op: str, *args: Expr) -> Expr:
    """``op(args)``, folded where all arguments are constants."""
    try:
        made = power(args[0], args[1]) if op == "pow" else apply(op, *args)
        if isinstance(made, Apply) and all(isinstance(arg, Literal) for arg in made.args):
            return folded(made)
    except (TypingError, ConstantError) as error:
        refuse("E603", error.message, hint=error.hint)
    divisor = args[-1]
    if op in ("div", "floordiv", "mod") and isinstance(divisor, Literal) and divisor.value == 0:
        refuse("E603", "division by zero")
    return made


def folded(made: Apply) -> Literal:
    """The constant value of an operator over constants; raises ``ConstantError``."""
    value = fold(made.op, tuple(arg.value for arg in made.args if isinstance(arg, Literal)))
    if made.type is FLOAT:
        return constant(float(value))
    return constant(bool(value) if made.type is BOOL else value)


def _connected(op: str, decides: bool, x: Expr, y: Expr) -> Expr:
    """``and`` or ``or`` of two conditions; where one of them is the constant ``decides``, so is the result."""
    for one, other in ((x, y), (y, x)):
        if isinstance(one, Literal):
            return one if one.value == decides else other
    return node(op, x, y)


conjunction = functools.partial(_connected, "and", False)
disjunction = functools.partial(_connected, "or", True)


def choice(condition: Expr, yes: Expr, no: Expr) -> Expr:
    """``yes if condition else no`` of two values of one type."""
    if isinstance(condition, Literal):
        return yes if condition.value else no
    return node("where", condition, yes, no)


def convert(expr: Expr, scalar: ScalarType) -> Expr:
    """The expression as another type: what is not 0 is true, fractions are dropped."""
    if expr.type is scalar:
        return expr
    if scalar is BOOL:
        return node("ne", expr, literal(0) if expr.type is INT else literal(0.0))
    return node("to_int" if scalar is INT else "to_float", expr)


# -- PyTorch's types ---------------------------------------------------------------------------------------------------


def scalar_of(dtype: torch.dtype) -> ScalarType:
    """The type of the IR that stands for one of PyTorch's."""
    if dtype is torch.bool:
        return BOOL
    if dtype.is_complex:
        refuse("E603", "flashgen has no complex numbers")
    return FLOAT if dtype.is_floating_point else INT


def _weak_dtype(value: bool | int | float) -> torch.dtype:
    if isinstance(value, bool):
        return torch.bool
    return torch.int64 if isinstance(value, int) else torch.get_default_dtype()
