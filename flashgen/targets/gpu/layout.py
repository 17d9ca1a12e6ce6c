"""Memory that is declared once: parts one behind the other, from which sizes are counted and C++ is printed.

In: parts. Out: offsets and bytes; a struct of constants for each kind of block, and what a compiler is to check.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Part:
    """``size`` bytes under a ``name`` in C++ and a ``title`` for people; what ``holds`` there, as code for its bytes.

    The code is over what a block in ``templates/cuda`` has, and the same for every block that has the part at all.
    """

    name: str
    title: str
    size: int
    holds: str
    align: int = 1


@dataclass(frozen=True)
class Layout:
    """Parts in their order, those without bytes left out of nothing; ``last`` takes the place of all at the end."""

    parts: tuple[Part, ...]
    last: Part | None = None

    @property
    def all(self) -> tuple[Part, ...]:
        """The parts, and what comes last."""
        return self.parts if self.last is None else (*self.parts, self.last)

    @property
    def offsets(self) -> Mapping[str, int]:
        """Where each part begins, in bytes."""
        at, found = 0, {} if self.last is None else {self.last.name: 0}
        for each in self.parts:
            at += -at % each.align if each.size else 0
            found[each.name] = at
            at += each.size
        return found

    @property
    def bytes(self) -> int:
        """Of all."""
        begins = self.offsets
        end = max((begins[each.name] + each.size for each in self.parts), default=0)
        return end if self.last is None else max(end, self.last.size)

    @property
    def buffers(self) -> dict[str, int]:
        """Bytes by title, with what goes before a part that is aligned; parts without bytes are left out."""
        found: dict[str, int] = {}
        begins, at = self.offsets, 0
        for each in self.parts:
            end = begins[each.name] + each.size
            found[each.title] = found.get(each.title, 0) + end - at
            at = end
        return {title: size for title, size in found.items() if size}


@dataclass(frozen=True)
class Printed:
    """Layouts as C++: structs of constants, one for each kind of block, and assertions for a block that has one."""

    structs: str
    assertions: str


def printed(name: str, comment: str, parameters: str, layouts: Mapping[str, Layout]) -> Printed:
    """The structs ``name<…>``, by their template arguments. What no layout has is not printed."""
    parts = {each.name: each for layout in layouts.values() for each in layout.all if each.size}
    lines = [f"// {comment}", f"template <{parameters}> struct {name};"]
    same: dict[Layout, str] = {}
    for arguments, layout in layouts.items():
        first = same.setdefault(layout, arguments)
        if first != arguments:
            lines.append(f"template <> struct {name}<{arguments}> : {name}<{first}> {{}};")
            continue
        lines.append(f"template <> struct {name}<{arguments}> {{")
        sizes, places = {each.name: each.size for each in layout.all}, layout.offsets
        lines += [
            f"  static constexpr int {each.name} = {places.get(each.name, 0)}, "
            f"{each.name}_bytes = {sizes.get(each.name, 0)};  // {each.title}"
            for each in parts.values()
        ]
        lines += [f"  static constexpr int bytes = {layout.bytes};", "};"]
    checks = [
        f'  static_assert(Memory::{each.name}_bytes == {each.holds}, "{each.title}: what the plan counts");'
        for each in parts.values()
    ]
    return Printed("\n".join(lines), "\n".join(checks).strip())


@dataclass(frozen=True)
class Words:
    """Words of 4 bytes that lie together, by name and what they are."""

    names: tuple[tuple[str, str], ...]

    def struct(self, name: str, base: str = "") -> str:
        """A struct of ints."""
        fields = "\n".join(f"  int {word};  // {what}" for word, what in self.names)
        return f"struct {name}{f' : {base}' if base else ''} {{\n{fields}\n}};"

    def places(self, name: str) -> str:
        """A struct of their numbers."""
        numbers = "\n".join(
            f"  static constexpr int {word} = {number};  // {what}" for number, (word, what) in enumerate(self.names)
        )
        return f"struct {name} {{\n{numbers}\n  static constexpr int count = {len(self.names)};\n}};"


def joined(parts: Iterable[str]) -> str:
    """Declarations one behind the other."""
    return "\n".join(each for each in parts if each)
