"""Stage 2, decide for GPUs: which element of a captured tensor kernels read before they need a pair's score.

In: a ``Variant``. Out: the load, if there is one: of 1 or 2 bytes, with the key's position as its last index and the
query's as another, so that what neighbouring keys read lies side by side; whether batch entries share such elements.
"""

from __future__ import annotations

from collections.abc import Iterator

from flashgen.analysis.bounds import clamped_dimensions
from flashgen.analysis.constraints import COLUMN, ROW
from flashgen.analysis.variant import Variant
from flashgen.ir.expr import Load, index_set, walk
from flashgen.ir.types import ElementType

MOST_BYTES = 2  # of an element: two of them are a register


def loads_of_pairs(variant: Variant) -> Iterator[Load]:
    """What the score and the mask of a pair read, of whatever level."""
    return (each for each in walk(variant.score, variant.keep_of_pairs) if isinstance(each, Load))


def prefetched(variant: Variant) -> Load | None:
    """The first of the score's loads, or else of the mask's, that may be read so; registers hold no more than one."""
    if variant.kind.rows_of_heads or variant.kind.f8 or variant.tangent is not None:
        return None
    return next((each for each in loads_of_pairs(variant) if _lies_side_by_side(variant, each)), None)


def _lies_side_by_side(variant: Variant, load: Load) -> bool:
    element = element_of(variant, load)
    if element.bytes > MOST_BYTES or load.indices[-1] != COLUMN or load.indices.count(ROW) != 1:
        return False
    if any(index_set(each) & {"i", "j"} for each in load.indices[:-1] if each != ROW):
        return False
    clamped = clamped_dimensions(load, variant.proofs)
    return not clamped[-1] and not clamped[load.indices.index(ROW)]


def is_shared(variant: Variant) -> bool:
    """Whether batch entries read, or add to, one element for each query and key."""
    if variant.kind.rows_of_heads or variant.kind.ragged or variant.kind.f8 or variant.tangent is not None:
        return False
    return any({ROW, COLUMN} <= set(each.indices) and "b" not in index_set(each) for each in loads_of_pairs(variant))


def element_of(variant: Variant, load: Load) -> ElementType:
    """The type of a captured tensor's elements."""
    return next(each.element for each in variant.spec.tensors if each.name == load.tensor)
