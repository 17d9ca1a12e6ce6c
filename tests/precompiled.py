"""The standard library's headers, parsed once for all kernels that tests compile for CPUs."""

from __future__ import annotations

import functools
import re
import subprocess
import tempfile
from pathlib import Path

from flashgen.store.cache import Cache, key_of
from flashgen.store.shipped import shipped
from flashgen.toolchains.cpp import REQUIRED_FLAGS, Compiler, cpu_identity

_HEADER, _PARSED = "standard.h", "standard.h.gch"


@functools.cache
def standard_headers(compiler: Compiler, root: Path) -> tuple[str, ...]:
    """What GCC is told to find the headers parsed; of another compiler nothing.

    They belong to the flags of this compiler: GCC crashes where a level of optimisation is another. Where a target's
    flags are others, GCC reads the header's text, which includes the same.
    """
    if "Free Software Foundation" not in compiler.version:
        return ()
    template = (shipped("templates") / "cpu" / "kernel.cpp.jinja").read_text(encoding="utf-8")
    text = "\n".join(re.findall(r"^#include <\w+>$", template, re.MULTILINE)) + "\n"
    flags = [*compiler.command, *compiler.optional_flags, *REQUIRED_FLAGS, *compiler.flags]

    def parsed() -> dict[str, bytes]:
        with tempfile.TemporaryDirectory() as folder:
            (Path(folder) / _HEADER).write_text(text, encoding="utf-8")
            subprocess.run([*flags, "-x", "c++-header", _HEADER, "-o", _PARSED], cwd=folder, check=True)
            return {_HEADER: text.encode(), _PARSED: (Path(folder) / _PARSED).read_bytes()}

    key = key_of(text, *flags, compiler.version, cpu_identity())
    found = Cache(root).fetch(key, _HEADER, parsed, _PARSED)
    return ("-include", str(found))
