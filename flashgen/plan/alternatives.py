"""Runners-up: tiles that the planner could have taken, what the model says of them, and why they lost."""

from __future__ import annotations

from dataclasses import dataclass

from flashgen.plan.plan import Tiles
from flashgen.plan.prediction import LIMITS, PassTime

MOST = 4  # that are shown
MODEL_ERROR = 0.03  # differences that mean nothing


@dataclass(frozen=True)
class RunnerUp:
    """A tile that was not chosen. ``slower``: predicted time over that of the choice, less 1."""

    Br: int
    Bc: int
    what: str
    seconds: float
    slower: float
    why: str


def runner_up(tile: Tiles, what: str, predicted: PassTime, chosen: PassTime) -> RunnerUp:
    """A tile beside the chosen one, with the reason that the model has for it."""
    slower = predicted.seconds / chosen.seconds - 1 if chosen.seconds else 0.0
    main, other = predicted.main, chosen.main
    why = f"limited by {LIMITS[main.bound]}"
    grown = {each: value - other.alone.get(each, 0.0) for each, value in main.alone.items()}
    most = max(grown, key=lambda each: grown[each], default=None)
    if most is not None and grown[most] > 0.02 * main.seconds:
        why = f"more time for {LIMITS[most]}"
    elif main.resident < other.resident:
        why = f"{main.resident} instead of {other.resident} blocks a multiprocessor: {main.resident_limit}"
    elif main.idle > other.idle + 0.02:
        why = f"{main.idle:.0%} of the multiprocessors' time is idle at the end"
    if abs(slower) <= MODEL_ERROR:
        why = "as good, as far as the model can tell; later in the planner's order"
    elif slower < 0:
        why = "the model prefers it; the planner's order, which comes first, does not"
    return RunnerUp(tile.Br, tile.Bc, what, predicted.seconds, slower, why)
