"""Calls by blocks of keys, each block with the queries whose lists name it; lse lies as in slices."""

from __future__ import annotations

from dataclasses import replace

from flashgen.kinds.kind import BOTH
from flashgen.kinds.slices import SLICES

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
