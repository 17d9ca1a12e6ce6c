"""The cache of compiled libraries: content-addressed entries that are whole or not there.

In: a key and a function that builds the files of its entry. Out: the path of a verified file.

    <root>/<key>/library.so         the file that is loaded
    <root>/<key>/seal.json          size and sha256 of every file, written last
    <root>/<key>/source.cpp, …      kept beside it for people
    <root>/<key>/preamble.h.gch     what sources begin with, compiled once
    <root>/locks/<key>.lock         held while an entry is built; <key>.holder says by whom
    <root>/compiler/<key>/          of the compiler itself: tables, templates, specs that it has read before
    <root>/operators/<key>/         the specs of operators in exported programs

A file is used only if it agrees with its seal, so that a truncated or half-written library is rebuilt, never
loaded. Files appear by an atomic replace; several processes that want one entry build it once.

What is read here runs as this user, so nothing is taken from a folder or an entry that another user can change, or
that belongs to one: the seal tells what is damaged, not who made it. Such a folder, and one that cannot be written or
whose file system does not let libraries run, is replaced by a private temporary one, with one warning.
"""

from __future__ import annotations

import atexit
import contextlib
import errno
import functools
import hashlib
import json
import os
import re
import shutil
import tempfile
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from flashgen.store.build_lock import doubt_about, doubt_about_folder, exclusive

ENVIRONMENT_VARIABLE = "FLASHGEN_CACHE_DIR"

_SEAL = "seal.json"
_LOCKS = "locks"
_COMPILER, _OPERATORS = "compiler", "operators"
_TEMPORARY = ".part-"
_KEY = re.compile(r"[0-9a-f]{64}")
_LOADED = ".so"  # files that are mapped to be executed
_NO_EXECUTION = getattr(os, "ST_NOEXEC", 0)


class UntrustedFolder(OSError):  # noqa: N818 - reads as what happened
    """What lies in a folder may be another user's."""


class _BuildError(Exception):
    """Carries an ``OSError`` of a build past those of the folder."""

    def __init__(self, error: OSError) -> None:
        self.error = error


@dataclass(frozen=True)
class CacheEntry:
    """One stored library: its key, the name of what it was built from, bytes on disk, time of the build."""

    key: str
    name: str
    size: int
    built: float


