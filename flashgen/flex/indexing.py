"""Reads of captured tensors: any mixture of positions, numbers, slices and chained brackets.

An index below 0 counts from the end, as in PyTorch: where an index may be negative, the length is added in the kernel.
One beyond the end is an error in PyTorch's eager mode, whatever the pair; a kernel reads the last entry.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from flashgen.flex.numbers import settled, told
from flashgen.flex.places import refuse
from flashgen.flex.stand_ins import Symbolic, TensorRow, flat, mapped, watched
from flashgen.flex.values import BOOL, FLOAT, INT, Session, choice, extent_symbol, node, scalar_of
from flashgen.ir.expr import Apply, Expr, Literal, Symbol, SymbolKind, literal
from flashgen.ir.interval import FULL_FLOAT, FloatRange
from flashgen.ir.operators import OPERATORS

_ALL = slice(None)


def index(session: Session, target: Tensor, key: Any) -> Any:
    """``target[key]``: a value where every dimension is indexed, else a row."""
    keys = list(key) if type(key) is tuple else [key]
    if isinstance(target, Symbolic) and (target.row is None or target.dim() == 0):
        return _part(target, keys)
    if isinstance(target, Symbolic):
        assert target.row is not None
        tensor, indices = target.row.captured, list(target.row.places)
    else:
        target, keys = _sliced(session, target, keys)
        tensor, indices = target, [None] * target.dim()
    open_axes = [axis for axis, each in enumerate(indices) if each is None]
    keys = _expanded(keys, len(open_axes))
    if len(keys) > len(open_axes):
        given = len(keys) + tensor.dim() - len(open_axes)
        refuse("E603", f"{session.called(tensor)} has {tensor.dim()} dimensions, {given} indices are given")
    number = session.slot(tensor)
    for axis, each in zip(open_axes, keys, strict=False):
        indices[axis] = None if _is_all(each) else _position(session, each, tensor, number, axis)
    found = [each for each in indices if each is not None]
    if len(found) < len(indices):
        return session.row(TensorRow(tensor, tuple(indices)))
    return session.symbolic(session.load(tensor, found))


def _part(x: Symbolic, keys: list[Any]) -> Any:
    """An element of a computed row, or a part of the row, by numbers, slices, None and an ellipsis."""
    if x.dim() == 0 and any(each is not None and each is not Ellipsis for each in keys):
        refuse("E603", "a value without dimensions is indexed", hint="use it as it is")
    if any(isinstance(each, Tensor) for each in flat(keys)):
        refuse("E603", "what is computed of a row is indexed by a value", hint="index the captured tensor instead")
    try:
        with watched():
            return x[tuple(mapped(keys, told))]
    except IndexError as error:
        return refuse("E603", f"an index is outside of a row of shape {list(x.shape)}: {error}")


def _sliced(session: Session, target: Tensor, keys: list[Any]) -> tuple[Tensor, list[Any]]:
    """The part of a captured tensor that the constant parts of an index select, and the index into it that is left."""
    if not any(each is None or (type(each) is slice and not _is_all(each)) for each in keys):
        return target, keys
    plain = [_ALL if isinstance(each, Symbolic) else each for each in keys]
    if any(isinstance(each, Symbolic) for each in flat([each for each in keys if type(each) is slice])):
        refuse("E601", "a slice asks for a value that is known to the kernel alone", hint="index single elements")
    if any(isinstance(each, Tensor) for each in plain):
        refuse("E603", "a slice stands beside an index that is a tensor", hint="slice the tensor outside of the mod")
    left: list[Any] = []
    for each in keys:
        if isinstance(each, Symbolic) or each is Ellipsis:
            left.append(each)
        elif each is None or type(each) is slice:
            left.append(_ALL)
    name = session.names.get(id(target), "")
    part = target[tuple(mapped(plain, settled))]
    session.alive.append(part)
    session.names.setdefault(id(part), name)
    return part, left


def _is_all(key: Any) -> bool:
    return type(key) is slice and key.start is None and key.stop is None and key.step is None


def _expanded(keys: list[Any], rank: int) -> list[Any]:
    """The index with its ellipsis written out."""
    places = [place for place, each in enumerate(keys) if each is Ellipsis]
    if not places:
        return keys
    place = places[0]
    return [*keys[:place], *[_ALL] * (rank - len(keys) + 1), *keys[place + 1 :]]


def _position(session: Session, key: Any, tensor: Tensor, slot: int, axis: int) -> Expr:
    """An index as an int of the language, counted from the start."""
    name = session.called(tensor)
    if key is None or type(key) is slice:
        refuse("E603", f"a part of {name} is sliced that a position has been chosen of", hint="slice it first")
    if type(key) is int:
        length = tensor.shape[axis]
        if not -length <= key < length:
            refuse("E603", f"index {key} is outside dimension {axis} of {name}, which has {length} entries")
    value = session.value(key)
    if value.dtype is torch.bool or scalar_of(value.dtype) is not INT:
        refuse("E603", f"an index of {name} is {value.dtype}", hint="convert it: index.int()")
    expr = value.expr
    if isinstance(expr, Literal):
        return expr if expr.value >= 0 else node("sub", extent_symbol(slot, axis), literal(-expr.value))
    if _not_negative(expr, session):
        return expr
    from_end = node("add", expr, extent_symbol(slot, axis))
    return choice(node("lt", expr, literal(0)), from_end, expr)


def _not_negative(expr: Expr, session: Session) -> bool:
    """Whether an index is at least 0 in every pair; for a captured number, as long as it has its sign."""
    match expr:
        case Literal(value=value):
            return value >= 0
        case Symbol(kind=kind):
            return kind in (SymbolKind.INDEX, SymbolKind.SIZE) or _is_param_from(expr, 0, session)
        case Apply(op="add" | "mul" | "div" | "floordiv" | "min" | "bitor" | "shr", args=(x, y)):
            return _not_negative(x, session) and (_not_negative(y, session) or expr.op == "shr")
        case Apply(op="max" | "bitand", args=(x, y)):
            return _not_negative(x, session) or _not_negative(y, session)
        case Apply(op="mod", args=(_, Literal(value=value))):
            return value > 0
        case Apply(op="mod", args=(_, Symbol() as divisor)):
            return _is_param_from(divisor, 1, session)
        case Apply(op="clamp", args=(_, low, high)):
            return _not_negative(low, session) and _not_negative(high, session)
        case Apply(op="where", args=(_, x, y)):
            return _not_negative(x, session) and _not_negative(y, session)
        case Apply(op="abs" | "popcount" | "hash"):
            return True
        case Apply(op="to_int" | "to_float" | "floor" | "ceil" | "round", args=(x,)):
            return x.type is BOOL or _not_negative(x, session)
        case Apply(op=op, args=(x,)) if x.type is FLOAT:
            values = OPERATORS[op].interval(FULL_FLOAT)
            return isinstance(values, FloatRange) and values.lo >= 0
    return False


def _is_param_from(expr: Symbol, least: int, session: Session) -> bool:
    """Whether a captured number is at least ``least``; the trace depends on the answer."""
    number: Any = session.number_of(expr)
    return number is not None and bool(number >= least)


# -- lengths, and rows -------------------------------------------------------------------------------------------------


class SymbolicLengths(tuple[Any, ...]):
    """A shape, like ``torch.Size``, whose lengths may be captured numbers."""

    def numel(self) -> Any:
        return math.prod(self)

    def __getitem__(self, key: Any) -> Any:
        found = super().__getitem__(key)
        return SymbolicLengths(found) if type(key) is slice else found


def lengths(session: Session, name: str, x: Tensor, dim: Any = None) -> Any:
    """The lengths of a captured tensor, or of a row of one."""
    row = x.row if isinstance(x, Symbolic) else TensorRow(x, (None,) * x.dim())
    assert row is not None
    found = SymbolicLengths(row.left(session.lengths(row.captured)))
    if name == "__len__":
        return int(found[0])
    return found if dim is None else found[dim]
