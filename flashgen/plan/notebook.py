"""How notebooks show a thing, as the plans of an op.

Pictures are made of what they show, so that they stand above it, and register here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from flashgen.ir.spec import AttentionSpec, HeadDim

# By the name of what is drawn. A drawing imports what it needs when it is called.
DRAWINGS: dict[str, Callable[[Any], str]] = {}


def drawn(what: str, thing: object) -> str:
    """The picture of a thing, as HTML or as letters."""
    return DRAWINGS[what](thing)


@dataclass(frozen=True, eq=False, repr=False)
class Plans(Mapping[HeadDim, Any]):
    """Plans by head dimension; empty where no generated kernel runs. A notebook shows them with the mask's tiles.

    ``derivatives`` say what computes tangents, derivatives of gradients, and the samples of ``torch.vmap``.
    """

    spec: AttentionSpec
    by_head_dim: Mapping[HeadDim, Any]
    derivatives: tuple[str, ...] = ()

    def __getitem__(self, head_dim: HeadDim) -> Any:
        return self.by_head_dim[head_dim]

    def __iter__(self) -> Iterator[HeadDim]:
        return iter(self.by_head_dim)

    def __len__(self) -> int:
        return len(self.by_head_dim)

    def __repr__(self) -> str:
        listed = "\n".join(f"  {head_dim}: {plan!r}" for head_dim, plan in self.items())
        return f"{{\n{listed}\n}}" if listed else "{}"

    def _repr_html_(self) -> str:
        return drawn("plans", self)
