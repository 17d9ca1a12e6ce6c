"""The cache: whole entries or none, whatever happens to its folder."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
import textwrap
import time
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from flashgen.store import cache as cache_module
from flashgen.store.cache import Cache

KEY = "ab" * 32
OTHER = "cd" * 32
FILES = {"library.so": b"machine code" * 100, "example.cpp": b"text", "compile.log": b""}


@pytest.fixture
def cache(tmp_path: Path) -> Cache:
    return Cache(tmp_path / "cache")


@pytest.fixture(autouse=True)
def _fresh_process() -> Iterator[None]:
    """Each test warns anew and has a private folder of its own."""
    cache_module._private_root.cache_clear()
    cache_module._warn_once.cache_clear()
    yield
    cache_module._private_root.cache_clear()
    cache_module._warn_once.cache_clear()


class Builder:
    """Counts how often it is asked."""

    def __init__(self) -> None:
        self.builds = 0

    def __call__(self) -> Mapping[str, bytes]:
        self.builds += 1
        return FILES


def test_builds_once(cache: Cache) -> None:
    build = Builder()
    assert cache.find(KEY, "library.so") is None
    path = cache.fetch(KEY, "library.so", build)
    assert path.read_bytes() == FILES["library.so"]
    assert cache.fetch(KEY, "library.so", build) == path
    assert cache.find(KEY, "library.so") == path
    assert build.builds == 1
    assert sorted(file.name for file in path.parent.iterdir()) == [
        "compile.log",
        "example.cpp",
        "library.so",
        "seal.json",
    ]


SEALS = {"seal is broken": "{", "seal is a list": "[]", "seal is deep": "[" * 100_000}


@pytest.mark.parametrize("damage", ["truncate", "flip", "remove", "seal is gone", *SEALS])
def test_a_damaged_entry_is_rebuilt(cache: Cache, damage: str) -> None:
    build = Builder()
    path = cache.fetch(KEY, "library.so", build)
    seal = path.parent / "seal.json"
    content = path.read_bytes()
    if damage == "truncate":
        path.write_bytes(content[:-1])
    elif damage == "flip":
        path.write_bytes(content[:-1] + b"?")
    elif damage == "remove":
        path.unlink()
    elif damage == "seal is gone":
        seal.unlink()
    else:
        seal.write_text(SEALS[damage])
    assert cache.find(KEY, "library.so") is None
    assert cache.fetch(KEY, "library.so", build).read_bytes() == FILES["library.so"]
    assert build.builds == 2


def test_leftovers_of_killed_builds_are_swept(cache: Cache) -> None:
    folder = cache.root / KEY
    folder.mkdir(parents=True)
    (folder / ".part-killed").write_bytes(b"half")
    (folder / "library.so").write_bytes(b"half")
    cache.fetch(KEY, "library.so", Builder())
    assert not list(folder.glob(".part-*"))


def test_errors_of_the_build_pass_through(cache: Cache) -> None:
    def fail() -> Mapping[str, bytes]:
        raise RuntimeError("no")

    with pytest.raises(RuntimeError, match="no"):
        cache.fetch(KEY, "library.so", fail)
    assert cache.fetch(KEY, "library.so", Builder()).exists()


def unusable_folders(tmp_path: Path) -> list[Path]:
    file = tmp_path / "a file"
    file.write_text("in the way")
    return [file, file / "below", Path("/proc/flashgen"), Path("/dev/null/flashgen")]


@pytest.mark.parametrize("which", range(4))
def test_a_folder_that_cannot_be_written(tmp_path: Path, which: int) -> None:
    cache, build = Cache(unusable_folders(tmp_path)[which]), Builder()
    with pytest.warns(RuntimeWarning, match="FLASHGEN_CACHE_DIR") as caught:
        path, again = (cache.fetch(KEY, "library.so", build) for _ in range(2))
    assert path == again
    assert len(caught) == 1
    assert path.read_bytes() == FILES["library.so"]
    assert build.builds == 1
    assert cache.entries() == ()
    assert cache.clear() == 0


@pytest.mark.skipif(os.name != "posix" or os.geteuid() == 0, reason="root writes everywhere")
def test_a_read_only_folder(tmp_path: Path) -> None:
    cache = Cache(tmp_path / "cache")
    cache.fetch(KEY, "library.so", Builder())
    for folder in (cache.root / "locks", cache.root):
        folder.chmod(0o555)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert cache.fetch(KEY, "library.so", Builder()).parent.parent == cache.root  # reading needs no writing
    with pytest.warns(RuntimeWarning, match="cannot be used"):
        assert cache.fetch(OTHER, "library.so", Builder()).parent.parent != cache.root
    for folder in (cache.root / "locks", cache.root):
        folder.chmod(0o755)


def test_a_full_disk(cache: Cache, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was built is kept: it is not compiled a second time."""
    build, replace = Builder(), cache_module.replace_file

    def full(path: Path, content: bytes) -> None:
        if path.is_relative_to(cache.root):
            raise OSError(errno.ENOSPC, "No space left on device")
        replace(path, content)

    monkeypatch.setattr(cache_module, "replace_file", full)
    with pytest.warns(RuntimeWarning, match="No space left on device"):
        path = cache.fetch(KEY, "library.so", build)
    assert path.read_bytes() == FILES["library.so"]
    assert build.builds == 1


