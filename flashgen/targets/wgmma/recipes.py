"""Which rows are considered on Hopper, best first, and how they work: those of warpgroups, then as on every GPU."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, TypeVar

from flashgen.analysis.constraints import COLUMN, ROW
from flashgen.analysis.levels import Level, level_of
from flashgen.analysis.pieces import block_sizes
from flashgen.analysis.variant import Variant
from flashgen.ir.types import ElementType
from flashgen.plan.recipe import FORCED, Decision, Rule
from flashgen.targets.gpu.architecture import Architecture
from flashgen.targets.gpu.layouts import forward_layout
from flashgen.targets.gpu.lengths import has_long_rows, has_whole_rows, keeps_as_far_as
from flashgen.targets.gpu.model import BESIDE_SUMS, FINDING_IN_RANGES, MOST_COLUMNS, padded
from flashgen.targets.gpu.prefetch import element_of, loads_of_pairs
from flashgen.targets.gpu.recipe import Recipe
from flashgen.targets.gpu.recipes import WARPS, Candidate, Considered, Recipes, alike, divided, rows_for
from flashgen.targets.gpu.rules import LONG_TILES, SUMS_TELL
from flashgen.targets.gpu.schedules import (
    Backward,
    ByBlocks,
    DividedWarpgroups,
    Forward,
    OwnKeys,
    PingPong,
    ProducerKeys,
    Producers,
    Queries,
    Schedule,
    SelfLoading,
    SelfLoadingKeys,
    SharedDq,
    SharedKeys,
)
from flashgen.targets.gpu.score import Product, Weighing
from flashgen.targets.wgmma import rules, tables

PERSISTENT = "persistent"  # a choice of which tile comes next
Served = TypeVar("Served", Producers, PingPong)
_LONG_TILES = Decision.by("heads", "the longest tiles of several first", LONG_TILES)


def forward(recipe: Recipe, element: ElementType, on: Architecture) -> Considered[Forward]:
    """Warps that copy do so by tensor copies alone."""
    variant = recipe.variant
    if variant.kind.f8:
        return Considered(rows_for(variant, tables.HOPPER_F8_FORWARD), (rules.EIGHT_BITS,))
    others = WARPS.forward(recipe, element, on)
    few = variant.kind.cached or variant.kind.backward_only  # rows: a warpgroup has 64 at least
    if few or element is ElementType.F32:
        return others
    if variant.listed is not None:
        by_blocks = [ByBlocks(row.Br, row.Bc, row.warps, warpgroups=True, blocks=2) for row in others.rows]
        return others.after([*by_blocks], others.rules)
    if variant.tangent is not None:
        rows = rows_for(variant, tables.HOPPER_JVP)
        rows = [row for row in rows if _copies_tensors(variant, element) or not row.producers]
        return others.after(rows, (rules.WARPGROUPS,))
    table, why = tables.HOPPER_SHORT_FORWARD, rules.SHORT_ROWS
    if has_whole_rows(variant):
        table, why = tables.HOPPER_WHOLE_FORWARD, rules.WHOLE_ROWS
    elif has_long_rows(variant):
        table, why = tables.HOPPER_FORWARD, rules.LONG_ROWS
    elif has_small_blocks(variant):
        table, why = tables.HOPPER_BLOCK_FORWARD, rules.SMALL_BLOCKS
    whys: tuple[Rule, ...] = (why,)
    rows = divided(rows_for(variant, table), variant.head_dim.v)
    if has_long_rows(variant) and (variant.uses_sqdist or _starts_in_turn(recipe)):
        rows.sort(key=lambda row: not row.producers)
        whys += (rules.NORMS_OF_KEYS if variant.uses_sqdist else rules.PRODUCTS_IN_TURN,)
    if not _copies_tensors(variant, element):
        rows = [row for row in rows if not row.producers]
    if not _weighs_in_turns(recipe):
        rows = [row for row in rows if not row.ping_pong]
    # In ragged batches a block asks for the next tile of some sequence by itself. Elsewhere a cluster gains by shared
    # copies where each of its blocks visits what rows of the other keep, too.
    if variant.kind.ragged or not keeps_as_far_as(variant, rules.CLUSTERS.limit):
        rows = [row for row in rows if row.cluster == 1]
    return others.after(_with_staged_pairs(rows) if recipe.prefetch is not None else rows, whys)


def _starts_in_turn(recipe: Recipe) -> bool:
    """Whether three warpgroups that start products in turn are faster than three blocks."""
    variant = recipe.variant
    plain = isinstance(recipe.score, Product) and variant.spec.dropout is None
    return plain and _padded_widths(variant) == (64, 64)


def _with_staged_pairs(rows: list[Forward]) -> list[Forward]:
    """A block that has its multiprocessor to itself stages what pairs read, the widest tile that leaves room for it."""
    staged = [replace(row, pairs_staged=True) if isinstance(row, Producers) else row for row in rows]
    return staged + [row for row in rows if row.producers]


def backward(recipe: Recipe, element: ElementType, on: Architecture) -> Considered[Backward]:
    """Rows for dK and dV."""
    variant, others = recipe.variant, WARPS.backward(recipe, element, on)
    is_of_warps = variant.kind.forward_only or variant.kind.backward_only
    if element is ElementType.F32 or variant.uses_sqdist or is_of_warps:
        return others
    table, why = tables.HOPPER_SHORT_BACKWARD, (rules.SHORT_ROWS,)
    if has_long_rows(variant):
        table, why = tables.HOPPER_BACKWARD, (rules.LONG_ROWS,)
    elif has_small_blocks(variant):
        table, why = tables.HOPPER_BLOCK_BACKWARD, (rules.SMALL_BLOCKS,)
    rows = rows_for(variant, table)
    rows = [row for row in rows if not isinstance(row, OwnKeys) or _divides_dq(recipe, element, row)]
    served = [row for row in rows if isinstance(row, ProducerKeys)]
    staged = [replace(row, pairs_staged=True) for row in served if _has_copiers_of_pairs(recipe, element, row)]
    whole = [replace(row, s_columns=row.Br) for row in served if _weighs_whole(recipe, element, row)]
    return others.after([*staged, *whole, *rows], why)


def _has_copiers_of_pairs(recipe: Recipe, element: ElementType, row: Backward) -> bool:
    """Whether of the warps that copy one is left for elements of 16 bits that pairs read."""
    variant = recipe.variant
    if recipe.prefetch is None or element_of(variant, recipe.prefetch).bytes != 2 or not recipe.weighing.first:
        return False
    if not recipe.one_pass:  # kernels that leave dQ to another do without
        return False
    carriers = -(-row.Br // 32) if recipe.row_state else 1
    return row.producers > carriers and _copies_tensors(variant, element)


def queries(recipe: Recipe, element: ElementType, on: Architecture) -> Considered[Queries]:
    """Rows for dQ."""
    variant, others = recipe.variant, WARPS.queries(recipe, element, on)
    if element is ElementType.F32 or variant.kind.forward_only or variant.kind.backward_only:
        return others
    table, why = tables.HOPPER_QUERIES, (rules.WARPGROUPS,)
    if has_small_blocks(variant):
        table, why = tables.HOPPER_BLOCK_QUERIES, (rules.SMALL_BLOCKS,)
    return others.after(rows_for(variant, table), why)


def complete(recipe: Recipe, element: ElementType, row: Schedule, on: Architecture) -> Candidate[Any]:
    """Who copies, and how, and whether blocks are persistent."""
    products = Decision.by("products", "of warpgroups (wgmma)", rules.WARPGROUPS)
    if not row.warpgroups:
        return WARPS.complete(recipe, element, row, on)
    is_alone = isinstance(row, SelfLoading) and recipe.variant.tangent is not None
    if is_alone or isinstance(row, ByBlocks | DividedWarpgroups | Queries):
        return Candidate(row, (products, *alike(row)))
    copies = _copies_tensors(recipe.variant, element)
    if copies:
        staging = Decision.by("staging", "tensor copies", rules.TENSOR_COPIES)
    else:
        staging = Decision("staging", "async copies", "rows are no whole numbers of 16 bytes", FORCED)
    roles = (f"{row.producers} producer warps", rules.PRODUCERS) if row.producers else ("all warps alike", rules.ALONE)
    own: Schedule = row
    decisions: tuple[Decision, ...] = ()
    match row:
        case PingPong():
            own, decisions = _finding(recipe, element, row), _in_turns(recipe, row)
        case Producers() | SelfLoading():
            own, decisions = _query_tiles(recipe, element, row, on, copies=copies)
        case OwnKeys():
            own, decisions = _with_halves_of_dq(recipe, row)
        case ProducerKeys() | SelfLoadingKeys():
            own, decisions = _key_tiles(recipe, element, row, copies=copies)
    return Candidate(own, (products, staging, Decision.by("roles", *roles), *decisions))


def _query_tiles(
    recipe: Recipe, element: ElementType, row: Producers | SelfLoading, on: Architecture, *, copies: bool
) -> tuple[Producers | SelfLoading, tuple[Decision, ...]]:
    """Which query tile comes next, and what is under way before it does."""
    early, heads = None, _heads(recipe) if row.producers else ()
    if isinstance(row, SelfLoading):
        row = replace(row, tensor_copies=copies, prefetches_next=copies and recipe.longest_first)
        early = rules.NEXT_TILE_EARLY if row.prefetches_next else None
    else:
        row = _finding(recipe, element, row)
        if recipe.variant.kind.f8:
            turned = Decision.by("V", "turned by a kernel of its own", rules.TURNED_AHEAD)
            return row, (*_order_of_queries(copies=True, early=None), turned, *heads)
        if recipe.variant.tangent is not None:
            return row, _order_with_tangents(recipe)
        row = _overlapping(recipe, element, row, on)
        early = rules.NEXT_LIST_EARLY if row.overlaps_next else None
    reads = [Decision.by("reads of pairs", "a tile ahead", rules.READ_AHEAD)] if recipe.prefetch is not None else []
    reads += [Decision.by("staging of pairs", "async copies", rules.STAGED_PAIRS)] if row.pairs_staged else []
    small = Decision.by("tanh", "a polynomial where a tile's arguments are small", rules.NEAR_SCORES)
    reads += [small] if recipe.score.small_tanh is not None else []
    told = Decision.by("maxima of rows", "where sums of weights ask for them", SUMS_TELL)
    reads += [told] if row.maxima_by_sums(recipe) else []
    return row, (*_order_of_queries(copies=copies, early=early), *heads, *reads)


def _key_tiles(
    recipe: Recipe, element: ElementType, row: ProducerKeys | SelfLoadingKeys, *, copies: bool
) -> tuple[ProducerKeys | SelfLoadingKeys, tuple[Decision, ...]]:
    """Which key tile comes next, and how many queries warps weigh at a time."""
    order = _order_of_keys(recipe, copies=copies, has_producers=row.producers > 0)
    persistent = order.choice == PERSISTENT
    few = recipe.weighing.first and row.blocks > 2
    reads = [Decision.by("reads of pairs", "before products are waited for", rules.READ_AHEAD)]
    reads = reads if recipe.prefetch is not None and recipe.weighing.first else []
    whole = _weighs_whole(recipe, element, row) and row.weighs_whole  # of a row that is pinned perhaps no more
    s_columns = row.Br if whole else rules.WEIGHED_AT_A_TIME.limit if few else min(row.Br, 64)
    why = rules.WHOLE_TILES if whole else rules.WEIGHED_AT_A_TIME
    overlap = [Decision.by("overlap", "dQ of the step before", rules.OVERLAP_BACKWARD)]
    own = replace(row, tensor_copies=copies, persistent=persistent, s_columns=s_columns)
    if isinstance(own, SelfLoadingKeys):
        own = replace(own, prefetches_next=persistent and recipe.longest_first)
        overlap += [Decision.by("prologue", "beside the tile before", rules.NEXT_TILE_EARLY)] * own.prefetches_next
    elif own.pairs_staged:  # a pinned tile may leave no warp for it
        own = replace(own, pairs_staged=_has_copiers_of_pairs(recipe, element, own))
        reads += [Decision.by("staging of pairs", "by warps that copy", rules.STAGED_PAIRS)] * own.pairs_staged
    at_a_time = Decision.by("queries at a time", str(s_columns), why)
    return own, (order, *overlap, _kept(recipe), at_a_time, *reads, *_turns(recipe, own))


def _kept(recipe: Recipe) -> Decision:
    """Which of the products of a step are there together."""
    if recipe.weighing.first:
        return Decision.by("weights", "P, then dP", rules.WEIGHTS_FIRST)
    return Decision.by("weights", "S beside dP", rules.ALL_AT_ONCE)


def _turns(recipe: Recipe, row: Backward) -> list[Decision]:
    """Where batch entries share a gradient of pairs."""
    in_turn = row.takes_turns(recipe)
    return [Decision.by("sums over the batch", "in turn, a tile at a time", rules.IN_TURN)] if in_turn else []


def _with_halves_of_dq(recipe: Recipe, row: OwnKeys) -> tuple[OwnKeys, tuple[Decision, ...]]:
    """Two warpgroups that divide dQ: others copy for them, by tensor copies, and a block has one key tile."""
    divided = ("divided among 2 warpgroups", rules.SHARED_KEYS)
    if not row.shares_keys:
        divided = ("whole rows of dK and dV", rules.OWN_KEYS)
    exchanged = rules.SHARED_DQ if row.divides_keys else rules.EXCHANGE
    cluster = [Decision.by("cluster", f"{row.cluster} blocks", exchanged)] if row.cluster > 1 else []
    own = replace(row, dq_sent=min(row.dq_sent, padded(recipe.variant.head_dim.qk) // 2))
    return own, (
        Decision.by("head dimension", *divided),
        *cluster,
        _order_of_keys(recipe, copies=True, has_producers=True),
        *_heads(recipe),
        Decision.by("overlap", "dQ of the step before", rules.OVERLAP_BACKWARD),
        _kept(recipe),
        *_turns(recipe, own),
    )


def _heads(recipe: Recipe) -> tuple[Decision, ...]:
    """Which head's tile comes next, in blocks with warps that copy."""
    return (_LONG_TILES,) if recipe.in_groups else ()


