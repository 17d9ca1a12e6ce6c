"""Launches: which kernels make up a pass on a GPU, over what grids, with what memory; data that every host can follow.

Stage 3, plan. In: nothing. Out: the types. A host fills ``struct Arguments`` (``plan/arguments.py``), allocates
``workspace_bytes``, clears the buffers that ask for it, and starts the launches one after another.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

ALIGNMENT = 256  # of every buffer in the workspace


@dataclass(frozen=True)
class Factor:
    """⌈size / tile⌉, where ``size`` is the name of an integer field of ``struct Arguments``."""

    size: str
    tile: int = 1

    def value(self, sizes: Mapping[str, int]) -> int:
        """The number at these sizes."""
        return -(-sizes[self.size] // self.tile)


@dataclass(frozen=True)
class Count:
    """⌈times · Π factors / divide⌉."""

    factors: tuple[Factor, ...]
    times: int = 1
    divide: int = 1

    def value(self, sizes: Mapping[str, int]) -> int:
        """The number at these sizes."""
        result = self.times
        for factor in self.factors:
            result *= factor.value(sizes)
        return -(-result // self.divide)


@dataclass(frozen=True)
class Buffer:
    """A part of the workspace; ``clear``: it has to be zero when the first launch starts."""

    name: str
    bytes: Count
    clear: bool = False


@dataclass(frozen=True)
class Box:
    """What one tensor copy brings of ``tensor``, a field of ``struct Arguments``: ``rows`` of ``columns`` elements."""

    tensor: str
    rows: int
    columns: int


@dataclass(frozen=True)
class Turns:
    """How many blocks of a kernel run at a time on a multiprocessor, and the buffer in which they count."""

    buffer: str
    blocks: int


@dataclass(frozen=True)
class Launch:
    """One kernel on a grid of blocks in one dimension. A grid of none is not started.

    A kernel with ``boxes`` takes a map of each, in this order, behind ``struct Arguments``. Blocks of one with
    ``turns`` do the work of many, so that no more of them are started than run at a time; what is left they count in
    the buffer of that name.
    """

    kernel: str
    grid: Count
    threads: int
    shared_bytes: int
    boxes: tuple[Box, ...] = ()
    turns: Turns | None = None


@dataclass(frozen=True)
class VisitLists:
    """Lists of tiles to visit that calls share: ``launch`` writes them where ``field`` points to.

    What they hold follows from the ``tiles``, own and visited, and from the values of the fields ``sizes`` and
    ``params``. A param has a second field, which is not null where only the GPU knows it: then there are no lists.
    ``pairs`` is the number of tiles of queries and keys, ``counts`` and ``visits`` are the bytes of the two parts.
    """

    field: str
    tiles: tuple[int, int]
    pairs: Count
    counts: Count
    visits: Count
    launch: Launch
    sizes: tuple[str, ...]
    params: tuple[tuple[str, str], ...]

    def bytes(self, sizes: Mapping[str, int]) -> int:
        """What ``field`` has to point to."""
        return self.counts.value(sizes) + self.visits.value(sizes)


@dataclass(frozen=True)
class PassLaunches:
    """One pass: its workspace and its kernels, in order, and the lists that these read where there are some."""

    buffers: tuple[Buffer, ...]
    launches: tuple[Launch, ...]
    lists: tuple[VisitLists, ...] = ()

    def offsets(self, sizes: Mapping[str, int]) -> Mapping[str, tuple[int, int]]:
        """Where each buffer begins in the workspace, and its bytes; one behind the other, aligned."""
        at, found = 0, {}
        for buffer in self.buffers:
            length = buffer.bytes.value(sizes)
            found[buffer.name] = (at, length)
            at += -(-length // ALIGNMENT) * ALIGNMENT
        return found

    def workspace_bytes(self, sizes: Mapping[str, int]) -> int:
        """The bytes that ``workspace`` has to point to."""
        return sum(-(-length // ALIGNMENT) * ALIGNMENT for _, length in self.offsets(sizes).values())
