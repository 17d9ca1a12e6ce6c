"""Tells people what is being compiled, where they wait for it for more than two seconds.

In: what a compiler is at work on. Out: one line on stderr, from whatever thread that runs in:

    flashgen: compiling causal_d64_cpu (g++) …

What is quick, or was compiled before, says nothing. ``FLASHGEN_PROGRESS=0`` says nothing ever.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections.abc import Iterator

ENVIRONMENT_VARIABLE = "FLASHGEN_PROGRESS"

_TELL_SECONDS = 2.0
_OFF = frozenset({"0", "off", "false", "no"})


@contextlib.contextmanager
def compiling(name: str, compiler: str) -> Iterator[None]:
    """Around the work of one compiler on one source."""
    if os.environ.get(ENVIRONMENT_VARIABLE, "").strip().lower() in _OFF:
        yield
        return
    timer = threading.Timer(_TELL_SECONDS, _tell, (f"flashgen: compiling {name} ({compiler}) …\n",))
    timer.daemon = True  # an interpreter that ends does not wait for it
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _tell(line: str) -> None:
    # One write, so that lines of several threads stay whole; stderr may be closed, missing, or know few characters.
    with contextlib.suppress(OSError, ValueError, AttributeError):
        encoding = sys.stderr.encoding or "utf-8"
        sys.stderr.write(line.encode(encoding, errors="replace").decode(encoding))
        sys.stderr.flush()
