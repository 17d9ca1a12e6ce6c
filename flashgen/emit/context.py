"""Stage 4, emit: what the contexts of all kernel templates share.

In: parts of a ``Variant``. Out: the same parts as templates want them. Does NOT know a target.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from flashgen.analysis.levels import Level, level_of
from flashgen.analysis.variant import CapturedGradient, Variant
from flashgen.emit.layout import laid_out
from flashgen.emit.placement import Placement
from flashgen.emit.spelling import c_literal, c_operator, user_name
from flashgen.ir.build import apply
from flashgen.ir.expr import Apply, Expr, Literal, Load, literal
from flashgen.ir.text import text
from flashgen.ir.types import ScalarType
from flashgen.ir.weights import (
    D_PROBABILITY,
    D_WEIGHT_TANGENT,
    DELTA,
    EPSILON,
    INVERSE,
    MOVED,
    PROBABILITY,
    PROBABILITY_TANGENT,
    TOTAL,
    WEIGHT,
    Form,
)


class AddHook(Protocol):
    """Places one hook: its name, its expression, the inputs that it declares after the pair, a comment."""

    def __call__(self, name: str, expr: Expr, declared: str = ..., comment: str = ...) -> None: ...


def by_score(variant: Variant, arriving: str = "d_score") -> str:
    """A format: what comes through the score of a pair, or what ``arriving`` names, from one of its derivatives.

    Where what arrives may be no number, and a derivative 0, nothing does: beside infinities, and if no product moves
    the score, which captured values may make infinite.
    """
    asked = variant.has_infinities or variant.score_by_dot == literal(0.0)
    return f"fg::chained({arriving}, %s)" if asked else f"{arriving} * %s"


def derivative_hooks(variant: Variant, placement: Placement, hook: AddHook, c_type: str, inputs: str) -> str | None:
    """Places what the score changes by: its derivatives, in forward mode what tangents change.

    The code of the sink's; None where nothing changes it.
    """
    tangent = variant.tangent
    if tangent is None or tangent.slopes is not None:
        hook("score_by_dot", variant.score_by_dot, comment="∂score/∂(q·k)")
        if variant.score_by_sqdist is not None:
            hook("score_by_sqdist", variant.score_by_sqdist, comment="∂score/∂|q|² = ∂score/∂|k|²")
    if tangent is None:
        return None
    moved = moved_inputs(variant, c_type, inputs)
    hook("score_tangent", tangent.score, moved, "What the score changes by: tS")
    if tangent.weight is not None:
        hook("weight_tangent", tangent.weight, f", {c_type} s", "What captured values change the weight by")
    slopes = tangent.slopes
    if slopes is not None:
        hook("score_tangent_by_dot", slopes.score_by_dot, moved, "∂tS/∂(q·k)")
        if slopes.score_by_sqdist is not None:
            hook("score_tangent_by_sqdist", slopes.score_by_sqdist, moved, "∂tS/∂|q|² = ∂tS/∂|k|²")
        if slopes.weight_by_score is not None:
            hook("weight_tangent_by_score", slopes.weight_by_score, f", {c_type} s, {c_type} t_s", "∂(t weight)/∂s")
    return None if tangent.sink is None else placement.value("sink_tangent", tangent.sink, Level.ROW)


def moved_inputs(variant: Variant, c_type: str, inputs: str) -> str:
    """What functions of a score's tangent declare behind the pair."""
    norms = f", {c_type} t_norms" if variant.uses_sqdist else ""
    return f"{inputs}, {c_type} t_dot{norms}"


def pair_terms(
    variant: Variant, gradient: CapturedGradient, label: str, hook: AddHook, c_type: str, pair: str, moved: str
) -> str | None:
    """What a pair adds to a captured gradient, over functions that this places; None: it arrives through the sink.

    ``pair``: what functions of a pair take first; ``moved``: what those of a score's tangent declare behind it.
    """
    parts, read = [], text(gradient.read)
    if gradient.from_score is not None:
        name = f"score_by_{label}"
        hook(name, gradient.from_score, comment=f"∂score/∂{read}")
        parts.append(by_score(variant) % f"{name}(INPUTS)")
    if gradient.from_score_tangent is not None:
        name = f"score_tangent_by_{label}"
        hook(name, gradient.from_score_tangent, moved, f"∂tS/∂{read}")
        parts.append(by_score(variant, "d_t_score") % f"{name}(MOVED)")
    if gradient.from_weight is not None:
        name = f"weight_by_{label}"
        hook(name, gradient.from_weight, f", {c_type} s", f"∂weight/∂{read}")
        parts.append(f"d_weight * {name}({pair}, safe)")
    if gradient.from_weight_tangent is not None:
        name = f"weight_tangent_by_{label}"
        hook(name, gradient.from_weight_tangent, f", {c_type} s, {c_type} t_s", f"∂(t weight)/∂{read}")
        parts.append(by_score(variant, "d_t_weight") % f"{name}({pair}, safe, t_e)")
    return " + ".join(parts) or None


