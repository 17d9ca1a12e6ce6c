"""What calls of each kind are, where they are more than dense ones: one table, which ``engine.py`` reads.

In: a kind. Out: its ``Takes``; None: its calls take what dense ones take.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from flashgen.kinds.cached import CACHED
from flashgen.kinds.eight_bits import EIGHT_BITS
from flashgen.kinds.ragged import RAGGED
from flashgen.op import cached, f8, ragged
from flashgen.op.call import CallChecker, Rest, Tensors
from flashgen.op.taken import Taken


class Take(Protocol):
    """Gives the call of an operator's arguments; ``derives``: it is to be differentiated, not run by kernels."""

    def __call__(self, checker: CallChecker, tensors: Tensors, rest: Rest, *, derives: bool = False) -> Taken: ...


# Gives what shapes are checked with, by q, k and v, the kind's own tensors and numbers.
WholeNumbers = Callable[[Sequence[Tensor], Sequence[Tensor], Sequence[Any]], Sequence[Any]]


def _as_they_are(_rows: Sequence[Tensor], _own: Sequence[Tensor], numbers: Sequence[Any]) -> Sequence[Any]:
    return numbers


@dataclass(frozen=True)
class Takes:
    """What calls of a kind take; what is said, behind the name of the spec, to who asks for gradients where there are
    none, and for derivatives of these.
    """

    take: Take
    whole_numbers: WholeNumbers = _as_they_are
    no_gradients: str = ""
    no_derivatives: str = ""


# By the names of kinds.
TAKES: Mapping[str, Takes] = {
    RAGGED.name: Takes(ragged.take, ragged.whole_numbers),
    CACHED.name: Takes(
        cached.take,
        cached.whole_numbers,
        "decode has no gradients; call it under torch.no_grad(), or train with the op",
        "decode has no derivatives, of neither mode: call the op, or op.reference.decode",
    ),
    EIGHT_BITS.name: Takes(
        f8.take,
        no_gradients="q, k and v of 8 bits have no gradients; call it under torch.no_grad(), or train in bfloat16",
        no_derivatives="q, k and v of 8 bits have no derivatives, of neither mode: widen them, or call op.reference",
    ),
}
