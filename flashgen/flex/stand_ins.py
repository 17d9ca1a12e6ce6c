"""What a mod is given, and computes: tensors to it, expressions to us.

A ``Symbolic`` is a tensor of no dimensions and holds an expression; a ``Row`` is a captured tensor of which some
dimensions have been indexed; a ``Vector`` is what was computed of one.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from flashgen.flex.places import refuse
from flashgen.ir.expr import Expr


class Symbolic(Tensor):
    """A number of a mod: to the mod a tensor without dimensions, to us an expression."""

    expr: Expr
    held: torch.dtype

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        refuse("E606", "a value of a mod was used after the mod had returned")


class Row(Tensor):
    """A captured tensor of which some dimensions are indexed: ``places`` holds None for those that are not."""

    captured: Tensor
    places: tuple[Expr | None, ...]

    __torch_function__ = Symbolic.__torch_function__


class Vector(Tensor):
    """What a mod computes of a row: an array of ``Symbolic``, of at least one dimension."""

    parts: np.ndarray[Any, Any]

    __torch_function__ = Symbolic.__torch_function__


def symbolic(expr: Expr, dtype: torch.dtype) -> Symbolic:
    """A tensor of a mod that holds an expression."""
    with torch._C.DisableTorchFunction():
        made: Symbolic = torch.Tensor._make_subclass(Symbolic, _blank(dtype))
    made.expr, made.held = expr, dtype
    return made


@functools.lru_cache(maxsize=32)
def _blank(dtype: torch.dtype) -> Tensor:
    """A tensor without dimensions, a real one also where a mode makes fake ones."""
    with torch._C.DisableTorchFunction(), _disable_current_modes(), torch.inference_mode(False):
        return torch.zeros((), dtype=dtype, device="cpu")


def row(captured: Tensor, indices: tuple[Expr | None, ...]) -> Row:
    """A captured tensor of which some dimensions are indexed."""
    with torch._C.DisableTorchFunction():
        made: Row = torch.Tensor._make_subclass(Row, _blank(torch.float32))
    made.captured, made.places = captured, indices
    return made


def vector(parts: np.ndarray[Any, Any]) -> Vector | Symbolic:
    """An array of symbolic values as a tensor; of no dimensions the value itself."""
    if parts.ndim == 0:
        alone: Symbolic = parts.item()
        return alone
    with torch._C.DisableTorchFunction():
        made: Vector = torch.Tensor._make_subclass(Vector, _blank(torch.float32))
    made.parts = parts
    return made
