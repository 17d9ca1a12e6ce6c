"""Stage 5, compile: C++ source to a shared library, by the system's compiler, through the cache.

In: a ``KernelSource`` (self-contained text). Out: a ``Binary``, the path of a library fit for this
machine's CPU. The key of an entry is the sha256 of the source, the flags, the compiler's identity and the
CPU's features, so that a cache folder can be shared between machines. Nothing here imports torch.
"""

from __future__ import annotations

import functools
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from flashgen.cache import Cache, key_of

REQUIRED_FLAGS = ("-std=c++17", "-O2", "-fwrapv", "-fno-math-errno", "-fno-trapping-math", "-fPIC", "-shared")
# Each is left out where the compiler refuses it: slower, never wrong.
OPTIONAL_FLAGS = ("-march=native", "-mprefer-vector-width=512", "-ffp-contract=fast", "-fopenmp")
CANDIDATES = ("c++", "g++", "clang++")

_LIBRARY = "library.so"


class Source(Protocol):
    """What is compiled: ``KernelSource`` and anything of the same shape."""

    @property
    def name(self) -> str:
        """A file name without its suffix, for logs and messages."""

    @property
    def text(self) -> str:
        """The whole source."""

    @property
    def defines(self) -> tuple[tuple[str, str], ...]:
        """Macros and their values."""


@dataclass(frozen=True)
class Compiler:
    """A C++ compiler: the command that starts it and what it says of its version."""

    command: tuple[str, ...]
    version: str


@dataclass(frozen=True)
class Binary:
    """A compiled library. ``seconds``: from asking to having it; ``cached``: it was there before."""

    name: str
    path: Path
    key: str
    seconds: float
    cached: bool


class CompilerMissing(Exception):  # noqa: N818 - reads as what happened
    """No C++ compiler was found."""


class CompileFailed(Exception):  # noqa: N818 - reads as what happened
    """The compiler refused a source; ``log`` is all that it said."""

    def __init__(self, message: str, log: str) -> None:
        super().__init__(message)
        self.log = log

    def __reduce__(self) -> tuple[type[CompileFailed], tuple[str, str]]:
        return type(self), (str(self), self.log)


def find_compiler() -> Compiler:
    """The compiler of ``$CXX``, else the first of c++, g++, clang++ on the path.

    Raises ``CompilerMissing`` where there is none, or where ``$CXX`` cannot be started.
    """
    chosen = os.environ.get("CXX")
    commands = [tuple(shlex.split(chosen))] if chosen and chosen.strip() else [(name,) for name in CANDIDATES]
    tried = []
    for command in commands:
        found = shutil.which(command[0])
        if found is not None:
            version = _version((found, *command[1:]), _modified(found))
            if version is not None:
                return Compiler((found, *command[1:]), version)
        tried.append(shlex.join(command))
    source = "$CXX names" if chosen and chosen.strip() else "the path has none of"
    raise CompilerMissing(
        f"no C++ compiler: {source} {', '.join(tried)}, or it does not start. "
        "Install one (Debian: apt install g++; Fedora: dnf install gcc-c++; macOS: xcode-select --install) "
        "or set CXX."
    )


def compile_sources(
    sources: Sequence[Source], *, cache: Cache | None = None, compiler: Compiler | None = None
) -> tuple[Binary, ...]:
    """Compile every source, several at a time, or take it from the cache.

    Raises ``CompilerMissing``, and ``CompileFailed`` for the first source that the compiler refuses.
    """
    cache = cache or Cache.default()
    chosen = compiler or find_compiler()
    workers = max(1, min(len(sources), os.cpu_count() or 1))
    with ThreadPoolExecutor(workers, thread_name_prefix="flashgen-compile") as pool:
        return tuple(pool.map(lambda source: _compile(source, cache, chosen), sources))


def binary_key(source: Source, compiler: Compiler) -> str:
    """The name of a source's entry in the cache."""
    parts = [source.text, *(f"{name}={value}" for name, value in source.defines)]
    parts += [*REQUIRED_FLAGS, *OPTIONAL_FLAGS, *compiler.command, compiler.version, cpu_identity()]
    return key_of(*parts)


