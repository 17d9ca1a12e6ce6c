"""Where a package is written: a user's files survive whatever their names, and no build leaves half a package."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest

from flashgen.compiler.package import folder as package_folder
from flashgen.compiler.package.folder import FolderRefused
from flashgen.compiler.package.manifest import Manifest, digest
from tests.cli.helpers import flashgen

OURS = {"src.cpp": b"// one\n", "__init__.py": b"one = 1\n"}
OTHERS = {"src.cpp": b"// two\n", "__init__.py": b"two = 2\n"}


def package(files: dict[str, bytes]) -> dict[str, bytes]:
    """Files of a package with the manifest that names them."""
    digests = {name: digest(content) for name, content in files.items()}
    return {**files, "manifest.json": Manifest("src", "", (), files=digests).to_json().encode()}


def contents(folder: Path) -> dict[str, bytes]:
    return {str(file.relative_to(folder)): file.read_bytes() for file in sorted(folder.rglob("*")) if file.is_file()}


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A user's project with a folder of the attention's name."""
    folder = tmp_path / "src"
    folder.mkdir()
    for name in ("main.cpp", "kernel.cu", "old.cubin", "__init__.py", "manifest.json"):
        (folder / name).write_text(f"a user's {name}\n")
    (tmp_path / "a.attn").write_text("attention src { head_dim 16 }")
    return folder


def test_a_project_of_the_same_name_is_refused(project: Path, tmp_path: Path) -> None:
    before = contents(tmp_path)
    outcome = flashgen("build", tmp_path / "a.attn", "-o", tmp_path)
    assert outcome.code == 2
    for said in (str(project), "not written by flashgen", "main.cpp", "__init__.py", "--force"):
        assert said in outcome.stderr
    assert contents(tmp_path) == before
    checked = flashgen("build", tmp_path / "a.attn", "-o", tmp_path, "--check")
    assert checked.code == 1
    assert "would refuse" in checked.stderr
    assert contents(tmp_path) == before


def test_force_writes_its_own_files_alone(project: Path, tmp_path: Path) -> None:
    before = contents(project)
    assert flashgen("build", tmp_path / "a.attn", "-o", tmp_path, "--force").code == 0
    after = contents(project)
    for name in ("main.cpp", "kernel.cu", "old.cubin"):
        assert after[name] == before[name]
    assert after["__init__.py"] != before["__init__.py"]
    assert flashgen("build", tmp_path / "a.attn", "-o", tmp_path).code == 0, "from now on it is flashgen's"


@pytest.mark.parametrize(
    "manifest",
    [
        b"{}",
        b"[]",
        b"{",
        b"\xff",
        b'{"name": "an app", "files": {"src.cpp": "00"}}',
        b'{"format": 3, "flashgen": "0.0", "name": "src"}',
        b'{"format": 4, "flashgen": "0.0", "files": {"../a.cpp": "00"}}',
        b'{"format": 4, "flashgen": "0.0", "files": {"..": "00"}}',
        b'{"format": 4, "flashgen": "0.0", "files": {"include/../../a.cpp": "00"}}',
        b'{"format": 4, "flashgen": "0.0", "files": {"/a.cpp": "00"}}',
        b'{"format": 4, "flashgen": "0.0", "files": ["a.cpp"]}',
        b"[" * 100_000,
    ],
)
def test_a_manifest_that_is_none_claims_nothing(tmp_path: Path, manifest: bytes) -> None:
    folder = tmp_path / "src"
    folder.mkdir()
    (folder / "manifest.json").write_bytes(manifest)
    with pytest.raises(FolderRefused):
        package_folder.write(folder, package(OURS))
    assert contents(folder) == {"manifest.json": manifest}


def test_a_manifest_cannot_have_files_elsewhere_removed(tmp_path: Path) -> None:
    folder, precious = tmp_path / "src", tmp_path / "precious.cpp"
    precious.write_bytes(b"x")
    package_folder.write(folder, package(OURS))
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest["files"]["../precious.cpp"] = digest(b"x")
    (folder / "manifest.json").write_text(json.dumps(manifest))
    package_folder.write(folder, package(OURS), force=True)
    assert precious.exists()


def test_files_of_an_earlier_build_go_and_no_others(tmp_path: Path) -> None:
    folder = tmp_path / "src"
    package_folder.write(folder, package({**OURS, "gone.cpp": b"", "edited.cpp": b""}))
    (folder / "edited.cpp").write_text("by hand")
    (folder / "mine.cpp").write_text("a user's")
    package_folder.write(folder, package(OURS))
    assert contents(folder) == {**package(OURS), "edited.cpp": b"by hand", "mine.cpp": b"a user's"}


@pytest.mark.parametrize("name", ["src.cpp", "manifest.json"])
def test_what_was_edited_is_not_overwritten(tmp_path: Path, name: str) -> None:
    folder = tmp_path / "src"
    package_folder.write(folder, package(OURS))
    edited = (folder / name).read_bytes().replace(b"one", b"by hand").replace(b'"name": "src"', b'"name": "SRC"')
    (folder / name).write_bytes(edited)
    before = contents(folder)
    with pytest.raises(FolderRefused, match=rf"'{name}' was edited since .* --force"):
        package_folder.write(folder, package(OTHERS))
    assert contents(folder) == before
    package_folder.write(folder, package(OTHERS), force=True)
    assert contents(folder) == package(OTHERS)


