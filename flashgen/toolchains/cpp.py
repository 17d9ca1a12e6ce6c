"""Stage 5, compile: C++ source to a shared library, by the system's compiler, through the cache.

In: a ``KernelSource`` without headers. Out: a ``Binary``, the path of a library fit for this
machine's CPU. The key of an entry is the sha256 of the source, the flags, the compiler's identity and the
CPU's features, so that a cache folder can be shared between machines. Nothing here imports torch.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import platform
import re
import shlex
import shutil
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from flashgen.store.build_lock import compiling
from flashgen.store.cache import Cache, key_of
from flashgen.store.headers import Headers, Source, headers_of, in_one

REQUIRED_FLAGS = ("-std=c++17", "-O2", "-fwrapv", "-fno-math-errno", "-fno-trapping-math", "-fPIC", "-shared")
THIS_CPU = "-march=native"
# Each is left out where the compiler refuses it: slower, never wrong.
OPTIONAL_FLAGS = (THIS_CPU, "-mprefer-vector-width=512", "-ffp-contract=fast", "-fopenmp")
CANDIDATES = ("c++", "g++", "clang++")

_LIBRARY, LOG = "library.so", "compile.log"
# What all sources of kernels include first, and the most libraries of a cache in which compiling it does not pay yet.
PREAMBLE = "flashgen/cpu/preamble.h"
_FEW_LIBRARIES = 2
_HEADER, _PRECOMPILED = "preamble.h", "preamble.h.gch"
_GCC = "Free Software Foundation"
_INSTALL = (
    "Install one (Debian: apt install g++; Fedora: dnf install gcc-c++; macOS: xcode-select --install) or set CXX."
)
_VERSION_SECONDS = 60.0


@dataclass(frozen=True)
class Compiler:
    """A C++ compiler: the command that starts it, what it says of its version, flags that come after all others."""

    command: tuple[str, ...]
    version: str
    flags: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """Of the command, for people."""
        return Path(self.command[0]).name

    @property
    def optional_flags(self) -> tuple[str, ...]:
        """Those it is given: a CPU that the command itself names is the one that is meant."""
        names_cpu = any(argument.startswith(("-march=", "-mcpu=")) for argument in self.command[1:])
        return tuple(flag for flag in OPTIONAL_FLAGS if not (names_cpu and flag == THIS_CPU))


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
    chosen = os.environ.get("CXX", "").strip()
    try:
        commands = [tuple(shlex.split(chosen))] if chosen else [(name,) for name in CANDIDATES]
    except ValueError as error:
        raise CompilerMissing(
            f"no C++ compiler: $CXX is {chosen!r}, which is no command ({error}). {_INSTALL}"
        ) from None
    tried = []
    for command in commands:
        found = shutil.which(command[0])
        if found is not None:
            version = _version((found, *command[1:]), _modified(found))
            if version is not None:
                return Compiler((found, *command[1:]), version)
        tried.append(f"'{shlex.join(command)}' ({_why_not(command[0], found)})" if chosen else command[0])
    source = "$CXX names" if chosen else "the path has none of"
    ending = "" if chosen else ", or it does not start"
    raise CompilerMissing(f"no C++ compiler: {source} {', '.join(tried)}{ending}. {_INSTALL}")


def _why_not(name: str, found: str | None) -> str:
    """Why a command does not start."""
    if found is not None:
        return "it does not start"
    path = Path(name)
    if os.sep not in name:
        return "it is not on the path"
    if path.is_dir():
        return "it is a folder"
    return "it may not be executed" if path.exists() else "it does not exist"


def compile_sources(
    sources: Sequence[Source], *, cache: Cache | None = None, compiler: Compiler | None = None
) -> tuple[Binary, ...]:
    """Compile every source, several at a time, or take it from the cache.

    Raises ``CompilerMissing``, and ``CompileFailed`` for the first source that the compiler refuses.
    """
    cache = cache or Cache.default()
    chosen = compiler or find_compiler()
    workers = max(1, min(len(sources), available_cores()))
    with ThreadPoolExecutor(workers, thread_name_prefix="flashgen-compile") as pool:
        return tuple(pool.map(lambda source: _compile(source, cache, chosen), sources))


def compile_with(source: Source, flags: Sequence[str], compiler: Compiler, key: str) -> Path:
    """The library of a source that is no kernel, compiled with these flags alone, or that of this key in the cache.

    Raises ``CompileFailed``.
    """
    build = functools.partial(_build, source, compiler, flags)
    try:
        return fetched(Cache.default(), key, (_LIBRARY,), build, _shown(source), source.name)[0]
    except OSError as error:
        raise CompileFailed(f"'{source.name}' could not be compiled: {error}", str(error)) from None


def available_cores() -> int:
    """How many this process may use: fewer than the machine has in a container that was given some."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def binary_key(source: Source, compiler: Compiler) -> str:
    """The name of a source's entry in the cache."""
    parts = [source.text, *(text for _, text in source.headers), *(f"{name}={value}" for name, value in source.defines)]
    parts += [*REQUIRED_FLAGS, *compiler.optional_flags, *compiler.command, compiler.version, *compiler.flags]
    return key_of(*parts, cpu_identity())


