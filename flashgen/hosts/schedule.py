"""One pass on a GPU, real or emulated, with all its numbers: what is cleared, what is started on which grid.

In: the launches of a pass (``plan/launches.py``) and the values of ``struct Arguments``. Out: a ``Schedule`` of one
``CallPart`` or several. Kernels index q, k, v and dO by 32 bits from the pointers that they get, so that a call on
larger tensors becomes several parts, over batches and then heads, each a shard of the call. In ragged batches kernels
index from where a sequence begins, and no call is divided.

Lists of the tiles that blocks visit are kept by the host for calls that share them, or made by each call. They are
found again by all values that they depend on, in bounded memory. The list that was not asked for longest makes room
for others. Without a list, as where it would be larger than the bound, blocks find the tiles themselves. To make a list
takes longer than it saves a single call: lengths that come once have none, nor have single queries. Lists that follow
from captured tensors are made by the call, where many blocks read them. Nothing here imports torch.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, TypeVar

from flashgen.hosts.kernel import ArgumentLayout, Step, Values
from flashgen.ir.spec import HeadDim
from flashgen.kinds.operand import Operand, Rows, span
from flashgen.plan.arguments import stored_field
from flashgen.plan.launches import Launch, PassLaunches, VisitLists, aligned

if TYPE_CHECKING:
    from flashgen.targets.gpu.tiles import GpuPlan

Binary = TypeVar("Binary")
MOST_ELEMENTS = 2**31 - 1  # from a kernel's pointer to the last element that it reads
ROW_ALIGNMENT = 16  # of rows that are whole numbers of 16 bytes; others are read element by element
LIST_BYTES = 32 << 20  # of one cache, or of one order in a call's workspace
MOST_LISTS = 256  # small ones cost more than their bytes
LEAST_TILES = 1024  # of queries and keys: of fewer a block finds its own in a moment
MOST_ORDERED = 1 << 14  # lists of a call: each is compared with all of its mask
LEAST_BLOCKS = 512  # that read what a call makes: fewer find their own while two kernels would be started

Held = TypeVar("Held")
Question = tuple[object, ...]


@dataclass(frozen=True)
class SharedLists:
    """Lists of one order, with numbers: ``steps`` write ``size`` bytes where the value in ``slot`` points to.

    They hold the classes of ``tiles`` tiles a mask. They depend on ``known`` and on the params in the slots ``params``;
    ``places`` are the slots of pointers to params that only the GPU knows.
    """

    slot: int
    size: int
    tiles: int
    steps: tuple[Step, ...]
    known: Question
    params: tuple[int, ...]
    places: tuple[int, ...]

    def question(self, values: Values) -> Question | None:
        """All values that the lists depend on; None where only the GPU knows them."""
        if not self.params:
            return self.known
        if any(values[place] for place in self.places):
            return None
        return (*self.known, *(values[slot] for slot in self.params))


def makes_lists(lists: VisitLists, sizes: Mapping[str, int], *, eager: bool) -> bool:
    """Whether a call makes these in its workspace. ``eager``: however few blocks read them."""
    if lists.kept or lists.bytes(sizes) > LIST_BYTES or lists.count.value(sizes) > MOST_ORDERED:
        return False
    return eager or lists.readers.value(sizes) >= LEAST_BLOCKS


class ListCache(Generic[Held]):
    """The lists of one library on one device. Calls hold on to what they use, whoever drops it here.

    ``eager``: lists are made when they are first asked for, however few tiles they tell of.
    """

    def __init__(self, most_bytes: int = LIST_BYTES, *, eager: bool = False) -> None:
        self.most_bytes, self.eager = most_bytes, eager
        self.bytes = 0
        self._asked: OrderedDict[Question, None] = OrderedDict()  # once, the last at the end
        self._entries: OrderedDict[Question, tuple[int, Held]] = OrderedDict()  # what was asked for last at the end
        self._lock = threading.Lock()  # gradients are computed in a thread of PyTorch's

    def __len__(self) -> int:
        return len(self._entries)

    def find(self, lists: SharedLists, values: Values, make: Callable[[], Held | None]) -> Held | None:
        """The lists that are kept for these values, or that ``make`` gives; None where blocks find tiles themselves.

        ``make`` gives None where there is no memory for lists; a later call asks again.
        """
        if lists.size > self.most_bytes or (lists.tiles < LEAST_TILES and not self.eager):
            return None
        question = lists.question(values)
        if question is None:
            return None
        with self._lock:
            known = self._entries.get(question)
            if known is not None:
                self._entries.move_to_end(question)
                return known[1]
            if not self.eager and question not in self._asked:
                self._asked[question] = None
                if len(self._asked) > MOST_LISTS:
                    self._asked.popitem(last=False)
                return None
            self._asked.pop(question, None)
            while self._entries and (self.bytes + lists.size > self.most_bytes or len(self) >= MOST_LISTS):
                _, (size, _) = self._entries.popitem(last=False)
                self.bytes -= size
            held = make()
            if held is None:
                return None
            self._entries[question] = lists.size, held
            self.bytes += lists.size
            return held


@dataclass(frozen=True)
class Compiled(Generic[Binary]):
    """What a pass of a call runs: what holds its kernels, their launches, and the plan."""

    binary: Binary
    launches: PassLaunches
    plan: GpuPlan


@dataclass(frozen=True)
class DeviceSize:
    """What a schedule depends on: how many multiprocessors a device has, and the bytes that its last cache holds."""

    multiprocessors: int
    cache_bytes: int


@dataclass(frozen=True)
class CallPart:
    """Launches over a shard of the call, whose values differ in a few slots.

    ``changes`` are new values by slot, ``moves`` distances in bytes of pointers that are not null. ``buffers`` are the
    offsets and bytes in the workspace; ``clear`` of these have to be zero when the first step starts. The steps read
    ``lists`` where their slots point to some; ``places`` are the slots of those that they make themselves, and where
    these begin in the workspace. ``counters`` are the slot of a pointer and how many numbers of 32 bits it points to,
    which are zero when the first step starts, and when the last one has ended.
    """

    changes: tuple[tuple[int, int], ...]
    moves: tuple[tuple[int, int], ...]
    buffers: Mapping[str, tuple[int, int]]
    clear: tuple[tuple[int, int], ...]
    steps: tuple[Step, ...]
    lists: tuple[SharedLists, ...] = ()
    places: tuple[tuple[int, int], ...] = ()
    counters: tuple[int, int] | None = None

    @property
    def workspace_bytes(self) -> int:
        """The bytes that ``workspace`` has to point to."""
        return max((offset + aligned(size) for offset, size in self.buffers.values()), default=0)

    def values(self, values: Values) -> Values:
        """The values of the call as this part's kernels take them."""
        if not self.changes:
            return values
        own = list(values)
        for slot, value in self.changes:
            own[slot] = value
        for slot, distance in self.moves:
            if own[slot]:
                own[slot] += distance
        return own


