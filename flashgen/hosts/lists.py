"""Lists of the tiles that blocks visit: kept by the host for calls that share them, or made by each call.

In: the ``VisitLists`` of a pass (``plan/launches.py``), values of ``struct Arguments``. Out: the lists of a call, made
once, and found again by all values that they depend on, in bounded memory. The list that was not asked for longest
makes room for others. Without a list, as where it would be larger than the bound, blocks find the tiles themselves. To
make a list takes longer than it saves a single call: lengths that come once have none, nor have single queries. Lists
that follow from captured tensors are made by the call, where many blocks read them. Nothing here imports torch.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Generic, TypeVar

from flashgen.hosts.kernel import Step, Values
from flashgen.plan.launches import VisitLists

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
