"""Machine code in ELF files: the kernels of a cubin, the functions of a library, in a form that does not move.

In: the bytes or the path of a 64-bit ELF file. Out: a digest by name. A kernel has a section of its own, which is taken
as it is. Functions of a library lie one behind another, and operands say how far their data are: these are taken out of
the text that objdump prints.
"""

from __future__ import annotations

import bisect
import functools
import hashlib
import itertools
import re
import shutil
import struct
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

_KERNEL = ".text."
_WRITABLE, _LOADED, _EXECUTABLE, _NO_BITS, _FUNCTION = 1, 2, 4, 8, 2
_INSTRUCTION = re.compile(r"^ *([0-9a-f]+):\s+(\S.*?)\s*$")
_RELATIVE = re.compile(r"-?0x[0-9a-f]+\(%rip\)")
_COMMENT = re.compile(r"\s*# ([0-9a-f]+)(?: <[^>]*>)?$")
_PLACE = re.compile(r"\b([0-9a-f]+) <([^>+]+)(?:\+0x[0-9a-f]+)?>$")
_READS_FEW = re.compile(r"v?p?(?:broadcast|insr|movz|movsx|mov[dq]$|cvt)")
_VECTORS = {"%zmm": 64, "%ymm": 32, "%xmm": 16}
_OWN = re.compile(r"<(.+)>")  # a function of the same library
_PADDING = re.compile(r"^(?:(?:data16|cs|rex\.W)\s+)*(?:nop[wl]?\b|xchg\s+%ax,%ax$)")


@dataclass(frozen=True)
class Section:
    """One section; ``content`` is empty where the file holds none of it."""

    name: str
    flags: int
    address: int
    link: int
    info: int
    content: bytes

    def holds(self, address: int) -> bool:
        """Whether an address lies within, once the file is loaded."""
        return bool(self.flags & _LOADED) and self.address <= address < self.address + len(self.content)


@dataclass(frozen=True)
class Function:
    """One function of a library: its name, where it begins, its size in bytes."""

    name: str
    address: int
    size: int


def sections(image: bytes) -> tuple[Section, ...]:
    """Every section in its order. Raises ``ValueError`` for what is no 64-bit ELF file."""
    if image[:6] != b"\x7fELF\x02\x01":
        raise ValueError("this is no 64-bit ELF file of a little-endian machine")
    at = struct.unpack_from("<Q", image, 40)[0]
    size, count, names = struct.unpack_from("<3H", image, 58)
    headers = [struct.unpack_from("<IIQQQQII", image, at + size * n) for n in range(count)]
    strings = image[headers[names][4] :]
    return tuple(
        Section(
            _string(strings, name), flags, address, link, info, b"" if kind == _NO_BITS else image[offset:][:length]
        )
        for name, kind, flags, address, offset, length, link, info in headers
    )


def functions(image: bytes) -> tuple[Function, ...]:
    """The functions of the symbol table, those of the C runtime's own objects, which have no size, left out."""
    every = sections(image)
    table = next((each for each in every if each.name == ".symtab"), None)
    if table is None:
        return ()
    names = every[table.link].content
    found = [
        Function(_string(names, name), address, size)
        for name, info, _, section, address, size in struct.iter_unpack("<IBBHQQ", table.content)
        if info & 15 == _FUNCTION and section and size
    ]
    return tuple(sorted(found, key=lambda each: (each.address, each.name)))


def kernel_digests(image: bytes) -> Mapping[str, str]:
    """The sha256 of each kernel's code in a cubin."""
    code = (each for each in sections(image) if each.name.startswith(_KERNEL))
    return {each.name.removeprefix(_KERNEL): _sha256(each.content) for each in code}


