"""Processes that judge cases, and whose crash is a finding.

In: cases. Out: their verdicts. Workers are forked by a server that has imported everything and computed nothing, so
that each starts in a moment and with no threads of its parent's. One that dies, or takes longer than it may, is ended
and replaced; the case that it had is the finding.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerContext, ForkServerProcess
from pathlib import Path
from types import TracebackType
from typing import Generic, TypeVar

from flashgen.store.build_lock import PROGRESS
from flashgen.store.cache import ENVIRONMENT_VARIABLE
from tools.fuzz.draws import Case
from tools.fuzz.judge import Finding, Verdict, judge

Item = TypeVar("Item")
# Operators stay registered for the life of a process.
_CASES_OF_A_WORKER = 60


def _serve(connection: Connection, scratch: str) -> None:
    """Judge what comes, until nothing comes any more."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    warnings.simplefilter("ignore")
    os.environ[ENVIRONMENT_VARIABLE] = scratch  # what the compiler remembers of specs is not the user's
    os.environ[PROGRESS] = "0"  # the campaign says how far it is
    while True:
        try:
            case = connection.recv()
        except EOFError:
            return
        connection.send(judge(case, Path(scratch)))


@dataclass
class _Worker(Generic[Item]):
    process: ForkServerProcess
    connection: Connection
    left: int
    item: Item | None = None
    deadline: float = 0.0

    def stop(self) -> None:
        self.connection.close()
        self.process.kill()
        self.process.join()


@dataclass
class Workers:
    """``jobs`` processes that ``serve``; a case may take ``limit`` seconds. Use it in a ``with`` statement."""

    jobs: int
    limit: float
    scratch: Path
    serve: Callable[[Connection, str], None] = _serve
    _context: ForkServerContext = field(init=False)

    def __enter__(self) -> Workers:
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload([__name__])
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        return None

    def judge(self, case: Case) -> Verdict:
        """One case."""
        ((_, verdict),) = self.judge_all([case], lambda each: each)
        return verdict

    def judge_all(self, items: Iterable[Item], case_of: Callable[[Item], Case]) -> Iterator[tuple[Item, Verdict]]:
        """Every item with the verdict of its case, as they come; items are asked for when a worker is free."""
        pending, workers = iter(items), list[_Worker[Item]]()
        exhausted = False
        try:
            while True:
                while not exhausted and (len(workers) < self.jobs or any(each.item is None for each in workers)):
                    item = next(pending, None)
                    if item is None:
                        exhausted = True
                        break
                    self._give(workers, item, case_of(item))
                busy = [each for each in workers if each.item is not None]
                if not busy:
                    return
                first = min(each.deadline for each in busy)
                ready = wait([each.connection for each in busy], max(0.0, first - time.monotonic()))
                for worker in busy:
                    verdict = self._verdict(worker, ready=worker.connection in ready)
                    if verdict is not None:
                        item, worker.item = worker.item, None
                        if worker.left == 0:
                            worker.stop()
                            workers.remove(worker)
                        assert item is not None, "it was busy"
                        yield item, verdict
        finally:
            for worker in workers:
                worker.stop()

    def _give(self, workers: list[_Worker[Item]], item: Item, case: Case) -> None:
        worker = next((each for each in workers if each.item is None), None)
        if worker is None:
            here, there = self._context.Pipe()
            process = self._context.Process(target=self.serve, args=(there, str(self.scratch)), daemon=True)
            process.start()
            there.close()
            worker = _Worker(process, here, _CASES_OF_A_WORKER)
            workers.append(worker)
        worker.item, worker.deadline = item, time.monotonic() + self.limit
        worker.left -= 1
        worker.connection.send(case)

    def _verdict(self, worker: _Worker[Item], *, ready: bool) -> Verdict | None:
        """What it says; what its end says; nothing while there is time."""
        if ready:
            try:
                verdict: Verdict = worker.connection.recv()
            except (EOFError, ConnectionResetError):
                worker.process.join()
                worker.left = 0
                return Verdict((Finding("crash", _end_of(worker.process.exitcode)),))
            return verdict
        if time.monotonic() >= worker.deadline:
            worker.left = 0
            return Verdict((Finding("hangs", f"no result within {self.limit:.0f} s"),))
        return None


def _end_of(code: int | None) -> str:
    if code is not None and code < 0:
        return f"the process ended by {signal.Signals(-code).name}"
    return f"the process ended with exit code {code}"