def test_what_says_the_same_already_is_nobodys_loss(tmp_path: Path) -> None:
    folder = tmp_path / "src"
    package_folder.write(folder, package(OURS))
    (folder / "src.cpp").write_bytes(OTHERS["src.cpp"])
    package_folder.write(folder, package(OTHERS))
    assert contents(folder) == package(OTHERS)


def test_a_users_file_of_a_name_that_is_new_to_the_package(tmp_path: Path) -> None:
    folder = tmp_path / "src"
    package_folder.write(folder, package(OURS))
    (folder / "more.cpp").write_text("a user's")
    with pytest.raises(FolderRefused, match=r"'more\.cpp' is not flashgen's"):
        package_folder.write(folder, package({**OURS, "more.cpp": b"ours"}))
    assert (folder / "more.cpp").read_text() == "a user's"


def test_links_are_not_followed(tmp_path: Path) -> None:
    folder, target = tmp_path / "src", tmp_path / "target.cpp"
    target.write_text("a user's")
    package_folder.write(folder, package(OURS))
    (folder / "src.cpp").unlink()
    (folder / "src.cpp").symlink_to(target)
    with pytest.raises(FolderRefused, match=r"symbolic link to '.*target\.cpp'"):
        package_folder.write(folder, package(OTHERS))
    package_folder.write(folder, package(OTHERS), force=True)
    assert target.read_text() == "a user's"
    assert not (folder / "src.cpp").is_symlink()


HEADERS = {**OURS, "include/fg/a.cuh": b"", "include/fg/b.cuh": b""}


def test_headers_lie_in_a_folder_that_goes_with_the_last_of_them(tmp_path: Path) -> None:
    folder = tmp_path / "src"
    for files in (OURS, HEADERS, {**OURS, "include/fg/b.cuh": b"new"}):
        package_folder.write(folder, package(files))
        assert contents(folder) == package(files)
        assert not package_folder.compare(folder, package(files)).write
    package_folder.write(folder, package(OURS))
    assert not (folder / "include").exists()
    package_folder.write(folder, package(HEADERS))
    (folder / "include" / "fg" / "mine.cuh").write_text("a user's")
    package_folder.write(folder, package(OURS))
    assert contents(folder / "include") == {"fg/mine.cuh": b"a user's"}


@pytest.mark.parametrize("name", ["include", "include/fg"])
def test_where_no_folder_can_be(tmp_path: Path, name: str) -> None:
    """A user's file, or a link to a folder, in which nothing is written or removed, whatever it holds."""
    folder, elsewhere = tmp_path / "src", tmp_path / "elsewhere"
    package_folder.write(folder, package(HEADERS))
    (folder / name).rename(elsewhere)
    (folder / name).symlink_to(elsewhere)
    before = contents(elsewhere)
    with pytest.raises(FolderRefused, match=rf"{name}' is a symbolic link.*move that away"):
        package_folder.write(folder, package({**HEADERS, "include/fg/a.cuh": b"new"}), force=True)
    package_folder.write(folder, package(OURS))
    assert contents(elsewhere) == before
    (folder / name).unlink()
    (folder / name).write_text("a user's")
    with pytest.raises(FolderRefused, match=rf"{name}' is a file.*move that away"):
        package_folder.write(folder, package(HEADERS), force=True)
    package_folder.write(folder, package(OTHERS))
    assert (folder / name).read_text() == "a user's"


def pipe(folder: Path) -> None:
    folder.mkdir()
    os.mkfifo(folder / "manifest.json")


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda folder: folder.symlink_to(folder.parent / "elsewhere"), "is a symbolic link"),
        (lambda folder: folder.write_text("a user's"), "is a file"),
        (lambda folder: (folder / "src.cpp").mkdir(parents=True), "is a folder"),
        (pipe, "is a pipe"),
    ],
)
def test_what_even_force_does_not_replace(tmp_path: Path, make: Callable[[Path], object], said: str) -> None:
    (tmp_path / "elsewhere").mkdir()
    make(tmp_path / "src")
    for force in (False, True):
        with pytest.raises(FolderRefused, match=said) as refused:
            package_folder.write(tmp_path / "src", package(OURS), force=force)
        assert "--force" not in str(refused.value)
    assert not contents(tmp_path / "elsewhere")


@pytest.mark.parametrize("name", ["src/.flashgen-part", ".src.flashgen-part"])
def test_a_users_folder_of_the_name_that_files_are_made_under(tmp_path: Path, name: str) -> None:
    folder = tmp_path / "src"
    if name.startswith("src/"):
        package_folder.write(folder, package(OURS))
    (tmp_path / name).mkdir()
    (tmp_path / name / "thesis.tex").write_text("a user's")
    before = contents(tmp_path)
    for force in (False, True):
        with pytest.raises(FolderRefused, match=rf"{name}' is a folder that no build made.* move that away"):
            package_folder.write(folder, package(OTHERS), force=force)
    assert contents(tmp_path) == before
    (tmp_path / name / "thesis.tex").unlink()
    package_folder.write(folder, package(OTHERS))
    assert contents(tmp_path) == {f"src/{each}": content for each, content in package(OTHERS).items()}


