"""Stage 2, decide for GPUs: what holds for all tiles of a variant, decided here once and only read afterwards.

In: a ``Variant``. Out: a ``Recipe``. What depends on the tiles too (who copies and how, whether blocks are persistent)
is in the rows that ``recipes.py`` of a family considers, and comes to plans with them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any

from flashgen.analysis.levels import Level, mask_axes, observed_loads
from flashgen.analysis.pieces import is_cut, is_irregular
from flashgen.analysis.selection import reads_tiles
from flashgen.analysis.variant import CapturedGradient, Variant
from flashgen.ir.expr import Expr, Load
from flashgen.plan.arguments import gradient_field, stored_tensors, summed_tensors
from flashgen.plan.recipe import FORCED, Decision
from flashgen.targets.gpu import rules
from flashgen.targets.gpu.diagonals import diagonal_numbers, has_runs, with_diagonals
from flashgen.targets.gpu.lengths import has_growing_rows
from flashgen.targets.gpu.prefetch import is_shared, prefetched
from flashgen.targets.gpu.score import Bounded, Distance, Extremes, Score, Weighing, extremes_of, score_of, weighing_of

# What masks tell apart where blocks take lists by their lengths: few masks, of heads that follow each other.
_ORDERED = tuple(map(frozenset, ((), ("b",), ("b", "hkv"))))


class Lists(Enum):
    """Where it is written which tiles a tile visits, and why."""

    NONE = ("each block finds them", rules.EACH_FINDS)
    OF_A_CALL = ("lists that the call makes", rules.LISTS_OF_A_CALL)
    KEPT = ("lists that the host keeps", rules.KEPT_LISTS)


@dataclass(frozen=True)
class Recipe:
    """How kernels for GPUs compute a ``variant``, whatever their tiles.

    Kernels evaluate ``computed``, which reads ``numbers`` that follow from the distance from a table. The mask reads
    ``observed_rows`` and ``observed_columns`` of captured tensors.

    **Tiles.** ``cuts``: open tiles are cut in pieces. ``longest_first``: blocks take lists by their lengths.
    ``in_groups``: without lists, blocks with warps that copy take the longest tiles of several heads before shorter
    ones. ``batch_inside``: such blocks take a tile of all batch entries before the next tile of a head.

    **Scores.** Of ``score``, ``weighing`` and ``extremes`` see ``score.py``. ``prefetch`` is a load of each pair, as of
    a bias; warpgroups start it before products are there. O is rescaled once a row's maximum has grown by more than
    ``lag``, in base 2. Exponents count from ``headroom`` below the maximum: weights reach 2^(lag + headroom).

    **Gradients.** ``one_pass``: one kernel computes dK, dV and, where results need not repeat, dQ. ``row_state``: rows
    carry lse and delta. Kernels of keys, of queries and of rows sum up gradients of captured values; ``captured`` are
    the fields of ``struct Arguments`` for these, by their numbers. ``runs``: of these gradients a table says over which
    distances pairs add to one element. ``stored``: pairs store dS of these, each in an element of its own. ``in_turn``:
    batch entries may add to this one in turn, tile by tile; the last one stores it.
    """

    variant: Variant
    computed: Variant
    numbers: tuple[Expr, ...]
    observed_rows: tuple[Load, ...]
    observed_columns: tuple[Load, ...]
    cuts: bool
    lists: Lists
    longest_first: bool
    in_groups: bool
    batch_inside: bool
    score: Score
    weighing: Weighing
    extremes: Extremes
    prefetch: Load | None
    lag: int
    headroom: int
    one_pass: bool
    row_state: bool
    key_gradients: tuple[CapturedGradient, ...]
    query_gradients: tuple[CapturedGradient, ...]
    sink_gradients: tuple[CapturedGradient, ...]
    captured: tuple[str, ...]
    runs: tuple[CapturedGradient, ...]
    stored: tuple[CapturedGradient, ...]
    in_turn: CapturedGradient | None

    @property
    def has_lists(self) -> bool:
        """Whether there may be lists of visits."""
        return self.lists is not Lists.NONE

    @property
    def decisions(self) -> Iterator[Decision]:
        """What is decided here, each with its reason."""
        variant = self.variant
        if variant.keep_everything:
            yield Decision("tiles to visit", "all", "nothing is masked", FORCED)
        else:
            yield Decision.by("tiles to visit", *self.lists.value)
            classes = ("cut in pieces", rules.PIECES) if self.cuts else ("by ranges alone", rules.RANGES_ALONE)
            yield Decision.by("open tiles", *classes)
        if variant.kind.cached:
            yield Decision.by("rows of a tile", "the query heads of a key/value head", rules.FEW_ROWS)
            yield Decision.by("keys of a tile", "as many as leave room for others", rules.WARPS_OF_A_MULTIPROCESSOR)
        elif variant.listed is not None:
            yield Decision.by("rows of a tile", "the heads of queries whose lists name its keys", rules.BY_BLOCKS)
            yield Decision.by("rows that visit a block", f"of {rules.NEAR_QUERIES.limit} queries", rules.NEAR_QUERIES)
        else:
            by_position = ("by position", rules.BY_POSITION)
            order = ("a tile's batch entries", rules.BATCH_INSIDE) if self.batch_inside else by_position
            order = ("longest lists first", rules.LONGEST_FIRST) if self.longest_first else order
            yield Decision.by("which tile comes next", *order)
            read = ("read from a table", rules.DIAGONALS)
            yield Decision.by("numbers by distance", *(read if self.numbers else ("for each pair", rules.PAIR_BY_PAIR)))
        if variant.weights.form.exponential:
            lag = rules.LAG_OF_8_BITS if variant.kind.f8 else rules.LAG
            yield Decision.by("rescaling", f"beyond 2^{self.lag}", lag)
        if isinstance(self.score, Bounded):
            yield Decision.by("maxima of rows", "once weights are large", rules.BOUNDED_SCORES)
        if isinstance(self.score, Distance):
            yield Decision.by("squared distances", "without what a row's keys share", rules.NORMS_OF_ROWS)
        if variant.kind.forward_only:
            return
        if self.one_pass:
            yield Decision.by("dQ", "added up by the kernel of dK and dV", rules.DQ_ADDED_UP)
        else:
            of_rows = "a captured gradient is summed over the keys of a row"
            why = "scores use |q - k|²" if variant.uses_sqdist else of_rows
            yield Decision("dQ", "in a kernel of its own", why, FORCED)

    def of(self, **changes: Any) -> Recipe:
        """The same kernels where a spec's schedule and types are others, or for predictions of other kept pairs."""
        variant, computed = replace(self.variant, **changes), replace(self.computed, **changes)
        return replace(self, variant=variant, computed=computed)


