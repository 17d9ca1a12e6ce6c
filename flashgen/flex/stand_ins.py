"""The tensors that a mod is called with, and computes: tensors to the mod, expressions to us.

To PyTorch a ``Symbolic`` is a tensor of ones, by which PyTorch checks and promotes types; to us each element is a
``Cell``, which holds an expression. A ``TensorRow``, a captured tensor of which some dimensions are indexed, reads
elements when they are asked for. Operators of such tensors go to ``dispatch.py``.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from flashgen.flex.places import refuse
from flashgen.ir.expr import Expr

Cells = np.ndarray[Any, Any]


@dataclass(eq=False)
class Cell:
    """An element of a symbolic tensor; views share it, and a method in place changes it."""

    expr: Expr


class TensorRow(NamedTuple):
    """A captured tensor and the index of each of its dimensions, None where there is none yet."""

    captured: Tensor
    places: tuple[Expr | None, ...]

    def left(self, lengths: Sequence[Any]) -> list[Any]:
        """Of a list with an item for each dimension, the items of dimensions that have no index yet."""
        return [length for length, place in zip(lengths, self.places, strict=True) if place is None]


class Symbolic(Tensor):
    """A tensor of a mod: ``session`` is the trace that it belongs to, ``ones`` what PyTorch computes with."""

    session: Any
    row: TensorRow | None
    ones: Tensor
    _cells: Cells | None

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(isinstance(each, Symbolic) and each.session.is_over for each in flat((args, kwargs))):
            refuse("E606", "a value of a mod was used after the mod had returned")
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    def __repr__(self, **options: Any) -> str:  # type: ignore[override]
        # PyTorch itself shows arguments where an overload of an operator does not take them.
        is_watched = torch._C._dispatch_tls_is_dispatch_key_included(_KEY)
        return "a value of a mod" if is_watched else super().__repr__(**options)  # type: ignore[no-untyped-call]

    @property
    def cells(self) -> Cells:
        """The elements, as an array of the tensor's shape."""
        if self._cells is None:
            assert self.row is not None
            self._cells = self.session.elements(self.row)
        return self._cells

    @property
    def expr(self) -> Expr:
        """The expression of a tensor without dimensions."""
        cell: Cell = self.cells.item()
        return cell.expr


def symbolic(
    session: Any, dtype: torch.dtype, shape: Sequence[int], cells: Cells | None = None, row: TensorRow | None = None
) -> Symbolic:
    """A tensor of these cells, or of a row."""
    ones = _ones(dtype, tuple(shape))
    with torch._C.DisableTorchFunction(), unwatched():
        made: Symbolic = torch.Tensor._make_subclass(Symbolic, ones)
    made.session, made.row, made._cells, made.ones = session, row, cells, ones
    return made


@functools.lru_cache(maxsize=256)
def _ones(dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    """A tensor of ones: a real one also under a mode that makes fake ones. A long row takes no memory."""
    with torch._C.DisableTorchFunction(), unwatched(), _disable_current_modes(), torch.inference_mode(mode=False):
        return torch.ones((), dtype=dtype, device="cpu").expand(shape)


# -- operators ---------------------------------------------------------------------------------------------------------

# A key of PyTorch's dispatcher above all others, which it leaves to extensions: while it is on, operators come here as
# they are called. A ``__torch_dispatch__`` would import DTensor and SymPy at the first of them, which takes a second.
_KEY = torch._C._dispatch_key_parse("DeferredInit")
_KEYS = torch._C.DispatchKeySet(_KEY)


@contextlib.contextmanager
def watched() -> Iterator[None]:
    """A context in which operators of symbolic tensors are answered by their session."""
    with torch._C.DisableTorchFunctionSubclass(), _disable_current_modes(), torch._C._IncludeDispatchKeyGuard(_KEY):
        yield


@contextlib.contextmanager
def unwatched() -> Iterator[None]:
    """A context in which operators are PyTorch's own."""
    with torch._C._ExcludeDispatchKeyGuard(_KEYS):
        yield


def _dispatched(func: Any, *args: Any, **kwargs: Any) -> Any:
    session = next((each.session for each in flat((args, kwargs)) if isinstance(each, Symbolic)), None)
    if session is not None:
        return session.dispatch(session, func, args, kwargs)
    with unwatched():
        return func(*args, **kwargs)


_LIBRARY: Any = torch.library.Library("_", "IMPL")  # type: ignore[no-untyped-call]
_LIBRARY.fallback(_dispatched, "DeferredInit")


# -- arguments ---------------------------------------------------------------------------------------------------------


def array_of(values: Sequence[Any], shape: Sequence[int] = ()) -> Cells:
    """An array of objects, which NumPy does not look into."""
    return np.fromiter(values, object, len(values)).reshape(tuple(shape))


def flat(value: Any) -> list[Any]:
    """The arguments of a call, also those inside tuples, lists and slices."""
    if type(value) in (tuple, list):
        return [each for part in value for each in flat(part)]
    if type(value) is dict:
        return flat(list(value.values()))
    return flat([value.start, value.stop, value.step]) if type(value) is slice else [value]


def mapped(value: Any, change: Callable[[Any], Any]) -> Any:
    """The arguments of a call with each one changed."""
    if type(value) in (tuple, list):
        return type(value)([mapped(each, change) for each in value])
    if type(value) is dict:
        return {key: mapped(each, change) for key, each in value.items()}
    if type(value) is slice:
        return slice(*(mapped(each, change) for each in (value.start, value.stop, value.step)))
    return change(value)
