"""Which rows are considered on Hopper, best first, and how they work: those of warpgroups, then as on every GPU."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from flashgen.analysis.constraints import COLUMN, ROW
from flashgen.analysis.levels import Level, level_of
from flashgen.analysis.pieces import block_sizes
from flashgen.analysis.variant import Variant
from flashgen.ir.types import ElementType
from flashgen.plan.recipe import FORCED, Decision, Rule
from flashgen.targets.gpu.architecture import Architecture
from flashgen.targets.gpu.layouts import forward_layout
from flashgen.targets.gpu.lengths import has_long_rows, has_whole_rows, keeps_as_far_as
from flashgen.targets.gpu.model import MOST_COLUMNS, padded, takes_turns
from flashgen.targets.gpu.prefetch import element_of, loads_of_pairs
from flashgen.targets.gpu.recipe import Recipe
from flashgen.targets.gpu.recipes import WARPS, Candidate, Considered, Recipes, divided, rows_for
from flashgen.targets.gpu.rules import LONG_TILES, SUMS_TELL
from flashgen.targets.gpu.score import Product, Weighing
from flashgen.targets.gpu.tables import AnyChoice, BackwardChoice, ForwardChoice, QueryChoice
from flashgen.targets.wgmma import rules, tables

PERSISTENT = "persistent"  # a choice of which tile comes next
_Common = tuple[Decision, ...]  # what multiplies, what copies, and who
_LONG_TILES = Decision.by("heads", "the longest tiles of several first", LONG_TILES)


def forward(recipe: Recipe, element: ElementType, on: Architecture) -> Considered[ForwardChoice]:
    """Warps that copy do so by tensor copies alone."""
    variant = recipe.variant
    if variant.kind.f8:
        return Considered(rows_for(variant, tables.HOPPER_F8_FORWARD), (rules.EIGHT_BITS,))
    others = WARPS.forward(recipe, element, on)
    if (
        element is ElementType.F32 or variant.kind.cached or variant.kind.backward_only
    ):  # few rows: a warpgroup has 64 at least
        return others
    if variant.listed is not None:
        rows = [replace(row, warpgroups=True, blocks=2) for row in others.rows]
        return others.after(rows, others.rules)
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
        rows = [row for row in rows if not row.takes_turns]
    if not _shares_copies(variant):
        rows = [row for row in rows if row.cluster == 1]
    return others.after(_with_staged_pairs(rows) if recipe.prefetch is not None else rows, whys)


def _starts_in_turn(recipe: Recipe) -> bool:
    """Whether three warpgroups that start products in turn are faster than three blocks."""
    variant, is_product = recipe.variant, isinstance(recipe.score, Product)
    plain = is_product and variant.spec.dropout is None and not variant.kind.ragged
    return plain and _padded_widths(variant) == (64, 64)


def _with_staged_pairs(rows: list[ForwardChoice]) -> list[ForwardChoice]:
    """A block that has its multiprocessor to itself stages what pairs read, the widest tile that leaves room for it."""
    staged = [replace(row, pairs_staged=row.producers > 0 and not row.takes_turns) for row in rows]
    return staged + [row for row in rows if row.producers]


def backward(recipe: Recipe, element: ElementType, on: Architecture) -> Considered[BackwardChoice]:
    """The same for dK and dV."""
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
    rows = [row for row in rows if not row.dq_in_halves or _divides_dq(recipe, element, row)]
    staged = [replace(row, pairs_staged=True) for row in rows if _has_copiers_of_pairs(recipe, element, row)]
    whole = [replace(row, weighed=row.Br) for row in rows if _weighs_whole(recipe, element, row)]
    return others.after([*staged, *whole, *rows], why)


def _has_copiers_of_pairs(recipe: Recipe, element: ElementType, row: BackwardChoice) -> bool:
    """Whether of the warps that copy one is left for elements of 16 bits that pairs read."""
    variant = recipe.variant
    if recipe.prefetch is None or element_of(variant, recipe.prefetch).bytes != 2 or not recipe.weighing.first:
        return False
    if not recipe.one_pass:  # kernels that leave dQ to another do without
        return False
    carriers = -(-row.Br // 32) if recipe.row_state else 1
    return row.producers > carriers and not row.dq_in_halves and _copies_tensors(variant, element)


def queries(recipe: Recipe, element: ElementType, on: Architecture) -> Considered[QueryChoice]:
    """The same for dQ."""
    variant, others = recipe.variant, WARPS.queries(recipe, element, on)
    if element is ElementType.F32 or variant.kind.forward_only or variant.kind.backward_only:
        return others
    table, why = tables.HOPPER_QUERIES, (rules.WARPGROUPS,)
    if has_small_blocks(variant):
        table, why = tables.HOPPER_BLOCK_QUERIES, (rules.SMALL_BLOCKS,)
    return others.after(rows_for(variant, table), why)


def complete(recipe: Recipe, element: ElementType, row: AnyChoice, on: Architecture) -> Candidate[Any]:
    """Who copies, and how, and whether blocks are persistent."""
    variant = recipe.variant
    if not row.warpgroups:
        return WARPS.complete(recipe, element, row, on)
    products = Decision.by("products", "of warpgroups (wgmma)", rules.WARPGROUPS)
    divides_dq = isinstance(row, BackwardChoice) and row.dq_in_halves
    divides = row.split > 1 and not divides_dq and not (isinstance(row, ForwardChoice) and row.takes_turns)
    if (
        isinstance(row, QueryChoice)
        or divides
        or variant.listed is not None
        or (variant.tangent is not None and not row.producers)
    ):
        alike = WARPS.complete(recipe, element, row, on)
        return Candidate(alike.row, (products, *alike.decisions[1:]))
    copies = _copies_tensors(variant, element)
    if copies:
        staging = Decision.by("staging", "tensor copies", rules.TENSOR_COPIES)
    else:
        staging = Decision("staging", "async copies", "rows are no whole numbers of 16 bytes", FORCED)
    has_producers = row.producers > 0
    roles = (f"{row.producers} producer warps", rules.PRODUCERS) if has_producers else ("all warps alike", rules.ALONE)
    common = (products, staging, Decision.by("roles", *roles))
    if isinstance(row, BackwardChoice) and divides_dq:
        return _with_halves_of_dq(recipe, row, common)
    if isinstance(row, ForwardChoice) and row.takes_turns:
        return _in_turns(recipe, row, common)
    heads = _heads(recipe) if has_producers else ()
    if isinstance(row, ForwardChoice):
        if variant.kind.f8:
            turned = Decision.by("V", "turned by a kernel of its own", rules.TURNED_AHEAD)
            by_position = _order_of_queries(copies=True, early=None)
            return Candidate(replace(row, tensor_copies=True), (*common, *by_position, turned, *heads))
        if variant.tangent is not None:
            return Candidate(replace(row, tensor_copies=True), (*common, *_order_with_tangents(recipe)))
        row, early = _early(recipe, element, replace(row, tensor_copies=copies), on)
        reads = [Decision.by("reads of pairs", "a tile ahead", rules.READ_AHEAD)] if recipe.prefetch is not None else []
        reads += [Decision.by("staging of pairs", "async copies", rules.STAGED_PAIRS)] if row.pairs_staged else []
        small = Decision.by("tanh", "a polynomial where a tile's arguments are small", rules.NEAR_SCORES)
        reads += [small] if recipe.score.small_tanh is not None else []
        told = Decision.by("maxima of rows", "where sums of weights ask for them", SUMS_TELL)
        reads += [told] if isinstance(recipe.score, Product) and recipe.score.maxima_by_sums else []
        return Candidate(row, (*common, *_order_of_queries(copies=copies, early=early), *heads, *reads))
    order = _order_of_keys(recipe, copies=copies, has_producers=has_producers)
    persistent = order.choice == PERSISTENT
    begins_next = persistent and recipe.longest_first
    few = recipe.weighing.first and row.blocks > 2
    reads = [Decision.by("reads of pairs", "before products are waited for", rules.READ_AHEAD)]
    reads = reads if recipe.prefetch is not None and recipe.weighing.first else []
    whole = _weighs_whole(recipe, element, row) and row.weighs_whole  # of a row that is pinned perhaps no more
    weighed = row.Br if whole else rules.WEIGHED_AT_A_TIME.limit if few else min(row.Br, 64)
    at_a_time = Decision.by("queries at a time", str(weighed), rules.WHOLE_TILES if whole else rules.WEIGHED_AT_A_TIME)
    staged = row.pairs_staged and _has_copiers_of_pairs(recipe, element, row)  # a pinned tile may leave none
    reads += [Decision.by("staging of pairs", "by warps that copy", rules.STAGED_PAIRS)] if staged else []
    overlap = [Decision.by("overlap", "dQ of the step before", rules.OVERLAP_BACKWARD)]
    overlap += [Decision.by("prologue", "beside the tile before", rules.NEXT_TILE_EARLY)] if begins_next else []
    own = replace(
        row, tensor_copies=copies, persistent=persistent, begins_next=begins_next, weighed=weighed, pairs_staged=staged
    )
    decisions = (*common, order, *overlap, _weights(recipe), at_a_time, *reads)
    return Candidate(own, (*decisions, *_turns(recipe, own)))


def _weights(recipe: Recipe) -> Decision:
    """When P is formed."""
    why = rules.WEIGHTS_FIRST if recipe.weighing.first else rules.ALL_AT_ONCE
    return Decision.by("weights", "P, then dP" if recipe.weighing.first else "S beside dP", why)


def _turns(recipe: Recipe, row: BackwardChoice) -> list[Decision]:
    """Where batch entries share a gradient of pairs."""
    in_turn = takes_turns(recipe, row)
    return [Decision.by("sums over the batch", "in turn, a tile at a time", rules.IN_TURN)] if in_turn else []


def _with_halves_of_dq(recipe: Recipe, row: BackwardChoice, common: _Common) -> Candidate[BackwardChoice]:
    """Two warpgroups that divide dQ: others copy for them, by tensor copies, and a block has one key tile."""
    sent = min(row.dq_sent or 0, padded(recipe.variant.head_dim.qk) // 2)
    divided = ("divided among 2 warpgroups", rules.SHARED_KEYS)
    if not row.shares_keys:
        divided = ("whole rows of dK and dV", rules.OWN_KEYS)
    exchanged = rules.SHARED_DQ if row.divides_keys else rules.EXCHANGE
    cluster = [Decision.by("cluster", f"{row.cluster} blocks", exchanged)] if row.cluster > 1 else []
    own = replace(row, tensor_copies=True, weighed=row.Br // 2, dq_sent=sent)
    return Candidate(
        own,
        (
            *common,
            Decision.by("head dimension", *divided),
            *cluster,
            _order_of_keys(recipe, copies=True, has_producers=True),
            *_heads(recipe),
            Decision.by("overlap", "dQ of the step before", rules.OVERLAP_BACKWARD),
            _weights(recipe),
            *_turns(recipe, own),
        ),
    )


def _heads(recipe: Recipe) -> tuple[Decision, ...]:
    """Which head's tile comes next, in blocks with warps that copy."""
    return (_LONG_TILES,) if recipe.in_groups else ()


