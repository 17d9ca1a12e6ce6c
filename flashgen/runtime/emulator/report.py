"""What a launch under the emulator tells: bytes moved, bank conflicts, or the fault that ended it."""

from __future__ import annotations

import enum
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field


class FaultKind(enum.StrEnum):
    """What was wrong, in the order of ``enum class Fault`` of templates/emulator/interface.h."""

    LAUNCH = "launch"
    OUTSIDE = "outside"
    MISALIGNED = "misaligned"
    SHARED_OUTSIDE = "shared-outside"
    UNINITIALIZED = "uninitialized"
    NOT_AWAITED = "not-awaited"
    NOT_COMMITTED = "not-committed"
    RACE = "race"
    GLOBAL_RACE = "global-race"
    DIVERGENCE = "divergence"
    DEADLOCK = "deadlock"


class EmulatorError(Exception):
    """A kernel did what it must not do.

    ``line`` is the line of the source that did it and ``line_text`` what stands there; ``other_line`` is the second
    line where there is one: the earlier access of a race, the copy, the barrier where others wait. Zero: no line.
    ``trace`` are the lines that called, the innermost first: from ``line`` out to the kernel.
    """

    def __init__(
        self,
        kind: FaultKind,
        message: str,
        line: int,
        other_line: int,
        trace: tuple[int, ...],
        source: str,
    ) -> None:
        lines = source.splitlines()
        self.kind = kind
        self.message = message
        self.line = line
        self.other_line = other_line
        self.line_text = _line(lines, line)
        self.other_line_text = _line(lines, other_line)
        self.trace = trace
        shown = [_shown(lines, line)] if line else []
        shown += [f"called from\n{_shown(lines, caller)}" for caller in trace if caller != line]
        shown += [f"and\n{_shown(lines, other_line)}"] if other_line else []
        super().__init__("\n".join([f"{kind}: {message}", *shown]))


@dataclass(frozen=True)
class Traffic:
    """Bytes of global memory, as lanes requested them: no cache, and no merging of equal requests."""

    loaded: int = 0
    stored: int = 0
    added: int = 0

    @property
    def total(self) -> int:
        """Loads, stores and atomic additions, each counted once."""
        return self.loaded + self.stored + self.added

    def __add__(self, other: Traffic) -> Traffic:
        return Traffic(self.loaded + other.loaded, self.stored + other.stored, self.added + other.added)


@dataclass(frozen=True)
class LineRequests:
    """Requests of one line to shared memory. A request without conflicts takes its ``least`` wavefronts."""

    line: int
    requests: int
    wavefronts: int
    least: int

    @property
    def conflicts(self) -> int:
        """Wavefronts that bank conflicts cost."""
        return self.wavefronts - self.least


@dataclass(frozen=True)
class Report:
    """Counts of one launch: global memory by allocation, shared memory by line."""

    traffic: Mapping[str, Traffic] = field(default_factory=dict)
    shared: tuple[LineRequests, ...] = ()

    @property
    def hbm_bytes(self) -> int:
        """All bytes of global memory."""
        return sum(traffic.total for traffic in self.traffic.values())

    @property
    def bank_conflicts(self) -> Mapping[int, int]:
        """Lost wavefronts by line, of the lines that lost any."""
        return {each.line: each.conflicts for each in self.shared if each.conflicts}

    @classmethod
    def total(cls, reports: Iterable[Report]) -> Report:
        """The sum over launches of one source: the kernels of a pass."""
        traffic: dict[str, Traffic] = {}
        shared: dict[int, LineRequests] = {}
        for report in reports:
            for name, moved in report.traffic.items():
                traffic[name] = traffic.get(name, Traffic()) + moved
            for each in report.shared:
                old = shared.get(each.line, LineRequests(each.line, 0, 0, 0))
                shared[each.line] = LineRequests(
                    each.line,
                    old.requests + each.requests,
                    old.wavefronts + each.wavefronts,
                    old.least + each.least,
                )
        return cls(traffic, tuple(shared[line] for line in sorted(shared)))


def _shown(lines: list[str], number: int) -> str:
    return f"{number:>6} | {_line(lines, number)}"


def _line(lines: list[str], number: int) -> str:
    return lines[number - 1] if 0 < number <= len(lines) else ""
