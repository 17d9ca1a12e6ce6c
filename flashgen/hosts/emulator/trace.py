"""The lines that led to a fault, from the addresses that the machine found on the stack of the thread.

In: a compiled library with line numbers (``-g1``) and addresses in it. Out: lines of the kernel's source, the innermost
first, inlined functions included. Read by ``addr2line``, which comes with GCC; without it there is no trace.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

_PLACE = re.compile(r"^(.*):(\d+)(?: \(discriminator \d+\))?$")


def lines_of(library: Path, addresses: Sequence[int], file_name: str) -> tuple[int, ...]:
    """The lines of ``file_name`` at these addresses; empty where nothing can tell them."""
    tool = shutil.which("addr2line")
    if tool is None or not addresses:
        return ()
    done = subprocess.run(
        [tool, "-i", "-e", str(library), *(hex(address) for address in addresses)],
        capture_output=True,
        check=False,
        text=True,
        errors="replace",
    )
    places = [found for found in map(_PLACE.match, done.stdout.splitlines()) if found]
    return tuple(int(found[2]) for found in places if Path(found[1]).name == file_name)
