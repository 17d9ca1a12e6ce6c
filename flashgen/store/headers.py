"""Headers that generated sources include by name, and a source as one text with all of them.

In: a text that says ``#include "flashgen/NAME"``. Out: the headers that it takes, those of ``templates/include`` or
of a package.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol

from flashgen.store.gallery import shipped

Headers = tuple[tuple[str, str], ...]  # texts by name, in the order in which a compiler opens them

_INCLUDE = re.compile(r'^#include "(flashgen/(?:\w+/)?\w[\w.]*)"', re.MULTILINE)


class Source(Protocol):
    """What is compiled: ``KernelSource`` and anything of the same shape."""

    @property
    def name(self) -> str:
        """A file name without its suffix, for logs and messages."""

    @property
    def text(self) -> str:
        """The whole source."""

    @property
    def headers(self) -> Headers:
        """What the text includes."""

    @property
    def defines(self) -> tuple[tuple[str, str], ...]:
        """Macros and their values."""


@dataclass(frozen=True)
class Text:
    """A source that is nothing else."""

    name: str
    text: str
    headers: Headers = ()
    defines: tuple[tuple[str, str], ...] = ()


@functools.cache
def shipped_header(name: str) -> str:
    """The text of a header that comes with flashgen."""
    return (shipped("templates") / "include" / name).read_text(encoding="utf-8")


def headers_of(text: str, read: Callable[[str], str] = shipped_header) -> Headers:
    """What a text includes, and what that includes, each once. Raises ``OSError`` where one cannot be read."""
    found: dict[str, str] = {}

    def open_those_of(text: str) -> None:
        for name in _INCLUDE.findall(text):
            if name not in found:
                found[name] = read(name)
                open_those_of(found[name])

    open_those_of(text)
    return tuple(found.items())


def in_one(file: str, text: str, headers: Headers) -> str:
    """A text with its headers in the place of their includes; directives say which line of which file stands where."""
    left = dict(headers)

    def lines(file: str, text: str) -> Iterator[str]:
        for number, line in enumerate(text.splitlines(), 1):
            found = _INCLUDE.match(line)
            if found and found[1] in left:
                yield f'#line 1 "{found[1]}"'
                yield from lines(found[1], left.pop(found[1]))
                yield f'#line {number + 1} "{file}"'
            else:
                yield "" if found or line == "#pragma once" else line

    return "\n".join(lines(file, text)) + "\n" if headers else text
