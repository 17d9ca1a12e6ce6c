"""Stage 3, plan for GPUs: lists of the tiles that each tile visits, made once for all heads that share a mask.

In: a ``Variant``, the tiles of a pass. Out: ``VisitLists``: of masks over positions the host keeps them for later calls
(``runtime/lists.py``), of masks over captured tensors each call makes its own (``runtime/schedule.py``). The kernels
that write them, and what lies where, are in ``templates/cuda/lists.cuh.jinja``.
"""

from __future__ import annotations

from flashgen.analysis.levels import Level, level_of
from flashgen.analysis.pieces import is_irregular
from flashgen.analysis.variant import Variant
from flashgen.ir.expr import Load, index_set, walk
from flashgen.plan.arguments import Field, argument_fields, mask_params, mask_sizes, param_field, param_place_field
from flashgen.plan.cuda_model import VISIT_LIST, WINDOW
from flashgen.plan.cuda_plan import BackwardTiles, ForwardTiles, QueryTiles
from flashgen.plan.launches import Count, Factor, Launch, VisitLists

CHUNK = 16  # bytes
TILES_OF_CHUNK = 8
COUNTS = 4  # bytes of a window's first chunk
NUMBER = LENGTH = 4  # bytes: which tile and mask a list is of; how many visits it has
OF_QUERIES, OF_KEYS = "visits_of_queries", "visits_of_keys"
_THREADS = 128
_ORDERED = 4  # lists of a block, a warp each


def observed_loads(variant: Variant) -> tuple[tuple[Load, ...], tuple[Load, ...]]:
    """The elements that the mask reads by row, and those by column: their ranges are found before all else."""
    loads = [node for node in walk(variant.keep) if isinstance(node, Load)]
    return (
        tuple(each for each in loads if level_of(each) is Level.ROW),
        tuple(each for each in loads if level_of(each) is Level.COLUMN),
    )


def keeps_lists(variant: Variant) -> bool:
    """Whether a list may be used again: the mask depends on positions alone, and its rows are not runs of keys."""
    return is_irregular(variant.keep)


def has_lists(variant: Variant) -> bool:
    """Whether there may be lists: kept ones, or a call's own, where ranges of captured tensors are observed."""
    return keeps_lists(variant) or any(observed_loads(variant))


def takes_longest_first(variant: Variant) -> bool:
    """Whether blocks take lists by their lengths: heads share these, so that they are few, and a block reads one."""
    return has_lists(variant) and "h" not in index_set(variant.keep)


def cuda_fields(variant: Variant) -> tuple[Field, ...]:
    """The fields of ``struct Arguments`` as GPU kernels of a variant have them."""
    fields = argument_fields(variant.spec)
    if not has_lists(variant):
        return fields
    comment = "lists of what tiles visit; null: each block finds what it visits"
    return (*fields, *(Field(name, "pointer", comment, "uint4") for name in (OF_QUERIES, OF_KEYS)))


def lists_of_queries(
    symbol: str, which: str, variant: Variant, tiles: ForwardTiles | QueryTiles, readers: Launch
) -> tuple[VisitLists, ...]:
    """The key tiles of each query tile, if there are lists. ``which``: the end of the names of the kernels."""
    return _lists(OF_QUERIES, symbol, which, variant, ("q_len", tiles.Br), ("kv_len", tiles.Bc), readers)


def lists_of_keys(
    symbol: str, which: str, variant: Variant, tiles: BackwardTiles, readers: Launch
) -> tuple[VisitLists, ...]:
    """The query tiles of each key tile."""
    return _lists(OF_KEYS, symbol, which, variant, ("kv_len", tiles.Bc), ("q_len", tiles.Br), readers)


def made_in_workspace(lists: tuple[VisitLists, ...]) -> tuple[Launch, ...]:
    """The launches that a pass begins with, once the ranges of what its mask reads are there."""
    return tuple(launch for each in lists if not each.kept for launch in each.launches)


def _lists(
    field: str,
    symbol: str,
    which: str,
    variant: Variant,
    own: tuple[str, int],
    visited: tuple[str, int],
    readers: Launch,
) -> tuple[VisitLists, ...]:
    if not has_lists(variant):
        return ()
    keep, kept, longest_first = variant.keep, keeps_lists(variant), takes_longest_first(variant)
    masks = [Factor(size) for axis, size in (("b", "batch"), ("h", "heads")) if axis in index_set(keep)]
    lists = (*masks, Factor(*own))
    length, tile = visited
    copies = 2 if longest_first else 1  # in the order of tiles, and in that of lengths
    parts = [
        Count((*lists, Factor(length, WINDOW * tile)), copies * CHUNK),
        Count((*lists, Factor(length, TILES_OF_CHUNK * tile)), copies * CHUNK),
    ]
    launches = [Launch(f"{symbol}_visits_of_{which}", Count(lists), _THREADS, VISIT_LIST, makes=field)]
    if longest_first:
        parts.append(Count(lists, LENGTH))
        ordering = Count(lists, divide=_ORDERED)
        launches.append(Launch(f"{symbol}_order_of_{which}", ordering, _THREADS, 0, makes=field))
    found = VisitLists(
        field=field,
        tiles=(own[1], tile),
        kept=kept,
        longest_first=longest_first,
        pairs=Count((Factor(*own), Factor(*visited))),
        count=Count(lists),
        readers=readers.grid,
        parts=tuple(parts),
        launches=tuple(launches),
        sizes=("q_len", "kv_len", *mask_sizes(keep)),
        params=tuple((param_field(each), param_place_field(each)) for each in mask_params(keep)),
    )
    return (found,)
