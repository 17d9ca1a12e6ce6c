"""A call of some kind, as an engine runs it.

In: an operator's tensors, as ``ragged.py``, ``cached.py`` and ``f8.py`` read them, or a dense call. Out: the tensors of
a dense call, the values of the kind's fields, and the dense problems that the call is made of.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from flashgen.ir.spec import AttentionSpec
from flashgen.op.call import Call, Rest, Tensors
from flashgen.reference import tiled
from flashgen.reference.programs import Place
from flashgen.reference.shard import Shard

# Gives the view that one problem has of a tensor of the call, by the tensor's place.
View = Callable[[Place, Any], Any]
# A dense problem of a call: the number of its sequence, its shard, q, k and v, and its view.
OneProblem = tuple[int, Shard, Tensors, View]


@dataclass(frozen=True)
class KindCall:
    """A checked call, its tensors and last arguments. ``pointers`` are the values of the kind's pointer fields."""

    call: Call
    tensors: Tensors
    rest: Rest
    pointers: list[int]

    @property
    def pairs(self) -> Sequence[tuple[int, int]]:
        """The lengths of each sequence, of queries and of keys, where the host knows them."""
        return ()

    def problems(self, spec: AttentionSpec) -> Iterator[OneProblem]:
        """The problems whose results are not zero: one, or one for each sequence."""
        if not tiled.gives_nothing(spec, self.call.shard):
            yield 0, self.call.shard, self.tensors, _all_of

    def widened(self, dtypes: Sequence[torch.dtype]) -> Tensors | None:  # noqa: ARG002 - subclasses read it
        """Tensors in one of these types for a dense call where no kernel takes 8 bits; None for other kinds."""
        return None

    def finish(self, o: Tensor, lse: Tensor | None) -> None:
        """Write the rows of o and lse that kernels leave out."""

    def finish_gradients(self, dq: Tensor, dk: Tensor, dv: Tensor) -> None:
        """Write the rows of gradients that kernels leave out."""


def _all_of(_place: Place, x: Any) -> Any:
    return x
