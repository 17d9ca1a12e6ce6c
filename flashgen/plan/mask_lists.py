"""Which masks have lists of the tiles that each tile visits (``cuda_lists.py``), and of what kind."""

from __future__ import annotations

from flashgen.analysis.levels import observed_loads
from flashgen.analysis.pieces import is_irregular
from flashgen.analysis.variant import Variant
from flashgen.ir.expr import index_set


def keeps_lists(variant: Variant) -> bool:
    """Whether a list may be used again: the mask depends on positions alone, and its rows are not runs of keys."""
    return is_irregular(variant.keep)


def has_lists(variant: Variant) -> bool:
    """Whether there may be lists: kept ones, or a call's own, where ranges of captured tensors are observed."""
    return keeps_lists(variant) or any(observed_loads(variant.keep))


def takes_longest_first(variant: Variant) -> bool:
    """Whether blocks take lists by their lengths: heads share these, so that they are few, and a block reads one."""
    return has_lists(variant) and "h" not in index_set(variant.keep)
