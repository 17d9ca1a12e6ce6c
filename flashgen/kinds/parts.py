"""Calls over some of the keys of rows: what is written is float32, which a caller adds up and rounds once.

Backward, o is that of all keys.
"""

from __future__ import annotations

from dataclasses import replace

from flashgen.kinds.dense import DENSE, OPERANDS
from flashgen.kinds.kind import named
from flashgen.kinds.operand import F32

PARTS = replace(
    DENSE,
    name="parts",
    mark="_parts",
    suffix=None,
    operands=named(*(replace(each, elements=F32) if each.is_written else each for each in OPERANDS.values())),
    stands_in=True,
    parts=True,
)
