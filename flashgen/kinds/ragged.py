"""Ragged batches: sequences of any lengths, one behind the other, each a call of its own.

q is [Tq, H, D], k [Tk, Hkv, D], v [Tk, Hkv, Dv]. What is one number a row is by heads, as lse is given out.
"""

from __future__ import annotations

from dataclasses import replace

from flashgen.kinds.dense import OPERANDS
from flashgen.kinds.kind import Kind, named
from flashgen.kinds.operand import Field, Rows

_PACKED = {Rows.STRIDED: Rows.PACKED_STRIDED, Rows.CONTIGUOUS: Rows.PACKED_HEADS}
_MOST = ("b_total", "h_total", "max_seqlen_q", "max_seqlen_k")
STARTS = {"q_starts": "q", "k_starts": "k and v"}
RAGGED = Kind(
    "ragged",
    mark="_ragged",
    operands=named(*(replace(each, rows=_PACKED[each.rows]) for each in OPERANDS.values())),
    suffix="_varlen",
    tensors=("cu_seqlens_q", "cu_seqlens_k"),
    numbers=("b_start", "h_start", *_MOST),
    may_be_none=_MOST,
    dims=3,
    pointers=tuple(
        Field(name, "const pointer", f"where sequences begin among the rows of {rows}, [batch + 1]", "int32_t", True)
        for name, rows in STARTS.items()
    ),
    sizes=tuple(
        Field(name, "i64", f"{rows} that a sequence may have")
        for name, rows in (("q_most", "queries"), ("kv_most", "keys"))
    ),
    by_sequence=True,
    by_lengths=True,
    ragged=True,
)
