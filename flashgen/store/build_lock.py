"""One build of an entry at a time: who waits is told for what, and nobody waits for a process that is gone.

In: the path of a lock file and what is built; what a compiler is at work on. Out: one line on stderr, where people wait
for more than two seconds, ``flashgen: compiling causal_d64_cpu (g++) …``, unless ``FLASHGEN_PROGRESS`` is 0. A process
that dies lets go of its lock, unless a child that it forked still holds it; one that is stopped does not. As entries
appear whole, to go on without the lock is harmless: the worst is a second build.

What this process loads from a folder runs as its user: here are reasons to doubt a path, in words, or None. Trusted are
this user and root. Where a folder's whole way from the top is trusted no other user can put anything there, nor
exchange it between a look at it and its use.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import platform
import stat
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


_WRITABLE = stat.S_IWGRP | stat.S_IWOTH
_POSIX = os.name == "posix"


def doubt_about_folder(folder: Path) -> str | None:
    """Why what lies in a folder cannot be relied on; one that does not exist yet is judged by those above it.

    ``folder`` is an absolute path without symbolic links. Raises ``OSError`` where it cannot be looked at.
    """
    if not _POSIX:
        return None
    for parent in reversed(folder.parents):
        doubt = _doubt_about_parent(parent)
        if doubt is not None:
            return doubt
    return doubt_about(folder)


def doubt_about(path: Path) -> str | None:
    """Why a file or folder cannot be relied on, whose way there can; None for one that is not there."""
    status = _status(path)
    if status is None or not _POSIX:
        return None
    if stat.S_ISLNK(status.st_mode):
        return f"'{path}' is a symbolic link"
    if not stat.S_ISREG(status.st_mode) and not stat.S_ISDIR(status.st_mode):
        return f"'{path}' is no file"
    if status.st_uid not in (0, os.geteuid()):
        return _belongs(path, status)
    if status.st_mode & _WRITABLE:
        return _can_be_written(path, status)
    return None


def _doubt_about_parent(folder: Path) -> str | None:
    """Of a folder that something lies in: in a sticky one, such as /tmp, nobody exchanges what belongs to another."""
    status = _status(folder)
    if status is None or not stat.S_ISDIR(status.st_mode):  # nothing lies in a file
        return None
    if status.st_uid not in (0, os.geteuid()) and not _is_unmapped(status.st_uid):
        return _belongs(folder, status)
    if not status.st_mode & _WRITABLE or status.st_mode & stat.S_ISVTX:
        return None
    if not status.st_mode & stat.S_IWOTH and _has_group_to_itself(status.st_gid):
        return None
    return _can_be_written(folder, status)


def _status(path: Path) -> os.stat_result | None:
    try:
        return path.lstat()
    except FileNotFoundError:
        return None


def _belongs(path: Path, status: os.stat_result) -> str:
    name = str(status.st_uid)
    with contextlib.suppress(ImportError, KeyError):
        import pwd  # noqa: PLC0415 - POSIX alone has it

        name = f"'{pwd.getpwuid(status.st_uid).pw_name}'"
    return f"'{path}' belongs to user {name}"


def _can_be_written(path: Path, status: os.stat_result) -> str:
    return f"other users can write to '{path}', whose mode is {stat.S_IMODE(status.st_mode):o}"


@functools.cache
def _has_group_to_itself(group: int) -> bool:
    """Whether a group holds this user alone, as where each user has one: there a umask of 002 is usual."""
    import grp  # noqa: PLC0415 - POSIX alone has it
    import pwd  # noqa: PLC0415

    try:
        own, entry = pwd.getpwuid(os.geteuid()), grp.getgrgid(group)
    except KeyError:
        return False
    return own.pw_gid == group and entry.gr_name == own.pw_name and set(entry.gr_mem) <= {own.pw_name}


@functools.cache
def _is_unmapped(user: int) -> bool:
    """Whether this is what root outside of a container is seen as in one, where only some users have numbers."""
    try:
        overflow = int(Path("/proc/sys/kernel/overflowuid").read_text(encoding="ascii"))
        mapped = Path("/proc/self/uid_map").read_text(encoding="ascii").split()
    except (OSError, ValueError):
        return False
    return user == overflow and mapped != ["0", "0", "4294967295"]
