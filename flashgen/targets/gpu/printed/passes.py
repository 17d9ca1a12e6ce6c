"""What kernels a source has of each pass, by the tiles of its element type: their constants, memory, and kinds.

In: the plan of a variant in one element type. Out: ``forward``, ``backward`` and ``queries`` in templates.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import TypeAlias

from flashgen.ir.types import ElementType
from flashgen.targets.gpu.launches import LEAST_PART, MOST_PARTS, MOST_UNITS, PART_OVERHEAD, shares_last
from flashgen.targets.gpu.layouts import backward_layout, forward_layout, query_layout
from flashgen.targets.gpu.model import (
    KEYS_OF_SUMS,
    MEASURERS,
    MERGED_WEIGHTS,
    MERGING_THREADS,
    MOST_COLUMNS,
    dq_column_groups,
    padded,
    printed,
    row_words,
    spans_of_half,
)
from flashgen.targets.gpu.primitives import C_TYPES, WarpgroupProducts
from flashgen.targets.gpu.printed.spec import has_dropout
from flashgen.targets.gpu.recipe import Recipe
from flashgen.targets.gpu.schedules import Backward, Forward, Schedule
from flashgen.targets.gpu.tiles import GpuPlan, finds_selected, merging_shares, merging_warps

# What templates ask of a schedule: of every one, forward, and of dK and dV.
_OF_SCHEDULES = ("warps", "stages", "split", "s_columns", "warpgroups", "producers", "blocks", "threads")
_OF_BOTH = ("cluster", "tensor_copies", "pairs_staged", "prefetches_next")
_OF_FORWARD = (*_OF_BOTH, "q_in_registers", "overlaps_next", "q_places", "ping_pong")
_OF_BACKWARD = (*_OF_BOTH, "persistent", "column_parts", "divides_keys", "halves_dq")


# What templates know of a pass, by name: its constants, memory, and kinds.
PassCode: TypeAlias = Mapping[str, object]


def forward_code(plan: GpuPlan) -> PassCode:
    """The forward pass. A block is a chain of classes."""
    recipe, variant = plan.recipe, plan.recipe.variant
    element, tiles, more = plan.own.element, plan.own.forward, dict[str, int]()
    if variant.kind.cached:
        more |= {"merging_warps": merging_warps(tiles, variant), "shares": merging_shares(tiles, variant)}
        more |= {"merging_threads": MERGING_THREADS, "merged_weights": MERGED_WEIGHTS}
        more |= {"finds_selected": int(finds_selected(tiles, variant, element))}
    if variant.kind.f8:
        more |= {"tiles_of_sums": max(1, KEYS_OF_SUMS // tiles.Bc)}
    more |= {"maxima_by_sums": int(tiles.maxima_by_sums(recipe))}
    more |= {"measurers": MEASURERS if variant.uses_sqdist and tiles.producers else 0}
    layouts = {C_TYPES[element]: forward_layout(recipe, element, tiles)}
    header = tiles.header if variant.tangent is None else tiles.header_of_tangents
    return {
        "tiles": tiles,
        "constants": _constants("ForwardPlan", "The plan of the forward pass.", tiles, _OF_FORWARD, more),
        "memory": printed("ForwardMemory", "Where blocks of the forward pass have what, in bytes.", "class T", layouts),
        "parts": _forward_parts(recipe, tiles),  # headers and names of what a spec asks for
        "header": "caches" if variant.kind.cached else header,
    }


def _forward_parts(recipe: Recipe, tiles: Forward) -> tuple[tuple[str, str], ...]:
    kind, tangent = recipe.variant.kind, recipe.variant.tangent is not None
    exponential = recipe.computed.weights.form.exponential
    chain = (
        ("state", "State", True),
        ("tangents", "Tangents", tangent),
        ("eight_bits", "EightBits", kind.f8),
        ("eight_bits_of_caches", "EightBitsOfCaches", kind.f8_cached),
        ("dropout", "WithDropout", has_dropout(recipe.variant)),
        ("shared_rows", "SharedRows", tiles.split > 1),
        ("exponentials", "Exponentials", exponential),
        ("weights", "FunctionsOfScores", not exponential),
        ("tangents", "MovingExponentials", tangent and exponential),
    )
    return tuple((header, name) for header, name, is_there in chain if is_there)


def backward_code(plan: GpuPlan) -> PassCode:
    """The pass of dK and dV."""
    recipe, element, tiles = plan.recipe, plan.own.element, plan.own.backward
    layouts = {
        f"{C_TYPES[element]}, {str(atomic).lower()}": backward_layout(recipe, element, tiles, with_dq=atomic)
        for atomic in ((True, False) if recipe.one_pass else (False,))
    }
    more = {
        "dq_column_groups": _dq_column_groups(plan, tiles),
        "stores_whole": bool(tiles.stored_whole(recipe)),
        "takes_turns": tiles.takes_turns(recipe),
        "divided": plan.own.queries.split > 1,  # some of the warps that share keys may weigh none
        "most_parts": MOST_PARTS,
        "least_part": LEAST_PART,
        "part_overhead": PART_OVERHEAD,
    }
    names = (*_OF_BACKWARD, "dq_sent") if tiles.halves_dq else _OF_BACKWARD
    return {
        "tiles": tiles,
        "constants": _constants("BackwardPlan", "The plan of dK and dV.", tiles, names, more),
        "memory": printed("BackwardMemory", "Where blocks of dK and dV have what.", "class T, bool atomic", layouts),
        "row_words": row_words(recipe).places("RowWords"),  # what each query carries
        # Blocks that add up dQ take one key tile after another.
        "persistent": recipe.one_pass and tiles.persistent,
        "shares_last": shares_last(recipe.variant, tiles),
        "most_units": MOST_UNITS,
    }


def query_code(plan: GpuPlan) -> PassCode:
    """The kernel of dQ, where it has one of its own."""
    element, tiles = plan.own.element, plan.own.queries
    layouts = {C_TYPES[element]: query_layout(plan.recipe, element, tiles)}
    comment = "Where the kernel of dQ has what, in bytes of shared memory."
    return {
        "constants": _constants("QueryPlan", "The plan of dQ, where it has a kernel of its own.", tiles),
        "memory": printed("QueryMemory", comment, "class T", layouts),
    }


def has_warpgroups(plan: GpuPlan) -> bool:
    """Whether warpgroups multiply in some pass."""
    return any(each.warpgroups for each in (plan.own.forward, plan.own.backward, plan.own.queries))


def warpgroup_products(plan: GpuPlan) -> WarpgroupProducts | None:
    """The products of warpgroups that the passes of a plan contain; None where it has none."""
    widths, head_dim, own = set[int](), plan.recipe.variant.head_dim, plan.own
    D, Dv = padded(head_dim.qk), padded(head_dim.v)
    forward, backward = own.forward, own.backward
    if forward.warpgroups:
        widths |= {forward.s_columns or forward.Bc, *_widths_of_o(Dv, own.element, forward)}
    if backward.halves_dq:
        of_dq = spans_of_half(D // backward.column_parts, own.element)
        of_dv = spans_of_half(Dv // backward.column_parts, own.element)
        of_keys = (*of_dq, *of_dv) if backward.shares_keys else (D, Dv)
        pieces = (min(64, span) for span in of_dq)  # where registers are few
        widths |= {backward.s_columns, *of_dq, *of_keys, *pieces}
    elif backward.warpgroups:
        widths |= {backward.s_columns, D, Dv, D // _dq_column_groups(plan, backward)}
    if own.queries.warpgroups:
        widths |= {own.queries.Bc, D}
    if not widths:
        return None
    spans = backward.halves_dq or (forward.warpgroups and (forward.split > 1 or Dv > MOST_COLUMNS))
    clusters = forward.cluster > 1 or backward.cluster > 1
    return WarpgroupProducts(tuple(sorted(width // 8 for width in widths)), own.element, spans, clusters)


def _widths_of_o(Dv: int, element: ElementType, tiles: Forward) -> tuple[int, ...]:
    """The columns of products with V."""
    if tiles.split > 1:
        return spans_of_half(Dv, element)
    return tuple(min(MOST_COLUMNS, Dv - first) for first in range(0, Dv, MOST_COLUMNS))


def _dq_column_groups(plan: GpuPlan, tiles: Backward) -> int:
    """Warpgroups that share a tile of dQ."""
    if not tiles.warpgroups or tiles.halves_dq:
        return 1
    return dq_column_groups(padded(plan.recipe.variant.head_dim.qk), tiles.Br, tiles.warps, plan.own.element)


def _constants(
    struct: str,
    comment: str,
    tiles: Schedule,
    names: tuple[str, ...] = (),
    more: Mapping[str, int] = MappingProxyType({}),
) -> dict[str, object]:
    """Those of one pass, as a struct template over the element type."""
    own = {name: getattr(tiles, name) for name in (*_OF_SCHEDULES, *names)}
    multiplying, copying = tiles.registers
    values = {"BR": tiles.Br, "BC": tiles.Bc, **own, "registers": multiplying, "producer_registers": copying, **more}
    members = tuple((name, str(int(value))) for name, value in values.items())
    return {"name": struct, "comment": comment, "members": members}
