"""What a peer is: a way to compute the same attention that an operator is timed against."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from flashgen.analysis.selection import lowered
from flashgen.ir.spec import AttentionSpec
from flashgen.op.selected import lowered_tensors
from flashgen.reference.shard import Shard
from flashgen.verification.inputs import Inputs

Arguments = Mapping[str, Any]


class Inexpressible(Exception):  # noqa: N818 - reads as what it says
    """A peer cannot compute this spec; the message says why."""


@dataclass(frozen=True)
class Peer:
    """``run(q, k, v, named)`` is the output; ``no_backward`` says why it has no gradients, where it has none.

    ``first_call_seconds`` is what the first call took, where that compiles and is not a part of any time.
    """

    run: Callable[[Tensor, Tensor, Tensor, Arguments], Tensor]
    no_backward: str | None = None
    first_call_seconds: float | None = None


def lowered_inputs(spec: AttentionSpec, inputs: Inputs) -> tuple[AttentionSpec, Inputs]:
    """The spec that kernels are made for, and the arguments that they are given."""
    shard = Shard.whole(inputs.q.shape, inputs.k.shape)
    captured = lowered_tensors(spec, inputs.captured, shard.sizes(inputs.q.shape[-1], inputs.v.shape[-1]))
    return lowered(spec), replace(inputs, captured=captured)
