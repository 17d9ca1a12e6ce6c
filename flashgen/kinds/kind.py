"""``Kind``: what sets the kernels and the operator of one kind of call apart from those of dense calls."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from types import MappingProxyType
from typing import Any
from typing import Literal as OneOf

from flashgen.ir.types import ElementType
from flashgen.kinds.operand import Field, Operand

PassName = OneOf["forward", "backward"]
BOTH: tuple[PassName, PassName] = ("forward", "backward")


def named(*operands: Operand) -> Mapping[str, Operand]:
    """Operands by their names."""
    return MappingProxyType({each.name: each for each in operands})


@dataclass(frozen=True, eq=False)
class Kind:
    """One kind of call.

    **Its operator.** ``suffix`` is what its name ends in; None: it has none of its own. Beside what a spec declares it
    takes ``tensors`` and ``numbers``, by name; numbers that ``may_be_none`` may be left out, others are ints. ``dims``:
    of q, k and v, the last of which is the head dimension. ``o``: the type of o, None where it is that of q.

    **Its kernels.** ``mark`` stands in their names. ``operands`` are the rows that they read and write. In ``struct
    Arguments`` ``pointers`` stand behind what varies from call to call, ``sizes`` at the end; ``rows_as_declared``:
    pointers to rows have the types and comments of ``operands``, else those of a dense call. ``by_sequence``: params
    and drop probabilities may differ from sequence to sequence. ``passes``: those that have kernels. ``learns``:
    captured values receive gradients. ``by_lengths``: the tiles of a call on a GPU go by its lengths; else they are the
    planner's own, or go by its rows. ``stands_in``: they run in the place of dense ones, which a user may have edited.
    ``on_cpus``: CPUs have some.

    **What they do otherwise.** ``ragged``: every sequence of a batch is a call of its own. ``cached``: keys and values
    lie in a cache, of ``f8_cached`` in 8 bits beside queries of more. ``parts``: they see some of the keys of rows, and
    write float32. ``slices``: o, lse and dQ are rows of larger tensors, and gradients of keys float32. ``f8``: they
    multiply q, k and v of 8 bits. ``lists``: they read lists of selected keys, others the bits that are made of these.
    ``rows_of_heads``: the rows of a tile are of the heads that share keys, at positions that need not be neighbours.
    """

    name: str
    _: KW_ONLY
    mark: str
    operands: Mapping[str, Operand] = field(repr=False)
    suffix: str | None = field(default=None, repr=False)
    tensors: tuple[str, ...] = field(default=(), repr=False)
    numbers: tuple[str, ...] = field(repr=False)
    may_be_none: tuple[str, ...] = field(repr=False)
    dims: int = field(default=4, repr=False)
    o: ElementType | None = field(default=None, repr=False)
    pointers: tuple[Field, ...] = field(default=(), repr=False)
    sizes: tuple[Field, ...] = field(default=(), repr=False)
    rows_as_declared: bool = field(default=False, repr=False)
    by_sequence: bool = field(default=False, repr=False)
    passes: tuple[PassName, ...] = field(default=BOTH, repr=False)
    learns: bool = field(default=True, repr=False)
    by_lengths: bool = field(default=False, repr=False)
    stands_in: bool = field(default=False, repr=False)
    on_cpus: bool = field(default=True, repr=False)
    ragged: bool = field(default=False, repr=False)
    cached: bool = field(default=False, repr=False)
    f8_cached: bool = field(default=False, repr=False)
    parts: bool = field(default=False, repr=False)
    slices: bool = field(default=False, repr=False)
    f8: bool = field(default=False, repr=False)
    lists: bool = field(default=False, repr=False)
    rows_of_heads: bool = field(default=False, repr=False)
    whole: tuple[int | None, ...] = field(init=False, repr=False)  # the numbers of a call that is no part of another

    def __post_init__(self) -> None:
        object.__setattr__(self, "whole", tuple(None if name in self.may_be_none else 0 for name in self.numbers))

    @property
    def forward_only(self) -> bool:
        """Whether kernels have no backward pass."""
        return self.passes == BOTH[:1]

    @property
    def backward_only(self) -> bool:
        """Whether kernels have no forward pass."""
        return self.passes == BOTH[1:]

    @property
    def schema(self) -> str:
        """The schema of the operator's own numbers."""
        return ", ".join(f"SymInt{'?' if name in self.may_be_none else ''} {name}" for name in self.numbers)

    def rows(self, q: Any) -> Sequence[Any]:
        """The shape of lse."""
        return q.shape[:-1] if self.dims == 4 else (q.shape[1], q.shape[0])
