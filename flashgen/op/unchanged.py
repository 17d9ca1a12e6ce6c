"""Whether a tensor is the one of an earlier call, unchanged, without a look at what it holds."""

from __future__ import annotations

import weakref

from torch import Tensor


class UnchangedTensor:
    """A tensor as it is now: equal to another record of the same tensor if nothing was written in between.

    PyTorch counts writes, but not those to tensors of inference mode.
    """

    def __init__(self, x: Tensor) -> None:
        self._tensor, self._version = weakref.ref(x), x._version

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, UnchangedTensor):
            return NotImplemented
        x = self._tensor()
        return x is not None and x is other._tensor() and self._version == other._version

    __hash__ = None  # type: ignore[assignment]
