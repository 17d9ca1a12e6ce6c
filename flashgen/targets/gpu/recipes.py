"""Stage 2, decide for GPUs: which rows of the tables are considered, best first, and how each of them works.

In: a ``Recipe``, an element type, an architecture. Out: ``Candidate``s, each with the reasons of its
choices; where the schedule pins a tile, those that have it. What stands here is for products of one warp (mma.sync),
which every GPU has; a family of more puts its own before them (``Recipes``).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Generic, TypeAlias

from flashgen.analysis.factors import factor_of_dot
from flashgen.analysis.variant import Variant
from flashgen.ir.types import ElementType
from flashgen.plan.recipe import FORCED, Decision, Rule
from flashgen.targets.gpu import rules, tables
from flashgen.targets.gpu.architecture import Architecture
from flashgen.targets.gpu.layouts import forward_layout
from flashgen.targets.gpu.model import element_of_keys, padded
from flashgen.targets.gpu.recipe import Recipe
from flashgen.targets.gpu.schedules import (
    MOST_WARPS,
    Backward,
    ByBlocks,
    Forward,
    KeyWarps,
    ProducerKeys,
    Producers,
    Queries,
    QueryWarps,
    Schedule,
    SelfLoading,
    SelfLoadingKeys,
    Warps,
)
from flashgen.targets.gpu.tables import S, Table

_FEW_ROWS = (16, 32)


@dataclass(frozen=True)
class Considered(Generic[S]):
    """Rows of a table, best first, and the rules that put them in this order."""

    rows: list[S]
    rules: tuple[Rule, ...]

    def after(self, rows: list[S], rules: tuple[Rule, ...]) -> Considered[S]:
        """These rows behind other ones, if there are some, which other rules put first."""
        return Considered(rows + self.rows, rules) if rows else self


@dataclass(frozen=True)
class Candidate(Generic[S]):
    """A row with all that is decided of it, and why."""

    row: S
    decisions: tuple[Decision, ...]


Completes: TypeAlias = Callable[[Recipe, ElementType, Any, Architecture], Candidate[Any]]


@dataclass(frozen=True)
class Recipes:
    """What a family considers for each pass, before the schedule pins any; ``complete`` decides how a row works."""

    forward: Callable[[Recipe, ElementType, Architecture], Considered[Forward]]
    backward: Callable[[Recipe, ElementType, Architecture], Considered[Backward]]
    queries: Callable[[Recipe, ElementType, Architecture], Considered[Queries]]
    complete: Completes


def is_plain(variant: Variant) -> bool:
    """Whether a pair's weight takes no more than a product and an exponential, and its mask a comparison or two."""
    plain_score = variant.weights.form.exponential and factor_of_dot(variant.score) is not None
    return plain_score and variant.spec.dropout is None and has_light_mask(variant)


def has_light_mask(variant: Variant) -> bool:
    """Whether the mask needs few registers: bounds on i - j do, divisions and captured tensors do not."""
    return variant.keep.size <= rules.LIGHT_MASK.limit


