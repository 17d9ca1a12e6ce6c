"""Looks at the machine: what flashgen needs, what is there, what is missing and how to get it.

In: this process's environment. Out: a ``Report`` of ``Finding``s, and which backends run here. A look never fails:
whatever could crash or hang (PyTorch, the driver, CuPy, a library that was just compiled) is asked in a process of its
own, and an answer that does not come is a finding.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import importlib.util
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from typing import Literal as OneOf

from flashgen.diagnostics import quoted_list
from flashgen.store.cache import ENVIRONMENT_VARIABLE, Cache
from flashgen.store.headers import Text
from flashgen.targets.gpu.architecture import UnsupportedGpu
from flashgen.targets.registry import target_of
from flashgen.toolchains.cpp import CompileFailed, CompilerMissing, compile_sources, find_compiler
from flashgen.toolchains.nvrtc import INSTALL as GPU_EXTRA
from flashgen.version import __version__

State = OneOf["ok", "missing", "optional"]

OLDEST_TORCH = (2, 6)
# What the package requires beside PyTorch.
_REQUIRED = ("click", "filelock", "jinja2", "lark", "numpy", "platformdirs", "rich")
# What it takes where it is there, and what for.
_EXTRAS = {
    "matplotlib": ("plot", "pictures in files and plots"),
    "transformers": ("transformers", "models of Hugging Face with attn_implementation='flashgen'"),
}
_SECONDS = 120.0
_LEAST_FREE = 500e6  # bytes
_TORCH_HINT = "pip install 'torch>=2.6' (a CPU build is enough for CPUs)"
_OPENMP_HINT = "install the compiler's OpenMP (g++ brings it; Debian for clang++: apt install libomp-dev)"


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at. ``missing`` limits what runs here; ``optional`` is absent, and not needed for that.

    ``found`` says what is there, ``cure`` how to get what is not.
    """

    name: str
    state: State
    found: str
    cure: str = ""


@dataclass(frozen=True)
class Report:
    """Everything that was found, and of each backend why it does not run here; empty where it does."""

    findings: tuple[Finding, ...]
    backends: Mapping[str, str]

    @property
    def runs(self) -> tuple[str, ...]:
        """The backends that run here."""
        return tuple(name for name, why in self.backends.items() if not why)

    def to_json(self) -> dict[str, object]:
        """Plain data."""
        return {
            "flashgen": __version__,
            "findings": [asdict(each) for each in self.findings],
            "backends": {name: {"runs": not why, "why_not": why} for name, why in self.backends.items()},
        }


def examine() -> Report:
    """Look at everything; takes as long as PyTorch takes to import, and never raises."""
    with warnings.catch_warnings(), ThreadPoolExecutor(3) as pool:
        warnings.simplefilter("ignore")  # of what could not be used, which is what is reported
        asked = {name: pool.submit(_ask, code) for name, code in _QUESTIONS.items()}
        compiler = pool.submit(_looked, "C++ compiler", _compiler)
        answers = {name: future.result() for name, future in asked.items()}
        findings = (
            *_looked("Python", _python),
            *_looked("packages", _packages),
            *_looked("PyTorch", lambda: _torch(answers["torch"])),
            *compiler.result(),
            *_looked("cache", _cache),
            *_looked("GPU", lambda: _gpu(answers)),
            *_looked("extras", _extras),
        )
    return Report(findings, _backends({each.name: each for each in findings}))


def _looked(name: str, look: Callable[[], Iterator[Finding]]) -> tuple[Finding, ...]:
    """What a look found; that it failed, if it did."""
    try:
        return tuple(look())
    except Exception as error:
        said = f"could not be looked at ({type(error).__name__}: {error})"
        return (Finding(name, "missing", said, "please report this: it is a mistake of flashgen's"),)


def _backends(by_name: Mapping[str, Finding]) -> Mapping[str, str]:
    """Why each backend does not run here."""

    def why(*needed: str) -> str:
        lacking = [each for each in needed if each not in by_name or by_name[each].state != "ok"]
        return "" if not lacking else f"{lacking[0]}: {by_name[lacking[0]].found if lacking[0] in by_name else 'none'}"

    base = ("Python", "packages", "PyTorch")
    compiled = why(*base, "C++ compiler")
    return {
        "cpu": compiled + "; PyTorch's operators take its place, slowly" * compiled.startswith("C++"),
        "cuda": why(*base, "GPU", "PyTorch on GPUs", "CuPy", "NVRTC"),
        "emulator": compiled,
        "reference": why(*base),
    }


# -- what is looked at -------------------------------------------------------------------------------------------------


def _python() -> Iterator[Finding]:
    said = f"{platform.python_version()} ({sys.executable}), {platform.system()} {platform.machine()}"
    yield Finding("Python", "ok", said)


def _packages() -> Iterator[Finding]:
    absent = [name for name in _REQUIRED if _version_of(name) is None]
    if absent:
        said, cure = f"{quoted_list(absent, 'and')} not there", f"pip install {' '.join(absent)}"
        yield Finding("packages", "missing", said, cure)
    else:
        yield Finding("packages", "ok", ", ".join(f"{name} {_version_of(name)}" for name in _REQUIRED))


