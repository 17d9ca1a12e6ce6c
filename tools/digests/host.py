"""What Python does in hot calls: the number of functions that are called, and the time of one thread.

In: a ``Piece`` of the host's. Out: its entry. Calls are short, on the CPU and on a GPU that starts nothing
(``tools/benchmarks/host_time.py``), with one head of 16 queries at D 64.
"""

from __future__ import annotations

import functools
import sys
import time
from collections.abc import Callable
from typing import Any

import torch

import flashgen
from tools.benchmarks.host_time import imitated
from tools.digests.sample import Piece

_TEXT = "attention hot { head_dim 64  mask causal }"
_TOKENS, _ROOM, _HEAD_DIM = 16, 128, 64
_WARM, _CALLS, _SECONDS = 60, 50, 2.0


def entries_of(piece: Piece) -> dict[str, dict[str, Any]]:
    """The one entry of a piece."""
    torch.set_num_threads(1)
    call = _call(_op(piece.option), piece.kind, torch.float32 if piece.element == "f32" else torch.bfloat16)
    for _ in range(_WARM):
        call()
    return {"call": {"python_calls": python_calls(call), "microseconds": microseconds(call)}}


def python_calls(call: Callable[[], object]) -> int:
    """How many functions of Python a call enters, at least: now and then there is more to do."""
    return min(_counted(call) for _ in range(5))


def microseconds(call: Callable[[], object]) -> float:
    """The least that a call takes of this thread."""
    best, end = float("inf"), time.perf_counter() + _SECONDS
    while time.perf_counter() < end:
        begin = time.thread_time()
        for _ in range(_CALLS):
            call()
        best = min(best, (time.thread_time() - begin) / _CALLS)
    return best * 1e6


def _counted(call: Callable[[], object]) -> int:
    count = 0

    def profile(_frame: object, event: str, _argument: object) -> None:
        nonlocal count
        count += event == "call"

    before = sys.getprofile()
    sys.setprofile(profile)
    try:
        call()
    finally:
        sys.setprofile(before)
    return count


@functools.cache
def _op(driver: str) -> Any:
    return flashgen.loads(_TEXT, backend="cpu") if driver == "cpu" else imitated(_TEXT)


def _call(op: Any, kind: str, dtype: torch.dtype) -> Callable[[], object]:
    def tensor(*shape: int) -> torch.Tensor:
        return torch.randn(shape, dtype=dtype)

    x = [tensor(1, 1, _TOKENS, _HEAD_DIM) for _ in range(4)]
    leaves = [each.clone().requires_grad_() for each in x[:3]]
    rows = [tensor(_TOKENS, 1, _HEAD_DIM) for _ in range(3)]
    ends = torch.tensor([0, _TOKENS // 4, _TOKENS], dtype=torch.int32)
    cache, filled = [tensor(1, 1, _ROOM, _HEAD_DIM) for _ in range(2)], torch.tensor([_ROOM], dtype=torch.int32)
    calls: dict[str, Callable[[], object]] = {
        "dense": lambda: op(*x[:3]),
        "dense with backward": lambda: torch.autograd.grad(op(*leaves), leaves, x[3]),
        "decode": lambda: op.decode(x[0][:, :, :1], *cache, filled),
        "varlen": lambda: op.varlen(*rows, ends, ends, _TOKENS, _TOKENS),
    }
    return calls[kind]
