"""The formulas of a spec as kernels compute them: hooks, weights, and the constants of exponents.

In: the recipe of a variant, and where its code is placed. Out: a ``SpecCode``, ``spec`` in templates.
Formulas are placed first, captured gradients and loads of the mask by their own modules, and then all hooks are there.
"""

from __future__ import annotations

from dataclasses import dataclass

from flashgen.analysis.base_2 import LOG2_E
from flashgen.analysis.constraints import ROW
from flashgen.analysis.factors import is_of_launch, never_zero
from flashgen.analysis.levels import Level, level_of
from flashgen.analysis.selection import selected
from flashgen.analysis.variant import Variant, constant_factor, linear_factor
from flashgen.emit.context import WeightCode, by_score, derivative_hooks, formula
from flashgen.emit.distance import split_score
from flashgen.emit.placement import Hooks, Placement
from flashgen.emit.spelling import c_literal
from flashgen.ir.build import apply
from flashgen.ir.expr import Expr, Literal, Load, literal
from flashgen.ir.text import text
from flashgen.ir.types import ElementType
from flashgen.plan.arguments import stride_field, tensor_field
from flashgen.targets.gpu.ahead import element_of
from flashgen.targets.gpu.primitives import C_TYPES
from flashgen.targets.gpu.recipe import Recipe


@dataclass(frozen=True)
class RowFunction:
    """A function of one row, evaluated where a pass begins or ends."""

    name: str
    code: str
    comment: str


READ_OF_PAIR = "read_of_pair"  # a function


@dataclass(frozen=True)
class Ahead:
    """An element that pairs read, which may be read before it is needed: its types in the tensor and in expressions.

    ``offset`` is its place in the ``tensor``, ``stride`` and ``row_stride`` how far the next column's and row's are.
    """

    element: str
    c_type: str
    tensor: str
    offset: str
    stride: str
    row_stride: str
    comment: str


class Places:
    """Where the code of one source is placed: hooks by their names, and functions of rows. It grows as modules add."""

    def __init__(self, recipe: Recipe) -> None:
        ahead = {} if recipe.ahead is None else {recipe.ahead: READ_OF_PAIR}
        self.placement = Placement(recipe.computed.proofs, lanes=None, ahead=ahead)
        self.row_functions: list[RowFunction] = []
        self.inputs: dict[str, str] = {}
        self.pair_inputs = ", float dot" + (", float sqdist" if recipe.variant.uses_sqdist else "")

    def hook(self, name: str, expr: Expr, declared: str | None = None, comment: str = "") -> None:
        """Place a function of a pair."""
        self.placement.function(name, expr, comment)
        self.inputs[name] = self.pair_inputs if declared is None else declared

    def row_function(self, name: str, expr: Expr, comment: str) -> None:
        """Place a function of a row."""
        code = self.placement.value(name, expr, Level.ROW)
        self.row_functions.append(RowFunction(name, code, comment))


@dataclass(frozen=True)
class NormCode:
    """Of scores without |q|²: what |k|² is multiplied by once a key, if it is, and whether heads have their own.

    ``varies``: it is no constant, so that sequences of a ragged batch may have their own, by their lengths.
    """

    of_key: str | None
    of_heads: bool
    varies: bool


@dataclass(frozen=True)
class SpecCode:
    """What a spec computes.

    ``linear``: scores are the dot product but for a factor, with which kernels go on; ``signed``: one of the launch,
    perhaps negative. Maxima are of products times ``direction``, 1 or -1; ``hidden`` stands for the product of a pair
    that is not kept; ``slope`` is the factor. ``is_bounded``: whether weights may be formed before maxima are looked
    at, None: in every launch; ``bounds_rows``: where they may no lse is extreme. ``score_factor``: of exponential
    weights, what makes the score, or the dot product, an exponent in base 2; ``top_factor`` the same of a maximum,
    ``natural_factor`` of a maximum for base e; ``exponent_of_dot`` before what numbers of 8 bits are multiplied by.
    ``lag_code``: the recipe's lag in units of the score. ``by_score``: a format: what comes through the score, from one
    of its derivatives; ``by_tangent`` and ``by_weight_tangent`` the same of its tangent and of the weight's.
    ``ahead``: an element that pairs read, which kernels may read before; ``near``: up to which argument scores need no
    special function. ``scaled_weights`` have to be brought into the range of the elements. ``tangent``: forward mode,
    beside o and lse, or its backward pass; ``weight_tangent``: captured values change weights beside what scores
    change; ``moves_apart``: of exponential weights, what a score changes by is asked for once there are weights.
    ``norms``: scores are linear in squared distances, and pairs form them without |q|².
    """

    formula: str
    hooks: Hooks
    function_inputs: dict[str, str]
    row_functions: tuple[RowFunction, ...]
    weights: WeightCode
    scaled_weights: bool
    sink: str | None
    split_score: bool
    sqdist: bool
    distance: bool
    dropout: bool
    tangent: bool
    weight_tangent: bool
    moves_apart: bool
    sink_tangent: str | None
    linear: bool
    signed: bool
    direction: str
    hidden: str
    slope: str
    is_bounded: str | None
    bounds_rows: bool
    score_factor: str
    top_factor: str
    natural_factor: str
    exponent_of_dot: str
    lag_code: str
    dot_factor: str | None
    by_score: str
    by_tangent: str
    by_weight_tangent: str
    ahead: Ahead | None
    near: str | None
    norms: NormCode | None

    def run(self, block: str, others: str, arguments: str, by_bounds: object) -> str:
        """Runs a block; of one that is for launches that bound scores, or for others, the one that a launch needs."""
        plain, bounding, free = (f"{block}{argument}{others}.run();" for argument in ("", ", true", ", false"))
        return f"if (make_launch({arguments}).is_bounded) {bounding}\n  else {free}" if by_bounds else plain


