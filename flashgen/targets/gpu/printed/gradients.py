"""Gradients of captured values, as the kernels that sum them up see them.

In: the recipe of a variant, and where its code is placed. Out: a ``GradientCode``, ``gradients`` in
templates.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from flashgen.analysis.constraints import COLUMN, ROW
from flashgen.analysis.diagonals import by_distance
from flashgen.analysis.levels import Level
from flashgen.analysis.variant import CapturedGradient
from flashgen.emit.context import labels, moved_inputs, pair_terms
from flashgen.emit.placement import Placement
from flashgen.ir.expr import Expr, Load, index_set
from flashgen.ir.spec import CapturedTensor
from flashgen.ir.text import text
from flashgen.plan.arguments import dimension_field, gradient_field, stored_field, stored_tensors, summed_tensors
from flashgen.targets.gpu.primitives import C_TYPES
from flashgen.targets.gpu.printed.spec import Places
from flashgen.targets.gpu.recipe import Recipe


@dataclass(frozen=True)
class Gradient:
    """A captured gradient as the backward template sees it."""

    label: str
    level: str
    number: int  # of the target
    target: str  # the member of Arguments that receives it
    sum_index: str  # which of a lane's sums a pair belongs to
    pair_code: str | None  # one pair's contribution; None: it arrives through the sink alone
    sink_code: str | None  # one row's contribution through the sink
    offset: str  # of the element
    offset_by_distance: str | None  # the same over a diagonal, where it follows from the distance
    runs: int | None  # which number it is of those whose elements are known for runs of distances
    factor: str | None  # a number of the launch times dS is what a pair adds, by distance or to an element of its own
    stored: dict[str, str] | None  # where each pair of a call has an element of its own
    summed: dict[str, str] | None  # where batch entries may add to it in turn
    strides: tuple[str, str] | None  # of i and j, where each pair of a head has an element of its own
    comment: str


@dataclass(frozen=True)
class GradientCode:
    """By the kernel that sums them up: ``keys``, of which ``pairs`` have elements of their own a pair, ``queries``,
    and ``sinks``, which arrive through sinks.
    """

    keys: tuple[Gradient, ...]
    pairs: tuple[Gradient, ...]
    queries: tuple[Gradient, ...]
    sinks: tuple[Gradient, ...]

    @property
    def by_runs(self) -> tuple[Gradient, ...]:
        """Those whose elements are known for runs of distances."""
        return tuple(each for each in self.pairs if each.runs is not None)

    @property
    def stored(self) -> tuple[Gradient, ...]:
        """Those that are stored a fragment of dS at a time, where that is all that follows the weights."""
        return tuple(each for each in self.pairs if each.stored is not None and each.factor is not None)

    @property
    def in_turn(self) -> Gradient | None:
        """The one that batch entries may add to in turn."""
        return next((each for each in self.pairs if each.summed is not None), None)

    @property
    def by_fragments(self) -> tuple[Gradient, ...]:
        """All that are stored so."""
        return (*self.stored, *(() if self.in_turn is None else (self.in_turn,)))


def gradient_code(recipe: Recipe, places: Places) -> GradientCode:
    """The captured gradients of a variant; places their derivatives."""
    gradients = recipe.computed.gradients
    found = {
        gradient.read: _gradient(gradient, label, recipe, places)
        for gradient, label in zip(gradients, labels(gradients), strict=True)
    }
    return GradientCode(
        keys=tuple(found[each.read] for each in recipe.key_gradients),
        pairs=tuple(found[each.read] for each in recipe.key_gradients if each.level is Level.PAIR),
        queries=tuple(found[each.read] for each in recipe.query_gradients),
        sinks=tuple(found[each.read] for each in recipe.sink_gradients),
    )


def _gradient(gradient: CapturedGradient, label: str, recipe: Recipe, places: Places) -> Gradient:
    variant, read, target, placement = recipe.computed, gradient.read, gradient_field(gradient.name), places.placement
    moved = moved_inputs(variant, "float", places.pair_inputs)
    pair_code = pair_terms(variant, gradient, label, places.hook, "float", "a, u, x, r, c", moved)
    sinks = []
    for arriving, name, part in (
        ("d_sink", "sink", gradient.from_sink),
        ("d_t_sink", "sink_tangent", gradient.from_sink_tangent),
    ):
        if part is not None:
            places.row_function(f"{name}_by_{label}", part, f"∂{name}/∂{text(read)}")
            sinks.append(f"{arriving} * {name}_by_{label}(a, u, x, r)")
    offset = placement.gradient_offset(read, gradient.level) if isinstance(read, Load) else "0"
    on_diagonal, strides = by_distance(read), _strides_of_pairs(read)
    return Gradient(
        label=label,
        level=gradient.level.value,
        number=recipe.captured.index(target),
        target=target,
        sum_index={Level.COLUMN: "[k]", Level.ROW: "[n]"}.get(gradient.level, ""),
        pair_code=pair_code,
        sink_code=" + ".join(sinks) or None,
        offset=offset,
        offset_by_distance=None if on_diagonal is None else placement.gradient_offset(on_diagonal, Level.DIAGONAL),
        runs=recipe.runs.index(gradient) if gradient in recipe.runs else None,
        factor=None if on_diagonal is None and strides is None else _factor(gradient, placement),
        stored=_whole(stored_tensors(variant.spec), gradient),
        summed=_whole(summed_tensors(variant.spec), gradient) if gradient == recipe.in_turn else None,
        strides=strides,
        comment=f"∂L/∂{text(read)}",
    )


def _whole(tensors: Iterable[CapturedTensor], gradient: CapturedGradient) -> dict[str, str] | None:
    """The member of Arguments that receives a gradient that pairs store, and the type of its elements."""
    found = (each for each in tensors if each.name == gradient.name)
    return next(({"target": stored_field(each.name), "element": C_TYPES[each.element]} for each in found), None)


def _factor(gradient: CapturedGradient, placement: Placement) -> str | None:
    factor = gradient.times_score_gradient
    return None if factor is None else placement.value(f"score_by_{gradient.name}", factor, Level.LAUNCH)


def _strides_of_pairs(read: Expr) -> tuple[str, str] | None:
    """i and j are indices as they are, and no other index follows from them."""
    if not isinstance(read, Load) or read.indices.count(ROW) != 1 or read.indices.count(COLUMN) != 1:
        return None
    if any(index_set(each) & {"i", "j"} for each in read.indices if each not in (ROW, COLUMN)):
        return None

    def stride(of: Expr) -> str:
        later = range(read.indices.index(of) + 1, len(read.indices))
        return " * ".join(f"a.{dimension_field(read.tensor, axis)}" for axis in later) or "1"

    return stride(ROW), stride(COLUMN)
