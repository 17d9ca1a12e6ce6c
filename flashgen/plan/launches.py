"""Launches: which kernels make up a pass on a GPU, over what grids, with what memory; data that every host can follow.

Stage 3, plan. In: nothing. Out: the types. A host fills ``struct Arguments`` (``plan/arguments.py``), allocates
the workspace, clears the buffers that ask for it, and starts the launches one after another.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from flashgen.kinds.dense import OPERANDS
from flashgen.kinds.operand import Operand

ALIGNMENT = 256  # of every buffer in the workspace
TURNED_KEYS = 128  # of a block of V of 8 bits, whose columns become rows


@dataclass(frozen=True)
class Factor:
    """⌈size / tile⌉, where ``size`` is the name of an integer field of ``struct Arguments``.

    ``more`` names a field that is added: so many sequences, ``size`` rows together, have at most so many tiles more.
    """

    size: str
    tile: int = 1
    more: str = ""

    def value(self, sizes: Mapping[str, int]) -> int:
        """The number at these sizes."""
        return -(-sizes[self.size] // self.tile) + (sizes[self.more] if self.more else 0)


@dataclass(frozen=True)
class Count:
    """⌈times · Π factors / divide⌉, and no more than ``most``."""

    factors: tuple[Factor, ...]
    times: int = 1
    divide: int = 1
    most: int | None = None

    def value(self, sizes: Mapping[str, int]) -> int:
        """The number at these sizes."""
        result = self.times
        for factor in self.factors:
            result *= factor.value(sizes)
        result = -(-result // self.divide)
        return result if self.most is None else min(result, self.most)


@dataclass(frozen=True)
class Sum:
    """Of several counts."""

    counts: tuple[Count, ...]

    def value(self, sizes: Mapping[str, int]) -> int:
        """The number at these sizes."""
        return sum(count.value(sizes) for count in self.counts)


@dataclass(frozen=True)
class Buffer:
    """A part of the workspace; ``clear``: it has to be zero when the first launch starts."""

    name: str
    bytes: Count | Sum
    clear: bool = False


@dataclass(frozen=True)
class Box:
    """What one tensor copy brings of ``tensor``, a field of ``struct Arguments``: ``rows`` of ``columns`` elements.

    ``turned``: of the transposed tensor, which stands at the start of the workspace.
    """

    tensor: str
    rows: int
    columns: int
    element_bytes: int = 2
    turned: bool = False


@dataclass(frozen=True)
class TileCounter:
    """How many blocks of a kernel run at a time on a multiprocessor, and the buffer in which they count."""

    buffer: str
    blocks: int


@dataclass(frozen=True)
class Launch:
    """One kernel on a grid of blocks in one dimension. A grid of none is not started.

    A kernel with ``boxes`` takes a map of each, in this order, behind ``struct Arguments``. Blocks of one with
    ``tile_counter`` are persistent: no more of them are started than run at a time, and what is left they count in the
    buffer of that name. One that ``makes`` lists, those of this field, is started where they are made. ``cluster``
    blocks run together.
    """

    kernel: str
    grid: Count | Sum
    threads: int
    shared_bytes: int
    boxes: tuple[Box, ...] = ()
    tile_counter: TileCounter | None = None
    makes: str = ""
    cluster: int = 1


@dataclass(frozen=True)
class Order:
    """Blocks of a group of heads take the lists of their mask one after another, the longest first.

    A group has as many of the ``heads`` that share a mask as a cache holds what blocks read of them: ``of_a_head``
    bytes of each. ``group`` is the field of ``struct Arguments`` that says how many. With ``masks`` heads are divided
    into so many groups that share one.
    """

    group: str
    heads: Count
    of_a_head: Count
    masks: Factor | None = None

    def heads_of_a_group(self, sizes: Mapping[str, int], cache_bytes: int) -> int:
        """A divisor of the number of heads."""
        heads = max(self.heads.value(sizes) // (self.masks.value(sizes) if self.masks else 1), 1)
        most = cache_bytes // max(self.of_a_head.value(sizes), 1)
        return max((n for n in range(1, heads + 1) if heads % n == 0 and n <= most), default=1)


@dataclass(frozen=True)
class VisitLists:
    """Lists of tiles to visit, for the heads that share a mask: ``launches`` write them where ``field`` points to.

    Where ``kept``, what they hold follows from the ``tiles``, own and visited, and from the values of the fields
    ``sizes`` and ``params``: the host keeps them for later calls. A param has a second field, which is not null where
    only the GPU knows it: then there are no lists. Else they follow from captured tensors, and a call makes its own, in
    its workspace. Where there is an ``order``, blocks take the longest first. ``pairs`` is the number of tiles of
    queries and keys, ``count`` that of lists, ``readers`` that of blocks that read them, ``parts`` are bytes.
    """

    field: str
    tiles: tuple[int, int]
    kept: bool
    order: Order | None
    pairs: Count
    count: Count
    readers: Count | Sum
    parts: tuple[Count, ...]
    launches: tuple[Launch, ...]
    sizes: tuple[str, ...]
    params: tuple[tuple[str, str], ...]

    def bytes(self, sizes: Mapping[str, int]) -> int:
        """What ``field`` has to point to."""
        return sum(part.value(sizes) for part in self.parts)


@dataclass(frozen=True)
class Splits:
    """Into how many parts the keys of a sequence are split, for a block each; the parts are merged in a fixed order.

    ``field`` says how many were asked for (0: as many as leave no multiprocessor without ``blocks``), and then how many
    there are; ``merges`` is 1 where these are several. The block that is the last to come to its end, which
    ``arrivals`` tells it, a counter for each work tile, merges what all have left, up to ``most_alone`` bytes; of more
    ``apart`` is 1, and a kernel of its own merges them. ``left`` names the number of rows, says how many a tile has at
    most, and the bytes that a part leaves of each. ``work_tiles`` is the number of blocks of one part, ``visited`` that
    of tiles of keys that a sequence has at most, of which a part that nobody asked for has ``least`` or more.
    """

    field: str
    merges: str
    apart: str
    arrivals: str
    left: tuple[str, int, int]
    most_alone: int
    work_tiles: Count
    visited: Count
    blocks: int
    least: int

    def values(self, sizes: Mapping[str, int], multiprocessors: int) -> dict[str, int]:
        """The values of all three fields, which follow from the sizes and the device alone."""
        visited = max(self.visited.value(sizes), 1)
        count = sizes[self.field]
        if count == 0:
            most = self.blocks * multiprocessors // max(self.work_tiles.value(sizes), 1)
            count = min(most, visited // self.least)
        count = max(1, min(count, visited))
        rows, most_rows, of_a_row = self.left
        left = count * min(sizes[rows], most_rows) * of_a_row
        return {self.field: count, self.merges: int(count > 1), self.apart: int(count > 1 and left > self.most_alone)}

    def counters(self, found: Mapping[str, int], sizes: Mapping[str, int]) -> int:
        """How many counters a call with these ``values`` takes."""
        return self.work_tiles.value(sizes) if found[self.merges] and not found[self.apart] else 0


@dataclass(frozen=True)
class PassLaunches:
    """One pass: its workspace and its kernels, in order, and the lists that these read where there are some.

    Among the ``launches`` are those that make lists in the workspace, not those of lists that the host keeps.
    ``operands`` say where the rows lie that they read and write, ``splits`` how many blocks share a sequence's keys.
    ``whole`` are the gradients (``stored_field``) every element of which is stored, zeros included, by name with the
    most batch entries of a call that is worth it for; None where they have elements of their own.
    """

    buffers: tuple[Buffer, ...]
    launches: tuple[Launch, ...]
    lists: tuple[VisitLists, ...] = ()
    operands: Mapping[str, Operand] = field(default_factory=lambda: OPERANDS, repr=False, compare=False)
    splits: Splits | None = None
    whole: Mapping[str, int | None] = field(default_factory=dict)

    @property
    def kernels(self) -> Mapping[str, Launch]:
        """Every launch that a host may be told to start, by its kernel."""
        of_lists = (launch for lists in self.lists for launch in lists.launches)
        return {launch.kernel: launch for launch in (*self.launches, *of_lists)}

    def offsets(self, sizes: Mapping[str, int], made: Collection[VisitLists] = ()) -> Mapping[str, tuple[int, int]]:
        """Where each buffer begins in the workspace, and its bytes; one behind the other, aligned.

        Behind them lie the lists that the call has ``made``, by their fields.
        """
        lengths = {buffer.name: buffer.bytes.value(sizes) for buffer in self.buffers}
        lengths |= {lists.field: lists.bytes(sizes) for lists in made}
        at, found = 0, {}
        for name, length in lengths.items():
            found[name] = (at, length)
            at += aligned(length)
        return found


def aligned(length: int) -> int:
    """The bytes that a buffer of the workspace takes."""
    return -(-length // ALIGNMENT) * ALIGNMENT