@dataclass(frozen=True)
class Schedule:
    """A pass. All its parts use the workspace, one after another."""

    workspace_bytes: int
    parts: tuple[CallPart, ...]


@dataclass(frozen=True)
class _Shard:
    """Batches b … b + batch - 1, key/value heads head … head + kv_heads - 1."""

    b: int
    batch: int
    head: int
    kv_heads: int


def schedule(
    launches: PassLaunches,
    layout: ArgumentLayout,
    head_dim: HeadDim,
    values: Values,
    device: DeviceSize,
    most: int = MOST_ELEMENTS,
    *,
    eager: bool = False,
) -> Schedule:
    """The parts of one pass; ``eager``: each makes lists that few blocks read, too.

    Raises ``ValueError`` where a single key/value head is too large for a part.
    """
    known = layout.ints(values)
    shards = tuple(_shards(known, head_dim, most, launches.operands))
    is_whole = len(shards) == 1
    parts = tuple(
        _part(launches, layout, head_dim, known, each, device, is_whole=is_whole, eager=eager) for each in shards
    )
    return Schedule(max(part.workspace_bytes for part in parts), parts)


def storing(layout: ArgumentLayout, fixed: Values) -> Values:
    """Values of a call whose captured gradients are to be stored wherever they can be."""
    stored = (int(name.startswith(stored_field(""))) for name in layout.names[: layout.varying])
    return (*stored, *fixed)


