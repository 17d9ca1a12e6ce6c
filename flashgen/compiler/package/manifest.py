"""What a generated package says of itself: written by ``flashgen build``, read at every import.

``made`` makes dataclasses of JSON: each field is of the type that its class says, or an error names it.
"""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, is_dataclass, replace
from enum import Enum
from pathlib import Path, PurePath
from types import NoneType, UnionType
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

from flashgen.plan.packed import ManifestBinary, ManifestGpuKernel, ManifestGpuSource, ManifestKernel
from flashgen.targets.gpu.tiles import ElementPlan
from flashgen.version import __version__

FILE_NAME = "manifest.json"
SPEC_FILE_NAME = "spec.json"  # the parsed spec, constants and imports resolved
INCLUDE = "include"  # the folder of headers
# Counts up when the files of a package or the kernels' arguments change their meaning.
FORMAT = 15
_SEAL, _BUILDING = "sealed", "building"


@dataclass(frozen=True)
class Manifest:
    """A package: the operator's name, what identifies its spec, the generated sources, binaries and their kernels.

    ``files`` are the sha256 of all its files but this one.
    """

    name: str
    sha256: str
    kernels: tuple[ManifestKernel, ...]
    gpu_kernels: tuple[ManifestGpuKernel, ...] = ()
    gpu_sources: tuple[ManifestGpuSource, ...] = ()
    binaries: tuple[ManifestBinary, ...] = ()
    files: Mapping[str, str] = field(default_factory=dict)

    def to_json(self) -> str:
        """The text of the file; the same for the same manifest."""
        content = asdict(self)
        content["kernels"] += content.pop("gpu_kernels")
        content["binaries"] = [{name: x for name, x in each.items() if x is not None} for each in content["binaries"]]
        for name in ("gpu_sources", "binaries"):
            if not content[name]:
                del content[name]
        return _sealed({"format": FORMAT, "flashgen": __version__, **content})

    @classmethod
    def read(cls, folder: Path) -> Manifest:
        """The manifest of a package; ``ImportError`` where it is damaged, edited or another version's."""
        path = folder / FILE_NAME
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
            if isinstance(content, dict):
                if _BUILDING in content:
                    raise ImportError(f"a build of '{folder}' has not ended; {rebuild_hint(folder)}")
                if content.get("format", FORMAT) != FORMAT:
                    writer = f"'{path}' was written by flashgen {content.get('flashgen')}, this is {__version__}"
                    raise ImportError(f"{writer}; {rebuild_hint(folder)}")
            return _manifest(made(_Written, content), content)
        except (OSError, ValueError, RecursionError) as error:
            raise ImportError(f"'{path}' cannot be read: {error}; {rebuild_hint(folder)}") from None


@dataclass(frozen=True)
class _Written:
    """The file, field by field."""

    format: int
    flashgen: str
    name: str
    sha256: str
    kernels: tuple[ManifestKernel | ManifestGpuKernel, ...]
    files: Mapping[str, str]
    sealed: str
    gpu_sources: tuple[ManifestGpuSource, ...] | None = None
    binaries: tuple[ManifestBinary, ...] | None = None


def _manifest(written: _Written, content: Mapping[str, Any]) -> Manifest:
    """What a whole file says. Raises ``Damaged``."""
    sources = [
        replace(source, tiles=made(ElementPlan, source.tiles, f"gpu_sources[{n}].tiles"))
        for n, source in enumerate(written.gpu_sources or ())
    ]
    if written.sealed != _seal(content):
        raise Damaged(f"it is not as flashgen wrote it, as '{_SEAL}' says")
    return Manifest(
        name=written.name,
        sha256=written.sha256,
        kernels=tuple(each for each in written.kernels if isinstance(each, ManifestKernel)),
        gpu_kernels=tuple(each for each in written.kernels if isinstance(each, ManifestGpuKernel)),
        gpu_sources=tuple(sources),
        binaries=written.binaries or (),
        files=written.files,
    )


@dataclass(frozen=True)
class Claims:
    """Which files of a folder its manifest says flashgen wrote: the sha256 that each had, in any version.

    ``trusted`` is whether there is such a manifest, ``reason`` why there is none.
    """

    files: Mapping[str, frozenset[str]]
    trusted: bool
    reason: str = ""

    @classmethod
    def read(cls, folder: Path) -> Claims:
        """What the manifest of a folder claims; nothing where it is missing, damaged or another program's."""
        path = folder / FILE_NAME
        none: Mapping[str, frozenset[str]] = {}
        if path.is_symlink() or not path.is_file():
            return cls(none, False, f"was not written by flashgen (it has no {FILE_NAME} of its own)")
        content = _content(path)
        if content is None:
            return cls(none, False, f"was not written by flashgen, or its {FILE_NAME} is damaged")
        if "files" not in content and _BUILDING not in content:
            writer = content["flashgen"]
            return cls(none, False, f"was written by flashgen {writer}, which did not say what files are its own")
        try:
            named = [*content.get("files", {}).items(), *content.get(_BUILDING, {}).items()]
            files: dict[str, frozenset[str]] = {}
            for name, sha256 in named:
                file = PurePath(name)
                if file.anchor or ".." in file.parts or file.as_posix() != name or name == ".":
                    return cls(none, False, f"has a {FILE_NAME} that names files elsewhere ('{name}')")
                files[name] = files.get(name, frozenset()) | {str(sha256)}
        except AttributeError:
            return cls(none, False, f"has a damaged {FILE_NAME}")
        own = digest(path.read_bytes())
        whole = content.get(_SEAL) == _seal(content)
        return cls({**files, FILE_NAME: frozenset({own} if whole else {})}, True)

    def is_sealed(self, name: str, path: Path) -> bool:
        """Whether a file is as flashgen wrote it."""
        return digest(path.read_bytes()) in self.files.get(name, ())


