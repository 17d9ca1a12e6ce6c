"""The folders that come with flashgen, and its specs by their names.

In: a path, or the name of a spec. Out: a file. A file that is there is always meant before a spec of the gallery.
"""

from __future__ import annotations

import os
from pathlib import Path

from flashgen.diagnostics import nearest, quoted_list


def shipped(name: str) -> Path:
    """The folder of this name: inside an installed package, or beside it in a checkout."""
    package = Path(__file__).resolve().parents[1]
    installed = package / name
    return installed if installed.is_dir() else package.parent / name


def folder() -> Path:
    """Where the specs are."""
    return shipped("specs")


def names() -> tuple[str, ...]:
    """Of all specs, in the order of the alphabet."""
    return tuple(sorted(file.stem for file in folder().glob("*.attn")))


def spec_file(path: Path | str) -> Path | str:
    """The same path; the file of the gallery's spec, where it is a bare name and no file has it.

    Raises ``TypeError`` for what is no path.
    """
    if not isinstance(path, str | os.PathLike):
        raise TypeError(f"a file or the name of a spec must be a str or a Path, not {type(path).__name__}")
    given = Path(path)
    try:
        if _is_bare(path) and not given.exists() and given.name in names():
            return folder() / f"{given.name}.attn"
    except (OSError, ValueError):  # no path: who reads it says why
        pass
    return path


def hint(path: Path | str) -> str:
    """The names of the gallery that a bare name, which is none, probably stands for; empty where there is none."""
    close = nearest(Path(path).name, names(), limit=3) if _is_bare(path) else ()
    return f"did you mean {quoted_list(close)}, of the specs that come with flashgen?" if close else ""


def _is_bare(path: Path | str) -> bool:
    """Whether it is a name alone: ``alibi``, not ``./alibi`` or ``alibi.attn``."""
    name = os.fspath(path)
    return Path(name).name == name and not Path(name).suffix and name not in ("", ".", "..")
