"""Times an operator and its peers, forward and forward with backward, in the same run.

In: an ``AttentionOp`` and a shape. Out: a ``Comparison`` a pass; its first entry is flashgen, the others are peers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from flashgen.benchmark.peers import PEERS, Inexpressible
from flashgen.benchmark.timing import Times, paired_times
from flashgen.ir.shape import Shape
from flashgen.ir.spec import HeadDim
from flashgen.ir.types import ElementType
from flashgen.runtime.op import AttentionOp
from flashgen.runtime.signature import TORCH_DTYPES
from flashgen.verification.inputs import Inputs, fitting, random_inputs

DEFAULT_SHAPE = Shape(1, 8, 8, 1024, 1024)
_MOST_PAIRS = 2**24  # of which the dense peer forms several matrices

_Call = Callable[..., Tensor]


@dataclass(frozen=True)
class Comparison:
    """One pass at one head dimension, element type and shape; ``absent`` says why a peer is not among ``times``."""

    head_dim: HeadDim
    dtype: ElementType
    shape: Shape
    backward: bool
    times: tuple[Times, ...]
    absent: tuple[tuple[str, str], ...]


def bench(
    op: AttentionOp,
    *,
    shape: Shape | None = None,
    dtype: ElementType | None = None,
    peers: Sequence[str] = tuple(PEERS),
) -> Iterator[Comparison]:
    """Every head dimension of the spec, forward, then forward and backward."""
    shape = shape or fitting(op.spec, DEFAULT_SHAPE, pairs=_MOST_PAIRS)
    chosen = dtype or (op.spec.dtypes or (ElementType.F32,))[0]
    for head_dim in op.spec.head_dims:
        inputs = random_inputs(op.spec, shape, head_dim, TORCH_DTYPES[chosen])
        calls: dict[str, _Call] = {"flashgen": lambda q, k, v, named: op(q, k, v, **named)}
        absent = []
        for name in peers:
            try:
                calls[name] = PEERS[name](op.spec, inputs)
            except Inexpressible as reason:
                absent.append((name, str(reason)))
        for backward in (False, True):
            candidates = {name: _run(call, op, inputs, backward=backward) for name, call in calls.items()}
            yield Comparison(head_dim, chosen, shape, backward, paired_times(candidates), tuple(absent))


def _run(call: _Call, op: AttentionOp, inputs: Inputs, *, backward: bool) -> Callable[[], object]:
    """One pass as a function without arguments."""
    if not backward:

        def forward() -> Tensor:
            with torch.no_grad():
                return call(inputs.q, inputs.k, inputs.v, inputs.named)

        return forward
    leaves = {name: tensor.detach().clone().requires_grad_() for name, tensor in inputs.differentiable(op.spec).items()}
    named = {name: leaves.get(name, value) for name, value in inputs.named.items()}

    def both() -> object:
        o = call(leaves["q"], leaves["k"], leaves["v"], named)
        return torch.autograd.grad(o, list(leaves.values()), inputs.d_o, allow_unused=True)

    return both