def _in_turns(recipe: Recipe, row: PingPong) -> tuple[Decision, ...]:
    """Two warpgroups that share rows, and weigh key tiles in turns; the blocks of a cluster share copies."""
    cluster = [Decision.by("cluster", f"{row.cluster} blocks", rules.CLUSTERS)] if row.cluster > 1 else []
    return (
        Decision.by("head dimension", "divided among 2 warpgroups", rules.TURNS),
        Decision.by("tile order", PERSISTENT, rules.PERSISTENT),
        *cluster,
        *_heads(recipe),
    )


def _finding(recipe: Recipe, element: ElementType, row: Served) -> Served:
    """With the registers that finding visits takes, if warps that multiply can spare them."""
    in_ranges = replace(row, least_registers=FINDING_IN_RANGES)
    if not recipe.observed_rows or not recipe.observed_columns:
        return row
    needed = row.accumulators(recipe.variant, element) + BESIDE_SUMS
    return in_ranges if in_ranges.registers[0] >= needed else row


RECIPES = Recipes(forward, backward, queries, complete)


def takes_f8(variant: Variant) -> bool:
    """Whether kernels multiply q, k and v of 8 bits: rows are whole products of 32, and nobody asks for norms."""
    widths = (variant.head_dim.qk, variant.head_dim.v)
    return not variant.uses_sqdist and all(width % 32 == 0 and width <= 256 for width in widths)


