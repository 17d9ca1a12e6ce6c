"""The ops that are registered with ``torch.library``, by name and identity."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload

from flashgen.op.call import Attended, Rest, Tensors
from flashgen.op.engine import Engine
from flashgen.op.mapping import Batch
from flashgen.op.signature import Signature

NAMESPACE = "flashgen"


@dataclass(frozen=True, eq=False)
class Registered:
    """A registered op: its two operators, and the engine of its plain calls.

    ``batch`` says where its tensors run along the batch. ``first`` is the op whose engine the operators run, where that
    is another one.
    """

    name: str
    signature: Signature
    engine: Engine
    forward: OpOverload[..., Any]
    backward: OpOverload[..., Any]
    batch: Batch
    first: Registered | None = None

    @property
    def derivatives(self) -> tuple[str, ...]:
        """What computes tangents, derivatives of gradients, and the samples of ``torch.vmap``, in words."""
        return (
            f"tangents: {self.engine.tangents}",
            f"derivatives of gradients and of tangents: {self.engine.tangent_gradients}",
            f"torch.vmap: {self.batch.describe()}",
        )

    def attend_below_autograd(self, tensors: Tensors, rest: Rest) -> Attended:
        """The forward operator without its autograd; arguments and results are those of ``Engine.attend``."""
        with torch._C._AutoDispatchBelowAutograd():
            found = self.forward(*tensors, *rest[0], rest[1])
        return found if self.signature.has_lse else (found, None, None)

    def backward_below_autograd(self, *args: Any) -> list[Tensor]:
        """The backward operator without its autograd."""
        with torch._C._AutoDispatchBelowAutograd():
            found: list[Tensor] = self.backward(*args)
        return found


@functools.cache
def registry() -> dict[str, dict[str, Registered]]:
    """What is registered, by name and identity, as torch.library needs it: for the life of the process."""
    return {}


def first_of(name: str) -> Registered:
    """The op whose engine the operators of this name run."""
    return next(iter(registry()[name].values()))


def registered_names() -> tuple[str, ...]:
    """The names of the operators that are there, and of one that is about to be."""
    return tuple(registry())
