"""Paired timing: all candidates take turns within each round, so that a slow moment of the machine hits all of them.

In: named functions without arguments. Out: ``Times`` for each, with the ratio to the first taken round by round. On a
GPU the functions return at once; ``wait`` then makes the turn end with its work.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch

_TURN_SECONDS, _MOST_CALLS = 0.02, 1000


@dataclass(frozen=True)
class Spread:
    """A median with its quartiles."""

    median: float
    low: float
    high: float


@dataclass(frozen=True)
class Times:
    """One candidate: seconds a call, and how many times longer it took than the first candidate."""

    name: str
    seconds: Spread
    ratio: Spread
    rounds: int


def cuda_is_there() -> bool:
    """Whether PyTorch finds a GPU."""
    return torch.cuda.is_available()


def waiting(device: torch.device) -> Callable[[], object] | None:
    """What waits for the work of a device, where calls return before it is done."""
    return partial(torch.cuda.synchronize, device) if device.type == "cuda" else None


def paired_times(
    candidates: Mapping[str, Callable[[], object]],
    *,
    rounds: int = 15,
    budget: float = 30.0,
    wait: Callable[[], object] | None = None,
    settle: float = 0.0,
) -> tuple[Times, ...]:
    """Time the candidates against the first of them.

    Each is called twice to warm up, then in turn within a round, in an order that rotates and reverses; a turn of a
    short candidate is many calls. Rounds stop early when ``budget`` seconds are spent, but not before the third.
    ``wait`` returns when all work is done, where calls return before: it belongs to the time of a turn. A candidate
    runs ``settle`` seconds before its turn: a GPU at its power limit has the clock that its last work allowed.
    """

    def seconds(candidate: Callable[[], object], calls: int) -> float:
        """Of a call, over some calls in a row."""
        if wait is not None:
            wait()
        begin = time.perf_counter()
        for _ in range(calls):
            candidate()
        if wait is not None:
            wait()
        return (time.perf_counter() - begin) / calls

    names = list(candidates)
    calls = {}
    for name in names:
        candidates[name]()
        calls[name] = min(_MOST_CALLS, math.ceil(_TURN_SECONDS / seconds(candidates[name], 1)))
    samples: dict[str, list[float]] = {name: [] for name in names}
    stop = time.perf_counter() + budget
    for turn in range(rounds):
        if turn >= 3 and time.perf_counter() > stop:
            break
        start = turn % len(names)
        order = names[start:] + names[:start]
        for name in order if turn // len(names) % 2 == 0 else reversed(order):
            settled = time.perf_counter() + settle
            while time.perf_counter() < settled:
                seconds(candidates[name], calls[name])
            samples[name].append(seconds(candidates[name], calls[name]))
    first = samples[names[0]]
    return tuple(
        Times(
            name=name,
            seconds=spread(samples[name]),
            ratio=spread([own / base for own, base in zip(samples[name], first, strict=True)]),
            rounds=len(first),
        )
        for name in names
    )


def spread(values: Sequence[float]) -> Spread:
    """The median and the quartiles of at least two values."""
    low, median, high = statistics.quantiles(values, n=4, method="inclusive")
    return Spread(median, low, high)