def test_an_empty_folder_is_free(tmp_path: Path) -> None:
    (tmp_path / "src" / "__pycache__").mkdir(parents=True)
    package_folder.write(tmp_path / "src", package(OURS))
    assert contents(tmp_path / "src") == package(OURS)


def test_files_have_the_permissions_that_users_chose(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        package_folder.write(tmp_path / "src", package(OURS))
        package_folder.write(tmp_path / "src", package(OTHERS))
    finally:
        os.umask(before)
    assert (tmp_path / "src").stat().st_mode & 0o777 == 0o750
    assert {file.stat().st_mode & 0o777 for file in (tmp_path / "src").iterdir()} == {0o640}


class Killed(BaseException):
    """Stands for the end of a process."""


@pytest.mark.parametrize("old", [{}, OURS, {**OURS, "gone.cpp": b""}], ids=["first", "again", "fewer"])
def test_a_build_that_is_killed_harms_none_after_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, old: dict[str, bytes]
) -> None:
    """Killed before each renaming in turn. Nothing of it is taken for a user's, whatever is built next."""
    for number in range(6):
        folder = tmp_path / str(number) / "src"
        if old:
            package_folder.write(folder, package(old))
        die_before(number, monkeypatch)
        with contextlib.suppress(Killed):
            package_folder.write(folder, package(OTHERS))
        monkeypatch.undo()
        if folder.exists():
            found = {name: content for name, content in contents(folder).items() if "/" not in name}
            if found not in (package(old), package(OTHERS)):
                with pytest.raises(ImportError, match=r"has not ended.*flashgen build"):
                    Manifest.read(folder)
        following = package({"src.cpp": b"// three\n", "new.py": b""})
        package_folder.write(folder, following)
        assert contents(folder) == following
        assert [each.name for each in folder.parent.iterdir()] == ["src"]


def die_before(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """End like a killed process, which clears nothing up, before the renaming of this number."""
    renamings = iter(range(100))

    def dying(rename: Callable[[Path, Path], Path]) -> Callable[[Path, Path], Path]:
        def run(self: Path, target: Path) -> Path:
            if next(renamings) == number:
                monkeypatch.setattr(shutil, "rmtree", lambda *_, **__: None)
                raise Killed
            return rename(self, target)

        return run

    monkeypatch.setattr(Path, "replace", dying(Path.replace))
    monkeypatch.setattr(Path, "rename", dying(Path.rename))


def test_a_full_disk_leaves_what_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "src"
    package_folder.write(folder, package(OURS))

    def full(self: Path, content: bytes) -> int:
        raise OSError(28, "No space left on device", str(self))

    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(OSError, match="No space left"):
        package_folder.write(folder, package(OTHERS))
    monkeypatch.undo()
    assert contents(folder) == package(OURS)


def test_builds_at_once_leave_one_whole_package(tmp_path: Path) -> None:
    script = """
        import sys
        from pathlib import Path
        from flashgen.compiler.package import folder as package_folder
        from tests.pipeline.test_package_folder import package
        for turn in range(40):
            files = {sys.argv[2] + ".cpp": b"x" * turn, "all.cpp": b"y" * turn}
            package_folder.write(Path(sys.argv[1]), package(files))
    """
    start = [sys.executable, "-c", textwrap.dedent(script), str(tmp_path / "deep" / "src")]
    running = [subprocess.Popen([*start, name]) for name in "abc"]
    assert [each.wait(100) for each in running] == [0, 0, 0]
    left = contents(tmp_path / "deep" / "src")
    (last,) = {name for name in left if name not in ("all.cpp", "manifest.json")}
    assert left == package({last: b"x" * 39, "all.cpp": b"y" * 39})


def test_one_name_in_two_files_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    for name, head_dim in (("a", 16), ("b", 32)):
        (tmp_path / f"{name}.attn").write_text(f"attention same {{ head_dim {head_dim} }}")
    outcome = flashgen("build", tmp_path / "a.attn", tmp_path / "b.attn", "-o", tmp_path / "out")
    assert outcome.code == 2
    for said in ("a.attn", "b.attn", "'same'"):
        assert said in outcome.stderr
    assert not (tmp_path / "out").exists()


def test_of_several_attentions_none_is_written_where_one_is_refused(tmp_path: Path) -> None:
    (tmp_path / "two.attn").write_text("attention first { head_dim 16 } attention second { head_dim 16 }")
    (tmp_path / "out" / "second").mkdir(parents=True)
    (tmp_path / "out" / "second" / "notes.txt").write_text("a user's")
    outcome = flashgen("build", tmp_path / "two.attn", "-o", tmp_path / "out")
    assert outcome.code == 2
    assert contents(tmp_path / "out") == {"second/notes.txt": b"a user's"}
