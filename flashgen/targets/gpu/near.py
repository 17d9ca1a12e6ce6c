"""Stage 3, plan for GPUs: scores by a polynomial where what they take the tanh of is small, as of most soft-caps.

In: a ``Variant``. Out: a ``Near``, if its score has a tanh. The special function unit takes eight clocks for what other
units do in one, and a tanh asks it twice. Kernels ask once for all pairs of a warp's tile whether all are near.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

from flashgen.analysis.base_2 import LOG2_E
from flashgen.analysis.factors import is_of_launch
from flashgen.analysis.identities import make
from flashgen.analysis.levels import Level, kept_level
from flashgen.analysis.variant import DOT, Variant
from flashgen.ir.build import apply
from flashgen.ir.expr import Apply, Expr, literal, substitute, walk
from flashgen.targets.gpu.diagonals import exponent_of

# tanh x = x + x³ (c1 + c2 x²), right to 3e-7 up to FAR: to 1.4e-5 in a score whose cap is 50, where a weight is rounded
# to 2^-9 or 2^-12 of itself.
FAR = 0.3
_C1, _C2 = -0.33312132, 0.12641042


@dataclass(frozen=True)
class Near:
    """The ``score`` where ``argument`` is at most ``bound``, whatever its sign; ``exponent``: in base 2."""

    argument: Expr
    bound: Expr
    score: Expr
    exponent: Expr


def near_tanh(variant: Variant) -> Near | None:
    """None where there is none, or several, or where gradients of captured values want the same P of all kernels.

    Nor for squared distances, which no warpgroup multiplies.
    """
    if (
        variant.kind.rows_of_heads
        or variant.kind.f8
        or variant.tangent is not None
        or variant.gradients
        or variant.uses_sqdist
    ):
        return None
    found = {each for each in walk(variant.score) if isinstance(each, Apply) and each.op == "tanh"}
    if not variant.weights.form.exponential or len(found) != 1:
        return None
    (tanh,) = found
    if kept_level(tanh) is not Level.PAIR:  # there are few, and those of diagonals are read
        return None
    (argument,) = tanh.args
    match variant.score, argument:
        case (
            Apply(op="mul", args=(cap, inner)),
            Apply(op="mul", args=(factor, value)),
        ) if inner == tanh and value == DOT and is_of_launch(cap) and is_of_launch(factor) and factor != literal(0.0):
            # One multiplication less for either number.
            square = _product(factor, factor)
            cubed = _product(factor, square)
            numbers = (
                _product(cap, factor), _product(cap, literal(_C1), cubed), _product(cap, literal(_C2), cubed, square)
            )  # fmt: skip
            exponent = _odd(DOT, *(_product(literal(LOG2_E), each) for each in numbers))
            return Near(DOT, make("div", literal(FAR), make("abs", factor)), _odd(DOT, *numbers), exponent)
    near: dict[Expr, Expr] = {tanh: _odd(argument, literal(1.0), literal(_C1), literal(_C2))}
    score, exponent = substitute(variant.score, near), substitute(exponent_of(variant, variant.score), near)
    return Near(argument, literal(FAR), score, exponent)


def _product(*factors: Expr) -> Expr:
    return functools.reduce(lambda x, y: make("mul", x, y), factors)


def _odd(x: Expr, c0: Expr, c1: Expr, c2: Expr) -> Expr:
    square = apply("mul", x, x)
    inner = apply("add", c1, apply("mul", square, c2))
    return apply("mul", x, apply("add", c0, apply("mul", square, inner)))
