"""What the host takes in a call, beside SDPA: on the CPU at 16 tokens, and for a GPU, real or imitated.

    python -m tools.benchmarks.host_time [--only cpu,imitated,gpu] [--seconds 3] [--profile]

An imitated GPU is a driver that starts nothing, under the kernels of Hopper's plans, over CPU tensors: everything that
Python does for a launch, without the launch. "autograd alone" is a ``torch.autograd.Function`` that saves three
tensors and makes one forward and three backward: what a node in Python takes, whatever it computes.
"""

from __future__ import annotations

import argparse
import contextlib
import cProfile
import ctypes
import functools
import pstats
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

import flashgen
from flashgen.compiler.compiled import compiled
from flashgen.hosts.cuda import Counters, CudaKernel, CupyDriver
from flashgen.hosts.gpu_calls import kernel_variant, launches_of
from flashgen.hosts.kernel import ArgumentLayout, call_of
from flashgen.hosts.schedule import Compiled, DeviceSize
from flashgen.hosts.tensor_maps import BYTES
from flashgen.ir.spec import HeadDim
from flashgen.kinds.cached import CACHED
from flashgen.kinds.dense import DENSE
from flashgen.kinds.kind import Kind, PassName
from flashgen.kinds.ragged import RAGGED
from flashgen.op.op import AttentionOp, OpParts
from flashgen.plan.plan import Part
from flashgen.targets.gpu.lists import cuda_fields
from flashgen.targets.registry import GPUS

Attention = Callable[..., Any]
TEXT = "attention host_time {{ head_dim 64  {} }}"
CALLS = 50  # in a row, of one that is timed


class NoDriver(CupyDriver):
    """A GPU that starts nothing."""

    size = DeviceSize(132, 50 << 20)

    def __init__(self) -> None:
        """None is there."""

    def function(self, path: Path, name: str, shared_bytes: int) -> int:  # noqa: ARG002 - the names of a driver
        return 1

    def stream(self) -> int:
        return 0

    def clear(self, address: int, size: int, stream: int) -> None:
        """Nothing."""

    def launch(self, function: int, grid: int, threads: int, shared_bytes: int, stream: int, arguments: int) -> None:
        """Nothing."""

    def encode(self, tensor: object, address: int) -> bytes:  # noqa: ARG002 - see above
        return bytes(BYTES)

    def is_capturing(self) -> bool:
        return False

    def counters(self, size: int, stream: int) -> Counters:  # noqa: ARG002 - see above
        return Counters(0, size, torch.empty(0))

    def write_once(self, size: int, write: Callable[[int, int], None]) -> None:  # noqa: ARG002 - see above
        return None

    def enter(self) -> Any:
        return contextlib.nullcontext()

    def is_current(self) -> bool:
        return True

    def entry_points(self) -> tuple[int, int, int, int]:
        return nothing_in_c()


@functools.cache
def nothing_in_c() -> tuple[int, int, int, int]:
    """Addresses of a function in C that returns 0 and reads no memory: what a driver that starts nothing offers."""
    nothing = ctypes.cast(ctypes.CDLL("libm.so.6").feclearexcept, ctypes.c_void_p).value or 0
    return nothing, nothing, nothing, nothing


def imitated(text: str) -> AttentionOp:
    """The op over the driver that starts nothing."""
    spec, target = flashgen.loads(text, backend="reference").spec, GPUS["sm_90a"]

    def provider(kind: Kind) -> Callable[[HeadDim, int], CudaKernel]:
        @functools.cache
        def kernel(head_dim: HeadDim, _index: int) -> CudaKernel:
            variant = kernel_variant(spec, head_dim, kind)
            recipe = compiled(variant, target).plan.recipe

            def find(name: PassName, values: Mapping[str, float]) -> Compiled[Path]:
                plan = compiled(variant, target, part=Part(call_of(values)[0], name)).plan
                return Compiled(Path(), launches_of(plan, name, values), plan)

            def other(other_kind: Kind) -> CudaKernel | None:
                return provider(other_kind)(head_dim, 0) if other_kind in (RAGGED, CACHED) else None

            layout, driver = ArgumentLayout(cuda_fields(recipe)), NoDriver()
            return CudaKernel(layout, head_dim, find, driver.size, other=other, driver=driver)

        return kernel

    return AttentionOp(OpParts(spec, {"cpu": provider(DENSE)}))


