"""Calls that see a part of what a caller asks for, which it puts together.

slices      some of the rows of tensors, where other calls see the same keys. A number of each row (lse, delta)
lies in the tensor of all rows. The gradients of k and v are float32, as those of other rows are added
by blocks   blocks of keys, each with the queries whose lists name it; lse lies as in slices
parts       some of the keys of rows: what is written is float32, which a caller adds up and rounds once. Backward,
o is that of all keys
"""

from __future__ import annotations

from dataclasses import replace

from flashgen.kinds.dense import DENSE, OPERANDS
from flashgen.kinds.kind import BOTH, named
from flashgen.kinds.operand import F32, HEAD_ROWS, Field, Operand, Rows


def _sliced(each: Operand) -> Operand:
    if each.rows is Rows.CONTIGUOUS:
        return replace(each, rows=Rows.SLICED, says=each.says.replace("contiguous", "rows of a head together"))
    return replace(each, elements=F32) if each.is_written and not each.of_queries else each


SLICES = replace(
    DENSE,
    name="slices",
    mark="_slices",
    suffix=None,
    operands=named(*map(_sliced, OPERANDS.values())),
    rows_as_declared=True,
    sizes=(Field(HEAD_ROWS, "i64", "rows from one head's first to the next one's, of lse"),),
    stands_in=True,
    slices=True,
)

BY_BLOCKS = replace(
    SLICES,
    name="by blocks",
    mark="_by_blocks",
    passes=BOTH[:1],
    learns=False,
    by_lengths=False,
    on_cpus=False,
    slices=False,
    lists=True,
    rows_of_heads=True,
)

PARTS = replace(
    DENSE,
    name="parts",
    mark="_parts",
    suffix=None,
    operands=named(*(replace(each, elements=F32) if each.is_written else each for each in OPERANDS.values())),
    stands_in=True,
    parts=True,
)
