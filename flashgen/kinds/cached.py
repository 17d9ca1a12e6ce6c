"""Calls over caches: queries are the last ones of each sequence, keys and values lie in entries or pages.

Keys are as many as a sequence has room for. ``F8_CACHED`` are caches of 8 bits beside queries of more.
"""

from __future__ import annotations

from dataclasses import replace

from flashgen.kinds.dense import OPERANDS
from flashgen.kinds.kind import BOTH, Kind, named
from flashgen.kinds.operand import Elements, Field, Rows

PLACES = {
    "cache_lengths": "[batch]: the rows of each sequence in the cache",
    "cache_padding": "[batch]: those in front that are not its own; null: none",
    "cache_places": "[batch]: the entry of each sequence, where there are no pages; null: its number",
    "block_table": "[batch, table_columns]: the pages of each sequence; null where it has an entry",
}
FACTORS = {
    f"{name}_factors": f"[batch, kv_heads]: what {name} of 8 bits is multiplied by; null where by nothing"
    for name in ("k", "v")
}
_SIZES = {
    "cache_entries": "entries of the cache, or its pages",
    "cache_rows": "of an entry, or of a page",
    "table_columns": "of block_table",
    "group_rows": "queries of all heads that share a key/value head, the rows of its tiles",
}
# Where the last block of a tile to come to its end merges parts: zero before and after each launch.
ARRIVALS = {"arrivals": "[blocks of one part]: how many parts of each are done; null: another kernel merges them"}
# Decided when a call is scheduled, from the number of splits that was asked for.
SPLITS = {
    "splits": "parts of a sequence's keys, by a block each",
    "merges": "1 where there are several, else 0",
    "merges_apart": "1 where a kernel of its own merges them",
}
_WHOLE = ("b_total", "h_total")
CACHED = Kind(
    "cached",
    mark="_cached",
    operands=named(
        *(
            replace(each, rows=Rows.CACHED, elements=Elements.OF_THE_CACHE) if each.name in ("k", "v") else each
            for each in OPERANDS.values()
        )
    ),
    suffix="_decode",
    tensors=("cache_seqlens", "leftpad", "cache_batch_idx", "block_table", "k_descale", "v_descale"),
    numbers=("b_start", "h_start", *_WHOLE, "num_splits"),
    may_be_none=_WHOLE,
    pointers=(
        *(Field(name, "const pointer", comment, "int32_t", True) for name, comment in PLACES.items()),
        *(Field(name, "const pointer", comment, "float", True) for name, comment in FACTORS.items()),
        *(Field(name, "pointer", comment, "uint32_t", True) for name, comment in ARRIVALS.items()),
    ),
    sizes=(
        *(Field(name, "i64", comment) for name, comment in _SIZES.items()),
        Field("key_element", "i32", "of k and v: as element, or 3, float8_e4m3fn"),
        *(Field(each, "i32", says) for each, says in SPLITS.items()),
    ),
    by_sequence=True,
    passes=BOTH[:1],
    learns=False,
    cached=True,
    rows_of_heads=True,
)
F8_CACHED = replace(CACHED, name="cached, 8 bits", mark="_f8_cached", suffix=None, f8_cached=True)
