"""Processes that are ranks of a gloo group, for calls that are spread over them.

In: a case, the number of a call. Out: a ``Share`` of each rank, or what went wrong. They are started once and stay, for
one call after another; a rank that ends, or one that is waited for in vain, is a finding, and the next call has new
ones. They end with the process that has started them.
"""

from __future__ import annotations

import pickle
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, Listener
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tools.fuzz.draws import Case

if TYPE_CHECKING:
    from tools.fuzz.spread import Share

ANSWER = 60.0  # seconds that ranks wait for each other
_MARGIN = 30.0  # that are given them to say so
_START = 120.0


@dataclass(frozen=True)
class Fault:
    """What is wrong with ranks rather than with what they found: a word for its like, and for people."""

    kind: str
    detail: str


class Group:
    """``world`` processes, forked from one that has imported everything and computed nothing."""

    def __init__(self, world: int, scratch: Path) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="flashgen-ranks-")
        folder = Path(self._folder.name)
        listener = Listener(str(folder / "socket"), "AF_UNIX")
        given = [str(world), str(folder / "socket"), str(folder / "meet"), str(scratch)]
        self._parent = subprocess.Popen(
            [sys.executable, "-m", "tools.fuzz.rank", *given], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )  # fmt: skip
        ends: dict[int, Any] = {}
        for _ in range(world):
            end = listener.accept()
            ends[int(end.recv())] = end
        listener.close()
        self._ends: list[Connection] = [ends[rank] for rank in range(world)]

    def ask(self, case: Case, number: int, limit: float) -> Sequence[Share] | Fault:
        """What each rank found; after a ``Fault`` the group is of no use any more."""
        for end in self._ends:
            end.send_bytes(pickle.dumps((case, number)))
        stop = time.monotonic() + limit
        said: list[Any] = [_received(end, stop) for end in self._ends]
        if any(each is _ENDED for each in said):
            assert self._parent.stdout is not None, "it is a pipe"
            rank, code = map(int, self._parent.stdout.readline().split())
            return Fault("rank ends", f"rank {rank} ended by {_named(code)}")
        if any(each is None for each in said):
            late = [rank for rank, each in enumerate(said) if each is None]
            return Fault("ranks hang", f"ranks {late} gave no result within {limit:.0f} s")
        errors = [f"rank {rank}: {each}" for rank, each in enumerate(said) if isinstance(each, str)]
        if errors:
            return Fault("ranks", errors[0])
        reasons = {each.refused for each in said}
        if len(reasons) > 1:
            return Fault("ranks differ", "; ".join(f"rank {n}: {each.refused or 'ok'}" for n, each in enumerate(said)))
        return said

    def end(self) -> None:
        """End the processes."""
        for end in self._ends:
            end.close()
        self._parent.kill()
        self._parent.communicate()  # closes its pipes, whereupon the ranks end
        self._folder.cleanup()


class _Ended:
    """Of a process."""


_ENDED = _Ended()


def _received(end: Connection, stop: float) -> Any:
    """What a rank said; None: nothing in time."""
    try:
        return pickle.loads(end.recv_bytes()) if end.poll(max(0.0, stop - time.monotonic())) else None  # noqa: S301 - of a process of ours
    except (EOFError, ConnectionResetError):
        return _ENDED


def _named(code: int) -> str:
    return signal.Signals(-code).name if code < 0 else f"exit code {code}"


_groups: dict[int, Group] = {}


def ask(case: Case, number: int, scratch: Path) -> Sequence[Share] | Fault:
    """The same of the group that this process has started, or starts now."""
    ranks = case.calls[number].ranks
    assert ranks is not None, "the call is spread"
    group = _groups.get(ranks.world)
    if group is None:
        group = _groups[ranks.world] = Group(ranks.world, scratch)
    said = group.ask(case, number, _START + ANSWER + _MARGIN)
    if isinstance(said, Fault):
        del _groups[ranks.world]
        group.end()
    return said