@functools.cache
def cpu_identity() -> str:
    """What ``-march=native`` depends on: the machine's architecture, CPU model and features."""
    fields = {"model name", "flags", "Features", "CPU implementer", "CPU part", "isa"}
    lines = []
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines():
            name, _, value = line.partition(":")
            if name.strip() in fields:
                lines.append(f"{name.strip()}: {' '.join(sorted(value.split()))}")
    except OSError:
        lines.append(platform.processor())
    return "\n".join([platform.machine(), *sorted(set(lines))])


def _compile(source: Source, cache: Cache, compiler: Compiler) -> Binary:
    start = time.perf_counter()
    key = binary_key(source, compiler)
    path = cache.find(key, _LIBRARY)
    cached = path is not None
    if path is None:
        try:
            path = cache.fetch(key, _LIBRARY, lambda: _build(source, compiler))
        except CompileFailed as failure:
            text = source.text.encode()
            folder = cache.keep(key, {f"{source.name}.cpp": text, "compile.log": failure.log.encode()})
            kept = "" if folder is None else f"\nsource and log: {folder}"
            raise CompileFailed(f"{failure}{kept}", failure.log) from None
    return Binary(source.name, path, key, time.perf_counter() - start, cached)


def _build(source: Source, compiler: Compiler) -> dict[str, bytes]:
    """The files of an entry. Built in the system's temporary folder: the cache sees only what is finished."""
    with tempfile.TemporaryDirectory(prefix="flashgen-build-") as folder:
        scratch = Path(folder)
        code = scratch / f"{source.name}.cpp"
        code.write_text(source.text, encoding="utf-8")
        library = scratch / _LIBRARY
        defines = [f"-D{name}={value}" for name, value in source.defines]
        arguments = [*REQUIRED_FLAGS, *defines, code.name, "-o", library.name]
        log, success = _run(compiler, [*OPTIONAL_FLAGS, *arguments], scratch)
        if not success:
            accepted = [flag for flag in OPTIONAL_FLAGS if _accepts(compiler, flag, scratch)]
            if len(accepted) < len(OPTIONAL_FLAGS):
                log, success = _run(compiler, [*accepted, *arguments], scratch)
        if not success:
            complaints = [line for line in log.splitlines() if "error" in line] or log.strip().splitlines()
            command = shlex.join(compiler.command)
            raise CompileFailed(f"{command} could not compile '{source.name}': {complaints[0]}", log)
        return {
            _LIBRARY: library.read_bytes(),
            f"{source.name}.cpp": code.read_bytes(),
            "compile.log": log.encode(),
        }


def _accepts(compiler: Compiler, flag: str, scratch: Path) -> bool:
    probe = scratch / "probe.cpp"
    probe.write_text("int flashgen_probe() { return 0; }\n", encoding="utf-8")
    return _run(compiler, ["-fPIC", "-shared", flag, probe.name, "-o", "probe.so"], scratch)[1]


def _run(compiler: Compiler, arguments: list[str], scratch: Path) -> tuple[str, bool]:
    """The command and all that it printed, and whether it succeeded."""
    command = [*compiler.command, *arguments]
    environment = {**os.environ, "LC_ALL": "C", "TMPDIR": str(scratch)}
    try:
        done = subprocess.run(command, cwd=scratch, env=environment, capture_output=True, check=False)
    except OSError as error:
        raise CompilerMissing(f"{shlex.join(compiler.command)} cannot be started: {error}") from error
    printed = (done.stdout + done.stderr).decode("utf-8", errors="replace")
    return f"$ {shlex.join(command)}\n{printed}", done.returncode == 0


def _modified(path: str) -> int:
    try:
        return Path(path).stat().st_mtime_ns
    except OSError:
        return 0


@functools.cache
def _version(command: tuple[str, ...], modified: int) -> str | None:  # noqa: ARG001 - a new file is asked anew
    """What the compiler says of itself, None if it does not start."""
    try:
        done = subprocess.run(
            [*command, "--version"], capture_output=True, check=False, env={**os.environ, "LC_ALL": "C"}
        )
    except OSError:
        return None
    return done.stdout.decode("utf-8", errors="replace").strip() if done.returncode == 0 else None
