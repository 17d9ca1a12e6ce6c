"""The table of operators: one row each, looked up by the name that ``Apply.op`` holds.

Stage: IR. In: the rows of the family modules. Out: ``OPERATORS``. A row says everything that the compiler knows of an
operator: how it is typed, what it means (over NumPy or torch alike) and on constants, its derivatives, its ranges,
what it costs, and how the language, PyTorch, NumPy, C++ and CUDA spell it. Other modules ask the row and keep no list
of operators. Does NOT build nodes (``build.py``) and does NOT print them (``emit/``).

In C++ every function below is in namespace ``fg``, every range function in ``fg::ranges``. Ints wrap: infix ``+ - *``
on them are compiled with ``-fwrapv``.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from flashgen.ir import operators_arithmetic, operators_functions, operators_logic
from flashgen.ir.operators_base import (
    ArrayNamespace,
    Library,
    NoValueError,
    Operator,
    Samples,
)
from flashgen.ir.operators_typing import Signature, TypingError

__all__ = ["OPERATORS", "ArrayNamespace", "Library", "NoValueError", "Operator", "Samples", "Signature", "TypingError"]

OPERATORS: Mapping[str, Operator] = MappingProxyType(
    {row.name: row for row in (*operators_arithmetic.ROWS, *operators_logic.ROWS, *operators_functions.ROWS)}
)
