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

    where = staticmethod(np.where)
    isnan = staticmethod(np.isnan)
    logical_not = staticmethod(np.logical_not)
    minimum = staticmethod(np.minimum)
    maximum = staticmethod(np.maximum)

    def clamp(self, x: Any, lo: Any, hi: Any) -> Any:
        return np.minimum(np.maximum(x, lo), hi)

    floor_divide = staticmethod(np.floor_divide)
    remainder = staticmethod(np.remainder)
    abs = staticmethod(np.abs)
    pow = staticmethod(np.power)
    floor = staticmethod(np.floor)
    ceil = staticmethod(np.ceil)
    round = staticmethod(np.rint)

    def call(self, function: Library, x: Any) -> Any:
        return function.numpy(x)


NUMPY = NumpyNamespace()