def is_readable(shape: Sequence[int], strides: Sequence[int], element_bytes: int) -> bool:
    """Whether rows lie as kernels read them: contiguous, at multiples of 16 bytes, apart, and a head's not too far.

    Of [B, H, N, width], or of [T, H, width], where T are the rows of all sequences.
    """
    if len(shape) == 3:
        # How far a sequence reaches is checked where its length is known.
        own = (1, shape[1], min(shape[0], 2), shape[2])
        return is_readable(own, (0, strides[1], strides[0], strides[2]), element_bytes)
    if shape[3] > 1 and strides[3] != 1:
        return False
    if shape[2] > 1 and strides[2] < shape[3]:  # tensor copies know no rows that overlap
        return False
    if span((shape[2],), (strides[2],), shape[3]) > MOST_ELEMENTS:
        return False
    if shape[3] * element_bytes % ROW_ALIGNMENT:
        return True
    rows = zip(shape[:3], strides[:3], strict=True)
    return all(size < 2 or stride * element_bytes % ROW_ALIGNMENT == 0 for size, stride in rows)


def _shards(
    known: Mapping[str, int], head_dim: HeadDim, most: int, operands: Mapping[str, Operand]
) -> Iterator[_Shard]:
    batch, kv_heads = known["batch"], known["kv_heads"]
    group = known["heads"] // kv_heads

    strided = [each for each in operands.values() if each.in_32_bits]
    if any(each.rows is Rows.CACHED for each in strided):
        _check_cache(known, head_dim, most, strided)
        yield _Shard(0, batch, 0, kv_heads)
        return
    if strided[0].rows.is_packed:
        _check_sequences(known, head_dim, most, strided)
        yield _Shard(0, batch, 0, kv_heads)
        return

    def fits(batch: int, kv_heads: int) -> bool:
        part = {**known, "batch": batch, "heads": kv_heads * group, "kv_heads": kv_heads}
        return all(each.reach(head_dim, part) <= most for each in strided)

    batches = next((n for n in _halves(batch) if fits(n, kv_heads)), 1)
    heads = next((n for n in _halves(kv_heads) if fits(batches, n)), 0)
    if heads == 0:
        raise ValueError(
            f"q, k or v of one key/value head reaches over more than {most} elements; "
            "kernels take fewer rows, or fewer query heads for each key/value head"
        )
    for b in range(0, batch, batches):
        for head in range(0, kv_heads, heads):
            yield _Shard(b, min(batches, batch - b), head, min(heads, kv_heads - head))


def _check_sequences(known: Mapping[str, int], head_dim: HeadDim, most: int, strided: Sequence[Operand]) -> None:
    longest = {**known, "q_len": known["q_most"], "kv_len": known["kv_most"]}
    if any(each.reach(head_dim, longest) > most for each in strided):
        raise ValueError(
            f"q, k or v of the longest sequence, of up to {known['q_most']} queries and {known['kv_most']} keys, "
            f"reaches over more than {most} elements; kernels take shorter ones: pass max_seqlen_q and max_seqlen_k "
            "where they are"
        )
    if max(known["heads"] * known["q_len"], known["kv_heads"] * known["kv_len"]) > most:
        raise ValueError(f"all sequences together have more than {most} rows of heads; kernels take fewer")


def _check_cache(known: Mapping[str, int], head_dim: HeadDim, most: int, strided: Sequence[Operand]) -> None:
    """Kernels index by 32 bits from where a sequence's queries begin, and an entry or a page."""
    alone = {**known, "batch": 1, "cache_entries": min(known["cache_entries"], 1)}
    if any(each.reach(head_dim, alone) > most for each in strided):
        raise ValueError(
            f"the queries of a sequence, or an entry or page of the cache, reach over more than {most} elements; "
            "kernels take fewer rows: pages may hold any number of them together"
        )
    if known["batch"] * known["heads"] * known["q_len"] > most:
        raise ValueError(f"all queries together are more than {most} rows of heads; kernels take fewer")


