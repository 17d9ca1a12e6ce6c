"""Rows of captured tensors in the arithmetic of a mod: unrolled into one expression for each of their few elements.

In: functions of a ``Row``, a captured tensor of which a position has been chosen, or of what was computed of one. Out:
a ``Vector`` of symbolic values, or, from a reduction over all of it, one of them.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from flashgen.flex.indexing import Lengths, extents, row_answer
from flashgen.flex.numbers import Number
from flashgen.flex.places import refuse
from flashgen.flex.stand_ins import Row, Symbolic, Vector, vector
from flashgen.flex.values import FLOAT, Session, scalar_of
from flashgen.ir.expr import literal

MOST_TERMS = 256
# A function of single values, by its name: what a mod would get that called it.
Apply = Callable[[str, tuple[Any, ...], dict[str, Any]], Any]


class Extreme(NamedTuple):
    """What ``max`` and ``min`` over a dimension give."""

    values: Any
    indices: Any


def vector_answer(session: Session, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], apply: Apply) -> Any:
    """A function of which an argument is a row or a vector; ``apply`` computes with single values."""
    first = args[0] if args else None
    if isinstance(first, Row) and name in _OF_ROWS:
        return row_answer(session, name, *args, **kwargs)
    unrolled = _Unrolled(session, apply)
    if name in _QUESTIONS:
        return _QUESTIONS[name](unrolled.array(first), *args[1:], **kwargs)
    if name in _SHAPES:
        return vector(_SHAPES[name](unrolled.array(first), *args[1:], **kwargs))
    is_reduction = name in _REDUCTIONS and not any(isinstance(x, Tensor) for x in (*args[1:], *kwargs.values()))
    if is_reduction and name in _EXTREMES and (len(args) > 1 or "dim" in kwargs):
        places = unrolled.reduced(_EXTREMES[name], *args, **kwargs)
        return Extreme(unrolled.reduced(_REDUCTIONS[name], *args, **kwargs), places)
    if is_reduction:
        return unrolled.reduced(_REDUCTIONS[name], *args, **kwargs)
    if name in _LIKE_ANOTHER:  # whose type alone counts
        args = (first, *(unrolled.array(x).flat[0] if isinstance(x, (Row, Vector)) else x for x in args[1:]))
    if name in _NORMS:
        return unrolled.norm(*args, **kwargs)
    if name in _PRODUCTS:
        return unrolled.product(name, *args)
    if name.endswith("_") and not name.endswith("__"):
        refuse("E602", "a mod cannot change a row of a captured tensor", hints=("give the result a new name",))
    return unrolled.elementwise(name, args, kwargs)


class _Unrolled:
    """Computes with arrays of symbolic values."""

    def __init__(self, session: Session, apply: Apply) -> None:
        self._session, self._apply = session, apply

    def array(self, x: Any) -> np.ndarray[Any, Any]:
        """The elements of a row, a vector, a captured tensor, or the one that a value is."""
        if isinstance(x, Vector):
            return x.parts
        if isinstance(x, Row):
            return self._elements(x.captured, x.places)
        if isinstance(x, Tensor) and not isinstance(x, Symbolic) and x.dim() > 0:
            return self._elements(x, (None,) * x.dim())
        return _array((), [x])

    def _elements(self, tensor: Tensor, places: Sequence[Any]) -> np.ndarray[Any, Any]:
        session = self._session
        lengths = extents(session, "get:shape", tensor) or tuple(tensor.shape)
        shape = [int(length) for length, place in zip(lengths, places, strict=True) if place is None]
        if math.prod(shape) > MOST_TERMS:
            size = " × ".join(map(str, shape))
            refuse(
                "E603",
                f"a row of {session.called(tensor)} has {size} entries; a mod computes with at most {MOST_TERMS}",
                hints=("compute with it outside of the mod, and index the result",),
            )
        found = []
        for each in np.ndindex(*shape):
            left = iter(each)
            indices = [literal(next(left)) if place is None else place for place in places]
            found.append(session.symbolic(session.load(tensor, indices)))
        return _array(shape, found)

    def elementwise(self, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """A function of single values, over arguments that broadcast."""
        given = [*args, *kwargs.values()]
        arrays = [self.array(x) if isinstance(x, Tensor) else _array((), [x]) for x in given]
        try:
            arrays = list(np.broadcast_arrays(*arrays))
        except ValueError:
            shapes = " and ".join(str(list(each.shape)) for each in arrays if each.shape)
            refuse("E603", f"'{name.strip('_')}' of rows of shapes {shapes}", hints=("give them one length",))
        if arrays[0].size > MOST_TERMS:
            refuse("E603", f"a mod computes with at most {MOST_TERMS} terms at once, and here are {arrays[0].size}")
        made = []
        for each in zip(*(array.flat for array in arrays), strict=True):
            named = dict(zip(kwargs, each[len(args) :], strict=True))
            made.append(self._apply(name, each[: len(args)], named))
        return vector(_array(arrays[0].shape, made)) if isinstance(made[0], Symbolic) else made[0]

    def call(self, name: str, *args: Any, **kwargs: Any) -> Any:
        """A function of values and vectors."""
        is_single = not any(isinstance(x, (Row, Vector)) for x in args)
        return self._apply(name, args, kwargs) if is_single else self.elementwise(name, args, kwargs)

    def reduced(
        self, reduce: Callable[[_Unrolled, list[Any]], Any], x: Any, dim: Any = None, keepdim: bool = False
    ) -> Any:
        """Over some dimensions, or all."""
        array = self.array(x)
        axes = _axes(dim, array.ndim)
        moved = np.moveaxis(array, axes, range(array.ndim - len(axes), array.ndim))
        kept = moved.shape[: array.ndim - len(axes)]
        made = _array(kept, [reduce(self, list(moved[each].flat)) for each in np.ndindex(*kept)])
        return vector(np.expand_dims(made, tuple(axes)) if keepdim else made)

    def folded(self, name: str, values: Sequence[Any]) -> Any:
        """Pairs of neighbours, and pairs of these."""
        left = list(values)
        while len(left) > 1:
            pairs = itertools.zip_longest(left[::2], left[1::2])
            left = [x if y is None else self._apply(name, (x, y), {}) for x, y in pairs]
        return left[0]

    def norm(self, x: Any, p: Any = None, dim: Any = None, keepdim: bool = False, **others: Any) -> Any:
        """Of order ``p``; at 0 its derivative is 0, as in PyTorch."""
        order = others.pop("ord", p)
        order = 2 if order is None or order == "fro" else order
        if any(each is not None for each in others.values()) or not isinstance(order, (int, float)):
            refuse("E602", "a mod cannot call 'norm' like this", hints=("write (x * x).sum(-1).sqrt()",))
        size = self.call("abs", x)
        if order == math.inf:
            return self.reduced(_maximum, size, dim, keepdim)
        total = self.reduced(_sum, self.call("pow", size, float(order)), dim, keepdim)
        if order == 1:
            return total
        some = self.call("gt", total, 0)
        root = self.call("pow", self.call("where", some, total, 1.0), 1 / order)
        return self.call("where", some, root, 0.0)

    def product(self, name: str, x: Any, y: Any) -> Any:
        """The sum of the products of two rows."""
        x, y = (y, x) if name == "__rmatmul__" else (x, y)
        shapes = [self.array(each).shape for each in (x, y)]
        if any(len(shape) != 1 for shape in shapes) or shapes[0] != shapes[1]:
            refuse(
                "E603",
                f"'{name.strip('_')}' of shapes {list(shapes[0])} and {list(shapes[1])}; two rows of one length are "
                "expected",
                hints=("write (x * y).sum(-1)",),
            )
        return self.reduced(_sum, self.elementwise("mul", (x, y), {}))


# -- reductions --------------------------------------------------------------------------------------------------------


def _in_numbers(operator: str) -> Callable[[_Unrolled, list[Any]], Any]:
    """Of booleans and short ints in int64, as PyTorch computes sums."""

    def reduce(u: _Unrolled, values: list[Any]) -> Any:
        is_float = scalar_of(values[0].held) is FLOAT
        return u.folded(operator, values if is_float else [u.call("long", each) for each in values])

    return reduce


_sum = _in_numbers("add")


def _mean(u: _Unrolled, values: list[Any]) -> Any:
    if not values[0].held.is_floating_point:
        refuse("E603", f"PyTorch has no mean of {values[0].held}", hints=("convert it: x.float().mean(-1)",))
    return u.call("div", _sum(u, values), len(values))


def _any(u: _Unrolled, values: list[Any]) -> Any:
    return u.folded("logical_or", [u.call("bool", each) for each in values])


def _all(u: _Unrolled, values: list[Any]) -> Any:
    return u.folded("logical_and", [u.call("bool", each) for each in values])


def _maximum(u: _Unrolled, values: list[Any]) -> Any:
    return u.folded("maximum", values)


def _minimum(u: _Unrolled, values: list[Any]) -> Any:
    return u.folded("minimum", values)


def _first(is_before: str) -> Callable[[_Unrolled, list[Any]], Any]:
    """The place of the first value that no other comes before."""

    def reduce(u: _Unrolled, values: list[Any]) -> Any:
        best, place = values[0], u.call("full_like", values[0], 0, dtype=torch.int64)
        for number, each in enumerate(values[1:], start=1):
            wins = u.call(is_before, each, best)
            best, place = u.call("where", wins, each, best), u.call("where", wins, number, place)
        return place

    return reduce


_EXTREMES = MappingProxyType({"max": _first("gt"), "min": _first("lt")})
_REDUCTIONS: Mapping[str, Callable[[_Unrolled, list[Any]], Any]] = MappingProxyType(
    {
        "sum": _sum, "prod": _in_numbers("mul"), "mean": _mean, "any": _any, "all": _all,
        "amax": _maximum, "max": _maximum, "amin": _minimum, "min": _minimum,
        "argmax": _first("gt"), "argmin": _first("lt"),
    }
)  # fmt: skip
_LIKE_ANOTHER = frozenset(("to", "type_as"))
_NORMS = frozenset(("norm", "linalg_norm", "linalg_vector_norm", "vector_norm"))
_PRODUCTS = frozenset(("dot", "vdot", "inner", "matmul", "__matmul__", "__rmatmul__", "linalg_vecdot", "vecdot"))


# -- arrays ------------------------------------------------------------------------------------------------------------


def _array(shape: Sequence[int], values: Sequence[Any]) -> np.ndarray[Any, Any]:
    """An array of objects: NumPy would look into tensors."""
    flat = np.empty(len(values), object)
    for place, value in enumerate(values):
        flat[place] = value
    return flat.reshape(tuple(shape))


def _axes(dim: Any, rank: int) -> list[int]:
    dims = range(rank) if dim is None or dim in ((), []) else dim if isinstance(dim, (tuple, list)) else (dim,)
    axes = [int(each) for each in dims]
    if any(not -rank <= axis < rank for axis in axes):
        refuse("E603", f"dimension {axes} of a row of {rank} dimensions")
    return sorted({axis % rank for axis in axes})


def _with_axis(x: np.ndarray[Any, Any], dim: int) -> np.ndarray[Any, Any]:
    return np.expand_dims(x, dim)


def _squeezed(x: np.ndarray[Any, Any], dim: int | None = None) -> np.ndarray[Any, Any]:
    return x.squeeze() if dim is None else x.squeeze(dim) if x.shape[dim] == 1 else x


_SHAPES: Mapping[str, Callable[..., Any]] = MappingProxyType(
    {
        "unsqueeze": _with_axis,
        "squeeze": _squeezed,
        "flatten": lambda x: x.reshape(-1),
    }
)


def _items(x: np.ndarray[Any, Any], dim: int = 0) -> tuple[Any, ...]:
    moved = np.moveaxis(x, dim, 0)
    return tuple(vector(moved[number, ...]) for number in range(len(moved)))


def _iterated(x: np.ndarray[Any, Any]) -> Iterator[Any]:
    return iter(_items(x))


def _lengths(x: np.ndarray[Any, Any], dim: int | None = None) -> Any:
    return Lengths(x.shape) if dim is None else x.shape[dim]


_QUESTIONS: Mapping[str, Callable[..., Any]] = MappingProxyType(
    {
        "get:shape": _lengths, "size": _lengths, "dim": np.ndim, "get:ndim": np.ndim, "numel": np.size,
        "__len__": len, "__iter__": _iterated, "unbind": _items,
        "get:dtype": lambda x: x.flat[0].held,
    }
)  # fmt: skip
_OF_ROWS = frozenset(("get:shape", "size", "dim", "get:ndim", "get:dtype", "get:device"))


def part(array: np.ndarray[Any, Any], keys: Sequence[Any]) -> Any:
    """Of a vector what is indexed by numbers, slices, None and an ellipsis."""
    if any(isinstance(each, Tensor) for each in keys):
        refuse("E603", "what is computed of a row is indexed by a value", hints=("index the captured tensor instead",))
    plain = tuple(int(each) if type(each) is Number else each for each in keys)
    try:
        found = array[plain]
    except IndexError:
        refuse("E603", f"an index is outside of a row of shape {list(array.shape)}")
    return vector(found if isinstance(found, np.ndarray) else _array((), [found]))