def _version_of(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "(of unknown version)" if importlib.util.find_spec(name) is not None else None


def _torch(answer: _Answer) -> Iterator[Finding]:
    if answer.failure:
        yield Finding("PyTorch", "missing", f"cannot be imported: {answer.failure}", _TORCH_HINT)
        return
    version, cuda = str(answer.said["version"]), answer.said["cuda"]
    numbers = tuple(int(each) for each in re.findall(r"\d+", version)[:2])
    said = f"{version}, {f'for CUDA {cuda}' if cuda else 'without CUDA'}"
    if numbers < OLDEST_TORCH:
        yield Finding("PyTorch", "missing", f"{said}: older than 2.6", _TORCH_HINT)
    else:
        yield Finding("PyTorch", "ok", said)


def _compiler() -> Iterator[Finding]:
    """The compiler by what it makes: a library is compiled as kernels are, loaded, and asked for its threads."""
    name = "C++ compiler"
    try:
        compiler = find_compiler()
        command, version = compiler.command[0], (compiler.version.splitlines() or ["of unknown version"])[0]
        said = f"{command}: {version}"
        with tempfile.TemporaryDirectory(prefix="flashgen-doctor-") as folder:
            (binary,) = compile_sources([_PROBE], cache=Cache(Path(folder)), compiler=compiler)
            answer = _ask(_LOAD.format(path=str(binary.path)))
    except CompilerMissing as error:
        reason, _, cure = str(error).partition(". ")
        yield Finding(name, "missing", reason.removeprefix("no C++ compiler: "), cure)
        return
    except CompileFailed as error:
        yield Finding(name, "missing", f"does not compile: {error}", "choose another by CXX")
        return
    if answer.failure:
        cure = "choose a compiler by CXX that compiles for this machine"
        yield Finding(name, "missing", f"{said}; what it makes does not run here: {answer.failure}", cure)
        return
    yield Finding(name, "ok", said)
    if answer.said["openmp"]:
        yield Finding("OpenMP", "ok", f"{answer.said['openmp']}, {answer.said['threads']} threads")
    else:
        yield Finding("OpenMP", "optional", "not there: kernels run on one thread", _OPENMP_HINT)


def _cache() -> Iterator[Finding]:
    cache = Cache.default()
    root = cache.root
    cure = (
        f"set {ENVIRONMENT_VARIABLE} to a folder that you alone can write, on a disk from which libraries can be loaded"
    )
    doubt = cache.doubt() or cache.hindrance()
    if doubt is not None:
        said = f"{root} is not used ({doubt}): what is compiled is lost when a process ends"
        yield Finding("cache", "optional", said, cure)
        return
    entries = cache.entries()
    there = next(each for each in (root, *root.parents) if each.exists())
    free = shutil.disk_usage(there).free
    stored = f"{len(entries)} libraries, {sum(each.size for each in entries) / 1e6:.1f} MB"
    said = f"{root}: {stored if root.exists() else 'not there yet'}; {free / 1e9:.1f} GB free"
    if free < _LEAST_FREE:
        yield Finding("cache", "optional", said, f"make room: flashgen cache clear, or {cure}")
    else:
        yield Finding("cache", "ok", said)


def _gpu(answers: Mapping[str, _Answer]) -> Iterator[Finding]:
    """Driver, GPU, CuPy and NVRTC: missing where there is a GPU, optional where there is none."""
    driver, cupy, nvrtc, torch = (answers[name] for name in ("driver", "cupy", "nvrtc", "torch"))
    boards = driver.said.get("boards", [])
    lacking: State = "missing" if boards else "optional"
    if driver.failure:
        yield Finding("driver", "optional", driver.failure, "for GPUs: install NVIDIA's driver")
    else:
        yield Finding("driver", "ok", f"knows CUDA {driver.said['version'] / 1000:.1f}")
    supported = [_of_board(each) for each in boards]
    told = "; ".join(said for _, said in supported)
    if not boards:
        none = "none" if driver.failure else "the driver sees none"
        yield Finding("GPU", "optional", driver.said.get("why") or none)
    elif any(runs for runs, _ in supported):
        yield Finding("GPU", "ok", told)
    else:
        yield Finding("GPU", "missing", told, "backend='reference' runs on any GPU")
    if not torch.failure and torch.said["gpus"]:
        yield Finding("PyTorch on GPUs", "ok", ", ".join(torch.said["gpus"]))
    elif not torch.failure and boards:
        said = "PyTorch sees none" if torch.said["cuda"] else "PyTorch is built without CUDA"
        why = f" ({torch.said['why']})" if torch.said["why"] else ""
        yield Finding("PyTorch on GPUs", "missing", said + why, "install a build of torch for the driver's CUDA")
    if cupy.failure:
        yield Finding("CuPy", lacking, f"cannot be imported: {cupy.failure}", GPU_EXTRA)
    elif not driver.failure and cupy.said["runtime"] // 1000 > driver.said["version"] // 1000:
        said = f"{cupy.said['version']} is for CUDA {cupy.said['runtime'] // 1000}, newer than the driver's"
        yield Finding("CuPy", lacking, said, "pip install 'flashgen[cuda12]', or renew the driver")
    else:
        yield Finding("CuPy", "ok", str(cupy.said["version"]))
    if nvrtc.failure:
        yield Finding("NVRTC", lacking, nvrtc.failure, GPU_EXTRA)
    else:
        yield Finding("NVRTC", "ok", f"{nvrtc.said['version']}; compiles for GPUs, with or without one")


def _of_board(board: Mapping[str, Any]) -> tuple[bool, str]:
    """Whether kernels are generated for a GPU, and what to say of it."""
    try:
        target = target_of(board["name"], board["capability"], board["block_bytes"])
    except UnsupportedGpu as error:
        return False, str(error)
    return True, f"{board['name']}, target {target.name}"


def _extras() -> Iterator[Finding]:
    for name, (extra, purpose) in _EXTRAS.items():
        version = _version_of(name)
        if version is None:
            yield Finding(name, "optional", f"not there; it is for {purpose}", f"pip install 'flashgen[{extra}]'")
        else:
            yield Finding(name, "ok", version)


# -- what is asked in other processes ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Answer:
    """What a process said, or why it did not."""

    said: Mapping[str, Any]
    failure: str = ""


# Says what the compiler's libraries can do.
_PROBE = Text(
    "flashgen_doctor",
    """
#ifdef _OPENMP
#include <omp.h>
extern "C" int flashgen_openmp() { return _OPENMP; }
extern "C" int flashgen_threads() { return omp_get_max_threads(); }
#else
extern "C" int flashgen_openmp() { return 0; }
extern "C" int flashgen_threads() { return 1; }
#endif
""",
)
_LOAD = """
import ctypes, json
library = ctypes.CDLL({path!r})
print(json.dumps(dict(openmp=library.flashgen_openmp(), threads=library.flashgen_threads())))
"""

_QUESTIONS = {
    "torch": """
import json, torch
there, why = False, ""
try:
    if torch.version.cuda is not None:
        torch.cuda.init()
        there = True
except Exception as error:
    why = str(error).splitlines()[0]
gpus = [torch.cuda.get_device_name(each) for each in range(torch.cuda.device_count())] if there else []
print(json.dumps(dict(version=torch.__version__, cuda=torch.version.cuda, gpus=gpus, why=why)))
""",
    "driver": """
import ctypes, json
cuda = ctypes.CDLL("libcuda.so.1")
number, boards, why = ctypes.c_int(), [], ""
cuda.cuDriverGetVersion(ctypes.byref(number))
version, code = number.value, cuda.cuInit(0)
if code:
    text = ctypes.c_char_p()
    cuda.cuGetErrorName(code, ctypes.byref(text))
    why = "none: the driver says " + (text.value or b"error %d" % code).decode()
elif not cuda.cuDeviceGetCount(ctypes.byref(number)):
    for device in range(number.value):
        name = ctypes.create_string_buffer(200)
        cuda.cuDeviceGetName(name, 200, device)
        def attribute(which):
            cuda.cuDeviceGetAttribute(ctypes.byref(number), which, device)
            return number.value
        capability = 10 * attribute(75) + attribute(76)
        boards.append(dict(name=name.value.decode(), capability=capability, block_bytes=attribute(97)))
print(json.dumps(dict(version=version, boards=boards, why=why)))
""",
    "cupy": """
import json, cupy
print(json.dumps(dict(version=cupy.__version__, runtime=cupy.cuda.runtime.runtimeGetVersion())))
""",
    "nvrtc": """
import json
from flashgen.toolchains import nvrtc
try:
    found, version = nvrtc.find_nvrtc()
except nvrtc.NvrtcMissing as error:
    raise SystemExit(str(error).removesuffix(f": {nvrtc.INSTALL}"))  # which stands in the next line
program = found.createProgram('extern "C" __global__ void f() {}', "f.cu", (), ())
found.compileProgram(program, ("-arch=sm_80",))
print(json.dumps(dict(version=version)))
""",
}


def _ask(code: str) -> _Answer:
    """Run Python in a process of its own, which prints one JSON document at its end."""
    environment = {**os.environ, "PYTHONSAFEPATH": "1", "PYTHONWARNINGS": "ignore"}
    try:
        done = subprocess.run(
            [sys.executable, "-c", code],
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return _Answer({}, f"there was no answer in {_SECONDS:.0f} s")
    except OSError as error:
        return _Answer({}, f"no process could be started: {error}")
    complaints = done.stderr.decode("utf-8", errors="replace").strip().splitlines()
    if done.returncode < 0:
        return _Answer({}, f"the process was ended by signal {-done.returncode}")
    if done.returncode:
        return _Answer({}, complaints[-1] if complaints else f"the process ended with {done.returncode}")
    with contextlib.suppress(ValueError, IndexError):
        said = json.loads(done.stdout.decode("utf-8", errors="replace").splitlines()[-1])
        if isinstance(said, dict):
            return _Answer(said)
    return _Answer({}, "the process said nothing that could be read")
