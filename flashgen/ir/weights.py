"""The forms of weights, one row each: how scores become weights, how their row closes, how dS is formed.

Stage: IR. In: nothing. Out: ``FORMS``, and ``Weights``, which is a form with what a spec states of it. Other modules
ask a form's properties and know none by its name.

With e the score of a pair, w its weight before the row is closed, and sums over the pairs that are kept:

    w = exp(e - m) where ``exponential``, m a running maximum of the row; else the spec's own function of e
    total = Σ term(w)      Z = denominator(total)      P = w / Z      lse = log Z (+ m)
    dw = (dP - delta · share(P)) / Z      with share(P) = ∂Z/∂w and delta = rowsum(dO ∘ O) - d(lse)
    t(lse) = Σ share(P) tw / Z            where weights change by tw; tP = tw / Z - P t(lse)

Of forward mode itself the gradients are these, with dtP what reaches tP through dropout, dP what reaches P where it
multiplies tV, delta = rowsum(d(tO) ∘ O) - d(t(lse)) and epsilon = rowsum(d(tO) ∘ tO):

    d(tw) = (dtP - delta · share(P)) / Z
    dw    = (dP - epsilon · share(P) - delta · ∂share/∂P · tP) / Z - t(lse) d(tw)

and so of exp, whose tw is w tS, dS = P (dP - epsilon) + d(tS) (tS - t(lse)). t(lse) may be large where its differences
are not: it has to be subtracted from tS, not what either is multiplied by.

A form without a denominator has P = w, dw = dP and no lse. Masked pairs have P = 0 in every form, dropout acts on P,
and a sink is one more exponential in the total of an exponential form.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from flashgen.ir.build import apply
from flashgen.ir.expr import Expr, Symbol, SymbolKind, literal
from flashgen.ir.types import ScalarType


def _symbol(name: str) -> Symbol:
    return Symbol(ScalarType.FLOAT, name=name, kind=SymbolKind.FORM)


WEIGHT = _symbol("w")
TOTAL = _symbol("total")  # Σ term(w)
PROBABILITY = _symbol("P")  # before dropout
D_PROBABILITY = _symbol("dP")  # what arrives through dropout
DELTA = _symbol("delta")
INVERSE = _symbol("1 / Z")
# Of forward mode, differentiated: t(lse), epsilon, tP before dropout, d(tw).
MOVED = _symbol("t(lse)")
EPSILON = _symbol("epsilon")
PROBABILITY_TANGENT = _symbol("tP")
D_WEIGHT_TANGENT = _symbol("d(tw)")


@dataclass(frozen=True)
class Form:
    """One row of the table.

    ``word`` is what the language calls it, empty where the weight's expression stands alone. ``term`` is over
    ``WEIGHT``, ``denominator`` over ``TOTAL``, ``share`` and its derivative ``share_slope`` over ``PROBABILITY``; all
    None where rows have no denominator.
    ``degree``: the power of Z that is the total, so that those of a row's parts add up.
    ``formula`` is P for comments, ``{}`` the weight's expression, and ``with_sink`` the same with a sink; ``gradient``
    is what the backward pass computes, ``tangent`` what those of o and lse are. ``needs`` completes "'word' needs …".
    """

    name: str
    word: str
    formula: str
    gradient: str
    tangent: str
    exponential: bool = False
    with_sink: str = ""
    term: Expr | None = None
    denominator: Expr | None = None
    share: Expr | None = None
    share_slope: Expr | None = None
    degree: int = 1
    needs: str = ""

    @property
    def normalised(self) -> bool:
        """Whether a row has a denominator, and with it an lse."""
        return self.denominator is not None

    @property
    def divided(self) -> bool:
        """Whether P is a function's value, of any size, over the row's denominator."""
        return self.normalised and not self.exponential

    @property
    def is_sum(self) -> bool:
        """Whether the denominator is the plain sum of weights."""
        return self.term == WEIGHT and self.denominator == TOTAL

    @property
    def backward(self) -> Expr:
        """dS where weights are exponential, else dw; over the symbols above but ``WEIGHT`` and ``TOTAL``."""
        if self.share is None:
            return D_PROBABILITY
        taken = DELTA if self.share == literal(1.0) else apply("mul", DELTA, self.share)
        less = apply("sub", D_PROBABILITY, taken)
        return apply("mul", PROBABILITY, less) if self.exponential else apply("mul", less, INVERSE)

    @property
    def tangent_backward(self) -> Expr:
        """What reaches S of forward mode where weights are exponential, but for what comes by tS; else w.

        ``backward`` of what reaches tP is what reaches tS, or tw.
        """
        if self.share is None:
            return D_PROBABILITY
        is_sum = self.share == literal(1.0)
        less = apply("sub", D_PROBABILITY, EPSILON if is_sum else apply("mul", EPSILON, self.share))
        if self.exponential:
            return apply("mul", PROBABILITY, less)
        if not is_sum:
            assert self.share_slope is not None, "a row with a share has its derivative"
            t_share: Expr = PROBABILITY_TANGENT
            if self.share_slope != literal(1.0):
                t_share = apply("mul", self.share_slope, t_share)
            less = apply("sub", less, apply("mul", DELTA, t_share))
        return apply("sub", apply("mul", less, INVERSE), apply("mul", MOVED, D_WEIGHT_TANGENT))

    @property
    def written(self) -> tuple[str, ...]:
        """The ways to write it behind ``weights``, ``{}`` where an expression stands."""
        if self.exponential:
            return (self.word, f"{self.word}(sink = {{}})")
        return (f"{self.word}({{}})" if self.word else "{}",)


_T_O = "tO = tP V + P tV"
_DELTA = "delta = rowsum(dO ∘ O) - d(lse)   dP = dO Vᵀ"

SOFTMAX = Form(
    name="softmax",
    word="softmax",
    exponential=True,
    formula="P = exp(S) / Σ exp(S)",
    with_sink="P = exp(S) / (exp({}) + Σ exp(S))",
    gradient=f"P = exp(S - lse)   {_DELTA}   dS = P ∘ (dP - delta)",
    tangent=f"t(lse) = rowsum(P ∘ tS)   {_T_O}   tP = P ∘ (tS - t(lse))",
    term=WEIGHT,
    denominator=TOTAL,
    share=literal(1.0),
    share_slope=literal(0.0),
)
NORMALIZE = Form(
    name="normalize",
    word="normalize",
    formula="P = w / Σ w, w = {}",
    gradient=f"P = w(S) / Z   {_DELTA}   dS = w'(S) ∘ (dP - delta) / Z",
    tangent=f"t(lse) = rowsum(tw) / Z   {_T_O}   tP = tw / Z - P t(lse)   tw = w'(S) ∘ tS",
    term=WEIGHT,
    denominator=TOTAL,
    share=literal(1.0),
    share_slope=literal(0.0),
    needs="the weight that it divides by its sum",
)
NORMALIZE2 = Form(
    name="normalize2",
    word="normalize2",
    formula="P = w / √(Σ w²), w = {}",
    gradient=f"P = w(S) / Z   {_DELTA}   dS = w'(S) ∘ (dP - delta P) / Z",
    tangent=f"t(lse) = rowsum(P ∘ tw) / Z   {_T_O}   tP = tw / Z - P t(lse)   tw = w'(S) ∘ tS",
    term=apply("mul", WEIGHT, WEIGHT),
    denominator=apply("sqrt", TOTAL),
    share=PROBABILITY,
    share_slope=literal(1.0),
    degree=2,
    needs="the weight that it divides by the root of its sum of squares",
)
POINTWISE = Form(
    name="pointwise",
    word="",
    formula="P = {}",
    gradient="P = w(S)   dP = dO Vᵀ   dS = w'(S) ∘ dP",
    tangent=f"{_T_O}   tP = w'(S) ∘ tS",
)

FORMS: Mapping[str, Form] = MappingProxyType({each.name: each for each in (SOFTMAX, NORMALIZE, NORMALIZE2, POINTWISE)})


@dataclass(frozen=True)
class Weights:
    """A form with its expression: ``weight``, of ``s``, or the ``sink`` of an exponential form, over b, h, i."""

    form: Form = SOFTMAX
    weight: Expr | None = None
    sink: Expr | None = None

    def __post_init__(self) -> None:
        if (self.weight is None) != self.form.exponential:
            raise ValueError(f"'{self.form.name}' weights {'have no' if self.form.exponential else 'need a'} function")
        if self.sink is not None and not self.form.exponential:
            raise ValueError(f"'{self.form.name}' weights have no sink")

    @property
    def expression(self) -> Expr | None:
        """The weight, or the sink."""
        return self.sink if self.form.exponential else self.weight

    def over(self, expression: Expr | None) -> Weights:
        """The same form with another expression."""
        return Weights(self.form, sink=expression) if self.form.exponential else Weights(self.form, expression)

    def mapped(self, rule: Callable[[Expr], Expr]) -> Weights:
        """The same form with ``rule`` applied to its expression."""
        return self if self.expression is None else self.over(rule(self.expression))
