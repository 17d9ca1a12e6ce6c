"""Stage 2, decide for GPUs: what holds for all tiles of a variant, decided here once and only read afterwards.

In: a ``Variant``. Out: a ``Recipe``. What depends on the tiles too (who copies and how, whether blocks are persistent)
is in the rows that ``recipes.py`` of a family considers, and comes to plans with them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum

from flashgen.analysis.base_2 import bounding_condition, float_params, needs_no_maximum
from flashgen.analysis.factors import is_of_launch
from flashgen.analysis.levels import Level, kept_level, mask_axes, observed_loads
from flashgen.analysis.norms import SplitNorms, split_norms
from flashgen.analysis.pieces import is_cut, is_irregular
from flashgen.analysis.ranging import bounds
from flashgen.analysis.selection import reads_tiles
from flashgen.analysis.variant import DOT, CapturedGradient, Variant, linear_factor
from flashgen.ir.expr import Expr, Load, walk
from flashgen.ir.interval import INT_MAX, FloatRange, Range
from flashgen.ir.spec import AttentionSpec
from flashgen.plan.arguments import gradient_field, stored_tensors, summed_tensors
from flashgen.plan.recipe import FORCED, Decision, Rule
from flashgen.targets.gpu import rules
from flashgen.targets.gpu.ahead import is_shared, read_ahead
from flashgen.targets.gpu.diagonals import diagonal_numbers, exponent_of, has_runs, with_diagonals
from flashgen.targets.gpu.lengths import has_growing_rows, has_whole_rows
from flashgen.targets.gpu.near import Near, near_tanh

_ANY_DOT: Mapping[Expr, Range] = {DOT: FloatRange(-math.inf, math.inf)}  # of finite rows
# What masks tell apart where blocks take lists by their lengths: few masks, of heads that follow each other.
_ORDERED = tuple(map(frozenset, ((), ("b",), ("b", "hkv"))))
_MOST_FLOAT = (2 - 2.0**-23) * 2.0**127
_PARAM = FloatRange(2.0**-60, 2.0**60)  # of scores; by others these are no numbers, or none that a float holds
MOST_LSE = 88.0  # beyond, a row's scores are extreme: templates/include/flashgen/math.cuh says the same


class Lists(Enum):
    """Where it is written which tiles a tile visits."""

    NONE = "each block finds them"
    OF_A_CALL = "lists that the call makes"
    KEPT = "lists that the host keeps"


class SumsOfDq(Enum):
    """How dQ is summed over key tiles."""

    ADDED_UP = "added up by the kernel of dK and dV"
    OWN_KERNEL = "in a kernel of its own"


@dataclass(frozen=True)
class Recipe:
    """How kernels for GPUs compute a ``variant``, whatever their tiles.

    ``computed``: the variant as kernels evaluate it, with reads in the place of numbers that follow from the distance;
    ``numbers``: what is read. ``observed_rows`` and ``observed_columns``: what the mask reads of captured tensors.
    ``ahead``: an element that pairs read, which warpgroups read before their products are there; ``near``: scores where
    they need no special function. ``cuts``: open tiles are cut in pieces. ``longest_first``: blocks take lists by their
    lengths; ``in_groups``: where there are none those with warps that copy take the longest tiles of several heads
    before shorter ones; ``batch_inside``: of a head they take a tile of all batch entries before the next tile.

    Of the backward pass: ``row_state``: rows carry lse and delta; which kernel sums up which captured gradient, and the
    fields of ``struct Arguments`` that receive them, in the order of their numbers; ``weights_first``: dot products are
    needed no more once there are weights; ``folded``: because these take in the score's derivative, of which nothing
    but dS wants to know; ``bounded``: scores are, so that no row's are extreme. ``lag``: O is rescaled once a row's
    maximum has grown by more, in base 2; exponents are counted from ``headroom`` below the maximum, so that weights
    reach 2^(lag + headroom). ``moves_apart``: of forward mode, what a score changes by needs no dot product, and waits
    for the weights. ``runs``: gradients of which it is written for runs of distances whether they add to one element.
    ``stored``: those of which pairs store dS, each in an element of its own; ``in_turn``: the one to which batch
    entries may add in turn, a tile at a time, the last of which stores it.
    ``exponent``: the score in base 2, where it is so bounded that weights are formed before maxima of rows are looked
    at, which few tiles need; ``is_bounded``: in which launches, None: in all. ``sums_tell``: scores are products but
    for a factor, and sums of weights tell warpgroups where a maximum has grown. ``norms``: of a score that is linear in
    |q - k|², what pairs form of it without |q|².
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
    dq: SumsOfDq
    row_state: bool
    key_gradients: tuple[CapturedGradient, ...]
    query_gradients: tuple[CapturedGradient, ...]
    sink_gradients: tuple[CapturedGradient, ...]
    captured: tuple[str, ...]
    weights_first: bool
    folded: bool
    bounded: bool
    lag: int
    headroom: int
    moves_apart: bool
    runs: tuple[CapturedGradient, ...]
    stored: tuple[CapturedGradient, ...]
    in_turn: CapturedGradient | None
    exponent: Expr | None
    is_bounded: Expr | None
    sums_tell: bool
    ahead: Load | None
    near: Near | None
    norms: SplitNorms | None
    decisions: tuple[Decision, ...]

    @property
    def one_pass(self) -> bool:
        """Whether one kernel computes dK, dV and, where results need not repeat, dQ."""
        return self.dq is SumsOfDq.ADDED_UP

    @property
    def cache_of_groups(self) -> int:
        """Bytes: what blocks of a group of heads read."""
        return rules.LONG_TILES.limit

    @property
    def norms_by_lse(self) -> bool:
        """Whether what arrives at |q|² is summed up as P times what arrives at lse.

        Through the scores of all keys of a row as much arrives as at its lse. A sink takes a part of it; what is
        dropped is not in P.
        """
        computed = self.computed
        alone = computed.weights.sink is None and computed.spec.dropout is None and computed.tangent is None
        return self.norms is not None and alone

    @property
    def has_lists(self) -> bool:
        """Whether there may be lists of visits."""
        return self.lists is not Lists.NONE

    @property
    def keeps_lists(self) -> bool:
        """Whether they may be used again by a later call."""
        return self.lists is Lists.KEPT

    def with_spec(self, spec: AttentionSpec) -> Recipe:
        """The same of a spec that differs in schedule and element types, which nothing here depends on."""
        return replace(self, variant=replace(self.variant, spec=spec))

    def with_keep(self, keep: Expr) -> Recipe:
        """The same kernels, for predictions of a call that keeps these pairs."""
        return replace(self, variant=replace(self.variant, keep=keep), computed=replace(self.computed, keep=keep))