@functools.cache
def cpu_identity() -> str:
    """What ``-march=native`` depends on: the machine's architecture, CPU model and features."""
    fields = {"model name", "flags", "Features", "CPU implementer", "CPU part", "isa"}
    told = read_cpuinfo()
    lines = set() if told else {platform.processor()}
    for line in told.splitlines():
        name, _, value = line.partition(":")
        if name.strip() in fields:
            lines.add(f"{name.strip()}: {' '.join(sorted(value.split()))}")
    return "\n".join([platform.machine(), *sorted(lines)])


def read_cpuinfo(file: Path = Path("/proc/cpuinfo")) -> str:
    """What Linux says of its processors; nothing where there is no such file."""
    try:
        return file.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def _compile(source: Source, cache: Cache, compiler: Compiler) -> Binary:
    start = time.perf_counter()
    key = binary_key(source, compiler)
    build = functools.partial(_build, source, compiler)
    path, cached = fetched(cache, key, (_LIBRARY,), build, _shown(source), source.name)
    return Binary(source.name, path, key, time.perf_counter() - start, cached)


def fetched(
    cache: Cache,
    key: str,
    files: Sequence[str],
    build: Callable[[], Mapping[str, bytes]],
    shown: Mapping[str, bytes],
    what: str,
) -> tuple[Path, bool]:
    """The path of the first of some files of an entry, and whether it was there before; else they are built.

    Where a compiler refuses a source, that stays for people, as ``shown``, with the log. Raises ``CompileFailed``.
    """
    path = cache.find(key, *files)
    if path is not None:
        return path, True
    try:
        return cache.fetch(key, files[0], build, *files[1:], what=what), False
    except CompileFailed as failure:
        folder = cache.keep(key, {**shown, LOG: failure.log.encode()})
        kept = "" if folder is None else f"\nsource and log: {folder}"
        raise CompileFailed(f"{failure}{kept}", failure.log) from None


def load_library(path: Path) -> ctypes.CDLL:
    """A compiled library, loaded. Raises ``CompileFailed`` where this machine refuses it."""
    try:
        return ctypes.CDLL(str(path))
    except OSError as error:
        raise CompileFailed(
            f"what the compiler made cannot be loaded here: {error}. Does $CXX compile for another machine?", str(error)
        ) from None


def _build(source: Source, compiler: Compiler, flags: Sequence[str] | None = None) -> dict[str, bytes]:
    """The files of an entry, by the flags of kernels or by these alone.

    Built in the system's temporary folder: the cache sees only what is finished.
    """
    try:
        with tempfile.TemporaryDirectory(prefix="flashgen-build-") as folder, compiling(source.name, compiler.name):
            return _build_in(Path(folder), source, compiler, flags)
    except OSError as error:
        place = f"the temporary folder '{tempfile.gettempdir()}'"
        message = f"'{source.name}' could not be compiled in {place}: {error.strerror or error}; TMPDIR names another"
        raise CompileFailed(message, str(error)) from None


