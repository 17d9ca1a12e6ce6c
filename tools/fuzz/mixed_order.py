"""Derivatives of the second order of either mode over the other, of an operator and of the formula alike.

In: what ``second_order`` of ``flashgen.verification`` takes. Out, the same for the same seed:

    dt_q, dt_k, …, dt_t(q), …   gradients of Σ d_o · t_o + Σ d_lse · t_lse by q, k, …, and by their tangents
    td_q, td_k, …               tangents of dq, dk, …, as inputs and what arrives at o and lse move
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

import torch
from torch import Tensor

from flashgen.verification.verify import DIRECTIONS, Function, Results, moves_of, numbers_like


def mixed_order(
    function: Function,
    learned: Mapping[str, Tensor],
    d_o: Tensor,
    d_lse: Tensor | None,
    still: Collection[str] = (),
) -> dict[str, Tensor]:
    """The results above. ``d_lse`` None: no gradient arrives there; ``still``: what has no tangent."""
    learned = {name: x.detach().clone() for name, x in learned.items()}
    moves = moves_of(learned, still)
    if not moves:
        return {}
    by_values = through_tangents(function, learned, moves, d_o, d_lse)
    return {f"dt_{name}": x for name, x in by_values.items()} | _over_gradients(function, learned, moves, d_o, d_lse)


def through_tangents(
    function: Function,
    learned: Mapping[str, Tensor],
    moves: Mapping[str, Tensor],
    d_o: Tensor,
    d_lse: Tensor | None,
) -> dict[str, Tensor]:
    """Gradients of Σ d_o · t_o + Σ d_lse · t_lse by inputs and, as ``t(q)``, by tangents, those of ``moves`` of
    what is ``learned``.
    """
    leaves = {name: x.detach().clone().requires_grad_() for name, x in learned.items()}
    tangents = {name: x.detach().clone().requires_grad_() for name, x in moves.items() if name in leaves}

    def moved(own: Mapping[str, Tensor]) -> tuple[Tensor, ...]:
        return _reached(function({**leaves, **own}), d_lse)

    own = {name: leaves[name] for name in tangents}
    found = torch.func.jvp(moved, (own,), (tangents,))[1]
    weights = [d_o] if len(found) == 1 or d_lse is None else [d_o, d_lse]
    terms = [(x * w.to(x.dtype)).sum().double() for x, w in zip(found, weights, strict=True)]
    by = {**leaves, **{f"t({name})": x for name, x in tangents.items()}}
    total = sum(terms[1:], terms[0])
    if not total.requires_grad:
        return {name: torch.zeros_like(x) for name, x in by.items()}
    return dict(zip(by, torch.autograd.grad(total, list(by.values()), materialize_grads=True), strict=True))


def _over_gradients(
    function: Function,
    learned: Mapping[str, Tensor],
    moves: Mapping[str, Tensor],
    d_o: Tensor,
    d_lse: Tensor | None,
) -> dict[str, Tensor]:
    def outputs(leaves: Mapping[str, Tensor]) -> tuple[Tensor, ...]:
        return _reached(function(leaves), d_lse)

    def gradients(own: Mapping[str, Tensor], *arriving: Tensor) -> Mapping[str, Tensor]:
        found, pull = torch.func.vjp(outputs, {**learned, **own})[:2]
        of_leaves: Mapping[str, Tensor]
        (of_leaves,) = pull(tuple(w.to(x.dtype) for x, w in zip(found, arriving, strict=False)))
        return of_leaves

    own = {name: learned[name] for name in moves}
    # PyTorch gives no tangent to what lies over itself.
    arriving = tuple(x.contiguous() for x in ((d_o,) if d_lse is None else (d_o, d_lse)))
    directions = tuple(numbers_like(x, DIRECTIONS + n) for n, x in enumerate(arriving))
    found = torch.func.jvp(gradients, (own, *arriving), (dict(moves), *directions))[1]
    return {f"td_{name}": x for name, x in found.items()}


def _reached(results: Results, d_lse: Tensor | None) -> tuple[Tensor, ...]:
    """Those of o and lse at which a gradient arrives."""
    o, lse = results
    return (o,) if lse is None or d_lse is None else (o, lse)
