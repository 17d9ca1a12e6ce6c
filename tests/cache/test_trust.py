"""Whose files are used: nothing that another user can have made, or can change, runs as this one."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from flashgen.compiler.tile_choices import TunedStore
from flashgen.store import cache as cache_module
from flashgen.store.build_lock import doubt_about_folder
from flashgen.store.cache import Cache

KEY = "ab" * 32
FILES = {"library.so": b"ours", "compile.log": b""}
STRANGER = 12345

pytestmark = pytest.mark.skipif(os.name != "posix", reason="owners and modes are POSIX's")
as_root = pytest.mark.skipif(os.name != "posix" or os.geteuid() != 0, reason="only root can give files away")


@pytest.fixture(autouse=True)
def _fresh_process() -> Iterator[None]:
    """Each test warns anew and has a private folder of its own."""
    for each in (cache_module._private_root, cache_module._warn_once):
        each.cache_clear()
    yield
    for each in (cache_module._private_root, cache_module._warn_once):
        each.cache_clear()


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A cache with an entry, in a folder of its own."""
    root = tmp_path / "above" / "cache"
    Cache(root).fetch(KEY, "library.so", lambda: FILES)
    return root


def planted(root: Path) -> None:
    """What somebody else could put there: an entry that agrees with its seal."""
    Cache(root)._store(KEY, "library.so", {"library.so": b"theirs", "compile.log": b""})


def given_away(name: str) -> Callable[[Path], None]:
    return lambda root: os.chown(root / name, STRANGER, STRANGER)


def opened(name: str, mode: int) -> Callable[[Path], None]:
    return lambda root: (root / name).chmod(mode)


def linked(name: str) -> Callable[[Path], None]:
    def link(root: Path) -> None:
        (root / name).rename(root.parent / "elsewhere")
        (root / name).symlink_to(root.parent / "elsewhere")

    return link


WAYS = {
    "sticky and open": opened(".", 0o1777),
    "open to a group": opened(".", 0o775),
    "open": opened(".", 0o757),
    "entry is open": opened(KEY, 0o777),
    "library is open": opened(f"{KEY}/library.so", 0o766),
    "seal is open": opened(f"{KEY}/seal.json", 0o666),
    "entry is a link": linked(KEY),
    "library is a link": linked(f"{KEY}/library.so"),
    "parent is open": opened("..", 0o777),
}
GIVEN = {
    "folder": given_away("."),
    "entry": given_away(KEY),
    "library": given_away(f"{KEY}/library.so"),
    "seal": given_away(f"{KEY}/seal.json"),
    "parent": given_away(".."),
}


def check_it_is_not_used(root: Path, spoil: Callable[[Path], None]) -> None:
    planted(root)
    spoil(root)
    cache = Cache(root)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert cache.read(KEY, "library.so") is None
        assert cache.find(KEY, "library.so") is None
        path = cache.fetch(KEY, "library.so", lambda: FILES)
    assert path.read_bytes() == b"ours"
    if doubt_about_folder(root) is None and doubt_about_folder(root / KEY) is None:
        assert not caught, "the folder is ours: what lay there was replaced"
        assert cache.read(KEY, "library.so") == b"ours"
        return
    (told,) = (str(each.message) for each in caught)
    assert "cannot be used" in told
    assert "FLASHGEN_CACHE_DIR" in told
    assert root not in path.parents
    assert path.parent.parent.stat().st_mode & 0o077 == 0


@pytest.mark.parametrize("way", WAYS)
def test_what_others_can_write_is_not_used(root: Path, way: str) -> None:
    check_it_is_not_used(root, WAYS[way])


@as_root
@pytest.mark.parametrize("what", GIVEN)
def test_what_belongs_to_another_is_not_used(root: Path, what: str) -> None:
    """As where root runs with another user's cache."""
    check_it_is_not_used(root, GIVEN[what])


@pytest.mark.parametrize("below", [".", "compiler", "tuned"])
def test_all_that_is_stored_is_under_the_same_rule(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, below: str) -> None:
    """Compiled templates, the grammar's tables, specs and tuned tiles."""
    root = tmp_path / "cache"
    monkeypatch.setenv("FLASHGEN_CACHE_DIR", str(root))
    Cache.of_compiler().write(KEY, "template.bin", b"code")
    (root / "tuned").mkdir(mode=0o755)
    assert Cache.of_compiler().read(KEY, "template.bin") == b"code"
    assert TunedStore.default().root == root / "tuned"
    (root / below).chmod(0o777)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if below != "tuned":
            assert Cache.of_compiler().read(KEY, "template.bin") is None
            Cache.of_compiler().write(KEY, "template.bin", b"other")
        if below != "compiler":
            assert root not in TunedStore.default().root.parents
    root.chmod(0o755)
    (root / "compiler").chmod(0o755)
    assert Cache.of_compiler().read(KEY, "template.bin") == b"code", "nothing was written there"


