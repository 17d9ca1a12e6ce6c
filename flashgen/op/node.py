"""Calls in C++, with their node of autograd: what plain calls take where it has been compiled.

In: an op, its tensors. Out: what the op gives, by ``templates/host/node.cpp``, or None: then autograd's node is the one
in Python (``registration.py``), which takes everything. One library serves all ops; it needs a C++ compiler, Python's
headers and PyTorch's, and takes half a minute, so that it is compiled in a process of its own, once a process has
called ops often enough to gain from it, and found in the cache ever after. ``FLASHGEN_NODE=0`` leaves it alone, ``1``
waits for it at the first such call.
"""

from __future__ import annotations

import functools
import importlib.machinery
import importlib.util
import os
import platform
import struct
import subprocess
import sys
import sysconfig
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from flashgen.hosts.kernel import POINTERS, Native, Node, Prepared
from flashgen.op.call import FORKS, Call, backward_key, is_readable
from flashgen.store.cache import Cache, key_of
from flashgen.store.gallery import shipped
from flashgen.store.headers import Text
from flashgen.toolchains.cpp import CompileFailed, CompilerMissing, compile_with, find_compiler

ENVIRONMENT_VARIABLE = "FLASHGEN_NODE"
PATIENCE = 1000  # calls of a process before it is worth compiling

_NAME = "flashgen_node"
_FILE = "library.so"
_MOST_BYTES, _MOST_MAPS = 4096, 4  # as node.cpp says
_MOST_PLANS = 4096  # they are never given back
_ALIGNED_FLOATS = 64
# Numbers of torch's types in C++, and of those of params.
_SCALAR_TYPES = {torch.float16: 5, torch.float32: 6, torch.bfloat16: 15}
_PARAM_TYPES = {"i32": 3, "f32": 6}

# Gradients in Python: of d_o, of what was kept and of the tensors, for those that are needed.
Gradients = Callable[[Tensor, tuple[Any, ...], tuple[Any, ...], tuple[bool, ...]], Sequence[Tensor | None]]


@functools.cache
def source() -> Text:
    """The text that is compiled, as it comes with the package."""
    return Text(_NAME, (shipped("templates") / "host" / "node.cpp").read_text(encoding="utf-8"))


def key() -> str:
    """Of the library in the cache: it fits one version of Python and of torch, on any CPU of the kind."""
    abi = sysconfig.get_config_var("SOABI")
    parts = (torch.__version__, torch.version.git_version, abi, platform.machine())
    return key_of("node", source().text, *map(str, parts))


def build() -> Path:
    """Compile the library, or find it in the cache. Raises ``CompilerMissing`` and ``CompileFailed``."""
    from torch.utils.cpp_extension import include_paths, library_paths  # noqa: PLC0415 - takes long to import

    own = sysconfig.get_paths()["include"]
    if not (Path(own) / "Python.h").is_file():
        raise CompilerMissing("Python's headers are not there (Debian: apt install python3-dev)")
    libraries, abi = library_paths(), int(torch._C._GLIBCXX_USE_CXX11_ABI)
    flags = (
        "-std=c++20", "-O1", "-fPIC", "-shared", "-w", f"-D_GLIBCXX_USE_CXX11_ABI={abi}",
        *(f"-I{each}" for each in (*include_paths(), own)),
        *(f"-L{each}" for each in libraries), *(f"-Wl,-rpath,{each}" for each in libraries),
        "-lc10", "-ltorch_cpu", "-ltorch", "-ltorch_python",
    )  # fmt: skip
    return compile_with(source(), flags, find_compiler(), key())


