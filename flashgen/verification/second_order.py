"""Second derivatives, of an operator and of the formula alike.

In: a function of the tensors that are differentiated by. Out: tangents of its results in one direction, and the
gradients of its gradients in another; directions follow from the seed.

    t_o, t_lse                  tangents of o and lse, where all inputs have tangents
    ddq, ddk, …, dd_o, dd_lse   gradients of Σ r · (dq, dk, …) by q, k, …, and by the gradients of o and lse
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping

import torch
from torch import Tensor
from torch.autograd import forward_ad

Results = tuple[Tensor, Tensor | None]  # o and lse; None: there is none
Function = Callable[[Mapping[str, Tensor]], Results]  # of the tensors by name
_TANGENTS, DIRECTIONS = 7_001, 7_002


def second_order(
    function: Function,
    learned: Mapping[str, Tensor],
    d_o: Tensor,
    d_lse: Tensor | None,
    still: Collection[str] = (),
) -> dict[str, Tensor]:
    """The second derivatives. ``d_lse`` None: no gradient arrives at lse; ``still``: inputs without a tangent."""
    moves = moves_of(learned, still)
    return {**_tangents(function, learned, moves), **_gradients_of_gradients(function, learned, d_o, d_lse)}


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
        terms = [(x * numbers_like(x, DIRECTIONS + n)).sum().double() for n, x in enumerate(first) if x.requires_grad]
    if not terms:
        return {f"dd{name}": torch.zeros_like(x) for name, x in by.items()}
    second = torch.autograd.grad(sum(terms[1:], terms[0]), list(by.values()), materialize_grads=True)
    return {f"dd{name}": x for name, x in zip(by, second, strict=True)}


def moves_of(learned: Mapping[str, Tensor], still: Collection[str]) -> dict[str, Tensor]:
    """A tangent for each tensor by name, without those that are ``still``."""
    return {name: numbers_like(x, _TANGENTS + n) for n, (name, x) in enumerate(learned.items()) if name not in still}


def numbers_like(x: Tensor, seed: int) -> Tensor:
    """Normal numbers of the shape and type of ``x``, the same on every device and, but for rounding, in every type."""
    numbers = torch.randn(x.shape, generator=torch.Generator().manual_seed(seed))
    return numbers.to(device=x.device, dtype=x.dtype)
