"""Stage 2, analyse: one spec at one head dimension, rewritten into the few functions that a kernel needs.

In: an ``AttentionSpec`` and a ``HeadDim``. Out: a ``Variant``: the score as a function of ``dot`` and ``sqdist``, one
boolean that says which pairs are kept, the weights in canonical form, and every derivative that the backward pass
uses. Nothing here knows about tiles or targets.

With e = score(dot, sqdist) and dP the gradient that reaches a weight, the backward pass computes for each pair

    exponential weights    P = exp(e - lse)        dE = P (dP - delta)
    with a denominator     P = w(e) / Z            dE = w'(e) (dP - delta share(P)) / Z
    without                P = w(e)                dE = w'(e) dP

    d(dot) = dE ∂e/∂dot,   with delta = rowsum(dO ∘ O) - d(lse)

as in Algorithm 4 of the FlashAttention paper, there for softmax alone; ``ir/weights.py`` has the forms of weights.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from flashgen.analysis.bounds import IndexProof, known_symbols, prove_indices
from flashgen.analysis.differentiate import derivative, derivatives
from flashgen.analysis.factors import factor_of_dot, gathered, is_of_launch
from flashgen.analysis.levels import Level, level_of
from flashgen.analysis.selection import ListedBlocks, lowered, split_masked_score
from flashgen.analysis.simplify import canonical_weights, simplify
from flashgen.ir.build import apply
from flashgen.ir.expr import Apply, Expr, Literal, Load, Symbol, SymbolKind, literal, score_input, substitute, walk
from flashgen.ir.spec import AttentionSpec, HeadDim
from flashgen.ir.weights import Weights
from flashgen.kinds.dense import DENSE
from flashgen.kinds.kind import Kind

DOT = score_input("dot")
SQDIST = score_input("sqdist")
S = score_input("s")

_Rule = Callable[[Expr], Expr]


def maybe(rule: _Rule, expr: Expr | None) -> Expr | None:
    """``rule`` of an expression; None for None."""
    return None if expr is None else rule(expr)


@dataclass(frozen=True)
class CapturedGradient:
    """One read of a value that receives a gradient, and its derivatives (None: does not occur there).

    The read contributes Σ dE ∂score/∂read + dW ∂weight/∂read over pairs, and Σ d(sink) ∂sink/∂read over rows.
    ``level`` is the level of the element that is read: pair sums are reduced that far before they are stored. The last
    three are derivatives of what tangents change, in the backward pass of forward mode: see ``Tangent``.
    """

    read: Load | Symbol
    from_score: Expr | None
    from_weight: Expr | None
    from_sink: Expr | None
    from_score_tangent: Expr | None = None
    from_weight_tangent: Expr | None = None
    from_sink_tangent: Expr | None = None

    @property
    def of_pairs(self) -> tuple[Expr, ...]:
        """The derivatives that are computed for each pair."""
        parts = (self.from_score, self.from_weight, self.from_score_tangent, self.from_weight_tangent)
        return tuple(part for part in parts if part is not None)

    @property
    def times_score_gradient(self) -> Expr | None:
        """A number of the launch: what a pair adds is this times dS. None where a pair adds anything else."""
        alone = self.from_weight is None and self.from_score is not None and is_of_launch(self.from_score)
        return self.from_score if alone else None

    @property
    def is_of_sink(self) -> bool:
        return self.from_sink is not None or self.from_sink_tangent is not None

    def mapped(self, rule: _Rule) -> CapturedGradient:
        """The gradient with ``rule`` applied to everything that is computed for each pair."""
        return replace(
            self,
            from_score=maybe(rule, self.from_score),
            from_weight=maybe(rule, self.from_weight),
            from_score_tangent=maybe(rule, self.from_score_tangent),
            from_weight_tangent=maybe(rule, self.from_weight_tangent),
        )

    @property
    def name(self) -> str:
        return self.read.tensor if isinstance(self.read, Load) else self.read.name

    @property
    def level(self) -> Level:
        return level_of(self.read)


@dataclass(frozen=True)
class Slopes:
    """Derivatives of the tangents of score and weight, which the backward pass of forward mode needs in addition.

    ``score_by_dot`` is the whole derivative of the score's tangent by dot, ``score_by_sqdist`` the one by |q|² or |k|²
    (None: there is no sqdist). ``weight_by_score`` is that of w'(s) t_s and the captured values' part, over s and t_s;
    None where weights are exponential.
    """

    score_by_dot: Expr
    score_by_sqdist: Expr | None
    weight_by_score: Expr | None

    def mapped(self, rule: _Rule) -> Slopes:
        by_sqdist, by_score = maybe(rule, self.score_by_sqdist), maybe(rule, self.weight_by_score)
        return Slopes(rule(self.score_by_dot), by_sqdist, by_score)


@dataclass(frozen=True)
class Tangent:
    """What tangents change: of the score, of a weight beside what the score changes, and of a row's sink.

    Linear in t_dot, in t_norms (the tangent of |q|² + |k|², where there is a sqdist) and in what stands in the place of
    captured values, see ``tangent.py``. ``weight`` and ``sink`` are None where nothing changes them. ``slopes``: of
    kernels that differentiate it, None in forward mode itself.
    """

    score: Expr
    weight: Expr | None
    sink: Expr | None
    slopes: Slopes | None = None

    @property
    def of_pairs(self) -> tuple[Expr, ...]:
        slopes = self.slopes
        more = () if slopes is None else (slopes.score_by_dot, slopes.score_by_sqdist, slopes.weight_by_score)
        return tuple(each for each in (self.score, self.weight, *more) if each is not None)

    def mapped(self, rule: _Rule) -> Tangent:
        return replace(
            self,
            score=rule(self.score),
            weight=maybe(rule, self.weight),
            slopes=None if self.slopes is None else self.slopes.mapped(rule),
        )


@dataclass(frozen=True)
class Variant:
    """What a kernel computes for one head dimension; every ``D`` and ``Dv`` is a literal.

    ``score`` is over dot, sqdist, indices, sizes, params and loads. ``keep`` is the conjunction of mask, layout and the
    conditions on positions found in the score; a pair has weight 0 where it is false. ``score_by_dot`` is the whole
    derivative by dot (sqdist = |q|² + |k|² - 2 dot), ``score_by_sqdist`` the one by |q|² or |k|², None where sqdist is
    not used. ``weight_by_score`` is None where weights are exponential. ``proofs`` say how each load is kept inside its
    tensor.

    ``kind`` is that of the calls whose kernels compute it. ``tangent``: kernels compute tangents beside o and lse;
    None: they do not. ``listed``: they go through blocks of keys, each for the queries whose lists name it
    (``by_blocks.py``).
    """

    spec: AttentionSpec
    head_dim: HeadDim
    score: Expr
    keep: Expr
    weights: Weights
    score_by_dot: Expr
    score_by_sqdist: Expr | None
    weight_by_score: Expr | None
    gradients: tuple[CapturedGradient, ...]
    proofs: tuple[IndexProof, ...] = field(repr=False)
    kind: Kind = DENSE
    tangent: Tangent | None = None
    listed: ListedBlocks | None = None

    @property
    def uses_sqdist(self) -> bool:
        """Whether the kernel has to form ‖q - k‖²."""
        return self.score_by_sqdist is not None

    @property
    def has_infinities(self) -> bool:
        """Whether a branch of the score is infinite, other than -inf for pairs without a weight.

        Derivatives of the other branch are 0 there, whatever gradient arrives (mostly NaN).
        """
        parts: tuple[Expr, ...] = (self.score,)
        match self.score:
            case Apply(op="where", args=(condition, score, other)) if other == literal(-math.inf):
                parts = (condition, score)
        return any(isinstance(each, Literal) and each.value in (math.inf, -math.inf) for each in walk(*parts))

    @property
    def keep_of_pairs(self) -> Expr:
        """The condition checked for each pair: ``keep`` without ``tiles``, which are for tiles alone."""
        names = {each.name for each in self.spec.tensors if each.of_tiles}
        if not names:
            return self.keep
        reads = (node for node in walk(self.keep) if isinstance(node, Load) and node.tensor in names)
        return simplify(substitute(self.keep, {read: literal(True) for read in reads}))

    @property
    def keep_everything(self) -> bool:
        return self.keep == literal(True)

    @property
    def has_row_state(self) -> bool:
        """Whether rows carry a denominator."""
        return self.weights.form.normalised


def analyse(spec: AttentionSpec, head_dim: HeadDim) -> Variant:
    """Rewrite the spec for one head dimension."""
    spec = lowered(spec)

    known = known_symbols(head_dim, spec.layout)

    def specialise(expr: Expr) -> Expr:
        return substitute(expr, known)

    score = substitute(specialise(spec.score), {S: apply("mul", apply("to_float", specialise(spec.scale)), DOT)})
    score, score_keep = split_masked_score(simplify(apply("to_float", score)))
    weights, score = canonical_weights(map_weights(spec.weights, specialise), score)
    weights = map_weights(weights, functools.partial(simplify, reciprocals=True))  # a division a pair is slow
    score = gathered(simplify(score))
    layout = literal(True) if spec.layout is None else specialise(spec.layout.keep)
    keep = simplify(apply("and", specialise(spec.mask), apply("and", layout, score_keep)))

    weight_by_score = None if weights.weight is None else derivative(weights.weight, S)
    # Weights that do not look at scores have no gradient through them, however steep these are: 0 · inf is no number.
    differentiated = literal(0.0) if weight_by_score == literal(0.0) else score
    by_sqdist = derivative(differentiated, SQDIST) if SQDIST in set(walk(score)) else None
    by_dot = derivative(differentiated, DOT)
    if by_sqdist is not None:
        by_dot = simplify(apply("sub", by_dot, apply("mul", literal(2.0), by_sqdist)))
    by_dot = gathered(by_dot)
    return Variant(
        spec=spec,
        head_dim=head_dim,
        score=score,
        keep=keep,
        weights=weights,
        score_by_dot=by_dot,
        score_by_sqdist=by_sqdist,
        weight_by_score=weight_by_score,
        gradients=_captured_gradients(spec, differentiated, weights),
        proofs=prove_indices(spec, head_dim),
    )


def linear_factor(variant: Variant) -> Expr | None:
    """c where a softmax's score is c · dot, with a positive constant or a number of the launch, else None.

    Kernels may count such scores from where they like, if gradients want nothing of dot. What is a number of the launch
    may be negative or 0. Kernels of 8 bits and of forward mode take constants alone.
    """
    parts = (part for each in variant.gradients for part in each.of_pairs)
    if not variant.weights.form.exponential or any(DOT in walk(part) for part in parts):
        return None
    factor = factor_of_dot(variant.score)
    takes_numbers = not variant.kind.f8 and variant.tangent is None
    return factor if isinstance(factor, Literal) or takes_numbers else None


def constant_factor(variant: Variant) -> float | None:
    """``linear_factor`` where it is a constant, which kernels of all kinds and targets use."""
    factor = linear_factor(variant)
    return float(factor.value) if isinstance(factor, Literal) else None


def map_weights(weights: Weights, rule: _Rule) -> Weights:
    """The same weights with ``rule`` applied to their expression, a float."""
    return weights.mapped(lambda expression: rule(apply("to_float", expression)))


def _captured_gradients(spec: AttentionSpec, score: Expr, weights: Weights) -> tuple[CapturedGradient, ...]:
    """Every distinct read of a grad tensor or param, in the order of first appearance."""
    roots = (score, weights.weight, weights.sink)
    differentiable = {tensor.name for tensor in spec.tensors if tensor.grad}
    differentiable |= {param.name for param in spec.params if param.grad}
    reads = list(reads_of(differentiable, *roots))
    parts = partials(reads, roots)
    return tuple(CapturedGradient(read, *own) for read, own in parts if any(part is not None for part in own))


def reads_of(names: Container[str], *roots: Expr | None) -> Iterator[Load | Symbol]:
    """Every distinct read of captured values with these names, by first appearance."""
    for node in walk(*(root for root in roots if root is not None)):
        match node:
            case Load(tensor=name) | Symbol(kind=SymbolKind.PARAM, name=name) if name in names:
                yield node


def partials(
    reads: Sequence[Load | Symbol], roots: Iterable[Expr | None]
) -> Iterator[tuple[Load | Symbol, list[Expr | None]]]:
    """Each read with the derivatives of all roots by it; None where a root is not there or does not depend on it."""
    by_read = [{} if root is None else derivatives(root, reads) for root in roots]
    for read in reads:
        parts = [of.get(read) for of in by_read]
        yield read, [None if part == literal(0.0) else part for part in parts]
