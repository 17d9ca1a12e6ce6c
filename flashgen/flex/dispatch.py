"""Operators of PyTorch on symbolic tensors: PyTorch finds dtypes and shapes, the table of ``aten.py`` the elements.

In: an operator of aten, and the arguments of its call. Out: symbolic tensors. PyTorch first runs the operator on
tensors of ones, which gives dtypes and shapes, and refuses what PyTorch refuses.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from flashgen.flex.aten import CONSTANT, FILLED, FORMULAS, ORDER, REDUCTIONS, RULES, cast
from flashgen.flex.numbers import own, settled, told
from flashgen.flex.places import refuse, refuse_decision, refuse_unknown
from flashgen.flex.stand_ins import Cell, Cells, Symbolic, array_of, flat, mapped, symbolic, unwatched
from flashgen.flex.values import MOST_TERMS, Session, Value, constant, convert, scalar_of

Arguments = tuple[Any, ...]
_ADVICE: Mapping[str, str] = MappingProxyType(
    {
        "pow": "make it a float: x.float() ** n",
        "mean": "convert it: x.float().mean(-1)",
        "dot": "write (x * y).sum(-1)",
        "sub": "convert one of them: mask.int(), mask.float()",
        **dict.fromkeys(
            ("bitwise_not", "bitwise_and", "bitwise_or", "bitwise_xor"), "compare the score first: score > 0"
        ),
    }
)


def dispatch(session: Session, func: Any, args: Arguments, kwargs: dict[str, Any]) -> Any:
    """The result of an operator on symbolic tensors."""
    name, args, kwargs = func.overloadpacket.__name__, mapped(args, own), mapped(kwargs, own)
    if func._overloadname == "other":
        name = {"max": "maximum", "min": "minimum"}.get(name, name)
    if name == "_local_scalar_dense":
        refuse_decision("item", hinted=False)
    if func._schema.is_mutable:
        if name.endswith("_") or name.startswith("__i"):
            # ``add_`` and ``__ilshift__`` are called ``add`` and ``__lshift__`` where they change nothing.
            return _in_place(f"__{name[3:]}" if name.startswith("__i") else name[:-1], args, kwargs)
        refuse("E602", f"'{name}' of a mod writes to no tensor that it is given", hint="give the result a name")
    if func.is_view and name != "to":
        _shapes_of(session, func, args, kwargs)
        return _moved(session, func, args, kwargs)
    if name in FORMULAS:
        _shapes_of(session, func, args, kwargs)
        return FORMULAS[name](*args, **kwargs)
    answer = _ANSWERS.get(name)
    if answer is not None:
        return answer(session, name, _shapes_of(session, func, args, kwargs), args, kwargs)
    made = func.decompose(*args, **kwargs)
    return refuse_unknown(session.function or name, {**_ANSWERS, **FORMULAS}) if made is NotImplemented else made


# -- what PyTorch says -------------------------------------------------------------------------------------------------


def _shapes_of(session: Session, func: Any, args: Arguments, kwargs: Mapping[str, Any]) -> Any:
    """The result of the operator on ones of the operands' shapes and dtypes."""
    given = [x for x in flat(args) if isinstance(x, Symbolic)]
    for x in given:
        _check_count(x.cells.size)
    try:
        with unwatched():
            return func(*mapped(args, _ones), **mapped(kwargs, _ones))
    except (RuntimeError, IndexError, ValueError, TypeError) as error:
        name = session.function.strip("_") or func.overloadpacket.__name__
        shown = " and ".join(f"{x.dtype}{list(x.shape) if x.dim() else ''}" for x in given)
        hint = _ADVICE.get(func.overloadpacket.__name__, "")
        return refuse("E603", f"'{name}' of {shown}: {str(error).splitlines()[0]}", hint=hint)


def _ones(x: Any) -> Any:
    return x.ones if isinstance(x, Symbolic) else settled(x)


# -- elements ----------------------------------------------------------------------------------------------------------


def _values(session: Session, x: Any, shape: Sequence[int]) -> Any:
    """An operand's element for each element of the result; other arguments are repeated as they are."""
    if isinstance(x, Symbolic):
        of = np.broadcast_to(x.cells, shape)
        return [Value(cell.expr, x.dtype) for cell in of.flat]
    if isinstance(x, Tensor):  # a number that PyTorch has made a tensor of
        x = Value(constant(x.item()), x.dtype)
    elif isinstance(x, (bool, int, float)):
        x = session.value(x)
    return [x] * math.prod(shape)


