"""The cache of compiled libraries: content-addressed entries that are whole or not there.

In: a key and a function that builds the files of its entry. Out: the path of a verified file.

    <root>/<key>/library.so         the file that is loaded
    <root>/<key>/seal.json          its size and sha256, written last
    <root>/<key>/source.cpp, …      kept beside it for people
    <root>/locks/<key>.lock         held while an entry is built
    <root>/compiler/<key>/          of the compiler itself: tables, templates, specs that it has read before

A file is used only if it agrees with its seal, so that a truncated or half-written library is rebuilt, never
loaded. Files appear by an atomic replace; several processes that want one entry build it once. A folder that
cannot be written is replaced by a private temporary one, with one warning.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import hashlib
import json
import os
import re
import shutil
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

ENVIRONMENT_VARIABLE = "FLASHGEN_CACHE_DIR"

_SEAL = "seal.json"
_LOCKS = "locks"
_COMPILER = "compiler"
_TEMPORARY = ".part-"
_KEY = re.compile(r"[0-9a-f]{64}")
_LOCK_SECONDS = 900.0  # a build takes seconds; past this its owner is stuck, and building twice is harmless


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

    def find(self, key: str, file: str) -> Path | None:
        """The path of a stored file that agrees with its seal, or None."""
        return None if self.read(key, file) is None else self.root / key / file

    def read(self, key: str, file: str) -> bytes | None:
        """The content of a stored file that agrees with its seal, or None."""
        folder = self.root / key
        try:
            seal = json.loads((folder / _SEAL).read_text(encoding="utf-8"))
            content = (folder / file).read_bytes()
        except (OSError, ValueError):
            return None
        return content if isinstance(seal, dict) and seal.get(file) == _digest(content) else None

    def write(self, key: str, file: str, content: bytes) -> None:
        """Store or replace an entry of one file. Nothing happens where the folder cannot be written."""
        with contextlib.suppress(OSError):
            self._store(key, file, {file: content})

    def fetch(self, key: str, file: str, build: Callable[[], Mapping[str, bytes]]) -> Path:
        """The path of ``file`` in the entry ``key``; builds and stores the entry if it is missing or damaged.

        ``build`` returns the content of every file of the entry by name, ``file`` among them; its
        exceptions pass through. If the folder cannot be written, the entry goes to this process's private
        folder.
        """
        found = self.find(key, file)
        if found is not None:
            return found
        built: Mapping[str, bytes] | None = None
        try:
            with self._lock(key):
                found = self.find(key, file)
                if found is not None:
                    return found
                built = build()
                return self._store(key, file, built)
        except OSError as error:
            private = _private_root(os.getpid())
            if self.root == private:
                raise
            _warn_once(os.getpid(), str(self.root), error.strerror or str(error))
            ready = built
            return Cache(private).fetch(key, file, build if ready is None else lambda: ready)

    def keep(self, key: str, files: Mapping[str, bytes]) -> Path | None:
        """Store files for people to read, unsealed; None if the folder cannot be written."""
        folder = self.root / key
        try:
            folder.mkdir(parents=True, exist_ok=True)
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
                name = next((name for name, _ in files if name.endswith((".cpp", ".cu"))), folder.name[:12])
                size = sum(status.st_size for _, status in files)
                built = max((status.st_mtime for _, status in files), default=0.0)
                found.append(CacheEntry(folder.name, Path(name).stem, size, built))
        return tuple(sorted(found, key=lambda entry: entry.built, reverse=True))

    def clear(self) -> int:
        """Remove every entry, and nothing else that may lie in the folder; the number of bytes freed."""
        freed = sum(entry.size for entry in self.entries())
        for folder in self._folders():
            shutil.rmtree(folder, ignore_errors=True)
        for lock in (self.root / _LOCKS).glob("*.lock"):
            with contextlib.suppress(OSError):
                lock.unlink()
        with contextlib.suppress(OSError):
            (self.root / _LOCKS).rmdir()
        inner = self.root / _COMPILER
        if inner.is_dir():
            freed += Cache(inner).clear()
            with contextlib.suppress(OSError):
                inner.rmdir()
        return freed

    def _folders(self) -> list[Path]:
        try:
            return [folder for folder in self.root.iterdir() if _KEY.fullmatch(folder.name) and folder.is_dir()]
        except OSError:
            return []

    @contextlib.contextmanager
    def _lock(self, key: str) -> Iterator[None]:
        import filelock  # noqa: PLC0415 - likewise

        folder = self.root / _LOCKS
        folder.mkdir(parents=True, exist_ok=True)
        lock = filelock.FileLock(folder / f"{key}.lock", timeout=_LOCK_SECONDS)
        try:
            lock.acquire()
        except (filelock.Timeout, NotImplementedError):
            yield  # no lock to be had: entries are replaced atomically, so that the worst is a second build
            return
        try:
            yield
        finally:
            lock.release()

    def _store(self, key: str, file: str, content: Mapping[str, bytes]) -> Path:
        folder = self.root / key
        folder.mkdir(parents=True, exist_ok=True)
        for name, data in content.items():
            replace_file(folder / name, data)
        replace_file(folder / _SEAL, json.dumps({file: _digest(content[file])}).encode())
        for leftover in folder.glob(f"{_TEMPORARY}*"):  # of builds that were killed
            with contextlib.suppress(OSError):
                leftover.unlink()
        return folder / file


def key_of(*parts: str | bytes) -> str:
    """The key of an entry: a digest over all that decides its content, so that no two lists of parts share it."""
    digest = hashlib.sha256()
    for part in parts:
        data = part.encode() if isinstance(part, str) else part
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
    """A folder of this process alone, removed when it ends."""
    folder = Path(tempfile.mkdtemp(prefix="flashgen-"))

    def remove() -> None:
        if os.getpid() == process:  # not in a forked child
            shutil.rmtree(folder, ignore_errors=True)

    atexit.register(remove)
    return folder


@functools.cache
def _warn_once(process: int, root: str, reason: str) -> None:  # noqa: ARG001 - each process warns once
    warnings.warn(
        f"the cache folder '{root}' cannot be used ({reason}); compiled code goes to a temporary folder and "
        f"is lost when this process ends. Set {ENVIRONMENT_VARIABLE} to a folder that can be written.",
        RuntimeWarning,
        stacklevel=2,
    )