def _copies_tensors(variant: Variant, element: ElementType) -> bool:
    """Rows are whole numbers of 16 bytes."""
    widths = (variant.head_dim.qk, variant.head_dim.v)
    return all(width * element.bytes % 16 == 0 for width in widths)


def _padded_widths(variant: Variant) -> tuple[int, int]:
    return padded(variant.head_dim.qk), padded(variant.head_dim.v)


def _divides_dq(recipe: Recipe, element: ElementType, row: Backward) -> bool:
    """Whether two warpgroups may have half of dQ's columns each, of whole instructions, and tensor copies for them.

    By whole rows, registers have to hold them beside scores that are weighed before dP is there, and by nothing more:
    with the derivative that P takes in products of 192/128 wait for each other (C7512).
    """
    variant, widths = recipe.variant, _padded_widths(recipe.variant)
    whole = not any(width % (32 * row.column_parts) for width in widths)
    if variant.kind.ragged or not _copies_tensors(variant, element) or not whole:
        return False
    match row:
        case SharedDq():
            return _shares_dq(recipe)
        case SharedKeys():
            unpadded = widths == (variant.head_dim.qk, variant.head_dim.v)
            return row.cluster == 1 or (unpadded and max(widths) <= MOST_COLUMNS * row.cluster)
    return sum(widths) <= rules.OWN_KEYS.limit and recipe.weighing is Weighing.FIRST