def place_formulas(recipe: Recipe, places: Places) -> None:
    """Places the score, the weight, the mask and their derivatives."""
    variant, placement, weights = recipe.computed, places.placement, recipe.computed.weights
    if weights.form.exponential:
        _place_score(recipe, places)
    else:
        places.hook("score", variant.score, comment=f"The score: {text(variant.score)}")
    sink = None if weights.sink is None else placement.value("sink", weights.sink, Level.ROW)
    if weights.weight is not None:
        places.hook("weight", weights.weight, ", float s")
        assert variant.weight_by_score is not None
        places.hook("weight_by_score", variant.weight_by_score, ", float s", "∂weight/∂s")
    places.hook("keep", variant.keep_of_pairs, "", f"Kept pairs: {text(variant.keep_of_pairs)}")
    asked = selected(variant.keep, variant.spec.tensors) if variant.kind.cached else None
    if asked is not None:
        places.hook("is_selected", asked, "", "Whether a query selects a key's block")
    if recipe.near is not None:
        near = recipe.near
        places.hook("near_argument", near.argument, comment="Where it is small the score is the next one")
        places.hook("near_score", near.score)
    if recipe.exponent is not None:
        assert all(each.name != "row_score" for each in places.row_functions), "i - j is bounded by nothing"
        places.hook("exponent", recipe.exponent, comment=f"The score in base 2: log2(e) · ({text(variant.score)})")
        if recipe.near is not None:
            places.hook("near_exponent", recipe.near.exponent, comment="Where it is near")
    tangent = derivative_hooks(variant, placement, places.hook, "float", places.pair_inputs)
    if tangent is not None:
        places.row_functions.append(RowFunction("sink_tangent", tangent, "What the sink changes by"))
    if sink is not None:
        places.row_functions.append(RowFunction("sink_score", sink, "The sink"))


def _place_score(recipe: Recipe, places: Places) -> None:
    """That of a softmax: without what all keys of a query share, which is a function of the row."""
    variant, norms, placement = recipe.computed, recipe.norms, places.placement
    split = split_score(variant.score if norms is None else norms.pairs)
    rows = [] if split.rows is None else [placement.row_code(split.rows)]
    if norms is not None:
        rows.append(placement.row_code(norms.rows))
    less = ", less what is the same for all keys of a query" if rows else ""
    declared = None if norms is None else ", float dot"
    places.hook("score", split.pairs, declared, f"The score: {text(variant.score)}{less}")
    if rows:
        # Rounded, as what it is taken from and given back to is the same in all passes.
        code = rows[0] if norms is None else f"fg::settled({' + '.join(rows)})"
        places.row_functions.append(RowFunction("row_score", code, "What all scores of a row have in common"))
    if norms is not None and recipe.norms_by_lse:
        slope = placement.row_code(norms.factor)
        places.row_functions.append(RowFunction("row_slope", slope, "What that has of |q|² is this times it"))