def _made(session: Session, exprs: Sequence[Any], like: Tensor) -> Symbolic:
    scalar = scalar_of(like.dtype)
    cells = [Cell(session.checked(convert(each, scalar))) for each in exprs]
    return symbolic(session, like.dtype, like.shape, array_of(cells, like.shape))


def _check_count(count: int) -> None:
    if count > MOST_TERMS:
        refuse("E603", f"a mod computes with at most {MOST_TERMS} terms at once, and here are {count}")


def _elementwise(session: Session, name: str, found: Tensor, args: Arguments, kwargs: Mapping[str, Any]) -> Symbolic:
    rule, count = RULES[name], found.numel()
    _check_count(count)
    given = [_values(session, each, found.shape) for each in args]
    named = {key: _values(session, each, found.shape) for key, each in kwargs.items()}
    exprs = [
        rule(found.dtype, *(each[n] for each in given), **{key: each[n] for key, each in named.items()})
        for n in range(count)
    ]
    return _made(session, exprs, found)


def _filled(session: Session, name: str, found: Tensor, args: Arguments, kwargs: Mapping[str, Any]) -> Symbolic:
    """A new tensor of one value, with the shape and dtype that PyTorch found."""
    place = FILLED.get(name)
    value = CONSTANT[name] if place is None else args[place] if place < len(args) else kwargs["fill_value"]
    _check_count(found.numel())
    return _made(session, [cast(each, found.dtype).expr for each in _values(session, value, found.shape)], found)


def _reduced(_session: Session, name: str, found: Any, args: Arguments, kwargs: Mapping[str, Any]) -> Any:
    """A reduction over some dimensions, or all; maxima and minima over a dimension also return indices."""
    x = args[0]
    dims = args[1] if len(args) > 1 else kwargs.get("dim")
    cells = _last(x.cells, dims)
    if isinstance(found, tuple):
        values, places = found
        return _over(name, x, cells, values), _over(f"arg{name}", x, cells, places)
    return _over(name, x, cells, found)


def _over(name: str, x: Symbolic, cells: Cells, found: Tensor) -> Symbolic:
    rows = cells.reshape(found.numel(), -1)
    rule = REDUCTIONS[name]
    return _made(x.session, [rule(found.dtype, [Value(cell.expr, x.dtype) for cell in row]) for row in rows], found)


def _last(cells: Cells, dims: Any) -> Cells:
    """The elements with the reduced dimensions flattened to the last one."""
    rank = cells.ndim
    gone = range(rank) if dims is None or dims == [] else dims if isinstance(dims, list) else [dims]
    axes = sorted({axis % rank for axis in gone}) if rank else []
    kept = [axis for axis in range(rank) if axis not in axes]
    return cells.transpose(*kept, *axes)


_ANSWERS: Mapping[str, Callable[..., Any]] = MappingProxyType(
    {
        **dict.fromkeys(RULES, _elementwise),
        **dict.fromkeys((*FILLED, *CONSTANT), _filled),
        **dict.fromkeys(REDUCTIONS, _reduced),
    }
)


def _moved(session: Session, func: Any, args: Arguments, kwargs: Mapping[str, Any]) -> Any:
    """A view: PyTorch permutes numbers that each stand for an element."""
    x = args[0]
    cells = list(x.cells.flat)
    given, named = mapped((args[1:], dict(kwargs)), told)
    with unwatched():
        numbers = torch.arange(len(cells), device="cpu").view(x.shape)
        found = func(numbers, *given, **named)

    def moved(each: Any) -> Any:
        if not isinstance(each, Tensor):
            return each
        if each.dtype is not torch.int64:
            refuse_unknown(session.function)
        chosen = array_of([cells[n] for n in each.flatten().tolist()], each.shape)
        return symbolic(session, x.dtype, each.shape, chosen)

    return mapped(found, moved)


# -- in place ----------------------------------------------------------------------------------------------------------


def _in_place(name: str, args: Arguments, kwargs: dict[str, Any]) -> Any:
    """The elements of a tensor that a method changes in place, seen by all its views."""
    target = args[0]
    if target.row is not None or target.dim() > 0:
        is_whole = target.row is not None and all(place is None for place in target.row.places)
        what = "a captured tensor" if is_whole else "a row of a captured tensor"
        refuse("E602", f"a mod cannot change {what}", hint="give the result a new name")
    result = getattr(torch.ops.aten, name)(*args, **kwargs)
    if ORDER[scalar_of(result.dtype)] > ORDER[scalar_of(target.dtype)]:
        refuse("E603", f"{result.dtype} cannot be stored in a value of {target.dtype}", hint="give it a new name")
    target.cells.item().expr = cast(Value(result.expr, result.dtype), target.dtype).expr
    return target