def test_the_private_folder_goes_with_its_process(tmp_path: Path) -> None:
    script = """
        import os, warnings
        from pathlib import Path
        from flashgen.store.cache import Cache
        warnings.simplefilter("ignore")
        path = Cache(Path("/dev/null/x")).fetch("ab" * 32, "library.so", lambda: {"library.so": b"code"})
        if os.fork() == 0:
            raise SystemExit  # a child must not take its parent's folder away
        os.wait()
        print(path, path.exists())
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True, check=True)
    path, existed = done.stdout.split()
    assert existed == "True"
    assert not Path(path).parent.parent.exists()


def test_entries_and_clear(cache: Cache) -> None:
    cache.fetch(KEY, "library.so", Builder())
    cache.fetch(OTHER, "library.so", Builder())
    mine = cache.root / "notes.txt"
    mine.write_text("not the cache's")
    entries = cache.entries()
    assert {entry.key for entry in entries} == {KEY, OTHER}
    assert {entry.name for entry in entries} == {"example"}
    assert all(entry.size > 1200 and entry.built > 0 for entry in entries)
    assert cache.clear() == sum(entry.size for entry in entries)
    assert cache.entries() == ()
    assert [file.name for file in cache.root.iterdir()] == ["notes.txt"]


def test_where_it_is(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("FLASHGEN_CACHE_DIR", str(tmp_path / "here"))
    assert Cache.default().root == tmp_path / "here"
    monkeypatch.delenv("FLASHGEN_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert Cache.default().root.name == "flashgen"
    assert not (tmp_path / "xdg").exists()


SLOW_BUILD = """
    import sys, time
    from pathlib import Path
    from flashgen.store.cache import Cache
    root, log = map(Path, sys.argv[1:])
    def build():
        with log.open("a") as file:
            file.write("built ")
        time.sleep({seconds})
        return {{"library.so": b"code" * 10000}}
    path = Cache(root).fetch("ab" * 32, "library.so", build)
    assert path.read_bytes() == b"code" * 10000
"""


def start(script: str, *arguments: Path) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-c", textwrap.dedent(script), *map(str, arguments)])


def test_eight_processes_build_one_entry_once(tmp_path: Path) -> None:
    log = tmp_path / "log"
    processes = [start(SLOW_BUILD.format(seconds=0.3), tmp_path / "cache", log) for _ in range(8)]
    assert [process.wait(60) for process in processes] == [0] * 8
    assert log.read_text() == "built "


def test_a_build_killed_half_way_leaves_nothing_broken(tmp_path: Path) -> None:
    log = tmp_path / "log"
    victim = start(SLOW_BUILD.format(seconds=60), tmp_path / "cache", log)
    deadline = time.monotonic() + 30
    while not log.exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    victim.send_signal(signal.SIGKILL)
    victim.wait()
    assert Cache(tmp_path / "cache").find(KEY, "library.so") is None
    assert start(SLOW_BUILD.format(seconds=0), tmp_path / "cache", log).wait(60) == 0
    assert log.read_text() == "built built "
    seal = json.loads((tmp_path / "cache" / KEY / "seal.json").read_text())
    assert seal["library.so"]["size"] == 40000