def _shares_dq(recipe: Recipe) -> bool:
    """Whether two blocks may exchange dS and have half of dQ's columns each, a whole panel for each warpgroup.

    P is formed while dP is multiplied, and nobody asks for gradients beside.
    """
    variant, simple = recipe.variant, recipe.weighing.first and not recipe.variant.gradients
    return simple and variant.head_dim.qk == 256 and padded(variant.head_dim.v) == variant.head_dim.v


def _weighs_in_turns(recipe: Recipe) -> bool:
    """Whether two warpgroups may weigh key tiles in turns, each with whole panels of V's columns; K has two or more.

    Weights are counted from maxima, which each hands the other; nobody takes norms, or what a mask reads by column.
    """
    variant = recipe.variant
    plain = variant.weights.form.exponential and not variant.uses_sqdist and not recipe.observed_columns
    return plain and padded(variant.head_dim.v) % 128 == 0 and padded(variant.head_dim.qk) > 64


def _overlapping(recipe: Recipe, element: ElementType, row: Producers, on: Architecture) -> Producers:
    """As warpgroups may begin a query tile beside the last product of the one before, with one or two places for Q.

    Not where blocks go from sequence to sequence, where others look at K, or where pairs read captured values: of
    registers none are left.
    """
    variant = recipe.variant
    read_by_pairs = any(level_of(each) is Level.PAIR for each in loads_of_pairs(recipe.computed))
    if variant.kind.ragged or variant.uses_sqdist or read_by_pairs:
        return row
    two = replace(row, overlaps_next=True, q_places=2)
    if forward_layout(recipe, element, two).bytes <= on.block_bytes:
        return two
    # Q has one place: in short rows the next tile would wait for it.
    return replace(two, q_places=1) if has_whole_rows(variant) else row