def decide(variant: Variant) -> Recipe:
    """The recipe of a variant, for its plan, which carries it."""
    computed, numbers = with_diagonals(variant), diagonal_numbers(variant)
    # A tile of a cache is visited once: to look at what its mask reads would take as long as to look at the pairs.
    rows, columns = ((), ()) if variant.kind.rows_of_heads else observed_loads(variant.keep)
    of_pairs = [each for each in computed.gradients if each.of_pairs]
    keys = tuple(each for each in of_pairs if each.level is not Level.ROW)
    queries = tuple(each for each in of_pairs if each.level is Level.ROW)
    cuts, lists = is_cut(variant.keep), _lists(variant, observed=bool(rows or columns))
    longest_first = lists is not Lists.NONE and mask_axes(variant.keep) in _ORDERED
    in_groups = not longest_first and _in_groups(variant)
    dq = SumsOfDq.OWN_KERNEL if queries or variant.uses_sqdist else SumsOfDq.ADDED_UP
    folded = _folds(computed, keys)
    weights_first, (exponent, is_bounded) = folded or _weights_first(computed, keys), _exponent(computed)
    norms = None if exponent is not None else _norms(computed)
    return Recipe(
        variant=variant,
        computed=computed,
        numbers=numbers,
        observed_rows=rows,
        observed_columns=columns,
        cuts=cuts,
        lists=lists,
        longest_first=longest_first,
        in_groups=in_groups,
        batch_inside=is_shared(variant),
        dq=dq,
        row_state=variant.has_row_state,
        key_gradients=keys,
        query_gradients=queries,
        sink_gradients=tuple(each for each in computed.gradients if each.is_of_sink),
        captured=tuple(dict.fromkeys(gradient_field(each.name) for each in variant.gradients)),
        weights_first=weights_first,
        folded=folded,
        bounded=_is_bounded(computed),
        lag=_lag(variant).limit,
        headroom=_headroom(variant),
        moves_apart=_moves_apart(computed),
        runs=tuple(each for each in keys if weights_first and has_runs(variant, each)),
        stored=_stored(variant, keys, dq) if weights_first else (),
        in_turn=_in_turn(variant, keys, dq) if weights_first else None,
        exponent=exponent,
        is_bounded=is_bounded,
        sums_tell=_sums_tell(computed),
        ahead=read_ahead(computed),
        near=near_tanh(computed),
        norms=norms,
        decisions=tuple(_decisions(variant, numbers, lists, dq, cuts, longest_first, exponent is not None, norms)),
    )


