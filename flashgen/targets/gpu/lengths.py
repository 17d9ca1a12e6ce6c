"""How long the rows of tiles are that a mask leaves.

In: a ``Variant``. Out: whether queries keep keys however far back, and whether all keep as many.
"""

from __future__ import annotations

from flashgen.analysis.levels import Level, level_of
from flashgen.analysis.tiles import Tile, TileClass, classify
from flashgen.analysis.variant import Variant
from flashgen.ir.expr import Apply, Expr
from flashgen.ir.interval import IntRange

FAR = 8192  # tokens of a long sequence


def has_long_rows(variant: Variant) -> bool:
    """Whether queries keep keys however far back: for certain, or because the mask relates no queries to keys.

    Then a block has tiles enough to hide what it begins and ends with.
    """
    return keeps_as_far_as(variant, FAR)


def keeps_as_far_as(variant: Variant, length: int) -> bool:
    """Whether the last queries of so many positions keep the first keys, or the mask relates no queries to keys."""
    last = IntRange(length - 128, length - 1)
    sizes = {"B": 1, "H": 1, "Hkv": 1, "Nq": length, "Nk": length}
    far = Tile(IntRange(0, 0), IntRange(0, 0), last, IntRange(0, 127), sizes)
    return has_whole_rows(variant) or classify(variant.keep, far) is TileClass.FULL


def has_whole_rows(variant: Variant) -> bool:
    """Whether the mask relates no queries to keys: a row has all tiles, or those before a length."""
    return not _relates_pairs(variant.keep)


def has_growing_rows(variant: Variant) -> bool:
    """Whether long rows of tiles have several lengths, as under a causal mask."""
    return has_long_rows(variant) and not has_whole_rows(variant)


def _relates_pairs(condition: Expr) -> bool:
    if isinstance(condition, Apply) and condition.op in ("and", "or", "not"):
        return any(_relates_pairs(each) for each in condition.args)
    return level_of(condition) is Level.PAIR