class Cache:
    """A folder of entries. Nothing is created before the first entry is stored."""

    def __init__(self, root: Path) -> None:
        self.root = root

    @classmethod
    def default(cls) -> Cache:
        """The folder of ``FLASHGEN_CACHE_DIR``, else the user's cache folder of this platform."""
        chosen = os.environ.get(ENVIRONMENT_VARIABLE)
        if chosen:
            return cls(Path(chosen).expanduser())
        import platformdirs  # noqa: PLC0415 - takes longer to import than a stored entry to be found

        return cls(Path(platformdirs.user_cache_dir("flashgen", appauthor=False)))

    @classmethod
    def of_compiler(cls) -> Cache:
        """What the compiler keeps for itself: all of it is made again in a fraction of a second."""
        return cls(cls.default().root / _COMPILER)

    @classmethod
    def of_operators(cls) -> Cache:
        """What exported programs call, by the names of their operators."""
        return cls(cls.default().root / _OPERATORS)

    def keys(self) -> tuple[str, ...]:
        """The keys of every entry, in any order; a look at the names of folders alone."""
        return tuple(folder.name for folder in self._folders())

    def doubt(self) -> str | None:
        """Why nothing is taken from this folder; None where it can be relied on."""
        try:
            return doubt_about_folder(self._real_root())
        except OSError as error:
            return str(error)

    def hindrance(self) -> str | None:
        """Why nothing can be stored here, or loaded from here; None where it can. Leaves nothing behind."""
        try:
            root = self._real_root()
            self._require_execution(_LOADED)
            there = next(each for each in (root, *root.parents) if each.exists())
            with tempfile.TemporaryFile(dir=there):
                return None
        except OSError as error:
            return error.strerror or str(error)

    def usable(self) -> Cache:
        """The cache itself; where it cannot be relied on the private one of this process, with a warning."""
        doubt = self.doubt()
        if doubt is None:
            return self
        _warn_once(os.getpid(), doubt)
        return Cache(_private_root(os.getpid()))

    def find(self, key: str, file: str, *others: str) -> Path | None:
        """The path of a stored file that agrees with its seal, as ``others`` do, and can be loaded, or None."""
        if any(self.read(key, each) is None for each in (file, *others)):
            return None
        root = self._real_root()
        return None if file.endswith(_LOADED) and _refuses_libraries(root) else root / key / file

    def read(self, key: str, file: str) -> bytes | None:
        """The content of a stored file that agrees with its seal, or None."""
        try:
            root = self._trusted_root()
            _trust(doubt_about(root / key))
            if any(doubt_about(root / key / each) for each in (_SEAL, file)):
                return None  # and is replaced: the folder is ours
            seal = json.loads((root / key / _SEAL).read_text(encoding="utf-8"))
            content = (root / key / file).read_bytes()
        except UntrustedFolder as error:
            _warn_once(os.getpid(), str(error))
            return None
        except (OSError, ValueError, RecursionError):
            return None
        return content if isinstance(seal, dict) and seal.get(file) == _digest(content) else None

    def write(self, key: str, file: str, content: bytes) -> None:
        """Store or replace an entry of one file. Nothing happens where the folder cannot be written."""
        with contextlib.suppress(OSError):
            self._store(key, file, {file: content})

    def fetch(
        self, key: str, file: str, build: Callable[[], Mapping[str, bytes]], *others: str, what: str = ""
    ) -> Path:
        """The path of ``file`` in the entry ``key``; builds and stores the entry if it is missing or damaged.

        ``build`` returns the content of every file of the entry by name, ``file`` among them; its exceptions pass
        through. ``others`` have to be whole, too; ``what`` tells people what is built. If the folder cannot be used,
        the entry goes to this process's private folder.
        """
        found = self.find(key, file, *others)
        if found is not None:
            return found
        built: Mapping[str, bytes] | None = None
        try:
            self._require_execution(file)
            with exclusive(self._made(_LOCKS) / f"{key}.lock", what or file):
                found = self.find(key, file, *others)
                if found is not None:
                    return found
                try:
                    built = build()
                except OSError as error:
                    raise _BuildError(error) from error
                return self._store(key, file, built)
        except _BuildError as failed:
            raise failed.error from failed.error.__cause__
        except OSError as error:
            private = _private_root(os.getpid())
            if self.root == private:
                raise
            is_doubted = isinstance(error, UntrustedFolder)
            _warn_once(os.getpid(), str(error) if is_doubted else f"'{self.root}': {error.strerror or error}")
            ready = built
            return Cache(private).fetch(key, file, build if ready is None else lambda: ready, *others, what=what)

    def keep(self, key: str, files: Mapping[str, bytes]) -> Path | None:
        """Store files for people to read, unsealed; None if the folder cannot be written."""
        try:
            folder = self._made(key)
            for name, content in files.items():
                replace_file(folder / name, content)
        except OSError:
            return None
        return folder

    def entries(self) -> tuple[CacheEntry, ...]:
        """Every entry, the latest first."""
        found = []
        for folder in self._folders():
            with contextlib.suppress(OSError):
                files = [(file.name, file.stat()) for file in folder.iterdir()]
                name = next((name for name, _ in files if name.endswith((".cpp", ".cu", ".h"))), folder.name[:12])
                size = sum(status.st_size for _, status in files)
                built = max((status.st_mtime for _, status in files), default=0.0)
                found.append(CacheEntry(folder.name, Path(name).stem, size, built))
        return tuple(sorted(found, key=lambda entry: entry.built, reverse=True))

    def clear(self) -> int:
        """Remove every entry, and nothing else that may lie in the folder; the number of bytes freed."""
        before = sum(entry.size for entry in self.entries())
        for folder in self._folders():
            shutil.rmtree(folder, ignore_errors=True)
        freed = before - sum(entry.size for entry in self.entries())
        locks = self.root / _LOCKS
        if locks.is_dir() and not locks.is_symlink():
            for file in locks.iterdir():
                if _KEY.fullmatch(file.stem) and file.suffix in (".lock", ".holder"):
                    with contextlib.suppress(OSError):
                        file.unlink()
            with contextlib.suppress(OSError):
                locks.rmdir()
        for inner in (self.root / _COMPILER, self.root / _OPERATORS):
            if inner.is_dir() and not inner.is_symlink():
                freed += Cache(inner).clear()
                with contextlib.suppress(OSError):
                    inner.rmdir()
        return freed

    def _folders(self) -> list[Path]:
        try:
            folders = [folder for folder in self.root.iterdir() if _KEY.fullmatch(folder.name)]
        except OSError:
            return []
        return [folder for folder in folders if folder.is_dir() and not folder.is_symlink()]

    def _real_root(self) -> Path:
        """The folder itself: links on the way to it are followed once, so that none can be changed later."""
        try:
            return self.root.resolve()
        except RuntimeError as error:  # what Python 3.11 raises
            raise OSError(errno.ELOOP, str(error)) from None

    def _trusted_root(self) -> Path:
        root = self._real_root()
        _trust(doubt_about_folder(root))
        return root

    def _made(self, name: str) -> Path:
        """A folder below the root, made where it is missing, that nobody else can write to."""
        folder = self._trusted_root() / name
        missing = [each for each in (folder, *folder.parents) if not each.exists()]
        for each in reversed(missing):
            each.mkdir(mode=0o755, exist_ok=True)
        _trust(doubt_about_folder(folder.parent) or doubt_about(folder))  # another may have made them first
        return folder

    def _require_execution(self, file: str) -> None:
        if file.endswith(_LOADED) and _refuses_libraries(self._real_root()):
            raise OSError(errno.EPERM, "its file system is mounted noexec, so that no library can be loaded from it")

    def _store(self, key: str, file: str, content: Mapping[str, bytes]) -> Path:
        folder = self._made(key)
        for name, data in content.items():
            replace_file(folder / name, data)
        replace_file(folder / _SEAL, json.dumps({name: _digest(data) for name, data in content.items()}).encode())
        for leftover in folder.glob(f"{_TEMPORARY}*"):  # of builds that were killed
            with contextlib.suppress(OSError):
                leftover.unlink()
        return folder / file