def _sums_tell(computed: Variant) -> bool:
    """Not where weights of 8 bits begin high, nor in forward mode; not where wide K, in a ring, is waited for.

    Nor in ragged batches of narrow heads, whose kernels have no registers for it: they spilled 256 bytes.
    """
    width = computed.head_dim.qk
    others = computed.kind.f8 or computed.tangent is not None or (computed.kind.ragged and width <= 64)
    measured = width <= rules.SUMS_TELL.limit or (width <= 256 and not has_whole_rows(computed))
    return linear_factor(computed) is not None and not others and measured


def _stored(variant: Variant, keys: Sequence[CapturedGradient], dq: SumsOfDq) -> tuple[CapturedGradient, ...]:
    """dS but for a number of the launch is what a pair adds."""
    found = [each for each in keys if each.times_score_gradient is not None]
    names = [each.name for each in stored_tensors(variant.spec)]
    return tuple(each for each in found if each.name in names) if _stores(variant, dq) else ()


def _in_turn(variant: Variant, keys: Sequence[CapturedGradient], dq: SumsOfDq) -> CapturedGradient | None:
    """The same, and a tile is visited for all batch entries or for none."""
    if not _stores(variant, dq) or "b" in mask_axes(variant.keep):
        return None
    names = [each.name for each in summed_tensors(variant.spec)]
    found = [each for each in keys if each.name in names]
    return found[0] if len(found) == 1 and found[0].times_score_gradient is not None else None


def _stores(variant: Variant, dq: SumsOfDq) -> bool:
    if (
        variant.kind.ragged
        or variant.kind.cached
        or variant.kind.parts
        or variant.kind.slices
        or variant.kind.f8
        or variant.tangent is not None
    ):
        return False
    return dq is SumsOfDq.ADDED_UP and variant.spec.select is None


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


def _headroom(variant: Variant) -> int:
    if not variant.weights.form.exponential:
        return 0
    return (
        rules.HEADROOM_OF_8_BITS if variant.kind.f8 else rules.HEADROOM_BESIDE_8_BITS if variant.kind.f8_cached else 0
    )


def _lag(variant: Variant) -> Rule:
    return rules.LAG_OF_8_BITS if variant.kind.f8 else rules.LAG


def _is_linear(computed: Variant) -> bool:
    """What follows the weights is linear in them."""
    if computed.tangent is not None:
        return False
    return computed.weights.form.exponential and computed.spec.dropout is None and not computed.uses_sqdist


def _moves_apart(computed: Variant) -> bool:
    """Forward mode's tangents of scores are of products with tangents, and of what is captured, alone."""
    tangent = computed.tangent
    if tangent is None or computed.kind.backward_only or not computed.weights.form.exponential or computed.uses_sqdist:
        return False
    return DOT not in walk(tangent.score)


def _is_bounded(computed: Variant) -> bool:
    """|lse| is at most the largest score and the logarithm of how many there may be. A sink is bounded by nothing."""
    weights = computed.weights
    if not weights.form.exponential or weights.sink is not None or computed.tangent is not None:
        return False
    found = bounds(computed.score, _ANY_DOT)
    assert isinstance(found, FloatRange)
    return max(-found.lo, found.hi) + math.log(INT_MAX) < MOST_LSE


def _exponent(computed: Variant) -> tuple[Expr | None, Expr | None]:
    """``exponent`` and ``is_bounded`` of a recipe. A tile of a cache has few rows, and waits for memory."""
    if (
        not computed.weights.form.exponential
        or computed.tangent is not None
        or computed.kind.rows_of_heads
        or computed.kind.f8
    ):
        return None, None
    if kept_level(computed.score) is not Level.PAIR:
        return None, None
    exponent = exponent_of(computed, computed.score)
    if needs_no_maximum(exponent):
        return exponent, None
    condition = bounding_condition(exponent)
    return (None if condition is None else exponent), condition


