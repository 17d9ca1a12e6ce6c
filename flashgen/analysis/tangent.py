"""What tangents of q, k, v and of captured values change: the score, the weights and the sink, symbolically.

Stage: analyse. In: an ``AttentionSpec``; a ``Variant``. Out: the spec with one more tensor or param for each float that
it captures, which holds the tangent of that one; the variant over it, with its ``Tangent``. The derivatives are those
that the backward pass uses, from the rows of the operator table. With tq, tk, … for tangents,

    t_dot = tq·k + q·tk      t_norms = 2 q·tq + 2 k·tk
    tS = ∂score/∂dot t_dot + ∂score/∂|q|² t_norms + Σ ∂score/∂read t(read)

``ir/weights.py`` has what becomes of tS. Kernels are emitted from such a variant as from any other.

``with_slopes`` is the same for the backward pass of forward mode, which second derivatives are made of: tangents have
gradients there, and tS, tw and the sink's tangent are differentiated once more by all that they depend on.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TypeVar

from flashgen.analysis.differentiate import derivative, derivatives
from flashgen.analysis.simplify import simplify
from flashgen.analysis.variant import DOT, SQDIST, CapturedGradient, S, Slopes, Tangent, Variant, partials, reads_of
from flashgen.ir.build import apply
from flashgen.ir.expr import Expr, Load, literal, score_input
from flashgen.ir.spec import AttentionSpec, CapturedTensor, Param, Schedule
from flashgen.ir.types import ScalarType
from flashgen.kinds.forward_mode import FORWARD_MODE, FORWARD_MODE_BACKWARD

T_DOT = score_input("t_dot")
T_NORMS = score_input("t_norms")
T_S = score_input("t_s")


def tangent_names(spec: AttentionSpec) -> Mapping[str, str]:
    """The names of the tangents of captured floats, by the names of these; tensors, then params."""
    captured: tuple[CapturedTensor | Param, ...] = (*spec.tensors, *spec.params)
    taken = {each.name for each in captured}
    found: dict[str, str] = {}
    for each in captured:
        if each.type is ScalarType.FLOAT if isinstance(each, Param) else each.element.is_floating:
            name = f"t_{each.name}"
            while name in taken:
                name = f"t_{name}"
            taken.add(name)
            found[each.name] = name
    return found


def with_tangents(spec: AttentionSpec, *, learned: bool = False, moves: bool = False) -> AttentionSpec:
    """The spec with the tangents of its captured floats as further captured values.

    ``learned``: values keep their gradients; ``moves``: tangents have gradients where their values do. Else nothing has
    one.
    """
    names = tangent_names(spec)
    tensors = [replace(each, name=names[each.name]) for each in spec.tensors if each.name in names]
    params = [replace(each, name=names[each.name], default=literal(0.0)) for each in spec.params if each.name in names]
    return replace(
        spec,
        schedule=Schedule(),  # which has no word for forward mode
        tensors=(*_learned(spec.tensors, learned), *_learned(tensors, moves)),
        params=(*_learned(spec.params, learned), *_learned(params, moves)),
    )


_Captured = TypeVar("_Captured", CapturedTensor, Param)


def _learned(captured: Sequence[_Captured], learned: bool) -> Iterator[_Captured]:
    return (replace(each, grad=learned and each.grad) for each in captured)


def with_tangent(variant: Variant) -> Variant:
    """The variant over ``with_tangents`` of its spec, for kernels that compute tangents, and no gradients."""
    names = tangent_names(variant.spec)
    weights = variant.weights
    # As in the variant: what weights do not look at changes nothing, however steep it is.
    is_looked_at = variant.weight_by_score != literal(0.0)
    terms = [_product(variant.score_by_dot, T_DOT)]
    if variant.score_by_sqdist is not None:
        terms.append(_product(variant.score_by_sqdist, T_NORMS))
    if is_looked_at:
        terms += _by_reads(variant.score, names)
    floats = (each for each in variant.proofs if each.load.tensor in names)
    of_tangents = (replace(each, load=_load_of(each.load, names)) for each in floats)
    return replace(
        variant,
        spec=with_tangents(variant.spec),
        gradients=(),
        kind=FORWARD_MODE,
        tangent=Tangent(
            score=_sum_or_none(iter(terms)) or literal(0.0),
            weight=None if weights.weight is None else _sum_or_none(_by_reads(weights.weight, names)),
            sink=None if weights.sink is None else _sum_or_none(_by_reads(weights.sink, names)),
        ),
        proofs=(*variant.proofs, *of_tangents),
    )


def with_slopes(variant: Variant, *, moves: bool = True) -> Variant:
    """The variant over ``with_tangents`` of its spec, for the kernel that differentiates forward mode backward.

    ``moves``: also by the tangents of captured values. As forward mode is linear in tangents, these gradients are those
    of the ordinary backward pass, for gradients that arrive at the tangents of o and lse.
    """
    moving = with_tangent(variant)
    tangent = moving.tangent
    assert tangent is not None
    # tw, of which forward mode keeps the second term apart.
    by_score, weight = variant.weight_by_score, None
    if by_score is not None:
        terms = (_product(by_score, T_S), tangent.weight or literal(0.0))
        weight = _sum_or_none(iter(terms)) or literal(0.0)
    by_sqdist = None
    by_dot = derivative(tangent.score, DOT)
    if variant.score_by_sqdist is not None:
        by_sqdist = derivative(tangent.score, SQDIST)
        by_dot = simplify(apply("sub", by_dot, apply("mul", literal(2.0), by_sqdist)))
    spec = with_tangents(variant.spec, learned=True, moves=moves)
    slopes = Slopes(by_dot, by_sqdist, None if weight is None else derivative(weight, S))
    return replace(
        moving,
        spec=spec,
        kind=FORWARD_MODE_BACKWARD,
        tangent=replace(tangent, slopes=slopes),
        gradients=_gradients(variant, spec, (tangent.score, weight, tangent.sink)),
    )


def _gradients(
    variant: Variant, spec: AttentionSpec, moved: tuple[Expr | None, Expr | None, Expr | None]
) -> tuple[CapturedGradient, ...]:
    """The captured gradients, with their parts in the tangents of score, weight and sink (``moved``)."""
    captured: tuple[CapturedTensor | Param, ...] = (*spec.tensors, *spec.params)
    learned = {each.name for each in captured if each.grad}
    own = {each.read: each for each in variant.gradients}
    reads = dict.fromkeys((*own, *reads_of(learned, *moved)))
    found = []
    for read, (score, weight, sink) in partials(list(reads), moved):
        gradient = own.get(read) or CapturedGradient(read, None, None, None)
        if read in own or any(part is not None for part in (score, weight, sink)):
            found.append(
                replace(gradient, from_score_tangent=score, from_weight_tangent=weight, from_sink_tangent=sink)
            )
    return tuple(found)


def _by_reads(root: Expr, names: Mapping[str, str]) -> Iterator[Expr]:
    """∂root/∂read t(read), for every distinct read of a float."""
    reads = list(reads_of(names, root))
    slopes = derivatives(root, reads)
    for read in reads:
        moved = _load_of(read, names) if isinstance(read, Load) else replace(read, name=names[read.name])
        yield _product(slopes[read], moved)


def _load_of(read: Load, names: Mapping[str, str]) -> Load:
    return replace(read, tensor=names[read.tensor])


def _product(slope: Expr, tangent: Expr) -> Expr:
    return slope if slope == literal(0.0) else apply("mul", slope, tangent)


def _sum_or_none(terms: Iterator[Expr]) -> Expr | None:
    total: Expr | None = None
    for term in terms:
        if term != literal(0.0):
            total = term if total is None else apply("add", total, term)
    return None if total is None else simplify(total)
