"""Counters of launches on GPUs: zeros before each launch and after it, so that none has to be cleared.

In: how many bytes a launch takes, and its stream. Out: memory that no other launch counts in at the same time. Launches
of one stream run one after another, and share counters. A launch in a graph keeps its own counters for good: the graph
may be replayed beside any other launch.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from threading import Lock
from typing import Any, NamedTuple

import torch

_CHUNK_BYTES = 1 << 20  # of zeros that are made at a time
_ALIGNMENT = 256


class Counters(NamedTuple):
    """Zeros on a device; ``memory`` is held until the launch has been started."""

    address: int
    bytes: int
    memory: torch.Tensor


class CounterPool:
    """The counters of a device."""

    def __init__(self, index: int) -> None:
        self._index = index
        self._lock = Lock()
        self._chunk: torch.Tensor | None = None
        self._chunks: list[torch.Tensor] = []  # graphs may be replayed as long as the process lives
        self._taken = 0  # bytes of the chunk
        self._of_streams: dict[int, Counters] = {}

    def find(self, size: int, stream: int, *, captures: bool) -> Counters:
        """Zeros for a launch on the current stream, given as ``stream``; ``captures``: the launch goes into a graph."""
        found = None if captures else self._of_streams.get(stream)
        if found is not None and found.bytes >= size:
            return found
        with self._lock:
            found = self._take(-(-size // _ALIGNMENT) * _ALIGNMENT, captures=captures)
            if not captures:
                self._of_streams[stream] = found
            return found

    def _take(self, size: int, *, captures: bool) -> Counters:
        if captures and (self._chunk is None or self._taken + size > self._chunk.numel()):
            zeros = torch.zeros(size, dtype=torch.uint8, device=f"cuda:{self._index}")  # by the graph, at each replay
            return Counters(zeros.data_ptr(), size, zeros)
        # Graphs take what is left of a chunk while nothing can be made: half of it is kept for them.
        if self._chunk is None or (not captures and self._taken + size > self._chunk.numel() // 2):
            stream = torch.cuda.Stream(self._index)  # type: ignore[no-untyped-call]
            memory = lasting(max(_CHUNK_BYTES, 2 * size), stream)
            with torch.cuda.stream(stream):
                memory.zero_()
            stream.synchronize()  # once in thousands of calls
            self._chunk, self._taken = memory, 0
            self._chunks.append(memory)
        address = self._chunk.data_ptr() + self._taken
        self._taken += size
        return Counters(address, size, self._chunk)


def lasting(size: int, stream: Any) -> torch.Tensor:
    """Memory for longer than a call, of the stream.

    It is asked for in a thread of its own: where PyTorch warms up a graph, a thread's memory is that of the graph, in
    which nothing may stay.
    """

    def ask() -> torch.Tensor:
        with torch.cuda.stream(stream):
            return torch.empty(size, dtype=torch.uint8, device=stream.device)

    with ThreadPoolExecutor(1) as thread:
        return thread.submit(ask).result()
