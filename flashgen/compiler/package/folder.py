"""Writing a generated package: only into a folder that flashgen wrote, and there only its own files.

In: a folder and the files of its package, manifest among them. Out: what differs, what stands in the way, and the
folder as it is to be. A file is ours where the folder's manifest names it with the digest that it has: what was edited
since, and what others put there, is somebody's work.

New files are made aside and take their places by renaming. While they do, the manifest names the old and the new ones
(``building``), so that a build that was killed is neither taken for a package nor for somebody's work.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import stat
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from flashgen.compiler.package.manifest import FILE_NAME, Claims, building, digest
from flashgen.diagnostics import quoted_list

_ASIDE = ".flashgen-part"
# Of the folder aside: what tells it from a user's of the same name, and the folder in it that files are made in.
_MARK, _MADE = "of-a-build.txt", "files"
_MARK_SAYS = (
    "flashgen makes the files of a package here. Where no build runs, one was killed; the next removes this folder."
)
_LOCK_SECONDS = 30.0  # files are made before; renaming them takes milliseconds
_MOST_NAMED = 8


class FolderRefused(Exception):  # noqa: N818 - reads as what happened
    """Something stands where a package would be written; the message names it, and says what to do."""


@dataclass(frozen=True)
class Comparison:
    """A folder beside the package that is to be there: names of its files.

    ``edited`` and ``blocked`` say of each file what stands in its place: the first ``--force`` replaces, the second
    nothing does. ``foreign`` says why the folder is not flashgen's.
    """

    folder: Path
    write: tuple[str, ...]
    remove: tuple[str, ...]
    edited: Mapping[str, str]
    blocked: Mapping[str, str]
    foreign: str | None

    def refusal(self, *, force: bool) -> str | None:
        """Why nothing may be written; None where it may."""
        if self.blocked:
            return f"{_listed(self.blocked)}; nothing was written: move that away, or choose another folder with -o"
        if force:
            return None
        if self.foreign is not None:
            replaced = f"would replace {quoted_list(self.edited, 'and')} there" if self.edited else "replaces nothing"
            return (
                f"'{self.folder}' {self.foreign}; nothing was written: choose another folder with -o, or another name "
                f"of the attention. --force writes into it, {replaced}, and leaves every other file as it is"
            )
        if self.edited:
            return (
                f"in '{self.folder}' {_listed(self.edited)}; nothing was written: move that away, "
                "or pass --force to replace it"
            )
        return None


def compare(folder: Path, files: Mapping[str, bytes]) -> Comparison:
    """What writing a package would do to a folder. Raises ``OSError`` where that cannot be read."""
    kind = _kind(folder)
    if kind not in (None, "a folder"):
        return Comparison(folder, tuple(files), (), {}, {str(folder): f"is {kind}"}, None)
    claims = Claims.read(folder)
    write, edited, blocked = [], {}, {}
    for name, content in files.items():
        place = folder / name
        inside = _no_folder(folder, name)
        if inside is not None:
            blocked[str(inside)] = f"is {_kind(inside)}"
            continue
        found = _kind(place)
        if found == "a file" and place.read_bytes() == content:
            continue
        if found == "a symbolic link" and place.is_file() and place.read_bytes() == content:
            continue
        write.append(name)
        if found == "a file":
            if claims.is_sealed(name, place):
                continue
            edited[name] = "was edited since flashgen wrote it" if name in claims.files else "is not flashgen's"
        elif found == "a symbolic link":
            edited[name] = f"is a symbolic link to '{place.readlink()}'"
        elif found is not None:
            blocked[str(place)] = f"is {found}"
    gone = (name for name in sorted(claims.files) if name not in files and _no_folder(folder, name) is None)
    old = (name for name in gone if _kind(folder / name) == "a file")
    remove = tuple(name for name in old if claims.is_sealed(name, folder / name))
    aside = _place_aside(folder)
    if (write or remove) and not _is_free(aside):
        blocked[str(aside)] = f"is {_kind(aside)} that no build made, where the files of this one would be made"
    foreign = None if claims.trusted or kind is None else _foreign(folder, claims)
    return Comparison(folder, tuple(write), remove, edited, blocked, foreign)


def write(folder: Path, files: Mapping[str, bytes], *, force: bool = False) -> Comparison:
    """Make a folder hold a package; what it did. Raises ``FolderRefused``, and ``OSError``."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with _locked(folder.parent) as alone:
        found = compare(folder, files)
        refusal = found.refusal(force=force)
        if refusal is not None:
            raise FolderRefused(refusal)
        if not found.write and not found.remove:
            return found
        if folder.exists():
            changed = {name: files[name] for name in (*found.write, FILE_NAME)}
            _renew(folder, changed, found.remove, alone=alone)
        else:
            with _aside(_place_aside(folder), alone=alone) as aside:
                _fill(aside, files)
                aside.rename(folder)
        return found