def _build_in(scratch: Path, source: Source, compiler: Compiler, flags: Sequence[str] | None) -> dict[str, bytes]:
    code, library = scratch / f"{source.name}.cpp", scratch / _LIBRARY
    begins, headers = ((), source.headers) if flags is not None else _begun(source, compiler)
    code.write_text(in_one(code.name, source.text, headers), encoding="utf-8")
    files = [code.name, "-o", library.name]
    if flags is None:
        defines = _defines(source.defines)
        arguments = [*REQUIRED_FLAGS, *defines, *compiler.flags, *begins, *files]
        log, success = _run_with_optional(compiler, arguments, scratch)
    else:
        log, success = _run(compiler, [*files, *flags], scratch)
    command = shlex.join(compiler.command)
    if not success:
        complaints = [line for line in log.splitlines() if "error" in line] or log.strip().splitlines()
        raise CompileFailed(f"{command} could not compile '{source.name}': {complaints[0]}", log)
    if not library.is_file():
        raise CompileFailed(
            f"{command} wrote no library for '{source.name}', and did not say why: is it a compiler?", log
        )
    return {_LIBRARY: library.read_bytes(), **_shown(source), LOG: log.encode()}


def _begun(source: Source, compiler: Compiler) -> tuple[tuple[str, ...], Headers]:
    """Flags by which GCC takes the preamble of a source, compiled before, and the headers less what that has.

    Where that is not there yet, a thread compiles it for the sources to come. It changes seconds, and no code.
    """
    texts = dict(source.headers)
    if _GCC not in compiler.version or PREAMBLE not in texts:
        return (), source.headers
    include = f'#include "{PREAMBLE}"\n'
    preamble = headers_of(include, texts.__getitem__)
    text = in_one(_HEADER, include, preamble)
    flags = (*REQUIRED_FLAGS, *_defines([each for each in source.defines if each[0] in text]), *compiler.flags)
    key = key_of(text, *flags, *compiler.optional_flags, *compiler.command, compiler.version, cpu_identity())
    cache = Cache.default()
    found = cache.find(key, _PRECOMPILED, _HEADER)
    if found is None:
        if len(cache.keys()) >= _FEW_LIBRARIES:
            _precompile(cache.root, key, text, compiler, flags)
        return (), source.headers
    return ("-include", str(found.parent / _HEADER)), tuple((texts | dict.fromkeys(dict(preamble), "")).items())


@functools.cache
def _precompile(root: Path, key: str, text: str, compiler: Compiler, flags: tuple[str, ...]) -> threading.Thread:
    """Begin to compile a preamble, once in a process."""

    def build() -> dict[str, bytes]:
        with tempfile.TemporaryDirectory(prefix="flashgen-build-") as folder:
            header, compiled = Path(folder) / _HEADER, Path(folder) / _PRECOMPILED
            header.write_text(text, encoding="utf-8")
            files = ["-x", "c++-header", header.name, "-o", compiled.name]
            log, success = _run_with_optional(compiler, [*flags, *files], Path(folder))
            if not success:
                raise CompileFailed("the preamble could not be compiled", log)
            return {_HEADER: text.encode(), _PRECOMPILED: compiled.read_bytes()}

    def run() -> None:
        with contextlib.suppress(CompileFailed, CompilerMissing, OSError):
            Cache(root).fetch(key, _PRECOMPILED, build, _HEADER, what=_HEADER)

    thread = threading.Thread(target=run, name="flashgen-preamble")
    with contextlib.suppress(RuntimeError):  # the interpreter ends
        thread.start()
    return thread


def _defines(macros: Iterable[tuple[str, str]]) -> list[str]:
    return [f"-D{name}={value}" for name, value in macros]


def _shown(source: Source) -> dict[str, bytes]:
    """The file of an entry for people to read."""
    return {f"{source.name}.cpp": source.text.encode()}