def decide(variant: Variant) -> Recipe:
    """The recipe of a variant, for its plan, which carries it."""
    computed, form, kind = with_diagonals(variant), variant.weights.form, variant.kind
    # A tile of a cache is visited once: to look at what its mask reads would take as long as to look at the pairs.
    rows, columns = ((), ()) if kind.rows_of_heads else observed_loads(variant.keep)
    of_pairs = [each for each in computed.gradients if each.of_pairs]
    keys = tuple(each for each in of_pairs if each.level is not Level.ROW)
    queries = tuple(each for each in of_pairs if each.level is Level.ROW)
    lists = _lists(variant, observed=bool(rows or columns))
    longest_first = lists is not Lists.NONE and mask_axes(variant.keep) in _ORDERED
    one_pass = not queries and not variant.uses_sqdist
    score, weighing = score_of(computed), weighing_of(computed, keys)
    headroom = rules.HEADROOM_OF_8_BITS if kind.f8 else rules.HEADROOM_BESIDE_8_BITS if kind.f8_cached else 0
    stored, in_turn = _stored(variant, keys) if weighing.first and one_pass else ((), None)
    return Recipe(
        variant=variant,
        computed=computed,
        numbers=diagonal_numbers(variant),
        observed_rows=rows,
        observed_columns=columns,
        cuts=is_cut(variant.keep),
        lists=lists,
        longest_first=longest_first,
        in_groups=not longest_first and _in_groups(variant),
        batch_inside=is_shared(variant),
        score=score,
        weighing=weighing,
        extremes=extremes_of(computed, score),
        prefetch=prefetched(computed),
        lag=(rules.LAG_OF_8_BITS if kind.f8 else rules.LAG).limit,
        headroom=headroom if form.exponential else 0,
        one_pass=one_pass,
        row_state=variant.has_row_state,
        key_gradients=keys,
        query_gradients=queries,
        sink_gradients=tuple(each for each in computed.gradients if each.is_of_sink),
        captured=tuple(dict.fromkeys(gradient_field(each.name) for each in variant.gradients)),
        runs=tuple(each for each in keys if weighing.first and has_runs(variant, each)),
        stored=stored,
        in_turn=in_turn,
    )


def _stored(
    variant: Variant, keys: Sequence[CapturedGradient]
) -> tuple[tuple[CapturedGradient, ...], CapturedGradient | None]:
    """``stored`` and ``in_turn``: dS but for a number of the launch is what a pair adds.

    In turn where a tile is visited for all batch entries or for none.
    """
    kind, spec = variant.kind, variant.spec
    others = kind.ragged or kind.cached or kind.parts or kind.slices or kind.f8
    if others or variant.tangent is not None or spec.select is not None:
        return (), None
    stored, summed = ({each.name for each in found} for found in (stored_tensors(spec), summed_tensors(spec)))
    alike = tuple(each for each in keys if each.times_score_gradient is not None)
    in_turn = [each for each in keys if each.name in summed and "b" not in mask_axes(variant.keep)]
    alone = in_turn[0] if len(in_turn) == 1 and in_turn[0] in alike else None
    return tuple(each for each in alike if each.name in stored), alone


def _lists(variant: Variant, *, observed: bool) -> Lists:
    # Lists are of shapes, and the shapes of sequences lie on the device.
    if variant.kind.ragged or variant.kind.rows_of_heads:
        return Lists.NONE
    if variant.tangent is not None:  # to find visits takes little beside six products
        return Lists.NONE
    if is_irregular(variant.keep):
        return Lists.KEPT
    selects = reads_tiles(variant.keep, variant.spec.tensors) and mask_axes(variant.keep) in _ORDERED
    return Lists.OF_A_CALL if observed or selects else Lists.NONE


def _in_groups(variant: Variant) -> bool:
    """Not where sequences have tiles of their own."""
    if variant.kind.ragged or variant.kind.cached or variant.kind.rows_of_heads:
        return False
    if variant.tangent is not None and not variant.kind.backward_only:
        return True
    return has_growing_rows(variant)