def forward(recipe: Recipe, element: ElementType, on: Architecture) -> Considered[Forward]:
    """The table's; scores that are more than scaled products, and dropout, leave no registers for wide tiles."""
    variant = recipe.variant
    if variant.kind.cached:
        table = tables.SINGLE_CACHED if element is ElementType.F32 else tables.HALF_CACHED
        return Considered(divided(rows_for(variant, table), variant.head_dim.v), (rules.FEW_ROWS,))
    if variant.listed is not None:
        return Considered([ByBlocks(16 * warps, variant.listed.block, warps) for warps in (8, 4)], (rules.BY_BLOCKS,))
    if variant.tangent is not None:
        table = tables.SINGLE_JVP if element is ElementType.F32 else tables.HALF_JVP
        return Considered(rows_for(variant, table), (rules.WARPS,))
    if element is ElementType.F32:
        return Considered(rows_for(variant, tables.SINGLE_FORWARD), (rules.WARPS,))
    rows, why = rows_for(variant, tables.HALF_FORWARD), [rules.WARPS]
    if not is_plain(variant) or on.capability < 80:  # without cp.async copies take registers, too
        most, Dv = rules.NARROW_SCORES.limit, padded(variant.head_dim.v)  # of registers for scores and O
        rows = [row for row in rows if row.Br * (row.Bc + Dv) // (32 * row.warps) <= most] or rows
        why.append(rules.NARROW_SCORES)
    if on.sm_bytes <= rules.TWO_BLOCKS.limit and 64 < variant.head_dim.qk <= 128:
        rows.sort(key=lambda row: row.Bc != 32 or row.Br != 128)
        why.append(rules.TWO_BLOCKS)
    return Considered(rows, tuple(why))


def backward(recipe: Recipe, element: ElementType, on: Architecture) -> Considered[Backward]:  # noqa: ARG001 - see above
    """The table's; masks that take registers go where a warp has half of a head dimension."""
    variant = recipe.variant
    if variant.tangent is not None:
        table = tables.SINGLE_JVP_BACKWARD if element is ElementType.F32 else tables.HALF_JVP_BACKWARD
        return Considered(rows_for(variant, table), (rules.WARPS,))
    rows = rows_for(variant, tables.SINGLE_BACKWARD if element is ElementType.F32 else tables.HALF_BACKWARD)
    rows = divided(rows, variant.head_dim.qk, variant.head_dim.v)
    if variant.head_dim.qk <= rules.DIVIDED_HEADS.limit or has_light_mask(variant):
        return Considered(rows, (rules.WARPS,))
    rows.sort(key=lambda row: row.split == 1)
    return Considered(rows, (rules.WARPS, rules.DIVIDED_HEADS, rules.LIGHT_MASK))


def queries(recipe: Recipe, element: ElementType, on: Architecture) -> Considered[Queries]:  # noqa: ARG001 - as the others
    """The table's."""
    variant, single = recipe.variant, element is ElementType.F32
    if variant.tangent is not None:
        table = tables.SINGLE_JVP_QUERIES if single else tables.HALF_JVP_QUERIES
        return Considered(rows_for(variant, table), (rules.WARPS,))
    return Considered(rows_for(variant, tables.SINGLE_QUERIES if single else tables.HALF_QUERIES), (rules.WARPS,))


def rows_for(variant: Variant, table: Table[S]) -> list[S]:
    """The rows of a table for the head dimension."""
    larger = max(variant.head_dim.qk, variant.head_dim.v)
    return list(next((rows for most, rows in table if larger <= most), ()))


def divided(rows: list[S], *widths: int) -> list[S]:
    """Those whose warps share rows in parts of one length."""
    return [row for row in rows if all(padded(width) % (16 * row.split) == 0 for width in widths)]


def complete(recipe: Recipe, element: ElementType, row: Schedule, on: Architecture) -> Candidate[Any]:  # noqa: ARG001
    """How products of one warp go with a row: warps are alike, copy for themselves, and a block has one tile."""
    few = "a cache has few rows of queries, a warpgroup 64"
    why = few if recipe.variant.kind.cached else "no row of warpgroups goes with it"
    return Candidate(
        _weighing(row, element), (Decision("products", "of one warp (mma.sync)", why, FORCED), *alike(row))
    )


def alike(row: Schedule) -> tuple[Decision, ...]:
    """What is decided where warps are alike, copy for themselves, and a block has one tile."""
    decisions = (
        Decision.by("staging", "async copies", rules.COPIES_BY_ALL),
        Decision.by("roles", "all warps alike", rules.COPIES_BY_ALL),
        Decision.by("tile order", "one tile a block", rules.ONE_TILE_A_BLOCK),
    )
    if row.split <= (2 if isinstance(row, Backward) else 1):
        return decisions
    sharers = f"{row.split} {'warpgroups' if row.warpgroups else 'warps'}"
    return (*decisions, Decision.by("head dimension", f"divided among {sharers}", rules.SHARED_ROWS))


def of_rows(recipe: Recipe, element: ElementType, own: Forward, sram_bytes: int, rows: int) -> Forward:
    """Over caches: the tiles of a call whose key/value heads have so many rows, no larger than the planner's own.

    At most four are beside these, because each is another compilation.
    """

    def blocks(tiles: Forward) -> int:
        """How many share a multiprocessor's memory."""
        return sram_bytes // forward_layout(recipe, element, tiles).bytes

    variant, Br = recipe.variant, next((each for each in _FEW_ROWS if rows <= each < own.Br), own.Br)
    if Br == own.Br:
        return own
    sharers = own.warps * 16 // Br
    parts = (padded(variant.head_dim.v), own.Bc)
    is_narrow = element.bytes == 2 and variant.head_dim.qk <= rules.FEW_ROWS_SHARED.limit and own.split == 1
    if is_narrow and not any(count % (16 * sharers) for count in parts):
        shared = _weighing(Warps(Br, own.Bc, own.warps, own.stages, split=sharers), element)
        deeper = replace(shared, stages=own.stages + 1)
        more = _weighing(replace(shared, Bc=2 * own.Bc), element) if variant.kind.f8_cached else deeper
        return more if blocks(more) >= 2 else shared
    tiles = replace(own, Br=Br, warps=Br // 16 * own.split)
    alone = _weighing(replace(tiles, Bc=2 * own.Bc, stages=1), element)
    if own.split > 1 and own.stages == rules.WIDE_ROWS.limit and blocks(alone):
        return alone
    while tiles.Bc > 16 and blocks(tiles) * tiles.warps < rules.WARPS_OF_A_MULTIPROCESSOR.limit:
        tiles = _weighing(replace(tiles, Bc=tiles.Bc // 2), element)
    return tiles


def _weighing(row: S, element: ElementType) -> S:
    """With the columns of S that each of the warps that share rows, or keys, has: whole operands.

    Those of 16 bits come in pairs of 8 columns.
    """
    least = 8 if element is ElementType.F32 else 16
    match row:
        case KeyWarps():
            return replace(row, s_columns=max(row.Br // row.split, least))
        case Warps() | QueryWarps() if row.split > 1:
            return replace(row, s_columns=max(row.Bc // row.split, least))
    return row


# Products of one warp.
WARPS = Recipes(forward, backward, queries, complete)

# -- candidates, with what the schedule pins ---------------------------------------------------------------------------


def candidates(
    name: str, recipe: Recipe, element: ElementType, on: Architecture, recipes: Recipes = WARPS
) -> list[Candidate[Any]]:
    """Those of a pass, or of ``queries``, of which the schedule pins nothing; none where no row has what it pins."""
    considered: Considered[Any] = getattr(recipes, name)(recipe, element, on)
    before = {"forward": "", "backward": "backward_"}.get(name)
    wanted = () if before is None else ("Br", "Bc", "warps", "stages")
    pins = {each: getattr(recipe.variant.spec.schedule, f"{before}{each}") for each in wanted}
    pins = {each: pin for each, pin in pins.items() if pin is not None}
    why = tuple(Decision.by("tiles", rule.name, rule) for rule in considered.rules)
    if pins:
        why = (Decision("tiles", "the spec's", "the schedule pins them", FORCED),)
    rows = _pinned(considered.rows, pins) if pins else considered.rows
    found = (recipes.complete(recipe, element, row, on) for row in rows if _copies_rows(recipe.variant, element, row))
    return [Candidate(each.row, (*each.decisions, *why)) for each in found]


def _copies_rows(variant: Variant, element: ElementType, row: Schedule) -> bool:
    """Whether the threads that copy for themselves divide into groups that have a row each, of a power of two."""
    threads = 32 * row.warps
    if row.warpgroups:
        return True
    element = element_of_keys(variant, element)
    chunks = (padded(width) * element.bytes // 16 for width in (variant.head_dim.qk, variant.head_dim.v))
    return all(threads % (1 << (min(count, threads) - 1).bit_length()) == 0 for count in chunks)


def _pinned(rows: list[Schedule], pins: Mapping[str, int]) -> list[Schedule]:
    """The candidates with what the schedule pins; warps follow the tile where they are left free."""
    found: dict[Schedule, None] = {}

    def distance(row: Schedule) -> tuple[bool, int]:
        """Of each kind what is like the pinned tile first: whether others copy depends on how wide it is."""
        return not row.warpgroups, sum(pin != getattr(row, name) for name, pin in pins.items())

    for row in sorted(rows, key=distance):
        counts = sorted({row.warps, *range(1, MOST_WARPS + 1)}, key=lambda n: abs(n - row.warps))
        every: Any = ({"warps": count, **pins} for count in counts)
        tiles = (_alone(replace(row, **each)) for each in every)
        found |= dict.fromkeys(itertools.islice((each for each in tiles if each.works), 1))
    return list(found)


def _alone(tile: Schedule) -> Schedule:
    """A warpgroup alone copies for itself, beside another block: who copies for it would be left too many registers."""
    shape = (tile.Br, tile.Bc, tile.warps, tile.stages)
    match tile:
        case Producers() if tile.warps <= tile.producers:
            return SelfLoading(*shape, blocks=2, pairs_staged=tile.pairs_staged)
        case ProducerKeys() if tile.warps <= tile.producers:
            return SelfLoadingKeys(*shape, blocks=2)
    return tile
