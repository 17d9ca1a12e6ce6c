"""A spec with a list for each query as its kernels by blocks of keys see it: a block, with the queries that list it.

Stage: analyse. In: an ``AttentionSpec`` and a ``HeadDim``. Out: a ``Variant`` without the selection among its
conditions: a pair is there because a list names the block of its key, so that no pair asks. ``ListedBlocks`` say how a
list is read. Kernels that have tiles of queries read for each the keys that it selects, from the last cache, as often
as there are queries; these read them once for many queries, and leave a part of each row for each number of its list.
"""

from __future__ import annotations

import functools
from dataclasses import replace

from flashgen.analysis.bounds import prove_indices
from flashgen.analysis.selection import ListedBlocks, first_number, has_list_for_each_query, lowered
from flashgen.analysis.variant import Variant, analyse
from flashgen.ir.build import apply
from flashgen.ir.expr import index, literal, walk
from flashgen.ir.spec import AttentionSpec, HeadDim
from flashgen.kinds.slices import BY_BLOCKS

# Of both head dimensions, for which a thread's registers hold scores of a block beside a row's part of O.
WIDEST = 128
BLOCKS = (16, 32, 48, 64)  # keys of a block, which are a tile
UNIT = 8  # heads that share keys come in groups of so many, as fragments have rows


def objection_to_blocks(spec: AttentionSpec, head_dim: HeadDim) -> str:
    """Why kernels by blocks of keys do not compute a spec at a head dimension; empty where they do.

    This depends on the spec alone; ``plan/by_blocks.py`` decides by the sizes of a call.
    """
    select = spec.select
    if select is None or not has_list_for_each_query(lowered(spec).tensors):
        return "there is no list for each query"
    if index("h") in set(walk(*select.indices)):
        return "heads that share keys have lists of their own"
    if spec.layout is not None or spec.dropout is not None:
        return "blocks are drawn, or pairs dropped, by the positions of a head"
    if select.block not in BLOCKS:
        return f"blocks have {select.block} keys, not {', '.join(map(str, BLOCKS))}"
    if max(head_dim.qk, head_dim.v) > WIDEST:
        return f"head dimensions are above {WIDEST}"
    variant = analyse(replace(spec, select=None), head_dim)
    if not variant.weights.form.exponential:
        return "weights are no exponentials"
    if variant.uses_sqdist:
        return "scores use |q - k|²"
    return ""


@functools.lru_cache(maxsize=64)
def with_listed_blocks(spec: AttentionSpec, head_dim: HeadDim) -> Variant:
    """The variant of a spec to which there is no ``objection_to_blocks``."""
    select = spec.select
    assert select is not None, "keys are selected"
    plain, first = replace(spec, select=None), first_number(select)
    reading = replace(plain, mask=apply("and", plain.mask, apply("ge", first, literal(0))))
    proofs = prove_indices(reading, head_dim)
    listed = ListedBlocks(first, select.block)
    return replace(analyse(plain, head_dim), gradients=(), proofs=proofs, kind=BY_BLOCKS, listed=listed)
