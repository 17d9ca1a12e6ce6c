"""Stage 5, compile for GPUs: parts of sources side by side. NVRTC compiles one program at a time in a process.

In: parts of sources with what people call them, and a target. Out: a ``CudaBinary`` for each. This process and helpers,
one for each other core, take numbers of parts from a pipe and fill the cache: CuPy holds Python's lock while NVRTC is
at work, so that no thread of this process could hand out anything. What a helper cannot do, for whatever reason, this
process does, or says why it cannot be done.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO

from flashgen.store.cache import Cache
from flashgen.toolchains.cpp import available_cores
from flashgen.toolchains.nvrtc import CudaBinary, CudaSource, compile_cuda, is_compiled

_MOST_PARTS = 256  # a number is one byte, so that no reader gets half of it
_HELPER = f"import sys; from {__name__} import help_with; help_with(*map(int, sys.argv[1:]))"


def compile_cuda_parts(parts: Sequence[tuple[str, CudaSource]], target: str) -> tuple[CudaBinary, ...]:
    """Compile parts of sources, begun in the order given, or take them from the cache.

    Raises as ``compile_cuda`` does, for one of the parts that cannot be compiled.
    """
    missing = [(part, source, target) for part, source in parts if not is_compiled(source, target)]
    helpers = min(len(missing), available_cores()) - 1
    if helpers > 0 and os.name == "posix" and _shares_cache():
        _fill_cache(missing[:_MOST_PARTS], helpers)
    return tuple(compile_cuda(source, target, part=part) for part, source in parts)


def _shares_cache() -> bool:
    """Whether helpers would store where this process looks, and not each in a private folder."""
    cache = Cache.default()
    return not cache.doubt() and not cache.hindrance()


def _fill_cache(parts: list[tuple[str, CudaSource, str]], helpers: int) -> None:
    with contextlib.ExitStack() as stack:
        file = stack.enter_context(tempfile.TemporaryFile())
        pickle.dump(parts, file)
        file.flush()
        numbers, writing = os.pipe()
        stack.callback(os.close, numbers)
        os.write(writing, bytes(range(len(parts))))
        os.close(writing)
        started: list[subprocess.Popen[bytes]] = []
        with contextlib.suppress(OSError):  # where no process can be started, there is this one
            started.extend(stack.enter_context(_helper(file, numbers)) for _ in range(helpers))
        _take_parts(parts, numbers)
        for each in started:
            each.wait()


@contextlib.contextmanager
def _helper(file: IO[bytes], numbers: int) -> Iterator[subprocess.Popen[bytes]]:
    """A process that finds the modules that this one does. It is gone afterwards, whatever it was at."""
    paths = [each or str(Path.cwd()) for each in sys.path]
    process = subprocess.Popen(
        [sys.executable or "", "-P", "-c", _HELPER, str(numbers), str(os.getpid())],
        stdin=file,
        stdout=subprocess.DEVNULL,
        pass_fds=(numbers,),
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        start_new_session=True,  # Ctrl-C is for this process, which ends the others
    )
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def help_with(numbers: int, parent: int) -> None:
    """What a helper does: the parts that it reads on stdin, by their numbers from a pipe."""
    parts = pickle.loads(os.pread(0, os.fstat(0).st_size, 0))  # noqa: S301 - a file of the process that started this
    with contextlib.suppress(Exception):  # the other process meets it, too, and says it
        _take_parts(parts, numbers, parent)


def _take_parts(parts: list[tuple[str, CudaSource, str]], numbers: int, parent: int | None = None) -> None:
    """Until none is left, one cannot be compiled, or nobody waits for them."""
    try:
        while number := os.read(numbers, 1):
            if parent not in (None, os.getppid()):
                return
            part, source, target = parts[number[0]]
            compile_cuda(source, target, part=part)
    finally:
        while os.read(numbers, _MOST_PARTS):
            pass