def _halves(count: int) -> Iterator[int]:
    while count > 1:
        yield count
        count = -(-count // 2)
    yield count


def _moves(
    known: Mapping[str, int], shard: _Shard, head_dim: HeadDim, operands: Mapping[str, Operand]
) -> dict[str, int]:
    """Bytes from the pointers of the call to those of a shard; heads are divided within one batch alone."""
    group = known["heads"] // known["kv_heads"]
    moves = {}
    for each in operands.values():
        by_batch, by_head, _ = each.strides(head_dim, known)
        head = shard.head * (group if each.of_queries else 1)
        moves[each.name] = (shard.b * by_batch + head * by_head) * each.known_bytes(known)
    return moves


def _part(
    launches: PassLaunches,
    layout: ArgumentLayout,
    head_dim: HeadDim,
    known: Mapping[str, int],
    shard: _Shard,
    device: DeviceSize,
    *,
    is_whole: bool,
    eager: bool,
) -> CallPart:
    group = known["heads"] // known["kv_heads"]
    changes = {
        "batch": shard.batch,
        "heads": shard.kv_heads * group,
        "kv_heads": shard.kv_heads,
        "b_start": known["b_start"] + shard.b,
        "h_start": known["h_start"] + shard.head * group,
    }
    sizes = {**known, **changes}
    found = launches.splits.values(sizes, device.multiprocessors) if launches.splits else {}
    sizes |= found
    counters = launches.splits.counters(found, sizes) if launches.splits else 0
    made = [each for each in launches.lists if makes_lists(each, sizes, eager=eager)]
    started = {"", *(each.field for each in made)}
    buffers = launches.offsets(sizes, made)
    steps = [(each, _step(each, sizes, device)) for each in launches.launches if each.makes in started]
    # Where all blocks start at once none counts tiles, so that a small call needs no workspace, nor to clear one.
    idle = {
        each.tile_counter.buffer for each, step in steps if each.tile_counter and step.grid == each.grid.value(sizes)
    }
    idle &= {each.name for each in launches.buffers if each.clear}
    buffers = {name: place for name, place in buffers.items() if name not in idle}
    moves = {} if is_whole else _moves(known, shard, head_dim, launches.operands)
    orders = [each.order for each in launches.lists if each.order]
    groups = {each.group: each.heads_of_a_group(sizes, device.cache_bytes // 2) for each in orders}
    changed = (found | groups) if is_whole else (changes | found | groups)
    return CallPart(
        changes=tuple((layout.slots[name], value) for name, value in changed.items()),
        moves=tuple((layout.slots[name], distance) for name, distance in moves.items() if distance),
        buffers=buffers,
        clear=tuple(
            buffers[each.name]
            for each in launches.buffers
            if each.clear and each.name not in idle and buffers[each.name][1]
        ),
        steps=tuple(step for _, step in steps if step.grid),
        lists=tuple(_shared(each, layout, sizes, device) for each in launches.lists if each.kept),
        places=tuple((layout.slots[each.field], buffers[each.field][0]) for each in made),
        counters=(layout.slots[launches.splits.arrivals], counters) if launches.splits and counters else None,
    )


def _step(launch: Launch, sizes: Mapping[str, int], device: DeviceSize) -> Step:
    grid = launch.grid.value(sizes)
    if launch.tile_counter:
        most = launch.tile_counter.blocks * device.multiprocessors
        grid = min(grid, max(1, most // launch.cluster) * launch.cluster)
    return Step(launch.kernel, grid, launch.threads, launch.shared_bytes, launch.boxes)


def _shared(lists: VisitLists, layout: ArgumentLayout, sizes: Mapping[str, int], device: DeviceSize) -> SharedLists:
    return SharedLists(
        slot=layout.slots[lists.field],
        size=lists.bytes(sizes),
        tiles=lists.pairs.value(sizes),
        steps=tuple(_step(each, sizes, device) for each in lists.launches),
        known=(lists.field, lists.tiles, *(sizes[name] for name in lists.sizes)),
        params=tuple(layout.slots[value] for value, _ in lists.params),
        places=tuple(layout.slots[place] for _, place in lists.params),
    )