def _in_turns(recipe: Recipe, row: ForwardChoice, common: _Common) -> Candidate[ForwardChoice]:
    """Two warpgroups that share rows, and weigh key tiles in turns; the blocks of a cluster share copies."""
    cluster = [Decision.by("cluster", f"{row.cluster} blocks", rules.CLUSTERS)] if row.cluster > 1 else []
    return Candidate(
        replace(row, tensor_copies=True, weighed=row.Bc),
        (
            *common,
            Decision.by("head dimension", "divided among 2 warpgroups", rules.TURNS),
            Decision.by("tile order", PERSISTENT, rules.PERSISTENT),
            *cluster,
            *_heads(recipe),
        ),
    )


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


def _divides_dq(recipe: Recipe, element: ElementType, row: BackwardChoice) -> bool:
    """Whether two warpgroups may have half of dQ's columns each, of whole instructions, and tensor copies for them.

    By whole rows, registers have to hold them beside scores that are weighed before dP is there, and by nothing more:
    with the derivative that P takes in products of 192/128 wait for each other (C7512).
    """
    variant, widths = recipe.variant, _padded_widths(recipe.variant)
    whole = not any(width % (32 * row.column_parts) for width in widths)
    if variant.kind.ragged or not _copies_tensors(variant, element) or not whole:
        return False
    if row.divides_keys:
        return _shares_dq(recipe)
    if row.cluster > 1:
        unpadded = widths == (variant.head_dim.qk, variant.head_dim.v)
        return unpadded and max(widths) <= MOST_COLUMNS * row.cluster
    return row.shares_keys or (sum(widths) <= rules.OWN_KEYS.limit and recipe.weighing is Weighing.FIRST)


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