def _norms(computed: Variant) -> SplitNorms | None:
    """Of a softmax alone: other weights see the score itself. A tile of a cache waits for memory."""
    if not computed.uses_sqdist or not computed.weights.form.exponential or computed.kind.cached:
        return None
    return split_norms(computed.score)


def _folds(computed: Variant, keys: tuple[CapturedGradient, ...]) -> bool:
    """dS is all that follows the weights, and reaches dot products by a factor of the pair, a number everywhere."""
    if not _is_linear(computed) or keys or computed.kind.forward_only or is_of_launch(computed.score_by_dot):
        return False
    found = bounds(computed.score_by_dot, _usual_numbers(computed))
    assert isinstance(found, FloatRange)
    return math.isfinite(found.lo) and math.isfinite(found.hi) and not found.may_be_nan


def _weights_first(computed: Variant, keys: tuple[CapturedGradient, ...]) -> bool:
    """What follows the weights is linear in them, and needs no dot product."""
    if not _is_linear(computed):
        return False
    parts = [computed.score_by_dot, *(each.from_score for each in keys)]
    return all(part is None or DOT not in walk(part) for part in parts) and is_of_launch(computed.score_by_dot)


def _usual_numbers(computed: Variant) -> Mapping[Expr, Range]:
    """Products, and params of scores that are numbers."""
    floats: dict[Expr, Range] = dict.fromkeys(float_params(computed.score_by_dot), _PARAM)
    return floats | {DOT: FloatRange(-_MOST_FLOAT, _MOST_FLOAT)} if floats else _ANY_DOT


def _decisions(
    variant: Variant,
    numbers: tuple[Expr, ...],
    lists: Lists,
    dq: SumsOfDq,
    cuts: bool,
    longest_first: bool,
    bounded: bool,
    norms: SplitNorms | None,
) -> Iterator[Decision]:
    of_lists = {
        Lists.NONE: rules.EACH_FINDS,
        Lists.OF_A_CALL: rules.LISTS_OF_A_CALL,
        Lists.KEPT: rules.KEPT_LISTS,
    }
    if variant.keep_everything:
        yield Decision("tiles to visit", "all", "nothing is masked", FORCED)
    else:
        yield Decision.by("tiles to visit", lists.value, of_lists[lists])
        classes = ("cut in pieces", rules.PIECES) if cuts else ("by ranges alone", rules.RANGES_ALONE)
        yield Decision.by("open tiles", *classes)
    if variant.kind.cached:
        yield Decision.by("rows of a tile", "the query heads of a key/value head", rules.FEW_ROWS)
        yield Decision.by("keys of a tile", "as many as leave room for others", rules.WARPS_OF_A_MULTIPROCESSOR)
    elif variant.listed is not None:
        yield Decision.by("rows of a tile", "the heads of queries whose lists name its keys", rules.BY_BLOCKS)
        yield Decision.by("rows that visit a block", f"of {rules.NEAR_QUERIES.limit} queries", rules.NEAR_QUERIES)
    else:
        order = ("longest lists first", rules.LONGEST_FIRST) if longest_first else ("by position", rules.BY_POSITION)
        order = ("a tile's batch entries", rules.BATCH_INSIDE) if is_shared(variant) and not longest_first else order
        yield Decision.by("which tile comes next", *order)
        by_distance = ("read from a table", rules.DIAGONALS) if numbers else ("for each pair", rules.PAIR_BY_PAIR)
        yield Decision.by("numbers by distance", *by_distance)
    if variant.weights.form.exponential:
        yield Decision.by("rescaling", f"beyond 2^{_lag(variant).limit}", _lag(variant))
    if bounded:
        yield Decision.by("maxima of rows", "once weights are large", rules.BOUNDED_SCORES)
    if norms is not None:
        yield Decision.by("squared distances", "without what a row's keys share", rules.NORMS_OF_ROWS)
    if variant.kind.forward_only:
        return
    if dq is SumsOfDq.ADDED_UP:
        yield Decision.by("dQ", dq.value, rules.DQ_ADDED_UP)
    else:
        why = "scores use |q - k|²" if variant.uses_sqdist else "a captured gradient is summed over the keys of a row"
        yield Decision("dQ", dq.value, why, FORCED)
