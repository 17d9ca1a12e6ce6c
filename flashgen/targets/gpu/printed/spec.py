"""The formulas of a spec as kernels compute them: hooks, weights, and the constants of exponents.

In: the recipe of a variant, and where its code is placed. Out: ``spec`` in templates.
Formulas are placed first, captured gradients and loads of the mask by their own modules, and then all hooks are there.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

from flashgen.analysis.constraints import ROW
from flashgen.analysis.factors import LOG2_E, is_of_launch, never_zero
from flashgen.analysis.levels import Level, level_of
from flashgen.analysis.selection import selected
from flashgen.analysis.variant import Variant
from flashgen.emit.context import WeightCode, by_score, derivative_hooks, formula
from flashgen.emit.distance import split_score
from flashgen.emit.placement import Placement
from flashgen.emit.spelling import c_literal
from flashgen.ir.build import apply
from flashgen.ir.expr import Expr, Literal, Load, literal
from flashgen.ir.text import text
from flashgen.ir.types import ElementType
from flashgen.plan.arguments import stride_field, tensor_field
from flashgen.targets.gpu.prefetch import element_of
from flashgen.targets.gpu.primitives import C_TYPES
from flashgen.targets.gpu.recipe import Recipe
from flashgen.targets.gpu.score import Bounded, Distance, Product


@dataclass(frozen=True)
class RowFunction:
    """A function of one row, evaluated where a pass begins or ends."""

    name: str
    code: str
    comment: str


READ_OF_PAIR = "read_of_pair"  # a function


class Places:
    """Where the code of one source is placed: hooks by their names, and functions of rows. It grows as modules add."""

    def __init__(self, recipe: Recipe) -> None:
        ahead = {} if recipe.prefetch is None else {recipe.prefetch: READ_OF_PAIR}
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
class ExponentCode:
    """What exponents are made by: of scores, or of products where scores are these but for a factor.

    An exponent in base 2 is ``factor`` times these, that of a maximum ``of_top``, in base e ``natural_of_top``.
    ``hidden`` stands for the product of a pair that is not kept. Where a launch has the factor, ``slope``, maxima are
    of products times its ``sign``, 1 or -1. Where it is a constant ``of_dot`` is that in base 2, without the factor of
    numbers of 8 bits, and ``lag`` the recipe's in units of these.
    """

    factor: str
    of_top: str
    natural_of_top: str
    hidden: str = "-INFINITY"
    sign: str = ""
    slope: str = ""
    of_dot: str = ""
    lag: str = ""


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
    score, small = recipe.score, recipe.score.small_tanh
    if small is not None:
        places.hook("near_argument", small.argument, comment="Where it is small the score is the next one")
        places.hook("near_score", small.score)
    if isinstance(score, Bounded):
        assert all(each.name != "row_score" for each in places.row_functions), "i - j is bounded by nothing"
        places.hook("exponent", score.exponent, comment=f"The score in base 2: log2(e) · ({text(variant.score)})")
        if small is not None:
            places.hook("near_exponent", small.exponent, comment="Where it is near")
    tangent = derivative_hooks(variant, placement, places.hook, "float", places.pair_inputs)
    if tangent is not None:
        places.row_functions.append(RowFunction("sink_tangent", tangent, "What the sink changes by"))
    if sink is not None:
        places.row_functions.append(RowFunction("sink_score", sink, "The sink"))


def _place_score(recipe: Recipe, places: Places) -> None:
    """That of a softmax: without what all keys of a query share, which is a function of the row."""
    variant, placement = recipe.computed, places.placement
    norms = recipe.score.norms if isinstance(recipe.score, Distance) else None
    pairs, of_row = split_score(variant.score if norms is None else norms.pairs)
    rows = [] if of_row is None else [placement.row_code(of_row)]
    if norms is not None:
        rows.append(placement.row_code(norms.rows))
    less = ", less what is the same for all keys of a query" if rows else ""
    declared = None if norms is None else ", float dot"
    places.hook("score", pairs, declared, f"The score: {text(variant.score)}{less}")
    if rows:
        # Rounded, as what it is taken from and given back to is the same in all passes.
        code = rows[0] if norms is None else f"fg::settled({' + '.join(rows)})"
        places.row_functions.append(RowFunction("row_score", code, "What all scores of a row have in common"))
    if isinstance(recipe.score, Distance) and recipe.score.by_lse:
        slope = placement.row_code(recipe.score.norms.factor)
        places.row_functions.append(RowFunction("row_slope", slope, "What that has of |q|² is this times it"))


def spec_code(recipe: Recipe, places: Places) -> dict[str, object]:
    """What a spec computes, once everything is placed."""
    variant, placement, form = recipe.computed, places.placement, recipe.computed.weights.form
    score, small = recipe.score, recipe.score.small_tanh
    norms = _norm_code(score, placement) if isinstance(score, Distance) else None
    exponent = _exponent_code(recipe, placement)
    bound = None if small is None else placement.value("near_bound", small.bound, Level.LAUNCH)
    condition = score.condition if isinstance(score, Bounded) else None
    in_bounds = None if condition is None else placement.value("is_bounded", condition, Level.LAUNCH)
    # Of wide heads a kernel with both ways spills: 676 bytes at D 256.
    narrow = variant.head_dim.qk + variant.head_dim.v <= 256
    factor = f"{{0}} *= fg::factor_of_scores({exponent.factor})" if exponent.sign else _dot_factor(variant, placement)
    prefetch = None if recipe.prefetch is None else _prefetch(variant, recipe.prefetch, placement)
    hooks, of_rows = placement.hooks(), {each.name: each.code for each in places.row_functions}
    assert len(hooks.members[Level.DIAGONAL.value]) <= len(recipe.numbers), "the workspace has no room for all"
    return {
        "formula": formula(variant),
        "hooks": hooks,
        "function_inputs": places.inputs,
        "row_functions": tuple(places.row_functions),
        "weights": WeightCode(form),
        # They have to be brought into the range of the elements.
        "scaled_weights": form.divided or ((variant.kind.f8 or variant.kind.f8_cached) and not form.exponential),
        "sink": of_rows.get("sink_score"),
        "split_score": "row_score" in of_rows,
        "sqdist": variant.uses_sqdist,
        "distance": placement.measures_distance,
        "dropout": has_dropout(variant),
        "tangent": variant.tangent is not None,  # forward mode, beside o and lse, or its backward pass
        # Captured values change weights beside what scores change.
        "weight_tangent": variant.tangent is not None and variant.tangent.weight is not None,
        "sink_tangent": of_rows.get("sink_tangent"),
        # A score is a product, bounded, without |q|² by ``norms``, or general; see ``score.py``.
        "product": isinstance(score, Product),
        "bounded": isinstance(score, Bounded),
        "in_bounds": in_bounds,  # which launches bound it, None: all
        # Then no lse is extreme, and there are kernels for both.
        "bounds_rows": in_bounds is not None and variant.weights.sink is None and narrow,
        "run": _run,
        "small_tanh": bound,  # up to which argument its tanh is a polynomial
        "norms": norms,
        "exponent": exponent,
        "dot_factor": factor,  # what becomes of sums of gradients of products
        # A format: what arrives through the score, from one of its derivatives.
        "by_score": functools.partial(by_score, variant),
        "prefetch": prefetch,
    }


def _run(block: str, others: str, arguments: str, by_bounds: object) -> str:
    """Runs a block; of one that is for launches that bound scores, or for others, the one that a launch needs."""
    plain, bounding, free = (f"{block}{argument}{others}.run();" for argument in ("", ", true", ", false"))
    return f"if (make_launch({arguments}).is_bounded) {bounding}\n  else {free}" if by_bounds else plain


def _exponent_code(recipe: Recipe, placement: Placement) -> ExponentCode:
    score = recipe.score
    factor = score.factor if isinstance(score, Product) else literal(1.0)
    if isinstance(factor, Literal):
        of_dot = LOG2_E * factor.value
        code, natural = c_literal(of_dot), c_literal(factor.value)
        if recipe.variant.kind.f8 and isinstance(score, Product):
            code, natural = "exponent_unit", "exponent_unit * fg::LN_2"
        return ExponentCode(code, code, natural, of_dot=c_literal(of_dot), lag=c_literal(recipe.lag / of_dot))
    unit = apply("mul", literal(LOG2_E), never_zero(factor))
    code = placement.value("exponent_of_dot", unit, Level.LAUNCH)
    slope, sign, hidden = f"{code} * fg::LN_2", f"fg::copy_sign(1.0f, {code})", f"fg::copy_sign(INFINITY, -{code})"
    return ExponentCode(code, f"fg::abs({code})", f"fg::abs({slope})", hidden, sign, slope)


def _norm_code(score: Distance, placement: Placement) -> dict[str, object]:
    """Of scores without |q|²."""
    factor = score.norms.of_key
    return {
        # What |k|² is multiplied by once a key, if it is, and whether heads have their own.
        "of_key": None if factor is None else placement.value("of_key", factor, level_of(factor)),
        "of_heads": factor is not None and level_of(factor) is Level.HEAD,
        # It is no constant, so that sequences of a ragged batch may have their own, by their lengths.
        "varies": factor is not None and not isinstance(factor, Literal),
        "by_lse": score.by_lse,  # what arrives at |q|² is P times what arrives at lse
    }


def _prefetch(variant: Variant, load: Load, placement: Placement) -> dict[str, object]:
    """An element that pairs read, which may be read before it is needed."""
    element = element_of(variant, load)
    return {
        # Its types in the tensor and in expressions.
        "element": "uint8_t" if element is ElementType.BOOL else C_TYPES[element],
        "c_type": "bool" if element is ElementType.BOOL else "float",
        # Its place in the tensor, and how far the next column's and row's are.
        "tensor": tensor_field(load.tensor),
        "offset": placement.offset_of_pair(load),
        "stride": stride_field(load.tensor, len(load.indices) - 1),
        "row_stride": stride_field(load.tensor, load.indices.index(ROW)),
        "comment": text(load),
    }


def has_dropout(variant: Variant) -> bool:
    """Whether pairs are dropped: over a cache none are."""
    return variant.spec.dropout is not None and not variant.kind.cached


def _dot_factor(variant: Variant, placement: Placement) -> str | None:
    """What becomes of sums {0} of gradients of dot products at the end, where one number is their factor.

    By 0 nothing is multiplied: in a row that has +inf sums are NaN, which times 0 stays.
    """
    tangent, slope = variant.tangent, variant.score_by_dot
    if tangent is not None and tangent.slopes is not None and tangent.slopes.score_by_dot != literal(0.0):
        return None
    if isinstance(slope, Literal):
        return f"{{0}} *= {c_literal(slope.value)}" if slope.value else "{0} = 0.0f"
    if not is_of_launch(slope):
        return None
    value = placement.value("score_by_dot", slope, Level.LAUNCH)
    return f"{{0}} = {by_score(variant, '{0}') % value}" if variant.has_infinities else f"{{0}} *= {value}"