class Alone(torch.autograd.Function):
    """Saves what an op saves, and makes what it makes."""

    @staticmethod
    def forward(ctx: Any, *tensors: Tensor) -> Tensor:
        ctx.save_for_backward(*tensors)
        return torch.empty_like(tensors[0])

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> Any:
        return tuple(map(torch.empty_like, ctx.saved_tensors))


def alone(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """What a node in Python takes."""
    found: Tensor = Alone.apply(q, k, v) if torch.is_grad_enabled() else torch.empty_like(q)  # type: ignore[no-untyped-call]
    return found


def calls_of(attention: Attention, x: list[Tensor]) -> Mapping[str, Callable[[], object]]:
    """Forward, and with backward; ``x`` are q, k, v and the gradient of o."""
    leaves = [each.clone().requires_grad_() for each in x[:3]]

    def forward() -> object:
        with torch.no_grad():
            return attention(*leaves)

    return {"forward": forward, "with backward": lambda: torch.autograd.grad(attention(*leaves), leaves, x[3])}


def microseconds(
    calls: Mapping[str, Callable[[], object]], seconds: float, wait: Callable[[], object]
) -> dict[str, float]:
    """The least of each, in turns; the device is waited for between them."""
    best = dict.fromkeys(calls, float("inf"))
    # On a CPU all is done by this thread, whose own time is counted; a GPU's gradients come from another one.
    clock = time.thread_time if wait is nobody else time.perf_counter
    for call in calls.values():
        for _ in range(3 * CALLS):
            call()
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        for name, call in calls.items():
            wait()
            begin = clock()
            for _ in range(CALLS):
                call()
            best[name] = min(best[name], (clock() - begin) / CALLS)
    return {name: value * 1e6 for name, value in best.items()}


def nobody() -> None:
    """There is no device to wait for."""


def settings(only: str) -> Iterator[tuple[str, str, Mapping[str, Attention], list[Tensor], Callable[[], object]]]:
    """Where, which spec, who, on what, and what waits."""
    for name, clause in (("plain", ""), ("causal", "mask causal")):
        peer = functools.partial(scaled_dot_product_attention, is_causal=name == "causal")
        beside: dict[str, Attention] = {"SDPA": peer, "autograd alone": alone}
        x = [torch.randn(1, 1, 16, 64) for _ in range(4)]
        text = TEXT.format(clause)
        if "cpu" in only:
            yield "cpu", name, {"flashgen": flashgen.loads(text, backend="cpu"), **beside}, x, nobody
        if "imitated" in only:
            yield "imitated", name, {"flashgen": imitated(text)}, [y.bfloat16() for y in x], nobody
        if "gpu" in only and torch.cuda.is_available():
            own = flashgen.loads(text, backend="cuda")
            yield "gpu", name, {"flashgen": own, **beside}, [y.bfloat16().cuda() for y in x], torch.cuda.synchronize


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="cpu,imitated,gpu")
    parser.add_argument("--seconds", type=float, default=3.0)
    parser.add_argument("--profile", action="store_true")
    given = parser.parse_args()
    torch.set_num_threads(1)
    for where, name, who, x, wait in settings(given.only):
        calls = {each: calls_of(attention, x) for each, attention in who.items()}
        for part in ("forward", "with backward"):
            found = microseconds({each: own[part] for each, own in calls.items()}, given.seconds, wait)
            print(where, name, part, *(f"{each} {value:.1f}" for each, value in found.items()), sep="  ", flush=True)
            if given.profile:
                profile(calls["flashgen"][part])


def profile(call: Callable[[], object], count: int = 2000) -> None:
    """Print where a call's time goes; the profiler makes functions of Python look slower than they are."""
    profiler = cProfile.Profile()
    profiler.enable()
    for _ in range(count):
        call()
    profiler.disable()
    pstats.Stats(profiler).sort_stats("tottime").print_stats(25)


if __name__ == "__main__":
    main()
