"""Dense calls: q [B, H, Nq, D], k [B, Hkv, Nk, D] and v [B, Hkv, Nk, Dv], any strides of b, h and n."""

from __future__ import annotations

from flashgen.kinds.kind import Kind, named
from flashgen.kinds.operand import F32, KEYS, QUERIES, Operand, Rows, Width

_PARTS = "what lse cannot hold of extreme rows, or 1 / Z where weights are divided; null or as lse"
_TOTALS = ("q_total", "kv_total", "b_total", "h_total")
_STARTS = ("q_start", "kv_start", "b_start", "h_start")
DENSE = Kind(
    "dense",
    mark="",
    # In the order of the fields.
    operands=named(
        Operand("q", QUERIES, Width.QK, Rows.STRIDED),
        Operand("k", KEYS, Width.QK, Rows.STRIDED),
        Operand("v", KEYS, Width.V, Rows.STRIDED),
        Operand("o", QUERIES, Width.V, Rows.STRIDED, is_written=True, by_row=True),
        Operand(
            "lse", QUERIES, Width.ONE, elements=F32, is_written=True, says="contiguous; null for pointwise weights"
        ),
        Operand("lse_parts", QUERIES, Width.TWO, elements=F32, is_written=True, says=f"contiguous: {_PARTS}"),
        Operand("d_o", QUERIES, Width.V, Rows.STRIDED),
        Operand("d_lse", QUERIES, Width.ONE, elements=F32, says="contiguous; null where lse was not used"),
        Operand("dq", QUERIES, Width.QK, Rows.STRIDED, is_written=True, by_row=True),
        Operand("dk", KEYS, Width.QK, Rows.STRIDED, is_written=True, by_row=True),
        Operand("dv", KEYS, Width.V, Rows.STRIDED, is_written=True, by_row=True),
    ),
    suffix="",
    numbers=(*_STARTS, *_TOTALS),
    may_be_none=_TOTALS,
    by_lengths=True,
)
OPERANDS = DENSE.operands
