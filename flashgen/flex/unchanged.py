"""Whether mods, with all that they capture, are the very objects of an earlier call.

In: a ``score_mod`` and a ``mask_mod``. Out: an ``Unchanged``; None where a captured object may change and stay the same
object. It holds tensors weakly, and is dropped together with the mods.
"""

from __future__ import annotations

import weakref
from types import CellType, FunctionType
from typing import Any

from torch import Tensor

from flashgen.flex.captured import Empty, content_of, globals_of, is_settled


class Unchanged:
    """The objects that mods captured. Of a tensor the type, the shape and ``requires_grad`` have to stay, too."""

    __slots__ = ("_cells", "_functions", "_globals", "_tensors")

    def __init__(self) -> None:
        self._functions: dict[int, tuple[weakref.ref[FunctionType], Any, Any]] = {}
        self._cells: list[tuple[CellType, Any]] = []
        self._globals: list[tuple[dict[str, Any], str, Any]] = []
        self._tensors: list[tuple[weakref.ref[Tensor], Any, Any, bool]] = []

    def holds(self) -> bool:
        for mod, code, defaults in self._functions.values():
            function = mod()
            if function is None or function.__code__ is not code or function.__defaults__ is not defaults:
                return False
            if function.__kwdefaults__ or function.__dict__:
                return False
        for there, name, content in self._globals:
            if there.get(name, Empty) is not (content() if type(content) is weakref.ref else content):
                return False
        try:
            for cell, content in self._cells:
                if cell.cell_contents is not (content() if type(content) is weakref.ref else content):
                    return False
        except ValueError:  # a cell was emptied
            return False
        for tensor, dtype, shape, learns in self._tensors:
            x = tensor()
            if x is None or x.dtype is not dtype or x.shape != shape or x.requires_grad is not learns:
                return False
        return True

    def look_at(self, value: Any) -> bool:
        """Record a captured value; returns whether a later call can tell that it is unchanged."""
        if isinstance(value, Tensor):
            self._tensors.append((weakref.ref(value), value.dtype, value.shape, value.requires_grad))
            return True
        if type(value) is tuple:
            return all(map(self.look_at, value))
        if is_settled(value):
            return True
        return type(value) is FunctionType and self._look_at_function(value)

    def _look_at_function(self, function: FunctionType) -> bool:
        names = globals_of(function)
        if names is None or id(function) in self._functions or vars(function) or function.__kwdefaults__:
            return False
        there, defaults = function.__globals__, function.__defaults__
        self._functions[id(function)] = (weakref.ref(function), function.__code__, defaults)
        closure = [(cell, content_of(cell)) for cell in function.__closure__ or ()]
        named = [(name, there.get(name, Empty)) for name in names]
        self._cells += [(cell, held(content)) for cell, content in closure]
        self._globals += [(there, name, held(content)) for name, content in named]
        contents = [content for _, content in (*closure, *named) if content is not Empty]
        return all(map(self.look_at, (*contents, *(defaults or ()))))


def held(content: Any) -> Any:
    """A weak reference to a tensor; any other object itself."""
    return weakref.ref(content) if isinstance(content, Tensor) else content


def looked_at(*mods: Any) -> Unchanged | None:
    """The captured objects of mods; None where a later call could not tell that they are unchanged."""
    found = Unchanged()
    return found if all(mod is None or found.look_at(mod) for mod in mods) else None
