"""A call as an engine runs it.

In: what a kind makes of its operator's tensors (``ragged.py``, ``cached.py``, ``f8.py``), or a dense call. Out: the
tensors of a dense call, values of the kind's own fields, and the dense problems that the call is made of.
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

# What one problem of a call sees of a tensor that has a place: a view.
View = Callable[[Place, Any], Any]


# A dense problem of a call: the number of its sequence, where it lies, q, k and v, and what it sees.
OneProblem = tuple[int, Shard, Tensors, View]


@dataclass(frozen=True)
class KindCall:
    """The call; ``rest`` is what the checker finds it by. ``pointers`` are the values of the kind's pointers."""

    call: Call
    tensors: Tensors
    rest: Rest
    pointers: list[int]

    @property
    def pairs(self) -> Sequence[tuple[int, int]]:
        """The lengths of each sequence, of queries and of keys, where the host knows them."""
        return ()

    def problems(self, spec: AttentionSpec) -> Iterator[OneProblem]:
        """Those that give anything: one, but of kinds by sequence."""
        if not tiled.gives_nothing(spec, self.call.shard):
            yield 0, self.call.shard, self.tensors, _all_of

    def widened(self, dtypes: Sequence[torch.dtype]) -> Tensors | None:  # noqa: ARG002 - of 8 bits
        """What dense calls take in their place where there is no kernel, in one of these types; None: the same."""
        return None

    def finish(self, o: Tensor, lse: Tensor | None) -> None:
        """Write what kernels leave out of o and lse."""

    def finish_gradients(self, dq: Tensor, dk: Tensor, dv: Tensor) -> None:
        """The same of gradients."""


def _all_of(_place: Place, x: Any) -> Any:
    return x