def function_digests(path: Path) -> Mapping[str, str]:
    """The sha256 of each function of a library: of its instructions, without objdump of its bytes.

    Another function of the library stands in it by its own instructions, so that names do not matter.
    """
    image = path.read_bytes()
    if disassembler() is None:
        return {each.name: _sha256(_bytes(image, each)) for each in functions(image)}
    texts = {name: "\n".join(lines) for name, lines in instructions(path).items()}
    alone = {name: _sha256(_OWN.sub("", text).encode()) for name, text in texts.items()}
    return {name: _sha256(_OWN.sub(lambda own: alone.get(own[1], ""), text).encode()) for name, text in texts.items()}


@functools.cache
def disassembler() -> str | None:
    """Where objdump is; without it digests of libraries are those of bytes."""
    return shutil.which("objdump")


def instructions(path: Path) -> Mapping[str, Sequence[str]]:
    """The instructions of each function in a form that is the same wherever functions and data lie.

    Jumps name the instruction of the function that they go to, calls a function, and a number that is read from memory
    is said to be what lies there. What pads is left out.
    """
    image = path.read_bytes()
    command = [disassembler() or "objdump", "-d", "--no-show-raw-insn", str(path)]
    printed = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    lines = [(int(found[1], 16), found[2]) for found in map(_INSTRUCTION.match, printed.splitlines()) if found]
    lines.sort()
    code = _Code(sections(image), {each.address: each.name for each in functions(image)}, lines)
    return {each.name: tuple(code.of(each)) for each in functions(image)}


@dataclass(frozen=True)
class _Code:
    """A library's instructions by address, and what else its operands mean."""

    sections: Sequence[Section]
    names: Mapping[int, str]
    lines: Sequence[tuple[int, str]]

    def of(self, function: Function) -> Iterator[str]:
        first, end = (bisect.bisect_left(self.lines, (each, "")) for each in _range(function))
        own = [(address, text) for address, text in self.lines[first:end] if not _PADDING.match(text)]
        places = [address for address, _ in own]
        for _, text in own:
            yield self._settled(text, function, places)

    def _settled(self, text: str, function: Function, places: Sequence[int]) -> str:
        comment = _COMMENT.search(text)
        if comment is not None:
            read = self._read(int(comment[1], 16), _bytes_read(text))
            return f"{_RELATIVE.sub('(%rip)', text[: comment.start()])} {read}"
        place = _PLACE.search(text)
        if place is None:
            return text
        target = int(place[1], 16)
        inside = target in range(*_range(function))
        goal = f"@{bisect.bisect_left(places, target)}" if inside else self._own(target) or self._part(place[2])
        return text[: place.start()] + goal

    def _own(self, address: int) -> str:
        return f"<{self.names[address]}>" if address in self.names else ""

    def _part(self, name: str) -> str:
        return f"<{name}>" if name in self.names.values() else name

    def _read(self, address: int, size: int) -> str:
        """The function that lies there, or the constant; nothing of what is written while a program runs."""
        own = self._own(address)
        if own:
            return own
        there = next((each for each in self.sections if each.holds(address)), None)
        if there is None or there.flags & (_WRITABLE | _EXECUTABLE):
            return ""
        return there.content[address - there.address :][:size].hex()


def _bytes_read(instruction: str) -> int:
    """How much of what lies at its operand an instruction reads, or at least: nothing where it takes the address."""
    name = instruction.partition(" ")[0]
    if name == "lea":
        return 0
    if name.endswith(("ss", "si")) or "{1to" in instruction or _READS_FEW.match(name):
        return 4
    if name.endswith("sd"):
        return 8
    return next((size for register, size in _VECTORS.items() if register in instruction), 4)


def _range(function: Function) -> tuple[int, int]:
    return function.address, function.address + function.size


def _bytes(image: bytes, function: Function) -> bytes:
    there = next(each for each in sections(image) if each.holds(function.address))
    return there.content[function.address - there.address :][: function.size]


def _string(table: bytes, at: int) -> str:
    return bytes(itertools.takewhile(bool, table[at : at + 4096])).decode()


def _sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()