def test_a_sticky_parent_is_fine(root: Path) -> None:
    root.parent.chmod(0o1777)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert Cache(root).find(KEY, "library.so") is not None


def test_folders_are_made_closed_whatever_the_umask(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        root = tmp_path / "a" / "b"
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            path = Cache(root).fetch(KEY, "library.so", lambda: FILES)
            assert Cache(root).find(KEY, "library.so") == path
    finally:
        os.umask(before)
    assert {each.stat().st_mode & 0o022 for each in (tmp_path / "a", root, *root.rglob("*"))} == {0}


def test_links_on_the_way_are_followed_once(root: Path, tmp_path: Path) -> None:
    """A link that another may change decides nothing once it was followed."""
    way = tmp_path / "way"
    way.symlink_to(root)
    found = Cache(way).find(KEY, "library.so")
    assert found is not None
    assert way not in found.parents
    assert found.parent.parent == root


def test_a_link_in_a_circle(tmp_path: Path) -> None:
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    with pytest.warns(RuntimeWarning, match="cannot be used"):
        assert Cache(tmp_path / "loop").fetch(KEY, "library.so", lambda: FILES).read_bytes() == b"ours"


def test_a_private_folder_is_not_made_where_others_can_exchange_it(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "open"))
    root.chmod(0o777)
    with pytest.warns(RuntimeWarning):
        path = Cache(root).fetch(KEY, "library.so", lambda: FILES)
    assert tmp_path not in path.parents


def test_a_planted_library_does_not_run(tmp_path: Path) -> None:
    """One user prepares a cache folder in /tmp, with a seal that fits; another calls the op."""
    root, proof = tmp_path / "cache", tmp_path / "proof"
    call = (
        "import flashgen, torch; x = torch.zeros(1, 1, 1, 16); "
        "flashgen.loads('attention a { head_dim 16 }', backend='cpu')(x, x, x)"
    )
    environment = {**os.environ, "FLASHGEN_CACHE_DIR": str(root)}

    def run() -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-c", call], env=environment, capture_output=True, text=True, timeout=200, check=False
        )

    assert run().returncode == 0
    (library,) = root.glob("*/library.so")
    trap = f'#include <cstdio>\n__attribute__((constructor)) void f() {{ std::fclose(std::fopen("{proof}", "w")); }}\n'
    (tmp_path / "trap.cpp").write_text(trap)
    subprocess.run(["c++", "-shared", "-fPIC", "trap.cpp", "-o", "trap.so"], cwd=tmp_path, check=True)
    Cache(root)._store(library.parent.name, "library.so", {"library.so": (tmp_path / "trap.so").read_bytes()})
    run()
    assert proof.exists(), "in a folder that is closed it is taken for ours: the trap works"
    proof.unlink()
    root.chmod(0o1777)
    done = run()
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("cannot be used") == 1
    assert not proof.exists()


def test_a_group_of_ones_own_may_write_above(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where each user has a group, a umask of 002 is usual; the cache itself is closed all the same."""
    import flashgen.store.build_lock

    (tmp_path / "cache").mkdir()
    tmp_path.chmod(0o775)
    for own in (True, False):
        monkeypatch.setattr(flashgen.store.build_lock, "_has_group_to_itself", lambda _, own=own: own)
        assert (doubt_about_folder(tmp_path / "cache") is None) is own


def test_a_file_system_without_execution(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache_module, "_refuses_libraries", lambda folder: root in (folder, *folder.parents))
    assert Cache(root).read(KEY, "compile.log") == b"", "what is only read is no matter"
    with pytest.warns(RuntimeWarning, match="mounted noexec"):
        path = Cache(root).fetch(KEY, "library.so", lambda: FILES)
    assert root not in path.parents


def test_clearing_follows_no_links(root: Path, tmp_path: Path) -> None:
    mine = tmp_path / "project"
    (mine / KEY).mkdir(parents=True)
    (mine / "poetry.lock").write_text("mine")
    (mine / KEY / "file").write_text("mine")
    for name in ("compiler", "cd" * 32):
        (root / name).symlink_to(mine)
    (root / "locks" / "Cargo.lock").write_text("mine")
    assert Cache(root).clear() > 0
    assert (mine / "poetry.lock").exists()
    assert (mine / KEY / "file").exists()
    assert (root / "locks" / "Cargo.lock").exists()
