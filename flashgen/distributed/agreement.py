"""What ranks have to have in common, told before anything else travels, so that a mistake of one is an error on all.

In: what this rank was given, or why that is wrong. Out: what all were given. Raises the same error on every rank. A
call that is right costs one collective of a few numbers; only what is wrong is told in words.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from flashgen.distributed.exchange import Group, answering, backend_of


@dataclass(frozen=True)
class Told:
    """What may differ between ranks: the rows of a rank, the seed that it would take, the time that it predicts."""

    length: int
    seed: int = 0
    nanoseconds: int = 0


@dataclass(frozen=True)
class Given:
    """A call as one rank sees it: ``said``, by what it is called, is one for all ranks."""

    said: Mapping[str, str]
    told: Told

    @property
    def digest(self) -> tuple[int, int]:
        """Of what is one for all ranks."""
        found = hashlib.sha256(repr(self.said).encode()).digest()
        return (int.from_bytes(found[:8], "little", signed=True), int.from_bytes(found[8:16], "little", signed=True))


@dataclass(frozen=True)
class Refused:
    """What a rank could not take, as a kind of error that every rank can raise."""

    error: type[Exception]
    message: str


def agree(of_this_rank: Callable[[], Given], group: Group) -> list[Told]:
    """What every rank told. Raises ``ValueError`` where they differ, and what ``of_this_rank`` raised on any."""
    mine: Given | Refused
    try:
        mine = of_this_rank()
    except Exception as error:  # whatever it is, the others wait for what this rank tells
        known = next((kind for kind in (TypeError, ValueError) if isinstance(error, kind)), None)
        mine = Refused(known or RuntimeError, str(error) if known else f"{type(error).__name__}: {error}")
    numbers = [0] * 6
    if isinstance(mine, Given):
        numbers = [1, *mine.digest, mine.told.length, mine.told.seed, mine.told.nanoseconds]
    with answering(group, "what a call was given"):
        device = "cuda" if backend_of(group, "cpu") == "nccl" else "cpu"
        own = torch.tensor(numbers, dtype=torch.int64, device=device)
        table = own.new_empty(dist.get_world_size(group), len(numbers))
        dist.all_gather(list(table), own, group=group)
        rows = table.tolist()
    if any(row[0] == 0 or row[1:3] != rows[0][1:3] for row in rows):
        _tell(mine, group)
    return [Told(*row[3:]) for row in rows]


def _tell(mine: Given | Refused, group: Group) -> None:
    """Raises the first of what ranks could not take, else the first difference."""
    said: list[Any] = [None] * dist.get_world_size(group)
    with answering(group, "what a call was given"):
        dist.all_gather_object(said, mine, group=group)
    for rank, each in enumerate(said):
        if isinstance(each, Refused):
            raise each.error(f"rank {rank}: {each.message}")
    for what, wanted in said[0].said.items():
        for rank, each in enumerate(said):
            if each.said[what] != wanted:
                raise ValueError(
                    f"ranks differ in {what}: rank 0 has {wanted}, rank {rank} has {each.said[what]}; "
                    "every rank has to pass the same"
                )
