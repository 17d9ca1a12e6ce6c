"""What the algorithms take and return: matrices in the HBM under the paper's names."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from flashgen.plan.arguments import gradient_field
from flashgen.reference.tiled import Problem
from tools.paper.hbm import Hbm
from tools.paper.pairs import Row, captured_names, closed, given_tensor, log_sum, row_names


@dataclass(frozen=True)
class Forward:
    """``o`` [B, H, Nq, Dv]; ``m`` and ``ell`` (ℓ) [B, H, Nq], None where rows do not carry them; what was counted."""

    problem: Problem
    o: Tensor
    m: Tensor | None
    ell: Tensor | None
    hbm: Hbm

    @property
    def lse(self) -> Tensor | None:
        """m + log ℓ, None for pointwise weights."""
        if self.ell is None:
            return None
        return log_sum(Row(torch.zeros_like(self.ell) if self.m is None else self.m, self.ell))


@dataclass(frozen=True)
class Backward:
    """dQ, dK, dV and the gradients of captured values by name; every access in ``hbm``."""

    dq: Tensor
    dk: Tensor
    dv: Tensor
    captured: Mapping[str, Tensor]
    hbm: Hbm


def results_of_rows(problem: Problem, hbm: Hbm) -> tuple[Tensor | None, Tensor | None]:
    """m and the denominators of rows that are done, None where rows do not carry them."""
    names = row_names(problem)
    row = Row(*(hbm.result(name) if name in names else problem.q.new_zeros(()) for name in ("m", "ell")))
    return row.m if "m" in names else None, closed(problem, row).ell if "ell" in names else None


def inputs_in_hbm(problem: Problem) -> Hbm:
    """Q, K and V in slow memory, in the precision of the computation. Captured tensors lie there too."""
    hbm = Hbm()
    for name, matrix in (("Q", problem.q), ("K", problem.k), ("V", problem.v)):
        hbm.put(name, matrix.detach().to(problem.compute))
    return hbm


def backward_inputs(forward: Forward, d_o: Tensor, d_lse: Tensor | None) -> Hbm:
    """Q, K, V, O, dO and what the rows carry; zeros for the gradients of captured values."""
    problem = forward.problem
    hbm = inputs_in_hbm(problem)
    hbm.put("O", forward.o)
    hbm.put("dO", d_o.detach().to(problem.compute))
    for name, value in (("m", forward.m), ("ell", forward.ell)):
        if value is not None:
            hbm.put(name, value)
    if d_lse is not None and row_names(problem):
        hbm.put("dlse", d_lse.detach().to(problem.compute))
    for name in captured_names(problem):
        hbm.initialise(gradient_field(name), hbm.result("Q"), *given_tensor(problem, name).shape, output=True)
    return hbm


def gradients_of(problem: Problem, hbm: Hbm) -> Backward:
    """The results of a backward pass."""
    captured = {name: hbm.result(gradient_field(name)) for name in captured_names(problem)}
    return Backward(hbm.result("dQ"), hbm.result("dK"), hbm.result("dV"), captured, hbm)
