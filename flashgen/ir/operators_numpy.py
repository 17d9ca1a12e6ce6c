"""NumPy as an ``ArrayNamespace``: folds constants, and states in tests what an operator means.

Stage: IR. In: NumPy arrays or scalars. Out: the same. Does NOT know operators or expressions.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from flashgen.ir.operators_base import Library


@dataclass(frozen=True)
class NumpyNamespace:
    """NumPy in one working precision. Callers silence warnings with ``np.errstate``."""

    dtype: Any = np.float64

    def is_float(self, x: Any) -> bool:
        return bool(np.issubdtype(np.asarray(x).dtype, np.floating))

    def to_float(self, x: Any) -> Any:
        return np.asarray(x).astype(self.dtype)

    def to_int(self, x: Any) -> Any:
        return np.asarray(x).astype(np.int64)

    def where(self, c: Any, x: Any, y: Any) -> Any:
        return np.where(c, x, y)

    def isnan(self, x: Any) -> Any:
        return np.isnan(x)

    def logical_not(self, x: Any) -> Any:
        return np.logical_not(x)

    def minimum(self, x: Any, y: Any) -> Any:
        return np.minimum(x, y)

    def maximum(self, x: Any, y: Any) -> Any:
        return np.maximum(x, y)

    def clamp(self, x: Any, lo: Any, hi: Any) -> Any:
        return np.minimum(np.maximum(x, lo), hi)

    def floor_divide(self, x: Any, y: Any) -> Any:
        return np.floor_divide(x, y)

    def remainder(self, x: Any, y: Any) -> Any:
        return np.remainder(x, y)

    def abs(self, x: Any) -> Any:
        return np.abs(x)

    def pow(self, x: Any, y: Any) -> Any:
        return np.power(x, y)

    def floor(self, x: Any) -> Any:
        return np.floor(x)

    def ceil(self, x: Any) -> Any:
        return np.ceil(x)

    def round(self, x: Any) -> Any:
        return np.rint(x)

    def call(self, function: Library, x: Any) -> Any:
        return function.numpy(x)


NUMPY = NumpyNamespace()
