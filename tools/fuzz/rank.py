"""The processes that ``ranks.py`` starts: one that has imported everything forks the ranks and says how they end.

In: cases, by a socket. Out: a ``Share`` each, or in words what went wrong. They end when who started them does.
"""

from __future__ import annotations

import os
import pickle
import signal
import sys
import threading
import traceback
import warnings
from dataclasses import replace
from datetime import timedelta
from multiprocessing.connection import Client
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from flashgen.diagnostics import SpecError
from flashgen.store.build_lock import PROGRESS
from flashgen.store.cache import ENVIRONMENT_VARIABLE
from flashgen.toolchains.cpp import CompileFailed
from tools.fuzz.ranks import ANSWER
from tools.fuzz.running import results_of
from tools.fuzz.spread import Share, share


def _serve(rank: int, world: int, address: str, meet: str, scratch: str) -> None:
    end = Client(address, "AF_UNIX")
    end.send(rank)
    time_limit = timedelta(seconds=ANSWER)
    dist.init_process_group("gloo", init_method=f"file://{meet}", rank=rank, world_size=world, timeout=time_limit)
    while True:
        case, number = pickle.loads(end.recv_bytes())  # noqa: S301 - of a process of ours
        said: Any
        try:
            said = share(case, number, Path(scratch), results_of)
            said = replace(said, results={name: _plain(x) for name, x in said.results.items()})
        except (SpecError, ValueError, TypeError, CompileFailed) as error:
            said = Share({}, refused=str(error) or type(error).__name__)
        except Exception:
            said = traceback.format_exc(limit=-3)
        end.send_bytes(pickle.dumps(said))


def _plain(x: Tensor) -> Tensor:
    return x.detach().resolve_conj().resolve_neg().contiguous().clone()


def _rank(rank: int, world: int, address: str, meet: str, scratch: str) -> None:
    """A rank, until who has started it ends."""

    def end() -> None:
        sys.stdin.buffer.read()
        os._exit(0)

    threading.Thread(target=end, daemon=True).start()
    try:
        _serve(rank, world, address, meet, scratch)
    except (EOFError, ConnectionResetError, BrokenPipeError):
        os._exit(0)


def main() -> None:
    """Fork the ranks, by arguments that ``Group`` gives, and say how they end."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    warnings.simplefilter("ignore")
    world, address, meet, scratch = sys.argv[1:]
    os.environ[ENVIRONMENT_VARIABLE] = scratch
    os.environ[PROGRESS] = "0"
    torch.set_num_threads(1)
    ranks = {}
    for rank in range(int(world)):
        child = os.fork()
        if child == 0:
            _rank(rank, int(world), address, meet, scratch)
        ranks[child] = rank
    while ranks:
        child, status = os.wait()
        sys.stdout.write(f"{ranks.pop(child)} {os.waitstatus_to_exitcode(status)}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
