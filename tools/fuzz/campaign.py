"""Draws specs, has them judged, cuts down what is wrong, and counts.

In: a machine, a seed, how many or how long. Out: ``Event``s as they come, and a ``Summary``.
"""

from __future__ import annotations

import itertools
import re
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

from tools.fuzz.corpus import keep
from tools.fuzz.draws import Draw, Machine
from tools.fuzz.judge import Verdict
from tools.fuzz.shrink import shrink
from tools.fuzz.workers import Workers

MACHINES = (Machine("cpu"), *(Machine("emulator", target) for target in ("sm_75", "sm_80", "sm_90a")))
_ATTEMPTS = 120


@dataclass(frozen=True)
class Failure:
    """A spec that was judged wrong: the seed that draws it, what is wrong, the smallest text, where that is kept."""

    seed: int
    kind: str
    detail: str
    text: str
    machines: tuple[str, ...]
    kept: Path | None


@dataclass
class Summary:
    """What a campaign has come to, so far."""

    machine: Machine
    seed: int
    specs: int = 0
    judged: int = 0
    results: int = 0
    borderline: int = 0
    seconds: float = 0.0
    refused: Counter[str] = field(default_factory=Counter)
    kinds: Counter[str] = field(default_factory=Counter)
    failures: list[Failure] = field(default_factory=list)

    def add(self, verdict: Verdict) -> None:
        """Count one spec."""
        self.specs += 1
        self.judged += not verdict.refused
        self.results += verdict.results
        self.borderline += verdict.borderline
        self.kinds.update(verdict.kinds)
        if verdict.refused:
            self.refused[_alike(verdict.refused)] += 1


def _alike(refused: str) -> str:
    """A reason without the names and numbers of one spec."""
    plain = re.sub(r"'[^']*'", "'…'", refused.partition("(")[0])
    return re.sub(r"(?<=\s)\d+", "…", plain).strip()


@dataclass(frozen=True)
class Limits:
    """When a campaign ends: after so many specs, or so many seconds; and what a failure may take to cut down."""

    count: int | None = None
    seconds: float | None = None
    attempts: int = _ATTEMPTS


def campaign(
    workers: Workers,
    machine: Machine,
    seed: int,
    draw: Callable[[int], Draw],
    limits: Limits,
    corpus: Path | None,
) -> Iterator[Summary]:
    """The summary after every spec; the last one is the whole. ``draw`` gives what a seed means."""
    start = time.monotonic()
    summary = Summary(machine, seed)

    def seeds() -> Iterator[int]:
        for number in itertools.count() if limits.count is None else range(limits.count):
            if limits.seconds is not None and time.monotonic() - start >= limits.seconds:
                return
            yield seed + number

    drawn = (_Drawn(each, draw(each)) for each in seeds())
    known: set[str] = set()
    for each, verdict in workers.judge_all(drawn, lambda each: each.draw.case):
        summary.add(verdict)
        if verdict.findings:
            # One of a kind is cut down: the others are most often the same bug.
            first = verdict.findings[0]
            alike = _kind(first.kind) in known
            known.add(_kind(first.kind))
            attempts = 0 if alike else limits.attempts
            summary.failures.append(_failure(workers, each, verdict, attempts, corpus))
        summary.seconds = time.monotonic() - start
        yield summary


@dataclass(frozen=True)
class _Drawn:
    seed: int
    draw: Draw


def _kind(kind: str) -> str:
    """What counts as the same while a failure is cut down: a result may become wrong by another name."""
    return "wrong" if kind.startswith("wrong") else kind


def _failure(workers: Workers, drawn: _Drawn, verdict: Verdict, attempts: int, corpus: Path | None) -> Failure:
    first = verdict.findings[0]
    at_once = drawn.draw.calls[first.call] if first.call >= 0 else None
    draw = drawn.draw if at_once is None else replace(drawn.draw, calls=(at_once,))
    found = {draw: verdict}

    def fails(candidate: Draw) -> bool:
        found[candidate] = workers.judge(candidate.case)
        return any(_kind(each.kind) == _kind(first.kind) for each in found[candidate].findings)

    if attempts and (draw == drawn.draw or fails(draw)):
        draw = shrink(draw, fails, attempts)
    elif attempts:
        draw = shrink(drawn.draw, fails, attempts)
    else:
        draw = drawn.draw
    last = next((each for each in found.get(draw, verdict).findings if _kind(each.kind) == _kind(first.kind)), first)
    machines = [draw.machine]
    alone = all(call.ranks is None and not call.door for call in draw.calls)
    if attempts and draw.machine in MACHINES and not draw.file and alone:
        others = (each for each in MACHINES if each != draw.machine)
        machines += [each for each in others if workers.judge(replace(draw.case, machine=each)).findings]
    kept = None
    if corpus is not None and draw.spec is not None and attempts:
        kept = keep(corpus, draw.case, tuple(machines), last.kind)
    text = f"{draw.case.text or draw.file}\n" + "\n".join(map(str, draw.calls))
    return Failure(drawn.seed, last.kind, last.detail, text, tuple(map(str, machines)), kept)