def _accepts(compiler: Compiler, flag: str, scratch: Path) -> bool:
    probe = scratch / "probe.cpp"
    probe.write_text("int flashgen_probe() { return 0; }\n", encoding="utf-8")
    return _run(compiler, ["-fPIC", "-shared", flag, probe.name, "-o", "probe.so"], scratch)[1]


def predefined(compiler: Compiler) -> str | None:
    """The macros that the compiler defines where it compiles kernels, one a line; None where it does not say."""
    asked = ["-std=c++17", "-dM", "-E", "-x", "c++", os.devnull]
    with tempfile.TemporaryDirectory(prefix="flashgen-build-") as folder:
        said, success = _run_with_optional(compiler, [*compiler.flags, *asked], Path(folder))
    return said if success else None


def _run_with_optional(compiler: Compiler, arguments: list[str], scratch: Path) -> tuple[str, bool]:
    """Run the compiler with the optional flags, but for those that are refused."""
    optional = compiler.optional_flags
    log, success = _run(compiler, [*optional, *arguments], scratch)
    if not success:
        accepted = [flag for flag in optional if _accepts(compiler, flag, scratch)]
        if len(accepted) < len(optional):
            log, success = _run(compiler, [*accepted, *arguments], scratch)
    return log, success


def _run(compiler: Compiler, arguments: list[str], scratch: Path) -> tuple[str, bool]:
    """The command and all that it printed, and whether it succeeded."""
    command = [*compiler.command, *arguments]
    environment = {**os.environ, "LC_ALL": "C", "TMPDIR": str(scratch)}
    try:
        done = subprocess.run(
            command, cwd=scratch, env=environment, stdin=subprocess.DEVNULL, capture_output=True, check=False
        )
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
            [*command, "--version"],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            check=False,
            env={**os.environ, "LC_ALL": "C"},
            timeout=_VERSION_SECONDS,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.decode("utf-8", errors="replace").strip() if done.returncode == 0 else None


# -- libraries that travel ---------------------------------------------------------------------------------------------

# One is loaded only where the system is of the same kind and every feature is there: an instruction that is not would
# end the process. Features have the names of Linux, without underscores; macros of compilers that it calls otherwise:
_OTHERWISE = {"sse3": "pni", "bmi": "bmi1", "lzcnt": "abm", "pclmul": "pclmulqdq", "sha": "shani"}
# Macros that name an instruction set which compilers choose from by themselves.
_SETS = re.compile(
    r"^#define __(SSE3|SSSE3|SSE4_1|SSE4_2|POPCNT|AVX\w*?|AMX\w*?|FMA4?|XOP|F16C|BMI2?|LZCNT|TBM|MOVBE|ADX|AES|PCLMUL"
    r"|VAES|VPCLMULQDQ|GFNI|SHA)__ 1$",
    re.MULTILINE,
)


def system_kind() -> str:
    """The kind of machine and system, as far as libraries go by it."""
    return f"{platform.system()} {platform.machine()}"


def needed_features(compiler: Compiler) -> tuple[str, ...] | None:
    """The features that libraries of a compiler may use; None where nobody can tell: then only this CPU will do."""
    if platform.machine().lower() not in ("x86_64", "amd64"):
        return None
    macros = predefined(compiler)
    if macros is None or "__x86_64__" not in macros:
        return None
    names = (name.lower().replace("_", "") for name in _SETS.findall(macros))
    return tuple(sorted({_OTHERWISE.get(name, name) for name in names}))


def lacking_features(features: tuple[str, ...], cpuinfo: Path = Path("/proc/cpuinfo")) -> tuple[str, ...]:
    """Those that the CPU at hand does not have; all, where the system does not say."""
    found = re.search(r"^flags\s*:(.*)$", read_cpuinfo(cpuinfo), re.MULTILINE)
    there = {name.replace("_", "") for name in found[1].split()} if found else set()
    return tuple(name for name in features if name not in there)
