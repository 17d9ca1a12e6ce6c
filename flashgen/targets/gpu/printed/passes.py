"""What kernels a source has of each pass, by the tiles of its element types: their constants, memory, and kinds.

In: the plan of a variant. Out: a ``ForwardCode``, a ``BackwardCode`` and a
``QueryCode``: ``forward``, ``backward`` and ``queries`` in templates, and ``forward_ways``. A source holds the kernels
of several element types: what only some of them do is compiled for these alone, by the constants of their structs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from flashgen.ir.types import ElementType
from flashgen.targets.gpu.last_keys import LEAST_PART, MOST_PARTS, MOST_UNITS, PART_OVERHEAD, shares_last
from flashgen.targets.gpu.layout import Printed, printed
from flashgen.targets.gpu.layouts import backward_layout, forward_layout, query_layout
from flashgen.targets.gpu.model import (
    KEYS_OF_SUMS,
    MEASURERS,
    MERGED_WEIGHTS,
    MERGING_THREADS,
    MOST_COLUMNS,
    finds_selected,
    merging_shares,
    merging_warps,
    padded,
    row_words,
    spans_of_half,
    stored_whole,
    takes_turns,
)
from flashgen.targets.gpu.primitives import C_TYPES, WarpgroupProducts
from flashgen.targets.gpu.recipe import Recipe
from flashgen.targets.gpu.tiles import BackwardTiles, ElementPlan, ForwardTiles, GpuPlan, QueryTiles


@dataclass(frozen=True)
class Constants:
    """The constants of one pass, as a struct template over the element type."""

    name: str
    comment: str
    by_element: Mapping[str, tuple[tuple[str, str], ...]]


class _OfTypes:
    """A pass over its element types, by their ``tiles``."""

    tiles: Mapping[str, Any]

    def has(self, what: str) -> bool:
        """Whether the tiles of some type are so."""
        return any(getattr(each, what) for each in self.tiles.values())


@dataclass(frozen=True)
class ForwardCode(_OfTypes):
    """The forward pass, over its element types, in the C++ ``namespace`` that holds its block.

    ``shows_columns``: what the mask reads by column comes with the tile; ``wide``: V has more columns than a product
    of warpgroups.
    """

    namespace: str
    tiles: Mapping[str, ForwardTiles]
    constants: Constants
    memory: Printed
    shows_columns: bool
    wide: bool

    @property
    def across(self) -> str:
        """What starts P·V."""
        if "f8e4m3" in self.tiles:
            return "start_product_of_turned"
        return "start_wide_across" if self.wide else "start_product_across"

    @property
    def mapped(self) -> tuple[str, ...]:
        """The types whose kernels take maps for tensor copies, and have persistent blocks."""
        return tuple(name for name, each in self.tiles.items() if each.tensor_copies)

    @property
    def self_loading(self) -> bool:
        """Whether some persistent blocks have no warps of their own to copy."""
        return any(each.tensor_copies and not each.producers for each in self.tiles.values())

    @property
    def has_producers(self) -> bool:
        """Whether some have them."""
        return any(each.tensor_copies and each.producers for each in self.tiles.values())

    @property
    def begins_next(self) -> bool:
        """Whether some that copy for themselves begin with the next query tile while they work on one."""
        return any(each.tensor_copies and each.begins_next and not each.goes_over for each in self.tiles.values())

    @property
    def divided(self) -> bool:
        """Whether warps share rows, and scores of each key tile."""
        return any(each.split > 1 and not each.takes_turns for each in self.tiles.values())

    @property
    def cluster(self) -> int:
        """Blocks that share copies of K and V."""
        return max(each.cluster for each in self.tiles.values())


@dataclass(frozen=True)
class BackwardCode(_OfTypes):
    """The pass of dK and dV, over its element types.

    ``persistent``: the types where blocks that add up dQ take one key tile after another. ``shows_rows``: what the
    mask reads by row comes with what rows carry, the ``row_words``; ``divided``: warps share the rows of dQ, and of
    those that share keys some may weigh none. ``has_turns``: batch entries take them at a
    gradient; ``clears``: of one of pairs what nobody visits is cleared.
    """

    tiles: Mapping[str, BackwardTiles]
    constants: Constants
    memory: Printed
    row_words: str
    persistent: tuple[str, ...]
    shows_rows: bool
    divided: bool
    clears: bool
    has_turns: bool
    shares_last: bool
    most_parts: int = MOST_PARTS
    most_units: int = MOST_UNITS
    least_part: int = LEAST_PART
    part_overhead: int = PART_OVERHEAD

    @property
    def mapped(self) -> tuple[str, ...]:
        """The types whose kernels take maps for tensor copies."""
        return tuple(name for name, each in self.tiles.items() if each.tensor_copies)

    @property
    def persistent_served(self) -> bool:
        """Whether beside some persistent blocks warps of their own copy."""
        return any(self.tiles[name].producers > 0 for name in self.persistent)

    @property
    def persistent_alone(self) -> bool:
        """Whether some persistent blocks copy for themselves."""
        return any(self.tiles[name].producers == 0 for name in self.persistent)

    @property
    def begins_next(self) -> bool:
        """Whether some blocks bring the list of the next key tile while they work on one."""
        return any(self.tiles[name].begins_next for name in self.persistent)

    @property
    def column_parts(self) -> int:
        """Blocks of a cluster that have a part of the columns each, of some types."""
        return max(each.column_parts for each in self.tiles.values())

    @property
    def clusters(self) -> bool:
        """Whether blocks run in clusters, of some types."""
        return any(each.cluster > 1 for each in self.tiles.values())


@dataclass(frozen=True)
class QueryCode:
    """The kernel of dQ, where it has one of its own."""

    constants: Constants
    memory: Printed


def forward_code(
    recipe: Recipe, elements: Sequence[ElementPlan], *, of_warpgroups: bool, namespace: str = "forward"
) -> ForwardCode:
    """The forward pass of some element types."""
    variant = recipe.variant
    layouts = {C_TYPES[each.element]: forward_layout(recipe, each.element, each.forward) for each in elements}
    has_measurers = variant.uses_sqdist and any(each.forward.producers for each in elements)
    pairs_staged = any(each.forward.pairs_staged for each in elements)
    goes_over = any(each.forward.goes_over for each in elements)

    def constants(element: ElementType, tiles: ForwardTiles) -> tuple[tuple[str, str], ...]:
        more = {"q_in_registers": int(tiles.q_in_registers)}
        more |= _role_constants(tiles) if of_warpgroups else {}
        more |= {"goes_over": int(tiles.goes_over), "q_places": tiles.q_places} if goes_over else {}
        more |= {"pairs_staged": int(tiles.pairs_staged)} if pairs_staged else {}
        more |= {"cluster": tiles.cluster} if tiles.cluster > 1 else {}
        if variant.kind.cached:
            more |= {"merging_warps": merging_warps(variant, tiles), "shares": merging_shares(variant, tiles)}
            more |= {"merging_threads": MERGING_THREADS, "merged_weights": MERGED_WEIGHTS}
            more |= {"finds_selected": int(finds_selected(variant, element, tiles))}
        if variant.kind.f8:
            more |= {"tiles_of_sums": max(1, KEYS_OF_SUMS // tiles.Bc)}
        more |= {"measurers": MEASURERS if tiles.producers else 0} if has_measurers else {}
        return _constants(tiles, more, of_warpgroups=of_warpgroups)

    return ForwardCode(
        namespace=namespace,
        tiles={str(each.element): each.forward for each in elements},
        constants=Constants(
            "ForwardPlan",
            "The plan of the forward pass.",
            {str(each.element): constants(each.element, each.forward) for each in elements},
        ),
        memory=printed("ForwardMemory", "Where blocks of the forward pass have what, in bytes.", "class T", layouts),
        shows_columns=bool(recipe.observed_columns) and any(each.forward.tensor_copies for each in elements),
        wide=padded(variant.head_dim.v) > MOST_COLUMNS,
    )


def forward_ways(plan: GpuPlan) -> tuple[ForwardCode, ...]:
    """The forward pass apart for the element types whose warps share rows, where there are both kinds: blocks of one
    kind have members that those of the other do without.
    """
    own = [each for each in plan.elements if each.forward.split == 1]
    turns = [each for each in plan.elements if each.forward.takes_turns]
    shared = [each for each in plan.elements if each.forward.split > 1 and not each.forward.takes_turns]
    of_warpgroups = has_warpgroups(plan)
    names = ("forward", "forward_in_turns", "forward_of_shared_rows" if own or turns else "forward")
    ways = [(each, name) for each, name in zip((own, turns, shared), names, strict=True) if each]
    return tuple(forward_code(plan.recipe, each, of_warpgroups=of_warpgroups, namespace=name) for each, name in ways)


def backward_code(plan: GpuPlan) -> BackwardCode:
    """The pass of dK and dV."""
    recipe = plan.recipe
    layouts = {
        f"{C_TYPES[each.element]}, {str(atomic).lower()}": backward_layout(
            recipe, each.element, each.backward, with_dq=atomic
        )
        for each in plan.elements
        for atomic in ((True, False) if recipe.one_pass else (False,))
    }
    of_warpgroups, in_halves = has_warpgroups(plan), _has_dq_in_halves(plan)
    clusters = any(each.backward.cluster > 1 for each in plan.elements)
    pairs_staged = any(each.backward.pairs_staged for each in plan.elements)

    def constants(tiles: BackwardTiles) -> tuple[tuple[str, str], ...]:
        more = {"split": tiles.split, "weighed": tiles.weighed}
        more |= {"dq_sent": tiles.dq_sent or 0} if in_halves else {}
        more |= {"cluster": tiles.cluster} if clusters else {}
        if of_warpgroups:
            more |= _role_constants(tiles)
            more |= {"dq_column_groups": tiles.dq_column_groups, "persistent": int(tiles.persistent)}
        more |= {"pairs_staged": int(tiles.pairs_staged)} if pairs_staged else {}
        more |= {"stores_whole": int(bool(stored_whole(recipe, tiles)))} if recipe.stored or recipe.in_turn else {}
        more |= {"takes_turns": int(takes_turns(recipe, tiles))} if recipe.in_turn is not None else {}
        return _constants(tiles, more, of_warpgroups=of_warpgroups)

    return BackwardCode(
        tiles={str(each.element): each.backward for each in plan.elements},
        constants=Constants(
            "BackwardPlan",
            "The plan of dK and dV.",
            {str(each.element): constants(each.backward) for each in plan.elements},
        ),
        memory=printed("BackwardMemory", "The same for dK and dV.", "class T, bool atomic", layouts),
        row_words=row_words(recipe).places("RowWords"),
        persistent=tuple(str(each.element) for each in plan.elements if recipe.one_pass and each.backward.persistent),
        shows_rows=bool(recipe.row_state and recipe.observed_rows),
        divided=any(each.queries.split > 1 for each in plan.elements),
        clears=any(stored_whole(recipe, each.backward) for each in plan.elements),
        has_turns=any(takes_turns(recipe, each.backward) for each in plan.elements),
        shares_last=any(shares_last(recipe.variant, each.backward) for each in plan.elements),
    )


def query_code(plan: GpuPlan) -> QueryCode:
    """The kernel of dQ."""
    layouts = {C_TYPES[each.element]: query_layout(plan.recipe, each.element, each.queries) for each in plan.elements}
    of_warpgroups = has_warpgroups(plan)
    return QueryCode(
        Constants(
            "QueryPlan",
            "The plan of dQ, where it has a kernel of its own.",
            {str(each.element): _constants(each.queries, {}, of_warpgroups=of_warpgroups) for each in plan.elements},
        ),
        printed("QueryMemory", "Where the kernel of dQ has what, in bytes of shared memory.", "class T", layouts),
    )


def has_warpgroups(plan: GpuPlan) -> bool:
    """Whether warpgroups multiply in some pass of some element type."""
    return any(tiles.warpgroups for each in plan.elements for tiles in (each.forward, each.backward, each.queries))


def warpgroup_products(plan: GpuPlan) -> WarpgroupProducts | None:
    """The products of warpgroups that the passes of a plan contain; None where it has none."""
    widths, head_dim = set[int](), plan.recipe.variant.head_dim
    D, Dv = padded(head_dim.qk), padded(head_dim.v)
    for each in plan.elements:
        if each.forward.warpgroups:
            widths |= {each.forward.weighed or each.forward.Bc, *_widths_of_o(Dv, each.element, each.forward)}
        if each.backward.dq_in_halves:
            of_dq = spans_of_half(D // each.backward.column_parts, each.element)
            of_dv = spans_of_half(Dv // each.backward.column_parts, each.element)
            of_keys = (*of_dq, *of_dv) if each.backward.shares_keys else (D, Dv)
            pieces = (min(64, span) for span in of_dq)  # where registers are few
            widths |= {each.backward.weighed, *of_dq, *of_keys, *pieces}
        elif each.backward.warpgroups:
            widths |= {each.backward.weighed, D, Dv, D // each.backward.dq_column_groups}
        if each.queries.warpgroups:
            widths |= {each.queries.Bc, D}
    elements = tuple(each.element for each in plan.elements if each.element is not ElementType.F32)
    if not widths:
        return None
    spans = _has_dq_in_halves(plan) or any(
        tiles.warpgroups and (tiles.split > 1 or Dv > MOST_COLUMNS)
        for tiles in (each.forward for each in plan.elements)
    )
    turns = any(each.forward.takes_turns for each in plan.elements)
    clusters = any(each.forward.cluster > 1 or each.backward.cluster > 1 for each in plan.elements)
    return WarpgroupProducts(tuple(sorted(width // 8 for width in widths)), elements, spans, turns, clusters)


def _widths_of_o(Dv: int, element: ElementType, tiles: ForwardTiles) -> tuple[int, ...]:
    """The columns of products with V."""
    if tiles.split > 1:
        return spans_of_half(Dv, element)
    return tuple(min(MOST_COLUMNS, Dv - first) for first in range(0, Dv, MOST_COLUMNS))


def _has_dq_in_halves(plan: GpuPlan) -> bool:
    return any(each.backward.dq_in_halves for each in plan.elements)


def _constants(
    tiles: ForwardTiles | BackwardTiles | QueryTiles, more: Mapping[str, int], *, of_warpgroups: bool
) -> tuple[tuple[str, str], ...]:
    shared = {"BR": tiles.Br, "BC": tiles.Bc, "warps": tiles.warps, "stages": tiles.stages, **more}
    shared |= {"warpgroups": int(tiles.warpgroups)} if of_warpgroups else {}
    if tiles.split > 1:
        shared |= {"split": tiles.split, "weighed": tiles.weighed}
    return tuple((name, str(value)) for name, value in shared.items())


def _role_constants(tiles: ForwardTiles | BackwardTiles) -> dict[str, int]:
    """Who copies, and how, how many blocks share the registers, and how many those who copy have and the others get."""
    roles = {"producers": tiles.producers, "blocks": tiles.blocks}
    if tiles.producers:
        roles |= {"producer_registers": tiles.producer_registers, "registers": tiles.registers}
    return roles | {"tensor_copies": int(tiles.tensor_copies)}
