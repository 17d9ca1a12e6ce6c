"""What the compiler has read and emitted before, so that loading a spec again neither parses nor fills templates.

In: what decides a result, and how to find it anew. Out: the result, from the cache where it holds one. Keys cover
flashgen's own code and templates; a spec is recalled only while every file that it was read from says the same.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from flashgen.analysis.variant import Variant
from flashgen.emit.kernel_source import KernelSource
from flashgen.ir.serialize import spec_from_data, spec_to_data
from flashgen.ir.spec import AttentionSpec
from flashgen.store.cache import Cache, key_of
from flashgen.store.gallery import shipped
from flashgen.store.headers import headers_of

# What a spec and its sources for CPUs come from, beside the templates of these.
_CODE = ("version.py", "analysis", "diagnostics", "emit", "ir", "kinds", "language", "plan", "targets")
_SPECS, _SOURCE = "specs.json", "source.json"
_BEGAN = time.time()
_MOST_BYTES = 1 << 21  # of a file; the front end refuses smaller ones


def specs_of_file(
    path: Path | str, constants: Mapping[str, object], read: Callable[[], Sequence[AttentionSpec]]
) -> Sequence[AttentionSpec]:
    """The specs of a file. What ``read`` raises passes through, and nothing is kept then."""
    try:
        if not Path(path).is_file():  # a pipe is read once
            return read()
        with Path(path).open("rb") as file:
            content = file.read(_MOST_BYTES)
    except (OSError, ValueError):
        return read()
    return _specs(_key("file", str(path), content, _written(constants), _place(path)), read)


def specs_of_text(
    text: str, constants: Mapping[str, object], read: Callable[[], Sequence[AttentionSpec]]
) -> Sequence[AttentionSpec]:
    """The specs of a text."""
    return _specs(_key("text", text, _written(constants), _place(".")), read)


def cpu_source(variant: Variant, emit: Callable[[], KernelSource]) -> KernelSource:
    """The source of one head dimension for CPUs; its tiles are those of a generic one."""
    key = _key(f"source of {variant.kind.name}", json.dumps(spec_to_data(variant.spec)), str(variant.head_dim))
    stored = _recalled(key, _SOURCE)
    if stored is not None:
        file_name, symbol, text, defines = json.loads(stored)
        macros = tuple((macro, value) for macro, value in defines)
        return KernelSource(file_name, "cpu", symbol, variant.head_dim, text, macros, headers_of(text))
    source = emit()
    _keep(key, _SOURCE, json.dumps([source.file_name, source.symbol, source.text, source.defines]))
    return source


def code_digest() -> str | None:
    """A digest over the compiler's code and templates: a version's number does not change while it is worked on.

    None where a file has changed since this process began: what runs here is not what lies there.
    """
    package = Path(__file__).resolve().parents[1]
    files = []
    templates = (str(shipped("templates") / name) for name in ("cpu", "include"))
    for path in (*(f"{package}/{name}" for name in _CODE), *templates):
        files += [path] if path.endswith(".py") else []
        for folder, below, found in os.walk(path):
            below[:] = sorted(each for each in below if each != "__pycache__")
            files += [f"{folder}/{each}" for each in sorted(found)]
    try:
        changed = any(os.stat(file).st_mtime >= _BEGAN for file in files)  # noqa: PTH116
        return None if changed else _digest(tuple(files))
    except OSError:
        return None


@functools.cache
def _digest(files: tuple[str, ...]) -> str:
    digest = hashlib.sha256()
    for file in files:
        content = Path(file).read_bytes()
        digest.update(f"{Path(file).name} {len(content)} ".encode() + content)
    return digest.hexdigest()


def _recalled(key: str | None, file: str) -> bytes | None:
    return None if key is None else Cache.of_compiler().read(key, file)


def _keep(key: str | None, file: str, content: str) -> None:
    """Store it under the key, if its code is still the one that ran."""
    if key is not None and code_digest() is not None:
        Cache.of_compiler().write(key, file, content.encode())


def _key(*parts: str | bytes) -> str | None:
    code = code_digest()
    return None if code is None else key_of(*parts, code)


def _specs(key: str | None, read: Callable[[], Sequence[AttentionSpec]]) -> Sequence[AttentionSpec]:
    stored = _recalled(key, _SPECS)
    if stored is not None:
        specs = [spec_from_data(data) for data in json.loads(stored)]
        if all(_says(source.name, source.text) for spec in specs for source in spec.sources[1:]):
            return specs
    specs = list(read())
    _keep(key, _SPECS, json.dumps([spec_to_data(spec) for spec in specs]))
    return specs


def _says(name: str, text: str) -> bool:
    """Whether an imported file still holds this text."""
    try:
        content = Path(name).read_bytes()
    except (OSError, ValueError):
        return False
    return content.replace(b"\r\n", b"\n").replace(b"\r", b"\n").removeprefix(b"\xef\xbb\xbf") == text.encode()


def _written(constants: Mapping[str, object]) -> str:
    """Constants as text; 1, 1.0 and True are three."""
    return repr(sorted((name, repr(value)) for name, value in constants.items()))


def _place(path: Path | str) -> str:
    """Where relative names of imported files start from; nowhere in a folder that was removed."""
    try:
        return "" if Path(path).is_absolute() else str(Path.cwd())
    except OSError:
        return ""