class Extension:
    """The library in this process: not there, on its way, or loaded."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._calls = 0
        self._plans = 0
        self._started = False
        self.module: Any = None
        self.is_wanted = True  # it may yet come
        self.why_not = ""

    def ask(self) -> Any:
        """The module, if it is there. The first call looks into the cache, a later one starts the compiler."""
        self._calls += 1
        if self._calls != 1 and (self._calls < PATIENCE or self._started):
            return self.module
        with self._lock:
            self._find()
        return self.module

    def load(self) -> None:
        """Compile and load it now."""
        with self._lock:
            if self.module is None:
                self._build()

    def room(self) -> bool:
        """Whether one more plan may be made."""
        self._plans += 1
        return self._plans <= _MOST_PLANS

    def _find(self) -> None:
        choice = os.environ.get(ENVIRONMENT_VARIABLE, "").strip().lower()
        if choice in ("0", "off", "false", "no"):
            self._refuse(f"{ENVIRONMENT_VARIABLE} is {choice}")
            return
        if self.module is not None or self._started:
            return
        path = Cache.default().usable().find(key(), _FILE)
        if path is not None:
            self._load(path)
        elif choice in ("1", "on", "true", "yes"):
            self._build()
        elif self._calls >= PATIENCE:
            self._started = True
            threading.Thread(target=self._wait, name="flashgen-node", daemon=True).start()

    def _build(self) -> None:
        try:
            self._load(build())
        except (CompilerMissing, CompileFailed, OSError) as error:
            self._refuse(str(error))

    def _wait(self) -> None:
        """Compile it in a process that ends even if this one does before, at the lowest priority."""
        code = "import os, torch; os.nice(19); from flashgen.op import node; print(node.build())"
        folder = str(Path(__file__).resolve().parent.parent.parent)
        paths = os.pathsep.join((folder, os.environ.get("PYTHONPATH", "")))
        try:
            done = subprocess.run(
                [sys.executable, "-c", code],
                env={**os.environ, "PYTHONPATH": paths},
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                check=False,
            )
        except OSError as error:
            self._refuse(str(error))
            return
        if done.returncode:
            self._refuse(done.stderr.strip().rpartition("\n")[2])
            return
        with self._lock:
            self._load(Path(done.stdout.strip().rpartition("\n")[2]))

    def _load(self, path: Path) -> None:
        try:
            loader = importlib.machinery.ExtensionFileLoader(_NAME, str(path))
            found = importlib.util.module_from_spec(importlib.util.spec_from_loader(_NAME, loader))  # type: ignore[arg-type]
            loader.exec_module(found)
        except (ImportError, OSError) as error:
            self._refuse(str(error))
        else:
            self.module, self.is_wanted = found, False

    def _refuse(self, why: str) -> None:
        self.why_not, self.is_wanted = why, False


extension = Extension()


def node_of(call: Call, tensors: Sequence[Tensor], gradients: Gradients, *, has_lse: bool) -> Node | None:
    """The node of a call, once its forward pass has run in Python. ``gradients``: those of this op and these numbers.

    None where there is none: it has not yet run, or has steps that need Python.
    """
    if call.nodes:
        return call.nodes[0]
    prepared = call.forward.get(False)
    if prepared is None and call.kernel is not None and not call.is_empty:
        return None
    node = None if prepared is None else _made(extension.module, call, tensors, prepared, gradients, has_lse)
    call.nodes.append(node)
    return node


def _made(
    module: Any, call: Call, tensors: Sequence[Tensor], prepared: Prepared, gradients: Gradients, has_lse: bool
) -> Node | None:
    q, dtype = tensors[0], tensors[0].dtype
    if FORKS or prepared.native is None or call.needs_copy or call.written is not dtype or not extension.room():
        return None
    native, kernel = prepared.native(), call.kernel
    params = None if kernel is None else kernel.layout.params
    if native is None or kernel is None or params is None or not _fits(native):
        return None
    rows, parts = q.shape[:-1].numel(), call.lse_parts[0]
    lse_at = -(-2 * rows // _ALIGNED_FLOATS) * _ALIGNED_FLOATS
    inputs = (word for x in tensors[:3] for word in _operand(x.shape, _strides(x)))
    results = (word for layout in (call.o, *call.gradients) for word in _operand(*layout))
    words = (
        _SCALAR_TYPES[dtype], int(has_lse), call.threads, kernel.row_alignment, *inputs, *results, rows, lse_at,
        len(params), *(8 * len(POINTERS) + 4 * n for n in range(len(params))),
        len(params), *(_PARAM_TYPES[each.kind] for each in params), *native.driver, *native.words,
    )  # fmt: skip
    end, unlearned = 6 + len(params), (False,) * len(params)
    seen: set[tuple[int, ...]] = set()

    def in_python(d_o: Tensor, *others: Any) -> tuple[Tensor | None, ...]:
        """Gradients of what C++ was not told of; of gradients that lie like these it will be."""
        needs, own, kept = (*others[:3], *unlearned), others[3:end], others[end:]
        if kept:
            o, together = kept
            kept = (o, together[lse_at:].view(call.lse[0]), together[: 2 * rows].view(parts))
        found = gradients(d_o, kept, own, needs)
        strides = d_o.stride()
        known = call.backward.get(backward_key(False, strides, unlearned))
        if known is not None and known.native is not None and strides not in seen and is_readable(kernel, d_o):
            seen.add(strides)
            backward = known.native()
            if backward is not None and _fits(backward):
                layout = _operand(d_o.shape, _strides(d_o))
                module.add(address, _packed((*layout, *backward.words)), backward.arguments)
        if len(found) == len(needs):
            return tuple(x if need else None for x, need in zip(found, needs, strict=True))
        each = iter(found)
        return tuple(next(each) if need else None for need in needs)

    address = module.plan(_packed(words), native.arguments, in_python, torch.empty(0, device=call.device))
    return functools.partial(module.attend, address)


def _fits(native: Native) -> bool:
    return len(native.arguments) <= _MOST_BYTES and all(launch[4] <= _MOST_MAPS for launch in native.launches)


def _strides(x: Tensor) -> tuple[int, ...]:
    """None where they follow from the shape."""
    return () if x.is_contiguous() else x.stride()


def _operand(sizes: Sequence[int], strides: Sequence[int]) -> tuple[int, ...]:
    return (len(sizes), *sizes, len(strides), *strides)


def _packed(words: Sequence[int]) -> bytes:
    """As 64 bits each; addresses are without a sign."""
    signed = (int(word) - (1 << 64) if int(word) >= 1 << 63 else int(word) for word in words)
    return struct.pack(f"{len(words)}q", *signed)
