"""Host sources of the emulator, each one self-contained text, so that a cache key covers all that is compiled.

In: the text of a ``.cu`` file with its headers in it. Out: a ``Text`` with the emulator's in the place of their
``#include`` and an entry for each kernel behind the end. Lines keep their numbers in that text, as an access is known
by one; its directives say where they come from. Also the machine, which is one library for all kernels.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Collection
from pathlib import Path

from flashgen.store.headers import Text
from flashgen.store.shipped import shipped

HEADER = "flashgen_emulator.h"

_INCLUDE = re.compile(r'^[ \t]*#[ \t]*include[ \t]+"([^"]+)".*$', re.MULTILINE)
_DIRECTIVE = re.compile(r"^#line .*", re.MULTILINE)
_PRAGMA_ONCE = re.compile(r"^#pragma once\n", re.MULTILINE)
_COMMENT = re.compile(r"//.*")
_NESTED = r"\((?:[^()]|\((?:[^()]|\([^()]*\))*\))*\)"
_CLUSTER = r"(?:__cluster_dims__\(\d+, 1, 1\)\s*)?"
_KERNEL = re.compile(
    rf"\b__global__\s+(?:__launch_bounds__\s*{_NESTED}\s*)?void\s+{_CLUSTER}(?:__launch_bounds__\s*{_NESTED}\s*)?(\w+)\s*\("
)

_REGISTERS = 'extern "C" void* flashgen_registers() { return &fg::emulator::registers; }\n'
_ENTRY = """\
extern "C" void flashgen_enter_KERNEL(const void* arguments) { fg::emulator::enter(KERNEL, arguments); }
extern "C" size_t flashgen_argument_bytes_KERNEL() { return fg::emulator::argument_bytes(KERNEL); }
"""


def kernel_names(text: str) -> tuple[str, ...]:
    """The kernels that a source defines, in its order."""
    return tuple(dict.fromkeys(_KERNEL.findall(_COMMENT.sub("", text))))


def blocks_of_cluster(text: str, kernel: str) -> int:
    """How many blocks of a kernel run together."""
    for found in _KERNEL.finditer(_COMMENT.sub("", text)):
        if found[1] == kernel:
            size = re.search(r"__cluster_dims__\((\d+)", found[0])
            return int(size[1]) if size else 1
    return 1


def kernel_source(text: str, name: str, kernels: Collection[str] | None = None) -> Text:
    """A generated source for the host's compiler. Its kernels are ``extern "C"``, so their names are theirs alone.

    Where only some ``kernels`` are wanted the others are ``static``, without an entry: a compiler drops them unread.
    """
    wanted = [each for each in kernel_names(text) if kernels is None or each in kernels]
    if kernels is not None:
        text = _KERNEL.sub(lambda found: found[0] if found[1] in kernels else f"static {found[0]}", text)
        text = text.replace('extern "C" static ', "[[maybe_unused]] static ")
    header = f'#define FLASHGEN_EMULATOR 1\n{_pasted(HEADER)}#line 1 "{name}.cu"\n'
    body = _INCLUDE.sub(lambda found: "" if Path(found[1]).name == HEADER else found[0], _DIRECTIVE.sub("", text))
    entries = "".join(_ENTRY.replace("KERNEL", kernel) for kernel in wanted)
    return Text(name, f'{header}{body}\n#line 1 "{name}.entries"\n{_REGISTERS}{entries}')


@functools.cache
def machine_source() -> Text:
    """The machine that all kernels run on."""
    return Text("emulator", _pasted("machine/machine.cpp"))


@functools.cache
def _pasted(name: str) -> str:
    """A file with its own includes pasted, each once, as a compiler would read them."""
    seen: set[Path] = set()

    def paste(path: Path) -> str:
        if path in seen:
            return ""
        seen.add(path)
        text = _PRAGMA_ONCE.sub("", path.read_text(encoding="utf-8"))
        return _INCLUDE.sub(lambda found: paste((path.parent / found[1]).resolve()), text)

    return paste((shipped("templates") / "emulator" / name).resolve())
