"""Dense calls in forward mode: o, lse and what both change by; and the backward pass of that.

Its backward pass takes d_o and d_lse for what arrives at the tangents of o and lse.
"""

from __future__ import annotations

from dataclasses import replace

from flashgen.kinds.dense import DENSE, OPERANDS
from flashgen.kinds.kind import BOTH, named
from flashgen.kinds.operand import F32, KEYS, QUERIES, Field, Operand, Rows, Width, operand_field

_MOVES = (
    Operand("t_q", QUERIES, Width.QK, Rows.STRIDED, says="the tangent of q; null: 0"),
    Operand("t_k", KEYS, Width.QK, Rows.STRIDED, says="of k; null: 0"),
    Operand("t_v", KEYS, Width.V, Rows.STRIDED, says="of v; null: 0"),
)
_MOVED = (
    Operand("t_o", QUERIES, Width.V, Rows.STRIDED, is_written=True, by_row=True),
    Operand("t_lse", QUERIES, Width.ONE, elements=F32, is_written=True, says="contiguous; null where it is not wanted"),
)
_WANTED = "null where no tangent's is wanted"
_GRADIENTS = (
    Operand("d_t_q", QUERIES, Width.QK, Rows.STRIDED, is_written=True, by_row=True, says=_WANTED),
    Operand("d_t_k", KEYS, Width.QK, Rows.STRIDED, is_written=True, by_row=True, says=_WANTED),
    Operand("d_t_v", KEYS, Width.V, Rows.STRIDED, is_written=True, by_row=True, says=_WANTED),
)
# What kernels read and write beside the operands of dense calls.
TANGENTS = named(*_MOVES, *_MOVED)
TANGENT_GRADIENTS = named(
    *(replace(each, is_written=False, says=each.says.split(";")[0]) for each in _MOVED), *_MOVES, *_GRADIENTS
)
FORWARD_MODE = replace(
    DENSE,
    name="tangents",
    mark="_jvp",
    suffix=None,
    operands=named(*OPERANDS.values(), *TANGENTS.values()),
    pointers=tuple(map(operand_field, TANGENTS.values())),
    sizes=tuple(Field(name, "i64") for each in TANGENTS.values() for name in each.stride_fields),
    passes=BOTH[:1],
    by_lengths=False,
)
FORWARD_MODE_BACKWARD = replace(
    FORWARD_MODE,
    name="tangents, backward",
    operands=named(*OPERANDS.values(), *TANGENT_GRADIENTS.values()),
    pointers=tuple(map(operand_field, TANGENT_GRADIENTS.values())),
    sizes=tuple(Field(name, "i64") for each in TANGENT_GRADIENTS.values() for name in each.stride_fields),
    passes=BOTH[1:],
)