def spec_code(recipe: Recipe, places: Places) -> SpecCode:
    """What a spec computes, once everything is placed."""
    variant, norms = recipe.computed, _norm_code(recipe, places.placement)
    placement, form, constant = places.placement, variant.weights.form, constant_factor(variant)
    launch = _exponent_of_launch(variant, placement)
    near = None if recipe.near is None else placement.value("near_bound", recipe.near.bound, Level.LAUNCH)
    condition = recipe.is_bounded
    is_bounded = None if condition is None else placement.value("is_bounded", condition, Level.LAUNCH)
    # Of wide heads a kernel with both ways spills: 676 bytes at D 256.
    bounds_rows = (
        condition is not None and variant.weights.sink is None and variant.head_dim.qk + variant.head_dim.v <= 256
    )
    dot_factor = _dot_factor(variant, placement) if launch is None else f"*= fg::factor_of_scores({launch})"
    hooks, of_rows = placement.hooks(), {each.name: each.code for each in places.row_functions}
    assert len(hooks.members[Level.DIAGONAL.value]) <= len(recipe.numbers), "the workspace has no room for all"
    factor, by_units = LOG2_E * (constant or 1.0), variant.kind.f8 and constant is not None
    score_factor = "exponent_unit" if by_units else c_literal(factor)
    natural_factor = "exponent_unit * fg::LN_2" if by_units else c_literal(constant or 1.0)
    return SpecCode(
        formula=formula(variant),
        hooks=hooks,
        function_inputs=places.inputs,
        row_functions=tuple(places.row_functions),
        weights=WeightCode(form),
        scaled_weights=form.divided or ((variant.kind.f8 or variant.kind.f8_cached) and not form.exponential),
        sink=of_rows.get("sink_score"),
        split_score="row_score" in of_rows,
        sqdist=variant.uses_sqdist,
        distance=places.placement.measures_distance,
        dropout=has_dropout(variant),
        tangent=variant.tangent is not None,
        weight_tangent=variant.tangent is not None and variant.tangent.weight is not None,
        moves_apart=recipe.moves_apart,
        sink_tangent=of_rows.get("sink_tangent"),
        linear=constant is not None or launch is not None,
        signed=launch is not None,
        direction="1.0f" if launch is None else f"fg::copy_sign(1.0f, {launch})",
        hidden="-INFINITY" if launch is None else f"fg::copy_sign(INFINITY, -{launch})",
        slope=c_literal(constant or 1.0) if launch is None else f"{launch} * fg::LN_2",
        is_bounded=is_bounded,
        bounds_rows=bounds_rows,
        score_factor=score_factor if launch is None else launch,
        top_factor=score_factor if launch is None else f"fg::abs({launch})",
        natural_factor=natural_factor if launch is None else f"fg::abs({launch} * fg::LN_2)",
        exponent_of_dot=c_literal(factor),
        lag_code=c_literal(recipe.lag / factor),
        dot_factor=dot_factor,
        by_score=by_score(variant),
        by_tangent=by_score(variant, "d_t_score"),
        by_weight_tangent=by_score(variant, "d_t_weight"),
        near=near,
        norms=norms,
        ahead=None if recipe.ahead is None else _ahead(variant, recipe.ahead, places.placement),
    )


def _norm_code(recipe: Recipe, placement: Placement) -> NormCode | None:
    if recipe.norms is None:
        return None
    factor = recipe.norms.of_key
    if factor is None:
        return NormCode(None, of_heads=False, varies=False)
    level = level_of(factor)
    code = placement.value("of_key", factor, level)
    return NormCode(code, of_heads=level is Level.HEAD, varies=not isinstance(factor, Literal))


def _ahead(variant: Variant, load: Load, placement: Placement) -> Ahead:
    element = element_of(variant, load)
    return Ahead(
        element="uint8_t" if element is ElementType.BOOL else C_TYPES[element],
        c_type="bool" if element is ElementType.BOOL else "float",
        tensor=tensor_field(load.tensor),
        offset=placement.offset_of_pair(load),
        stride=stride_field(load.tensor, len(load.indices) - 1),
        row_stride=stride_field(load.tensor, load.indices.index(ROW)),
        comment=text(load),
    )


def has_dropout(variant: Variant) -> bool:
    """Whether pairs are dropped: over a cache none are."""
    return variant.spec.dropout is not None and not variant.kind.cached


def _exponent_of_launch(variant: Variant, placement: Placement) -> str | None:
    """What makes exponents in base 2 of products, where that is a number of the launch. It is never 0."""
    factor = linear_factor(variant)
    if factor is None or isinstance(factor, Literal):
        return None
    exponent = apply("mul", literal(LOG2_E), never_zero(factor))
    return placement.value("exponent_of_dot", exponent, Level.LAUNCH)


def _dot_factor(variant: Variant, placement: Placement) -> str | None:
    """What becomes of sums of gradients of dot products at the end, where one number is their factor.

    By 0 nothing is multiplied: in a row that has +inf sums are NaN, which times 0 stays.
    """
    tangent, slope = variant.tangent, variant.score_by_dot
    if tangent is not None and tangent.slopes is not None and tangent.slopes.score_by_dot != literal(0.0):
        return None
    if isinstance(slope, Literal):
        return f"*= {c_literal(slope.value)}" if slope.value else "= 0.0f"
    if not is_of_launch(slope):
        return None
    return f"*= {placement.value('score_by_dot', slope, Level.LAUNCH)}"
