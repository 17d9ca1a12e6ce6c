"""Stage 3, plan for GPUs: scores by a polynomial where what they take the tanh of is small, as of most soft-caps.

In: a ``Variant``. Out: a ``Near``, if its score has a tanh. The special function unit takes eight clocks for what other
units do in one, and a tanh asks it twice. Kernels ask once for all pairs of a warp's tile whether all are near.
"""

from __future__ import annotations

from dataclasses import dataclass

from flashgen.analysis.base_2 import LOG2_E
from flashgen.analysis.levels import Level, kept_level
from flashgen.analysis.variant import DOT, Variant
from flashgen.ir.build import apply
from flashgen.ir.expr import Apply, Expr, Literal, literal, substitute, walk
from flashgen.targets.gpu.diagonals import exponent_of

# tanh x = x + x³ (c1 + c2 x²), right to 3e-7 up to FAR: to 1.4e-5 in a score whose cap is 50, where a weight is rounded
# to 2^-9 or 2^-12 of itself.
FAR = 0.3
_C1, _C2 = -0.33312132, 0.12641042


@dataclass(frozen=True)
class Near:
    """The ``score`` where ``argument`` is at most ``bound``, whatever its sign; ``exponent``: in base 2."""

    argument: Expr
    bound: float
    score: Expr
    exponent: Expr


def near_tanh(variant: Variant) -> Near | None:
    """None where there is none, or several, or where gradients of captured values want the same P of all kernels.

    Nor for squared distances, which no warpgroup multiplies.
    """
    if (
        variant.has_rows_of_heads
        or variant.f8
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
            Apply(op="mul", args=(Literal(value=cap), inner)),
            Apply(op="mul", args=(Literal(value=factor), value)),
        ) if inner == tanh and value == DOT and factor != 0:
            # One multiplication less for either constant.
            c0, c1, c2 = cap * factor, cap * _C1 * factor**3, cap * _C2 * factor**5
            exponent = _odd(DOT, *(LOG2_E * each for each in (c0, c1, c2)))
            return Near(DOT, FAR / abs(factor), _odd(DOT, c0, c1, c2), exponent)
    near: dict[Expr, Expr] = {tanh: _odd(argument, 1.0, _C1, _C2)}
    return Near(argument, FAR, substitute(variant.score, near), substitute(exponent_of(variant, variant.score), near))


def _odd(x: Expr, c0: float, c1: float, c2: float) -> Expr:
    square = apply("mul", x, x)
    inner = apply("add", literal(c1), apply("mul", square, literal(c2)))
    return apply("mul", x, apply("add", literal(c0), apply("mul", square, inner)))
