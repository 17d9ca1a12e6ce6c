"""Who else can change what lies in a folder: what this process loads from there runs as its user.

In: a path. Out: the reason to doubt it, in words, or None. Trusted are this user and root. Where a folder's whole way
from the top is trusted no other user can put anything there, nor exchange it between a look at it and its use.
"""

from __future__ import annotations

import contextlib
import functools
import os
import stat
from pathlib import Path

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
