"""Derivatives of the second order, of an operator and of the formula alike.

In: a function of the tensors that are differentiated by. Out: tangents of its results in one direction, and the
gradients of its gradients, taken in another; both the same for the same seed.

    t_o, t_lse                  what o and lse change by, as all inputs change at once
    ddq, ddk, …, dd_o, dd_lse   gradients of Σ r · (dq, dk, …) by q, k, …, and by the gradients of o and lse

Or, as ``mixed_order``, of either mode over the other:

    dt_q, dt_k, …, dt_t(q), …   gradients of Σ d_o · t_o + Σ d_lse · t_lse by q, k, …, and by their tangents
    td_q, td_k, …               tangents of dq, dk, …, as inputs and what arrives at o and lse move
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping

import torch
from torch import Tensor
from torch.autograd import forward_ad

Results = tuple[Tensor, Tensor | None]  # o and lse; None: there is none
Function = Callable[[Mapping[str, Tensor]], Results]  # of the tensors by name
_TANGENTS, _DIRECTIONS = 7_001, 7_002


def second_order(
    function: Function,
    learned: Mapping[str, Tensor],
    d_o: Tensor,
    d_lse: Tensor | None,
    still: Collection[str] = (),
) -> dict[str, Tensor]:
    """The results above. ``d_lse`` None: no gradient arrives there; ``still``: what has no tangent."""
    moves = _moves(learned, still)
    return {**_tangents(function, learned, moves), **_gradients_of_gradients(function, learned, d_o, d_lse)}


def mixed_order(
    function: Function,
    learned: Mapping[str, Tensor],
    d_o: Tensor,
    d_lse: Tensor | None,
    still: Collection[str] = (),
) -> dict[str, Tensor]:
    """The other results above; arguments as there."""
    learned = {name: x.detach().clone() for name, x in learned.items()}
    moves = _moves(learned, still)
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
    directions = tuple(_like(x, _DIRECTIONS + n) for n, x in enumerate(arriving))
    found = torch.func.jvp(gradients, (own, *arriving), (dict(moves), *directions))[1]
    return {f"td_{name}": x for name, x in found.items()}


def _tangents(function: Function, learned: Mapping[str, Tensor], moves: Mapping[str, Tensor]) -> dict[str, Tensor]:
    with forward_ad.dual_level():
        duals = {name: x.detach() for name, x in learned.items()}
        for name, tangent in moves.items():
            duals[name] = forward_ad.make_dual(duals[name].contiguous(), tangent)  # type: ignore[no-untyped-call]
        results = {"t_o": (found := function(duals))[0], "t_lse": found[1]}
        tangents = {
            name: (x, forward_ad.unpack_dual(x).tangent)  # type: ignore[no-untyped-call]
            for name, x in results.items()
            if x is not None
        }
    return {name: torch.zeros_like(x) if t is None else t for name, (x, t) in tangents.items()}


def _gradients_of_gradients(
    function: Function, learned: Mapping[str, Tensor], d_o: Tensor, d_lse: Tensor | None
) -> dict[str, Tensor]:
    leaves = {name: x.detach().clone().requires_grad_() for name, x in learned.items()}
    o, lse = function(leaves)
    arriving = {"_o": d_o.to(o.dtype).detach().clone().requires_grad_()}
    reached = [(o, arriving["_o"])]
    if lse is not None and d_lse is not None:
        arriving["_lse"] = d_lse.to(lse.dtype).detach().clone().requires_grad_()
        reached.append((lse, arriving["_lse"]))
    by = {**leaves, **arriving}
    reached = [(x, gradient) for x, gradient in reached if x.requires_grad]
    terms: list[Tensor] = []
    if reached:
        outputs, gradients = zip(*reached, strict=True)
        first = torch.autograd.grad(
            outputs, list(leaves.values()), gradients, create_graph=True, materialize_grads=True
        )
        terms = [(x * _like(x, _DIRECTIONS + n)).sum().double() for n, x in enumerate(first) if x.requires_grad]
    if not terms:
        return {f"dd{name}": torch.zeros_like(x) for name, x in by.items()}
    second = torch.autograd.grad(sum(terms[1:], terms[0]), list(by.values()), materialize_grads=True)
    return {f"dd{name}": x for name, x in zip(by, second, strict=True)}


def _moves(learned: Mapping[str, Tensor], still: Collection[str]) -> dict[str, Tensor]:
    """A tangent for each tensor by name, but for those ``still``."""
    return {name: _like(x, _TANGENTS + n) for n, (name, x) in enumerate(learned.items()) if name not in still}


def _reached(results: Results, d_lse: Tensor | None) -> tuple[Tensor, ...]:
    """Those of o and lse at which a gradient arrives."""
    o, lse = results
    return (o,) if lse is None or d_lse is None else (o, lse)


def _like(x: Tensor, seed: int) -> Tensor:
    """Normal numbers, the same on every device and in every type, but for rounding."""
    numbers = torch.randn(x.shape, generator=torch.Generator().manual_seed(seed))
    return numbers.to(device=x.device, dtype=x.dtype)
