"""Stage 3, plan for GPUs: lists of the tiles that each tile visits, made once for a shape and shared by calls.

In: a ``Variant``, the tiles of a pass. Out: ``VisitLists``. The kernels that write them, and what lies where, are
in ``templates/cuda/lists.cuh.jinja``; the host that keeps them is ``runtime/lists.py``.
"""

from __future__ import annotations

from flashgen.analysis.pieces import is_irregular
from flashgen.analysis.variant import Variant
from flashgen.ir.expr import index_set
from flashgen.plan.arguments import Field, argument_fields, mask_params, mask_sizes, param_field, param_place_field
from flashgen.plan.cuda_model import VISIT_LIST, WINDOW
from flashgen.plan.cuda_plan import BackwardTiles, ForwardTiles, QueryTiles
from flashgen.plan.launches import Count, Factor, Launch, VisitLists

CHUNK = 16  # bytes
TILES_OF_CHUNK = 8
COUNTS = 4  # bytes of a window's first chunk
OF_QUERIES, OF_KEYS = "visits_of_queries", "visits_of_keys"
_THREADS = 128


def shares_lists(variant: Variant) -> bool:
    """Whether a list may be used again: the mask depends on positions alone, and its rows are not runs of keys."""
    return is_irregular(variant.keep)


def cuda_fields(variant: Variant) -> tuple[Field, ...]:
    """The fields of ``struct Arguments`` as GPU kernels of a variant have them."""
    fields = argument_fields(variant.spec)
    if not shares_lists(variant):
        return fields
    comment = "lists that calls share; null: each block finds what it visits"
    return (*fields, *(Field(name, "pointer", comment, "uint4") for name in (OF_QUERIES, OF_KEYS)))


def lists_of_queries(kernel: str, variant: Variant, tiles: ForwardTiles | QueryTiles) -> VisitLists:
    """The key tiles of each query tile; ``kernel`` writes them."""
    return _lists(OF_QUERIES, kernel, variant, ("q_len", tiles.Br), ("kv_len", tiles.Bc))


def lists_of_keys(kernel: str, variant: Variant, tiles: BackwardTiles) -> VisitLists:
    """The query tiles of each key tile."""
    return _lists(OF_KEYS, kernel, variant, ("kv_len", tiles.Bc), ("q_len", tiles.Br))


def _lists(field: str, kernel: str, variant: Variant, own: tuple[str, int], visited: tuple[str, int]) -> VisitLists:
    keep = variant.keep
    masks = [Factor(size) for axis, size in (("b", "batch"), ("h", "heads")) if axis in index_set(keep)]
    lists = (*masks, Factor(*own))
    length, tile = visited
    return VisitLists(
        field=field,
        tiles=(own[1], tile),
        pairs=Count((Factor(*own), Factor(*visited))),
        counts=Count((*lists, Factor(length, WINDOW * tile)), CHUNK),
        visits=Count((*lists, Factor(length, TILES_OF_CHUNK * tile)), CHUNK),
        launch=Launch(kernel, Count(lists), _THREADS, VISIT_LIST),
        sizes=("q_len", "kv_len", *mask_sizes(keep)),
        params=tuple((param_field(each), param_place_field(each)) for each in mask_params(keep)),
    )