@dataclass(frozen=True)
class Observed:
    """An element that the mask reads, whose range over a tile the kernel observes."""

    load: Load
    struct: str  # rows or columns
    name: str
    c_type: str
    member: str  # its value at one row or column
    comment: str


@dataclass(frozen=True)
class Masks:
    """The batch entries and heads that the mask tells apart, numbered, as code."""

    count: str
    number: str  # of batch entry b and head h
    b: str  # of one that has number `mask`
    h: str


def masks_apart(indices: frozenset[str]) -> Masks:
    """How heads are numbered that ``b``, and ``h`` or ``hkv``, as far as they are among the indices, tell apart."""
    if "hkv" in indices:
        group = "(a.heads / a.kv_heads)"
        if "b" in indices:
            by_batch = f"b * a.kv_heads + h / {group}"
            return Masks("a.batch * a.kv_heads", by_batch, "mask / a.kv_heads", f"mask % a.kv_heads * {group}")
        return Masks("a.kv_heads", f"h / {group}", "0", f"mask * {group}")
    match "b" in indices, "h" in indices:
        case True, True:
            return Masks("a.batch * a.heads", "b * a.heads + h", "mask / a.heads", "mask % a.heads")
        case True, False:
            return Masks("a.batch", "b", "mask", "0")
        case False, True:
            return Masks("a.heads", "h", "0", "mask")
    return Masks("1", "0", "0", "0")


def observed_load(load: Load, placement: Placement) -> Observed:
    """The load as a member of its level's struct, and of the struct of ranges."""
    member = placement.value(user_name(load.tensor), load, level_of(load))
    struct = "rows" if level_of(load) is Level.ROW else "columns"
    c_type = {ScalarType.BOOL: "Bool", ScalarType.INT: "Int", ScalarType.FLOAT: "Float"}[load.type]
    return Observed(load, struct, member.split(".")[1], f"fg::ranges::{c_type}", member, text(load))


def labels(gradients: tuple[CapturedGradient, ...]) -> tuple[str, ...]:
    """A name for each read: the tensor's, behind a number from its second read on. No name begins with one."""
    seen: Counter[str] = Counter()
    found = []
    for gradient in gradients:
        seen[gradient.name] += 1
        found.append(gradient.name if seen[gradient.name] == 1 else f"{seen[gradient.name]}_{gradient.name}")
    return tuple(found)


def formula(variant: Variant) -> str:
    """The weights as a formula, for comments."""
    form, expression = variant.weights.form, variant.weights.expression
    if expression is None:
        return form.formula
    return (form.with_sink or form.formula).format(text(expression))


@dataclass(frozen=True)
class WeightCode:
    """A form of weights, and its formulas over code of templates."""

    form: Form

    def share(self, weight: str, tangent: str) -> str:
        """What the tangent of a weight adds to t(lse), but for 1 / Z to the form's degree."""
        share = self.form.share
        added = WEIGHT if share == literal(1.0) else None if share is None else apply("mul", share, WEIGHT)
        return _spelt(added, {PROBABILITY: weight, WEIGHT: tangent})

    def term(self, weight: str) -> str:
        """What a weight adds to its row's total."""
        return _spelt(self.form.term, {WEIGHT: weight})

    def denominator(self, total: str) -> str:
        """Z."""
        return _spelt(self.form.denominator, {TOTAL: total})

    def probability(self, weight: str) -> str:
        """P of a function's value; ``inverse`` is 1 / Z."""
        return f"{weight} * inverse" if self.form.divided else weight

    def backward(self, d_probability: str) -> str:
        """dS where weights are exponential, else dw, with ``p`` for P and the row's ``delta`` and ``inverse``."""
        return _spelt(self.form.backward, {**_OF_ROWS, D_PROBABILITY: d_probability})

    def tangent_backward(self, d_probability: str) -> str:
        """What reaches S, but for what comes by tS, or w.

        Beside the above with ``moved``, ``epsilon``, ``t_p`` for tP and ``d_t_weight`` for what reaches tw.
        """
        return _spelt(self.form.tangent_backward, {**_OF_ROWS, D_PROBABILITY: d_probability})


_OF_ROWS: Mapping[Expr, str] = {
    PROBABILITY: "p",
    DELTA: "delta",
    INVERSE: "inverse",
    MOVED: "moved",
    EPSILON: "epsilon",
    PROBABILITY_TANGENT: "t_p",
    D_WEIGHT_TANGENT: "d_t_weight",
}


def _spelt(formula: Expr | None, code: Mapping[Expr, str]) -> str:
    """A formula of a form over code that is one token, a call or a product."""
    match formula:
        case Literal(value=value):
            return c_literal(value)
        case Apply(op=op, args=args):
            return c_operator(op, tuple(_spelt(each, code) for each in args))
        case Expr():
            return code[formula]
    raise AssertionError("a form without a denominator has no such formula")


def tidy(rendered: str) -> str:
    """No trailing blanks, no runs of empty lines, no long lines, one newline at the end."""
    lines = "\n".join(line.rstrip() for line in rendered.splitlines())
    return laid_out(re.sub(r"\n{3,}", "\n\n", lines).strip())