def _renew(folder: Path, files: Mapping[str, bytes], old: Sequence[str], *, alone: bool) -> None:
    with _aside(_place_aside(folder), alone=alone) as aside:
        _fill(aside, files)
        digests = {name: digest(content) for name, content in files.items() if name != FILE_NAME}
        _fill(aside, {"building": building(folder, digests)})
        (aside / "building").replace(folder / FILE_NAME)
        for name in digests:
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (aside / name).replace(folder / name)
        for name in old:
            (folder / name).unlink(missing_ok=True)
            with contextlib.suppress(OSError):  # something is left in it
                os.removedirs((folder / name).parent)
        (aside / FILE_NAME).replace(folder / FILE_NAME)


def _fill(folder: Path, files: Mapping[str, bytes]) -> None:
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)


def _no_folder(folder: Path, name: str) -> Path | None:
    """What stands where a file's own folder would be, such as a link to another one; None where nothing is wrong."""
    inside = [folder / each for each in reversed(Path(name).parents) if each.name]
    return next((each for each in inside if _kind(each) not in (None, "a folder")), None)


def _foreign(folder: Path, claims: Claims) -> str | None:
    """Why a folder without a manifest that can be relied on is not to be touched; None where it is as good as empty."""
    others = sorted(each.name for each in folder.iterdir() if each.name not in ("__pycache__", _ASIDE))
    if not others:
        return None
    named = ", ".join(others[:_MOST_NAMED]) + (f" and {len(others) - _MOST_NAMED} more" if others[_MOST_NAMED:] else "")
    return f"{claims.reason}, and holds {named}"


def _kind(path: Path) -> str | None:
    """What stands there, in words; None for nothing."""
    try:
        mode = path.lstat().st_mode
    except (FileNotFoundError, NotADirectoryError):
        return None
    kinds = {stat.S_IFREG: "a file", stat.S_IFDIR: "a folder", stat.S_IFLNK: "a symbolic link", stat.S_IFIFO: "a pipe"}
    return kinds.get(stat.S_IFMT(mode), "a device or a socket")


def _listed(found: Mapping[str, str]) -> str:
    named = [f"'{name}' {what}" for name, what in list(found.items())[:_MOST_NAMED]]
    more = len(found) - len(named)
    return ", ".join(named) + (f", and {more} more" if more else "")


def _place_aside(folder: Path) -> Path:
    """Where the files of a package are made: on the same file system, as they are renamed."""
    return folder / _ASIDE if folder.exists() else folder.with_name(f".{folder.name}{_ASIDE}")


def _is_free(aside: Path) -> bool:
    """Whether nothing is there that may be a user's: what a build makes or a killed one left has a mark, or nothing."""
    if _kind(aside) != "a folder":
        return _kind(aside) is None
    try:
        return (aside / _MARK).is_file() or not any(aside.iterdir())
    except FileNotFoundError:  # another build has just removed it
        return True


@contextlib.contextmanager
def _aside(folder: Path, *, alone: bool) -> Iterator[Path]:
    """A folder to make files in, gone afterwards. One that a killed build left is removed where no other can run."""
    if alone:
        _remove(folder)
    made = folder / _MADE
    folder.mkdir()
    try:
        (folder / _MARK).write_text(_MARK_SAYS)
        made.mkdir()
        yield made
    finally:
        _remove(folder)


def _remove(aside: Path) -> None:
    """The mark goes last, so that what is left after a kill is still told from a user's."""
    shutil.rmtree(aside / _MADE, ignore_errors=True)
    shutil.rmtree(aside, ignore_errors=True)


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[bool]:
    """Keep other builds out of a folder; False where its file system knows no locks. Nothing is left behind."""
    try:
        import fcntl  # noqa: PLC0415 - POSIX alone has it
    except ImportError:
        yield False
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        deadline = time.monotonic() + _LOCK_SECONDS
        while True:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                alone = True
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise FolderRefused(
                        f"another build has been writing to '{folder}' for {_LOCK_SECONDS:.0f} s; "
                        "is it stopped? nothing was written"
                    ) from None
                time.sleep(0.02)
                continue
            except OSError:
                alone = False
            break
        yield alone
    finally:
        os.close(handle)