def _early(
    recipe: Recipe, element: ElementType, row: ForwardChoice, on: Architecture
) -> tuple[ForwardChoice, Rule | None]:
    """Whether what the next query tile begins with comes while a block works on one, to how many places, and why."""
    two = replace(row, begins_next=True, q_places=2)
    if not row.tensor_copies:
        return row, None
    if not row.producers:
        return (two, rules.NEXT_TILE_EARLY) if recipe.longest_first else (row, None)
    if not _goes_over(recipe, row):
        return row, None
    if forward_layout(recipe, element, two).bytes <= on.block_bytes:
        return two, rules.NEXT_LIST_EARLY
    # Q has one place: in short rows the next tile would wait for it.
    return (replace(two, q_places=1), rules.NEXT_LIST_EARLY) if has_whole_rows(recipe.variant) else (row, None)


def _goes_over(recipe: Recipe, row: ForwardChoice) -> bool:
    """Whether warpgroups may begin a query tile beside the last product of the one before, where others copy.

    Not where blocks go from sequence to sequence or share copies, where others look at K, or where pairs read captured
    values: of registers none are left. Warpgroups that weigh in turns, tangents and 8 bits have loops of their own.
    """
    variant = recipe.variant
    own_loop = row.takes_turns or variant.tangent is not None or variant.kind.f8
    return not (
        own_loop or variant.kind.ragged or row.cluster > 1 or variant.uses_sqdist or _read_by_pairs(recipe.computed)
    )


def _read_by_pairs(computed: Variant) -> bool:
    """Whether each pair reads a captured value for its score, or to know whether it is kept."""
    return any(level_of(each) is Level.PAIR for each in loads_of_pairs(computed))


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


def _weighs_whole(recipe: Recipe, element: ElementType, row: BackwardChoice) -> bool:
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


def _shares_copies(variant: Variant) -> bool:
    """Whether the blocks of a cluster may share copies, and gain by it: each visits what rows of the other keep, too.

    In ragged batches a block asks for the next tile of some sequence by itself.
    """
    return not variant.kind.ragged and keeps_as_far_as(variant, rules.CLUSTERS.limit)
