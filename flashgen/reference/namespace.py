"""Torch as the array namespace in which operators define their meaning.

In: torch tensors (bool, int64 or floating). Out: torch tensors, differentiable by autograd. Knows no operators and no
expressions; ``ArrayNamespace`` in ``ir/operators_base.py`` is the protocol.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from flashgen.ir.operators import Library

Value = Tensor | bool | int | float


@dataclass(frozen=True)
class TorchNamespace:
    """Torch in one working precision."""

    dtype: torch.dtype
    isnan = staticmethod(torch.isnan)
    logical_not = staticmethod(torch.logical_not)
    abs = staticmethod(torch.abs)
    floor = staticmethod(torch.floor)
    ceil = staticmethod(torch.ceil)
    round = staticmethod(torch.round)

    def is_float(self, x: Value) -> bool:
        return x.is_floating_point() if isinstance(x, Tensor) else isinstance(x, float)

    def to_float(self, x: Tensor) -> Tensor:
        return x if x.is_floating_point() else x.to(self.dtype)

    def to_int(self, x: Tensor) -> Tensor:
        return x.to(torch.int64)

    def where(self, c: Tensor, x: Value, y: Value) -> Tensor:
        return torch.where(c, _like(x, y), _like(y, x))

    def minimum(self, x: Value, y: Value) -> Tensor:
        return torch.minimum(_tensor(x, y), _tensor(y, x))

    def maximum(self, x: Value, y: Value) -> Tensor:
        return torch.maximum(_tensor(x, y), _tensor(y, x))

    def clamp(self, x: Tensor, lo: Value, hi: Value) -> Tensor:
        return torch.clamp(x, _tensor(lo, x), _tensor(hi, x))

    def floor_divide(self, x: Value, y: Value) -> Tensor:
        return torch.div(_tensor(x, y), _tensor(y, x), rounding_mode="floor")

    def remainder(self, x: Value, y: Value) -> Tensor:
        return torch.remainder(_tensor(x, y), _tensor(y, x))

    def pow(self, x: Value, y: Value) -> Tensor:
        return torch.pow(_tensor(x, y), _tensor(y, x))

    def call(self, function: Library, x: Tensor) -> Tensor:
        computed: Tensor = getattr(torch, function.torch[0])(x)
        return computed


def _tensor(x: Value, like: Value) -> Tensor:
    """``x`` as a tensor of the type of ``like``."""
    if isinstance(x, Tensor):
        return x
    return torch.tensor(x, dtype=like.dtype, device=like.device) if isinstance(like, Tensor) else torch.tensor(x)


def _like(x: Value, other: Value) -> Value:
    """A Python number beside a tensor, as a tensor of its type: a plain number may overflow in float16."""
    return _tensor(x, other) if isinstance(other, Tensor) and other.is_floating_point() else x
