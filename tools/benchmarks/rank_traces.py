"""Where a call over ranks spends its time, and whether a CUDA graph holds it.

In: a ``Setting``, its calls. Out: rows of tables. Every rank calls the same functions in one order.
"""

from __future__ import annotations

import cProfile
import pstats
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from flashgen.verification.verify import relative_error
from tools.benchmarks.rank_calls import Calls, Pass, Scale, Setting

cuda: Any = torch.cuda

_HOST_CALLS = 5  # that a device's queue holds, so that the host waits for none of them
# By what kernels are called: the first that is part of a name.
KINDS = (("nccl", "travel"), ("add_part", "added parts"), ("attention_", "attention"), ("ranks_", "attention"))
COLUMNS = ("first to last", "attention", "travel", "added parts", "other", "idle", "launches", "host", "host alone")


@dataclass(frozen=True)
class Traced:
    """One call on this rank, in ms: from its first kernel to the end of its last, kernels by kind, the time in which
    none ran, how many there were; what the host took to start it, and calls of one device with the same work. The
    ``longest`` kernels and the host's ``functions`` by name, ms of a call and how many.

    What others sent is waited for within ``travel``.
    """

    span: float
    kinds: dict[str, float]
    idle: float
    launches: int
    host: float
    host_alone: float
    longest: tuple[tuple[str, float, int], ...]
    functions: tuple[tuple[str, float, int], ...]

    @property
    def row(self) -> list[str]:
        """As ``COLUMNS``."""
        kinds = [self.kinds.get(each, 0.0) for each in ("attention", "travel", "added parts", "other")]
        times = [self.span, *kinds, self.idle]
        return [*(f"{x:.3f}" for x in times), str(self.launches), f"{self.host:.3f}", f"{self.host_alone:.3f}"]


def traced(setting: Setting, scale: Scale, *, backward: bool) -> Traced:
    """A call of a setting on this rank; raises ``RuntimeError`` where nothing was recorded."""
    calls = Calls(setting, scale)
    call, alone = calls.over_ranks(backward=backward), calls.alone(backward=backward)
    for each in (call, alone, call):
        each()
    host, host_alone = host_milliseconds(call), host_milliseconds(alone)
    cuda.synchronize()
    dist.barrier()
    with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as found:
        dist.all_reduce(torch.zeros(1, device=scale.device))
        cuda.synchronize()
        call()
        cuda.synchronize()
    events = [each for each in found.events() if "CUDA" in str(each.device_type)]
    spans = sorted((each.time_range.start, each.time_range.end, each.name) for each in events)
    spans = [each for each in spans if not each[2].startswith(("nccl:", "Memset", "ProfilerStep"))]
    # The meeting of ranks comes first.
    first = next((n for n, each in enumerate(spans) if "AllReduce" in each[2]), -1)
    return _of_spans(spans[first + 1 :], host, host_alone, _functions(call))


def _functions(call: Pass) -> tuple[tuple[str, float, int], ...]:
    """Where the host spends its own time in a call."""
    cuda.synchronize()
    dist.barrier()
    profiler = cProfile.Profile()
    profiler.enable()
    for _ in range(_HOST_CALLS):
        call()
    profiler.disable()
    cuda.synchronize()
    found = []
    for (file, line, name), (_, count, own, _, _) in pstats.Stats(profiler).stats.items():  # type: ignore[attr-defined]
        found.append((f"{Path(file).name}:{line} {name}", 1e3 * own / _HOST_CALLS, count // _HOST_CALLS))
    return tuple(sorted(found, key=lambda each: -each[1])[:25])


def _of_spans(
    spans: Sequence[tuple[float, float, str]], host: float, host_alone: float, functions: tuple[Any, ...]
) -> Traced:
    if not spans:
        raise RuntimeError("the profiler recorded no kernel")
    kinds: dict[str, float] = {}
    names: dict[str, tuple[float, int]] = {}
    busy, until = 0.0, spans[0][0]
    for start, end, name in spans:
        kind = next((kind for part, kind in KINDS if part in name.lower()), "other")
        kinds[kind] = kinds.get(kind, 0.0) + (end - start) / 1e3
        took, count = names.get(name, (0.0, 0))
        names[name] = took + (end - start) / 1e3, count + 1
        busy += max(0.0, end - max(start, until))
        until = max(until, end)
    span = (until - spans[0][0]) / 1e3
    longest = sorted(((name, *each) for name, each in names.items()), key=lambda each: -each[1])
    return Traced(span, kinds, span - busy / 1e3, len(spans), host, host_alone, tuple(longest[:12]), functions)


def host_milliseconds(call: Pass) -> float:
    """What the host takes to start a call, while its device works on what came before."""
    cuda.synchronize()
    dist.barrier()
    before = time.perf_counter()
    for _ in range(_HOST_CALLS):
        call()
    took = 1e3 * (time.perf_counter() - before) / _HOST_CALLS
    cuda.synchronize()
    return took


def graph_error(setting: Setting, scale: Scale, *, backward: bool) -> float:
    """The largest error of a captured call that is replayed with other numbers, beside the same call without a graph.

    Raises what capture raises.
    """
    calls = Calls(setting, scale)
    given = [calls.q, calls.k, calls.v, calls.d_o]
    leaves = [x.detach().requires_grad_(backward) for x in given[:3]]

    def run() -> list[Tensor]:
        o = calls.sharded(*leaves, **calls.named)
        return [o.detach(), *(torch.autograd.grad(o, leaves, calls.d_o) if backward else ())]

    with torch.set_grad_enabled(backward):
        stream = cuda.Stream()
        stream.wait_stream(cuda.current_stream())
        with cuda.stream(stream):  # kernels are compiled, and the mask is looked at, before
            for _ in range(3):
                run()
        cuda.current_stream().wait_stream(stream)
        cuda.synchronize()
        graph = cuda.CUDAGraph()
        with cuda.graph(graph, capture_error_mode="thread_local"):
            found = run()
        far = 0.0
        for seed in (11, 12):
            for n, x in enumerate(given):
                x.copy_(torch.randn(x.shape, generator=torch.Generator(scale.device).manual_seed(seed + n),
                                    device=scale.device, dtype=x.dtype))  # fmt: skip
            graph.replay()
            cuda.synchronize()
            replayed = [x.clone() for x in found]
            far = max(far, *(relative_error(x, y) for x, y in zip(replayed, run(), strict=True)))
    return far
