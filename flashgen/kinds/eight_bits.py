"""Dense calls whose q, k and v are of 8 bits; o is not. What each is multiplied by is a number a key/value head."""

from __future__ import annotations

from dataclasses import replace

from flashgen.ir.types import ElementType
from flashgen.kinds.dense import DENSE, OPERANDS
from flashgen.kinds.kind import BOTH, named
from flashgen.kinds.operand import F32, KEYS, Elements, Operand, Rows, Width, operand_field

DESCALES = ("q_descale", "k_descale", "v_descale")
_FACTORS = tuple(
    Operand(name, KEYS, Width.ONE, Rows.PER_HEAD, F32, says="null: 1")
    for name in ("q_factors", "k_factors", "v_factors")
)
EIGHT_BITS = replace(
    DENSE,
    name="8 bits",
    mark="_f8",
    operands=named(
        *(replace(each, elements=Elements.BFLOAT16) if each.name == "o" else each for each in OPERANDS.values()),
        *_FACTORS,
    ),
    suffix="_f8",
    tensors=DESCALES,
    o=ElementType.BF16,
    pointers=tuple(map(operand_field, _FACTORS)),
    passes=BOTH[:1],
    learns=False,
    by_lengths=False,
    on_cpus=False,
    f8=True,
)
