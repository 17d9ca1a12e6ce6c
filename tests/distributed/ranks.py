"""Runs functions in processes that are ranks of a gloo group, and returns what each returned."""

from __future__ import annotations

import atexit
import functools
import multiprocessing
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

from flashgen.toolchains import cpp

# Ranks are forked from a process that has imported everything and run nothing: each would take seconds to.
_CONTEXT: Any = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(["tests.distributed.cases"])


class Ranks:
    """``world`` processes that stay, for one function after another."""

    def __init__(self, world: int, seconds: float = 20) -> None:
        meet = Path(mkdtemp()) / "meet"
        pipes = [_CONTEXT.Pipe() for _ in range(world)]
        self._ends: list[Connection] = [own for own, _ in pipes]
        self._processes = [
            _CONTEXT.Process(target=_rank, args=(rank, world, str(meet), seconds, pipe), daemon=True)
            for rank, (_, pipe) in enumerate(pipes)
        ]
        for process, (_, pipe) in zip(self._processes, pipes, strict=True):
            process.start()
            pipe.close()
        atexit.register(self.end)

    def run(self, function: Callable[..., Any], *arguments: Any, may_end: bool = False) -> list[Any]:
        """What ``function`` returned on each rank. Raises what one of them raised.

        ``may_end``: of a process that ended by itself, None; else that is an error, too.
        """
        for end in self._ends:
            end.send((function, arguments, cpp.find_compiler()))
        found = []
        for rank, (end, process) in enumerate(zip(self._ends, self._processes, strict=True)):
            try:
                found.append(end.recv())
            except EOFError:
                process.join()
                code = process.exitcode
                found.append((None, "" if may_end else f"rank {rank}: its process ended, with exit code {code}"))
        errors = [error for _, error in found if error]
        if errors:
            self.end()  # those that wait for one that failed have given up the group
            ranks.cache_clear()
            raise RuntimeError("\n".join(errors))
        return [result for result, _ in found]

    def end(self) -> None:
        """End the processes."""
        for process in self._processes:
            process.terminate()


@functools.cache
def ranks(world: int) -> Ranks:
    """The processes of a world of this size, which all tests share."""
    return Ranks(world)


def run(function: Callable[..., Any], world: int, *arguments: Any) -> list[Any]:
    """``function(*arguments)`` on each of ``world`` ranks."""
    return ranks(world).run(function, *arguments)


def compile_by(compiler: cpp.Compiler) -> None:
    """Compile as the process that asks does, so that one of them compiles a kernel for all."""
    cpp.find_compiler = lambda: compiler


def _rank(rank: int, world: int, meet: str, seconds: float, pipe: Connection) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{meet}", rank=rank, world_size=world, timeout=timedelta(seconds=seconds)
    )
    while True:
        function, arguments, compiler = pipe.recv()
        compile_by(compiler)
        try:
            pipe.send((function(*arguments), ""))
        except Exception:
            pipe.send((None, f"rank {rank}: {traceback.format_exc()}"))
