"""Ranks compare their calls before any rows travel, so that a mistake on one rank is an error on all.

In: the call of this rank, or why it is wrong. Out: the facts of every rank. Raises the same error on every rank. A
correct call costs one collective of a few numbers; only errors are exchanged as text.
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
class RankFacts:
    """What may differ between ranks: the number of rows, the seed that a rank would draw, the time that it predicts."""

    length: int
    seed: int = 0
    nanoseconds: int = 0


@dataclass(frozen=True)
class RankCall:
    """The call of one rank. ``said`` describes each argument in words, by its name: equal on all ranks."""

    said: Mapping[str, str]
    told: RankFacts

    @property
    def digest(self) -> tuple[int, int]:
        found = hashlib.sha256(repr(self.said).encode()).digest()
        return (int.from_bytes(found[:8], "little", signed=True), int.from_bytes(found[8:16], "little", signed=True))


@dataclass(frozen=True)
class RankError:
    """The error of one rank, in a form that every rank can raise."""

    error: type[Exception]
    message: str


def agree(of_this_rank: Callable[[], RankCall], group: Group) -> list[RankFacts]:
    """The facts of every rank. Raises ``ValueError`` where calls differ, and on all ranks what one of them raised."""
    mine: RankCall | RankError
    try:
        mine = of_this_rank()
    except Exception as error:  # other ranks wait for an answer, whatever the error is
        known = next((kind for kind in (TypeError, ValueError) if isinstance(error, kind)), None)
        mine = RankError(known or RuntimeError, str(error) if known else f"{type(error).__name__}: {error}")
    numbers = [0] * 6
    if isinstance(mine, RankCall):
        numbers = [1, *mine.digest, mine.told.length, mine.told.seed, mine.told.nanoseconds]
    with answering(group, "what a call was given"):
        device = "cuda" if backend_of(group, "cpu") == "nccl" else "cpu"
        own = torch.tensor(numbers, dtype=torch.int64, device=device)
        table = own.new_empty(dist.get_world_size(group), len(numbers))
        dist.all_gather(list(table), own, group=group)
        rows = table.tolist()
    if any(row[0] == 0 or row[1:3] != rows[0][1:3] for row in rows):
        _tell(mine, group)
    return [RankFacts(*row[3:]) for row in rows]


def _tell(mine: RankCall | RankError, group: Group) -> None:
    """Raise the error of the first rank that has one, else the first difference between calls."""
    said: list[Any] = [None] * dist.get_world_size(group)
    with answering(group, "what a call was given"):
        dist.all_gather_object(said, mine, group=group)
    for rank, each in enumerate(said):
        if isinstance(each, RankError):
            raise each.error(f"rank {rank}: {each.message}")
    for what, wanted in said[0].said.items():
        for rank, each in enumerate(said):
            if each.said[what] != wanted:
                raise ValueError(
                    f"ranks differ in {what}: rank 0 has {wanted}, rank {rank} has {each.said[what]}; "
                    "every rank has to pass the same"
                )
