"""One build of an entry at a time: who waits is told for what, and nobody waits for a process that is gone.

In: the path of a lock file and what is built; what a compiler is at work on. Out: one line on stderr, where people wait
for more than two seconds, ``flashgen: compiling causal_d64_cpu (g++) …``, unless ``FLASHGEN_PROGRESS`` is 0. A process
that dies lets go of its lock, unless a child that it forked still holds it; one that is stopped does not. As entries
appear whole, to go on without the lock is harmless: the worst is a second build.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import sys
import threading
import time
import warnings
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

_TELL_SECONDS = 2.0
_MOST_SECONDS = 900.0  # a build takes seconds; past this its owner is stuck
_LOOK_SECONDS = 0.2


@dataclass(frozen=True)
class Holder:
    """The process that holds a lock: its number, machine and command, what it builds, and since when."""

    pid: int
    host: str
    command: str
    what: str
    since: float

    def __str__(self) -> str:
        where = "" if self.host == platform.node() else f" on '{self.host}'"
        return f"process {self.pid}{where} ({self.command})"

    @property
    def state(self) -> str:
        """``gone`` or ``stopped`` where it will not let go by itself; else nothing."""
        if self.host != platform.node():
            return ""
        try:
            os.kill(self.pid, 0)
        except ProcessLookupError:
            return "gone"
        except OSError:
            return ""
        with contextlib.suppress(OSError, IndexError):
            status = Path(f"/proc/{self.pid}/stat").read_text(encoding="utf-8", errors="replace")
            return {"T": "stopped", "Z": "gone", "X": "gone"}.get(status.rpartition(")")[2].split()[0], "")
        return ""


@contextlib.contextmanager
def exclusive(path: Path, what: str) -> Iterator[None]:
    """Hold a lock, or go on without where none is to be had. Warns after two seconds of waiting. Raises ``OSError``."""
    import filelock  # noqa: PLC0415 - takes longer to import than a stored entry to be found

    lock = filelock.FileLock(path, mode=0o644)
    start, told = time.monotonic(), False
    while True:
        try:
            lock.acquire(timeout=_LOOK_SECONDS)
            break
        except NotImplementedError:
            yield
            return
        except filelock.Timeout:
            holder, waited = _holder(path), time.monotonic() - start
            if (holder and holder.state) or waited > _MOST_SECONDS:
                if waited > _TELL_SECONDS or (holder and holder.state == "stopped"):
                    _tell(f"{holder or 'another process'} holds '{path}' and does not go on; building without it")
                yield
                return
            if waited > _TELL_SECONDS and not told:
                told = True
                whom = "another process, which builds the same"
                if holder is not None:
                    lasts = max(0.0, time.time() - holder.since)
                    whom = f"{holder}, which has been building '{holder.what}' for {lasts:.0f} s"
                _tell(f"waiting for {whom}; lock: '{path}'")
    try:
        _sign(path, what)
        yield
    finally:
        with contextlib.suppress(OSError):
            _note_of(path).unlink()
        lock.release()


def _tell(message: str) -> None:
    warnings.warn(message, RuntimeWarning, stacklevel=2)


def _note_of(path: Path) -> Path:
    """Beside the lock: some versions of filelock empty the file itself."""
    return path.with_suffix(".holder")


def _sign(path: Path, what: str) -> None:
    command = " ".join([Path(sys.executable or "python").name, *getattr(sys, "argv", [])])
    holder = Holder(
        os.getpid(), platform.node(), command if len(command) < 80 else f"{command[:76]} …", what, time.time()
    )
    with contextlib.suppress(OSError):
        handle = os.open(_note_of(path), os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        with open(handle, "w", encoding="utf-8") as file:  # noqa: PTH123 - of a descriptor
            file.write(json.dumps(asdict(holder)))


def _holder(path: Path) -> Holder | None:
    try:
        return Holder(**json.loads(_note_of(path).read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError, RecursionError):
        return None


PROGRESS = "FLASHGEN_PROGRESS"

_OFF = frozenset({"0", "off", "false", "no"})


@contextlib.contextmanager
def compiling(name: str, compiler: str) -> Iterator[None]:
    """Around the work of one compiler on one source."""
    if os.environ.get(PROGRESS, "").strip().lower() in _OFF:
        yield
        return
    timer = threading.Timer(_TELL_SECONDS, _write, (f"flashgen: compiling {name} ({compiler}) …\n",))
    timer.daemon = True  # an interpreter that ends does not wait for it
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _write(line: str) -> None:
    # One write, so that lines of several threads stay whole; stderr may be closed, missing, or know few characters.
    with contextlib.suppress(OSError, ValueError, AttributeError):
        encoding = sys.stderr.encoding or "utf-8"
        sys.stderr.write(line.encode(encoding, errors="replace").decode(encoding))
        sys.stderr.flush()
