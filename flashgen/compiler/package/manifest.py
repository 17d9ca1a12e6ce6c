"""What a generated package says of itself, and what it brings: written by ``flashgen build``, read at every import.

``made`` makes dataclasses of JSON: each field is of the type that its class says, or an error names it. Of a manifest
and its folder come ``KernelSource``s with the headers beside them, ``Packaged`` for a GPU, and ``Library`` for CPUs.
None of this needs a GPU, or torch.
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

from flashgen.diagnostics import quoted_list
from flashgen.emit.kernel_source import KernelSource
from flashgen.ir.spec import AttentionSpec, HeadDim
from flashgen.ir.types import ElementType
from flashgen.plan.packed import ManifestBinary, ManifestGpuKernel, ManifestGpuSource, ManifestKernel
from flashgen.plan.plan import ANY_CALLS, CallKind
from flashgen.store.cache import Cache
from flashgen.store.headers import headers_of, shipped_header
from flashgen.targets.cpu.plan import CpuPlan, tiles_from_json
from flashgen.targets.gpu.target import GpuTarget
from flashgen.targets.gpu.tiles import ElementPlan, GpuPlan
from flashgen.targets.registry import GPUS
from flashgen.toolchains.cpp import cpu_identity, lacking_features, system_kind
from flashgen.toolchains.nvrtc import Resources
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


def source_of(
    folder: Path, manifest: Manifest, written: ManifestKernel | ManifestGpuSource
) -> tuple[KernelSource, str]:
    """A source with its headers, and which of these files was edited, if any. Raises ``OSError``."""
    text = (folder / written.file).read_text(encoding="utf-8")
    headers = headers_of(text, lambda name: _header(folder, manifest, name))
    texts = {written.file: text, **{f"{INCLUDE}/{name}": header for name, header in headers}}
    edited = (name for name, each in texts.items() if digest(each.encode()) != manifest.files.get(name))
    head_dim = HeadDim(*map(int, (written.head_dim.split("/") * 2)[:2]))
    return KernelSource(written.file, written.target, written.symbol, head_dim, text, (), headers), next(edited, "")


def _header(folder: Path, manifest: Manifest, name: str) -> str:
    """A header of a package; of one without its own, that which comes with flashgen, where it still is the same."""
    try:
        return (folder / INCLUDE / name).read_text(encoding="utf-8")
    except FileNotFoundError:
        found = shipped_header(name)
        if digest(found.encode()) != manifest.files.get(f"{INCLUDE}/{name}"):
            raise
        return found


def edited_sources(folder: Path, manifest: Manifest) -> tuple[KernelSource, ...]:
    """The sources of a package that do not say any more what was written. Raises ``OSError``."""
    written: tuple[ManifestKernel | ManifestGpuSource, ...] = (*manifest.kernels, *manifest.gpu_sources)
    found = [source_of(folder, manifest, each) for each in written]
    return tuple(source for source, edited in found if edited)


@dataclass(frozen=True)
class Packaged:
    """What a package brings for a GPU: a source as it stands in the folder, the plan that it was written with.

    ``images`` are the paths of the binaries that were made of this source, ``resources`` those of its kernels. A source
    of which a file was ``edited``, itself or a header, is what its user wants to run, whatever the shape.
    """

    source: KernelSource
    plan: GpuPlan
    edited: str
    images: Mapping[CallKind, Path]
    resources: tuple[Resources, ...]

    def image(self, calls: CallKind) -> Path | None:
        """The binary that has all kernels of such calls, if there is one."""
        return next((path for each, path in self.images.items() if each.covers(calls)), None)


def packaged(
    folder: Path, manifest: Manifest, usual: GpuPlan, target: GpuTarget
) -> Mapping[tuple[ElementType, str], Packaged]:
    """What a package brings for a GPU, by element type and pass, where the planner has the ``usual`` plan.

    Nothing where nothing of it runs there. Raises ``OSError``.
    """
    fitting = [each for each in manifest.gpu_sources if each.head_dim == usual.head_dim and _runs_on(each, target)]
    nearest = max((each.target for each in fitting), key=lambda each: (GPUS[each].capability, each), default="")
    own = [each for each in fitting if each.target == nearest]
    return {(each.tiles.element, each.pass_name): _packaged(folder, manifest, each, usual) for each in own}


def _packaged(folder: Path, manifest: Manifest, written: ManifestGpuSource, usual: GpuPlan) -> Packaged:
    source, edited = source_of(folder, manifest, written)
    images: dict[CallKind, Path] = {}
    for binary in manifest.binaries:
        if binary.source != written.file or edited or not (folder / binary.file).is_file():
            continue
        content = (folder / binary.file).read_bytes()
        if digest(content) == manifest.files.get(binary.file):
            images[replace(ANY_CALLS, repeatable=binary.deterministic)] = _stored(content)
    resources = tuple(
        Resources(each.name, each.registers, 0, each.spill_bytes, each.stack_bytes)
        for each in manifest.gpu_kernels
        if each.target == written.target
    )
    plan = replace(  # without its reasons, which stand in the source
        usual,
        sram_bytes=written.sram_bytes,
        target=written.target,
        elements=(written.tiles,),
        reasons=(),
        rejected=written.rejected,
        decisions=(),
    )
    return Packaged(source, plan, edited, images, resources if images else ())


def _runs_on(source: ManifestGpuSource, target: GpuTarget) -> bool:
    """What was written for an architecture runs on later ones of the same generation, where its tiles fit."""
    if source.target == target.name:
        return True
    made_for = GPUS.get(source.target)
    if made_for is None or source.target.endswith("a"):
        return False
    same_generation = made_for.capability // 10 == target.capability // 10
    return same_generation and made_for.capability <= target.capability and source.sram_bytes <= target.block_bytes


def _stored(image: bytes) -> Path:
    """A cubin in the cache, whose path says what it holds: CuPy remembers modules by their paths."""
    return Cache.default().fetch(digest(image), "kernels.cubin", lambda: {"kernels.cubin": image})


@dataclass(frozen=True)
class Library:
    """A library of a package: where it is, and the plan that it was compiled with."""

    path: Path
    plan: CpuPlan


class NoLibrary(Exception):  # noqa: N818 - reads as what happened
    """A package brings no library that runs here; the message says why."""


def libraries(folder: Path, manifest: Manifest, spec: AttentionSpec) -> dict[HeadDim, Library]:
    """One for each head dimension, for machines without a compiler. Raises ``NoLibrary``, and ``OSError``.

    They are taken only where nobody changed them or their sources, and where the CPU has every feature that they may
    use.
    """
    found: dict[HeadDim, Library] = {}
    by_source = {each.source: each for each in manifest.binaries}
    for kernel, head_dim in zip(manifest.kernels, spec.head_dims, strict=True):
        binary = by_source.get(kernel.file)
        if binary is None:
            raise NoLibrary("the package holds none for CPUs; `flashgen build --target cpu` makes it")
        library, (_, edited) = folder / binary.file, source_of(folder, manifest, kernel)
        if edited or not library.is_file() or digest(library.read_bytes()) != manifest.files.get(binary.file):
            raise NoLibrary(f"'{edited or binary.file}' of the package is missing or was edited")
        _check_fits(binary)
        why = f"compiled when the package was built, by {binary.compiler}"
        tiles = tiles_from_json(binary.tiles or {})
        plan = CpuPlan(manifest.name, kernel.head_dim, binary.sram_bytes or 0, (why,), (), "local", tiles)
        found[head_dim] = Library(library, plan)
    return found


def _check_fits(binary: ManifestBinary) -> None:
    if binary.system != system_kind():
        raise NoLibrary(f"'{binary.file}' was compiled for {binary.system}, this is {system_kind()}")
    if binary.features is None:
        if binary.cpu != digest(cpu_identity().encode()):
            raise NoLibrary(f"'{binary.file}' was compiled for another CPU")
        return
    absent = lacking_features(binary.features)
    if absent:
        raise NoLibrary(
            f"'{binary.file}' was compiled for a CPU with {quoted_list(absent, 'and')}, which this one lacks"
        )