def _trust(doubt: str | None) -> None:
    if doubt is not None:
        raise UntrustedFolder(doubt)


def _refuses_libraries(folder: Path) -> bool:
    """Whether libraries cannot be loaded from a folder, or from the first above it that is there."""
    there = next(each for each in (folder, *folder.parents) if each.exists())
    try:
        return bool(os.statvfs(there).f_flag & _NO_EXECUTION)
    except (OSError, AttributeError):  # no POSIX
        return False


def key_of(*parts: str | bytes) -> str:
    """The key of an entry: a digest over all that decides its content, so that no two lists of parts share it."""
    digest = hashlib.sha256()
    for part in parts:
        data = part.encode(errors="surrogatepass") if isinstance(part, str) else part
        digest.update(len(data).to_bytes(8, "little") + data)
    return digest.hexdigest()


def _digest(content: bytes) -> dict[str, int | str]:
    return {"size": len(content), "sha256": hashlib.sha256(content).hexdigest()}


def replace_file(path: Path, content: bytes) -> None:
    """Write beside ``path``, then take its place in one step."""
    handle, name = tempfile.mkstemp(prefix=_TEMPORARY, dir=path.parent)
    temporary = Path(name)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
        temporary.chmod(0o755 if path.suffix == ".so" else 0o644)
        temporary.replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise


@functools.cache
def _private_root(process: int) -> Path:
    """A folder of this process alone, removed when it ends. Raises ``OSError`` where there is no place for one."""
    folder = Path(tempfile.mkdtemp(prefix="flashgen-", dir=_place_for_private_folder()))

    def remove() -> None:
        if os.getpid() == process:  # not in a forked child
            shutil.rmtree(folder, ignore_errors=True)

    atexit.register(remove)
    return folder


def _place_for_private_folder() -> Path:
    """The system's temporary folder, or another one where in that nothing can be relied on, or nothing runs."""
    tried = []
    for name in (tempfile.gettempdir(), "/dev/shm", "/var/tmp"):  # noqa: S108 - what is made there is private
        place = Path(name).resolve()
        if not place.is_dir() or not os.access(place, os.W_OK):
            continue
        doubt = doubt_about_folder(place / "flashgen")
        if doubt is None and not _refuses_libraries(place):
            return place
        tried.append(doubt or f"'{place}' is mounted noexec")
    raise OSError(
        f"there is no folder for compiled code ({'; '.join(tried)}): set {ENVIRONMENT_VARIABLE} to one that you alone "
        "can write, and from which libraries can be loaded"
    )


@functools.cache
def _warn_once(process: int, reason: str) -> None:  # noqa: ARG001 - each process warns once
    warnings.warn(
        f"the cache folder cannot be used ({reason}); compiled code goes to a temporary folder and is lost when this "
        f"process ends. Set {ENVIRONMENT_VARIABLE} to a folder that you alone can write.",
        RuntimeWarning,
        stacklevel=2,
    )
