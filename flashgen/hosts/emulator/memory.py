"""Host memory that stands for a GPU's: allocations far apart, so that an index that is off by little hits none.

In: names and sizes, or bytes. Out: addresses to put into a kernel's arguments, the ``allocations`` of a launch, and the
bytes after it.
"""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Mapping

_ALIGNMENT = 4096
_GAP = 1 << 20  # untouched pages cost nothing


class DeviceMemory:
    """Named allocations, aligned to 4096 bytes, fresh ones filled with ones: a NaN in every float format."""

    def __init__(self) -> None:
        self._maps: dict[str, mmap.mmap] = {}
        self._views: dict[str, ctypes.Array[ctypes.c_char]] = {}
        self._sizes: dict[str, int] = {}

    def allocate(self, name: str, size: int) -> int:
        """The address of a new allocation."""
        return self.put(name, b"\xff" * size)

    def put(self, name: str, data: bytes) -> int:
        """The address of a new allocation with this content."""
        if name in self._sizes:
            raise ValueError(f"'{name}' is already allocated")
        size = len(data)
        whole = -(-size // _ALIGNMENT) * _ALIGNMENT + 2 * _GAP
        self._maps[name] = mmap.mmap(-1, whole)
        self._maps[name][_GAP : _GAP + size] = data
        self._views[name] = (ctypes.c_char * whole).from_buffer(self._maps[name])
        self._sizes[name] = size
        return self.address(name)

    def bytes_of(self, name: str) -> bytes:
        """The content of an allocation."""
        return self._maps[name][_GAP : _GAP + self._sizes[name]]

    def address(self, name: str) -> int:
        """Where an allocation is."""
        return ctypes.addressof(self._views[name]) + _GAP

    @property
    def allocations(self) -> Mapping[str, tuple[int, int]]:
        """Address and bytes by name, for a launch."""
        return {name: (self.address(name), size) for name, size in self._sizes.items()}
