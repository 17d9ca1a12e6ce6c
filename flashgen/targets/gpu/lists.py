"""Stage 3, plan for GPUs: lists of the tiles that each tile visits, made once for all heads that share a mask.

In: a ``GpuPlan`` of one element type, the tiles of a pass. Out: ``VisitLists``: of masks over positions the host keeps
them for later calls (``hosts/schedule.py``), of masks over captured tensors each call makes its own
(``hosts/schedule.py``). The kernels that write them, and what lies where, are in ``templates/cuda/lists.cuh.jinja``.
"""

from __future__ import annotations

from flashgen.analysis.levels import mask_axes
from flashgen.kinds.operand import Field
from flashgen.plan.arguments import argument_fields, mask_params, mask_sizes, param_field, param_place_field
from flashgen.plan.launches import Count, Factor, Launch, Order, VisitLists
from flashgen.targets.gpu.model import FLOAT, VISIT_LIST, WINDOW
from flashgen.targets.gpu.recipe import Lists, Recipe
from flashgen.targets.gpu.schedules import Backward, Forward, Queries
from flashgen.targets.gpu.tiles import GpuPlan

CHUNK = 16  # bytes
TILES_OF_CHUNK = 8
COUNTS = 4  # bytes of a window's first chunk
NUMBER = LENGTH = 4  # bytes: which tile a list is of; how many visits it has
OF_QUERIES, OF_KEYS = "visits_of_queries", "visits_of_keys"
GROUPS = {OF_QUERIES: "group_of_queries", OF_KEYS: "group_of_keys"}
_THREADS = 128
_ORDERED = 4  # lists of a block, a warp each


def cuda_fields(recipe: Recipe) -> tuple[Field, ...]:
    """The fields of ``struct Arguments`` as GPU kernels of a variant have them."""
    fields = argument_fields(recipe.variant.spec, recipe.variant.kind)
    if not recipe.has_lists:
        return fields
    comment = "lists of what tiles visit; null: each block finds what it visits"
    lists = tuple(Field(name, "pointer", comment, "uint4") for name in (OF_QUERIES, OF_KEYS))
    if not recipe.longest_first:
        return (*fields, *lists)
    comment = "heads whose blocks take these lists one after another"
    return (*fields, *lists, *(Field(GROUPS[name], "i32", comment) for name in (OF_QUERIES, OF_KEYS)))


def lists_of_queries(plan: GpuPlan, kernel: str, tiles: Forward | Queries, readers: Launch) -> tuple[VisitLists, ...]:
    """The key tiles of each query tile that a kernel goes through, if there are lists."""
    return _lists(OF_QUERIES, plan, kernel, ("q_len", tiles.Br), ("kv_len", tiles.Bc), readers)


def lists_of_keys(plan: GpuPlan, kernel: str, tiles: Backward, readers: Launch) -> tuple[VisitLists, ...]:
    """The query tiles of each key tile."""
    return _lists(OF_KEYS, plan, kernel, ("kv_len", tiles.Bc), ("q_len", tiles.Br), readers)


def _order(field: str, plan: GpuPlan) -> Order | None:
    """K and V are what blocks of queries read; Q, dO and the sums of dQ are those of keys."""
    variant, of_keys = plan.recipe.variant, field == OF_KEYS
    if not plan.recipe.longest_first:
        return None
    head_dim, axes = variant.head_dim, mask_axes(variant.keep)
    width = (head_dim.qk + head_dim.v) * plan.own.element.bytes + of_keys * head_dim.qk * FLOAT
    heads = (Factor("kv_heads" if of_keys else "heads"),)
    if "hkv" in axes:  # whose blocks read the same K and V
        return Order(GROUPS[field], Count(heads), Count((), 0), Factor("kv_heads"))
    return Order(
        group=GROUPS[field],
        heads=Count(heads if "b" in axes else (Factor("batch"), *heads)),
        of_a_head=Count((Factor("q_len" if of_keys else "kv_len"),), width),
    )


def made_in_workspace(lists: tuple[VisitLists, ...]) -> tuple[Launch, ...]:
    """The launches that a pass begins with, once the ranges of what its mask reads are there."""
    return tuple(launch for each in lists if not each.kept for launch in each.launches)


def _lists(
    field: str, plan: GpuPlan, kernel: str, own: tuple[str, int], visited: tuple[str, int], readers: Launch
) -> tuple[VisitLists, ...]:
    recipe, which = plan.recipe, f"{kernel}_{plan.own.element}"
    if not recipe.has_lists:
        return ()
    keep, order = recipe.variant.keep, _order(field, plan)
    axes = mask_axes(keep)
    masks = [Factor(size) for axis, size in (("b", "batch"), ("h", "heads"), ("hkv", "kv_heads")) if axis in axes]
    lists = (*masks, Factor(*own))
    length, tile = visited
    copies = 2 if order else 1  # in the order of tiles, and in that of lengths
    parts = [
        Count((*lists, Factor(length, WINDOW * tile)), copies * CHUNK),
        Count((*lists, Factor(length, TILES_OF_CHUNK * tile)), copies * CHUNK),
    ]
    launches = [Launch(f"{plan.symbol}_visits_of_{which}", Count(lists), _THREADS, VISIT_LIST, makes=field)]
    if order:
        parts.append(Count(lists, LENGTH))
        ordering = Count(lists, divide=_ORDERED)
        launches.append(Launch(f"{plan.symbol}_order_of_{which}", ordering, _THREADS, 0, makes=field))
    found = VisitLists(
        field=field,
        tiles=(own[1], tile),
        kept=recipe.lists is Lists.KEPT,
        order=order,
        pairs=Count((Factor(*own), Factor(*visited))),
        count=Count(lists),
        readers=readers.grid,
        parts=tuple(parts),
        launches=tuple(launches),
        sizes=("q_len", "kv_len", *mask_sizes(keep)),
        params=tuple((param_field(each), param_place_field(each)) for each in mask_params(keep)),
    )
    return (found,)