def _order_of_queries(*, copies: bool, early: Rule | None) -> tuple[Decision, ...]:
    overlap = Decision.by("overlap", "weights of one tile beside O of the one before", rules.OVERLAP_FORWARD)
    if not copies:
        return Decision("tile order", "one tile a block", "nobody copies ahead without tensor copies", FORCED), overlap
    order = Decision.by("tile order", PERSISTENT, rules.PERSISTENT)
    if early is None:
        return order, overlap
    return order, overlap, Decision.by("prologue", "beside the tile before", early)


def _order_with_tangents(recipe: Recipe) -> tuple[Decision, ...]:
    if recipe.weighing.first:
        overlap = ("exponentials beside tS, O beside S", rules.OVERLAP_TANGENTS)
    else:
        overlap = ("O beside S", rules.TANGENTS_OF_PRODUCTS)
    return Decision.by("tile order", PERSISTENT, rules.PERSISTENT), *_heads(recipe), Decision.by("overlap", *overlap)


def _order_of_keys(recipe: Recipe, *, copies: bool, has_producers: bool) -> Decision:
    if not copies:
        return Decision("tile order", "one tile a block", "nobody copies ahead without tensor copies", FORCED)
    if recipe.variant.kind.ragged:
        ragged = (PERSISTENT, rules.KEYS_OF_SEQUENCES) if has_producers else ("one tile a block", rules.SHORT_SEQUENCES)
        return Decision.by("tile order", *ragged)
    if has_producers:
        divides = _divides_last_keys(recipe)
        order = (PERSISTENT, rules.LAST_KEYS) if divides else ("one tile a block", rules.KEYS_OF_PRODUCERS)
        return Decision.by("tile order", *order)
    if recipe.observed_rows or recipe.observed_columns:
        return Decision.by("tile order", "one tile a block", rules.KEYS_OF_DOCUMENTS)
    return Decision.by("tile order", PERSISTENT, rules.PERSISTENT_KEYS)


def _weighs_whole(recipe: Recipe, element: ElementType, row: Backward) -> bool:
    """Whether registers may hold S and dP of a whole tile of 128 queries beside dK and dV.

    Then they hold nothing else: scores are products but for a factor, and nobody asks for gradients beside.
    """
    variant = recipe.variant
    simple = recipe.one_pass and recipe.weighing.first and isinstance(recipe.score, Product)
    alone = not recipe.key_gradients and recipe.prefetch is None
    narrow = sum(_padded_widths(variant)) <= rules.WHOLE_TILES.limit
    copied = row.producers > 0 and _copies_tensors(variant, element)
    return row.Br == 128 and copied and narrow and simple and alone


def _divides_last_keys(recipe: Recipe) -> bool:
    """Whether blocks with warps that copy are persistent, and several of them share each of the last key tiles.

    Where key tiles take equally long and dK and dV are narrow; gradients of pairs are neither stored nor added in turn.
    """
    alone = not (recipe.has_lists or recipe.stored or recipe.in_turn or recipe.observed_rows)
    narrow = sum(_padded_widths(recipe.variant)) <= rules.LAST_KEYS.limit
    return recipe.one_pass and has_whole_rows(recipe.variant) and alone and narrow


def has_small_blocks(variant: Variant) -> bool:
    """Whether the mask is drawn in blocks of fewer positions than a wide tile has."""
    return any(size < rules.SMALL_BLOCKS.limit for axis in (ROW, COLUMN) for size in block_sizes(variant.keep, axis))
