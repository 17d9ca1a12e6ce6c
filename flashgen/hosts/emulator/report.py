"""What a launch under the emulator tells: bytes moved, bank conflicts, or the fault that ended it."""

from __future__ import annotations

import enum
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

_DIRECTIVE = re.compile(r'#line (\d+) "(.*)"')


class FaultKind(enum.StrEnum):
    """What was wrong, in the order of ``enum class Fault`` of templates/emulator/interface.h."""

    LAUNCH = "launch"
    OUTSIDE = "outside"
    MISALIGNED = "misaligned"
    SHARED_OUTSIDE = "shared-outside"
    UNINITIALIZED = "uninitialized"
    NOT_AWAITED = "not-awaited"
    NOT_COMMITTED = "not-committed"
    NOT_PUBLISHED = "not-published"
    NOT_ARRIVED = "not-arrived"
    RACE = "race"
    GLOBAL_RACE = "global-race"
    DIVERGENCE = "divergence"
    DEADLOCK = "deadlock"
    MBARRIER = "mbarrier"


class EmulatorError(Exception):
    """A kernel did what it must not do.

    ``line`` is the line of the source that did it and ``line_text`` what stands there; ``other_line`` is the second
    line where there is one: the earlier access of a race, the copy, the barrier where others wait. Zero: no line.
    ``trace`` are the lines that called, the innermost first: from ``line`` out to the kernel. Numbers are those of the
    source with its headers in it; the message says which line of which file each is.
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
class SharedRequests:
    """Requests to shared memory from one place of the code. Without conflicts they take the ``least`` wavefronts."""

    line: int
    place: int
    requests: int
    wavefronts: int
    least: int

    @property
    def conflicts(self) -> int:
        """Wavefronts that bank conflicts cost."""
        return self.wavefronts - self.least


@dataclass(frozen=True)
class Report:
    """Counts of one launch: global memory by allocation, shared memory by place in the compiled code."""

    traffic: Mapping[str, Traffic] = field(default_factory=dict)
    places: tuple[SharedRequests, ...] = ()

    @property
    def hbm_bytes(self) -> int:
        """All bytes of global memory."""
        return sum(traffic.total for traffic in self.traffic.values())

    @property
    def shared(self) -> tuple[SharedRequests, ...]:
        """Requests to shared memory by line, with no place."""
        return _sums((each.line, 0, each) for each in self.places)

    @classmethod
    def total(cls, reports: Iterable[Report]) -> Report:
        """The sum over launches of one source: the kernels of a pass."""
        all_of_them = tuple(reports)
        traffic: dict[str, Traffic] = {}
        for report in all_of_them:
            for name, moved in report.traffic.items():
                traffic[name] = traffic.get(name, Traffic()) + moved
        return cls(traffic, _sums((each.line, each.place, each) for report in all_of_them for each in report.places))


def _sums(requests: Iterable[tuple[int, int, SharedRequests]]) -> tuple[SharedRequests, ...]:
    """Sums over equal lines and places, in their order."""
    found: dict[tuple[int, int], tuple[int, int, int]] = {}
    for line, place, each in requests:
        a, b, c = found.get((line, place), (0, 0, 0))
        found[line, place] = (a + each.requests, b + each.wavefronts, c + each.least)
    return tuple(SharedRequests(*key, *found[key]) for key in sorted(found))


def _shown(lines: list[str], number: int) -> str:
    return f"{_place(lines, number):>6} | {_line(lines, number)}"


def _place(lines: list[str], number: int, file: str | None = None) -> str:
    """The number that a line has in its file, and the file that a directive or the caller names."""
    for above in range(min(number, len(lines)), 0, -1):
        found = _DIRECTIVE.match(lines[above - 1])
        if found:
            return f"{found[2]}:{int(found[1]) + number - above - 1}"
    return f"{file}:{number}" if file else str(number)


def placed(said: str, file: str, source: str) -> str:
    """A compiler's message whose places in ``file`` are those that the directives of its ``source`` name."""
    lines = source.splitlines()
    return re.sub(rf"\b{re.escape(file)}:(\d+)", lambda found: _place(lines, int(found[1]), file), said)


def _line(lines: list[str], number: int) -> str:
    return lines[number - 1] if 0 < number <= len(lines) else ""
