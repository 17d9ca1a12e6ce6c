"""Stage 6, load: a compiled library as two functions that take one struct.

In: the path of a library, the prefix of its functions and the fields of its ``struct Arguments``. Out: a
``Kernel``. Calls release the interpreter lock. Nothing here imports torch.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from flashgen.plan.arguments import Field

_FORMATS = {"const pointer": "P", "pointer": "P", "i32": "i", "i64": "q", "u32": "I", "u64": "Q", "f32": "f"}


class ArgumentLayout:
    """The memory layout of ``struct Arguments``: values in the order of the fields to bytes, as C aligns them."""

    def __init__(self, fields: Sequence[Field]) -> None:
        self.names = tuple(field.name for field in fields)
        self.slots: Mapping[str, int] = {name: slot for slot, name in enumerate(self.names)}
        formats = [_FORMATS[field.kind] for field in fields]
        self.pack: Callable[..., bytes] = struct.Struct("@" + "".join(formats)).pack

    def values(self, known: Mapping[str, float]) -> list[float]:
        """One value a field; zero, a null pointer, where nothing is known."""
        return [known.get(name, 0) for name in self.names]


@dataclass(frozen=True)
class Kernel:
    """The functions of one spec at one head dimension. Each takes the packed arguments."""

    layout: ArgumentLayout
    forward: Callable[[bytes], object]
    backward: Callable[[bytes], object]
    forward_workspace: Callable[[bytes], int]
    backward_workspace: Callable[[bytes], int]

    @classmethod
    def load(cls, path: Path, symbol: str, fields: Sequence[Field]) -> Kernel:
        """Load the functions ``symbol_forward``, ``symbol_backward`` and their ``_workspace`` companions.

        Raises ``OSError`` where the library cannot be loaded or lacks one of them.
        """
        library = ctypes.CDLL(str(path))

        def function(name: str, result: type[ctypes.c_int64] | None) -> Callable[[bytes], int]:
            try:
                found = library[f"{symbol}_{name}"]
            except AttributeError:
                raise OSError(f"'{path}' has no function '{symbol}_{name}'") from None
            found.argtypes = [ctypes.c_char_p]
            found.restype = result
            return found

        return cls(
            ArgumentLayout(fields),
            function("forward", None),
            function("backward", None),
            function("forward_workspace", ctypes.c_int64),
            function("backward_workspace", ctypes.c_int64),
        )
