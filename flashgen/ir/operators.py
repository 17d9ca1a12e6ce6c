"""The table of operators: one row each, looked up by the name that ``Apply.op`` holds.

Stage: IR. In: the rows of the family modules. Out: ``OPERATORS``. A row says everything that the compiler knows of an
operator: how it is typed, what it means (over NumPy or torch alike) and on constants, its derivatives, its ranges,
what it costs, and how the language, PyTorch, NumPy, C++ and CUDA spell it. Other modules ask the row and keep no list
of operators. Does NOT build nodes (``build.py``) and does NOT print them (``emit/``).

In C++ every function below is in namespace ``fg``, every range function in ``fg::ranges``. Ints wrap: infix ``+ - *``
on them are compiled with ``-fwrapv``. ``NUMPY`` folds constants, and states in tests what an operator means.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import numpy as np

from flashgen.ir import operators_arithmetic, operators_functions, operators_logic
from flashgen.ir.operators_base import ArrayNamespace, Library, NoValueError, Operator, Samples, Signature, TypingError

__all__ = ["OPERATORS", "ArrayNamespace", "Library", "NoValueError", "Operator", "Samples", "Signature", "TypingError"]

OPERATORS: Mapping[str, Operator] = MappingProxyType(
    {row.name: row for row in (*operators_arithmetic.ROWS, *operators_logic.ROWS, *operators_functions.ROWS)}
)


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
