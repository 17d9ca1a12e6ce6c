"""What ranks have to have in common, told before anything else travels, so that a mistake of one is an error on all.

In: what this rank was given, or why that is wrong. Out: what all were given. Raises the same error on every rank.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

import torch.distributed as dist

from flashgen.distributed.exchange import Group


@dataclass(frozen=True)
class Given:
    """A call as one rank sees it. ``length``, ``wrong`` and ``seed`` may differ; all else is one for all ranks."""

    op: str
    method: str
    partition: str
    q: str
    k: str
    v: str
    captured: str
    options: str
    mask: str
    length: int
    seed: int | None


@dataclass(frozen=True)
class Refused:
    """What a rank could not take."""

    error: type[Exception]
    message: str


_OWN = frozenset({"length", "seed"})
_WORDS = {"mask": "what the mask reads", "op": "the op", "options": "options", "captured": "captured values"}


def agree(of_this_rank: Callable[[], Given], group: Group) -> list[Given]:
    """What every rank was given. Raises ``ValueError`` where it differs, and what ``of_this_rank`` raised on any."""
    mine: Given | Refused
    try:
        mine = of_this_rank()
    except (TypeError, ValueError) as error:
        mine = Refused(TypeError if isinstance(error, TypeError) else ValueError, str(error))
    said: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(said, mine, group=group)
    for rank, each in enumerate(said):
        if isinstance(each, Refused):
            raise each.error(f"rank {rank}: {each.message}")
    first = said[0]
    for field in fields(Given):
        for rank, each in enumerate(said):
            if field.name not in _OWN and getattr(each, field.name) != getattr(first, field.name):
                what = _WORDS.get(field.name, f"'{field.name}'")
                raise ValueError(
                    f"ranks differ in {what}: rank 0 has {getattr(first, field.name)}, rank {rank} has "
                    f"{getattr(each, field.name)}; every rank has to pass the same"
                )
    return said