def building(folder: Path, files: Mapping[str, str]) -> bytes:
    """The manifest of a folder while files take their places there: what it claimed before, and these."""
    before = (_content(folder / FILE_NAME) if (folder / FILE_NAME).is_file() else None) or {}
    content = {"format": FORMAT, "flashgen": __version__, **before}
    content.pop(_SEAL, None)
    return _sealed({**content, _BUILDING: {**content.get(_BUILDING, {}), **files}}).encode()


def digest(content: bytes) -> str:
    """The sha256 by which a manifest names a file."""
    return hashlib.sha256(content).hexdigest()


def _sealed(content: Mapping[str, Any]) -> str:
    """The text of a manifest, with a digest over all else that it says: an edited one is told by it."""
    plain = json.loads(json.dumps(content, default=str))
    return json.dumps({**plain, _SEAL: _seal(plain)}, indent=2) + "\n"


def _seal(content: Mapping[str, Any]) -> str:
    rest = {name: value for name, value in content.items() if name != _SEAL}
    return digest(json.dumps(rest).encode())


def _content(path: Path) -> dict[str, Any] | None:
    """A manifest of flashgen's, of any version; None for anything else."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None
    ours = isinstance(content, dict) and {"format", "flashgen"} <= content.keys()
    return content if ours else None


def rebuild_hint(folder: Path) -> str:
    """What to do about a package that does not work."""
    return f"run 'flashgen build' for its spec again to write '{folder.name}' anew"


Made = TypeVar("Made")

_JSON = {dict: "an object", list: "a list", str: "a text", int: "an integer", bool: "true or false"}
_MOST_SHOWN = 40


class Damaged(ValueError):  # noqa: N818 - reads as what happened
    """Data is not what a type says; the message names the field."""


def made(kind: type[Made], value: Any, where: str = "") -> Made:
    """``value`` as a ``kind``; ``where`` is its place in the data. Raises ``Damaged``.

    Types are those of manifests: plain values, enumerations, tuples, mappings, dataclasses, and what may be None.
    """
    found: Made = _made(kind, value, where)
    return found


def _made(kind: Any, value: Any, where: str) -> Any:
    origin, inner = get_origin(kind), get_args(kind)
    if kind is Any or (value is None and NoneType in inner):
        return value
    if origin is UnionType:
        return _made(_likeliest([each for each in inner if each is not NoneType], value), value, where)
    if origin is tuple:
        return tuple(_made(inner[0], each, f"{where}[{n}]") for n, each in enumerate(_checked(list, value, where)))
    if origin is Mapping:
        return {name: _made(inner[1], each, _at(where, name)) for name, each in _checked(dict, value, where).items()}
    if is_dataclass(kind):
        return _instance(kind, _checked(dict, value, where), where)
    if issubclass(kind, Enum):
        if value not in [each.value for each in kind]:
            raise Damaged(f"'{where}' is {_shown(value)}, not one of {', '.join(str(each.value) for each in kind)}")
        return kind(value)
    return _checked(kind, value, where)


def _likeliest(kinds: Sequence[Any], value: Any) -> Any:
    """Of several dataclasses the one that ``schedule`` names, else the one whose fields differ least from these."""
    if len(kinds) == 1 or not isinstance(value, dict):
        return kinds[0]
    named = value.get("schedule")
    return min(kinds, key=lambda kind: (kind.__name__ != named, len(_types(kind).keys() ^ value.keys())))


def _instance(kind: Any, value: dict[str, Any], where: str) -> Any:
    """Of a dataclass, all of whose fields are there, but those that are None where nothing is said."""
    types = _types(kind)
    for name in value:
        if name not in types:
            raise Damaged(f"'{_at(where, name)}' is not known")
    for each in fields(kind):
        if each.name not in value and each.default is not None:
            raise Damaged(f"'{_at(where, each.name)}' is missing")
    return kind(**{name: _made(types[name], each, _at(where, name)) for name, each in value.items()})


@functools.cache
def _types(kind: Any) -> dict[str, Any]:
    return get_type_hints(kind)


def _checked(kind: type[Made], value: Any, where: str) -> Made:
    if type(value) is not kind:  # true is no integer
        raise Damaged(f"'{where}' is {_shown(value)}, not {_JSON[kind]}" if where else f"it is not {_JSON[kind]}")
    return value


def _at(where: str, name: str) -> str:
    return f"{where}.{name}" if where else name


def _shown(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= _MOST_SHOWN else f"{text[:_MOST_SHOWN]} …"
