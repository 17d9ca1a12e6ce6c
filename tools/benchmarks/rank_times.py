"""How long calls over ranks take, beside the same share of the work on one device and what is predicted.

In: a ``Run``. Out: tables of its report. Every rank calls the same functions in one order.
"""

from __future__ import annotations

import functools
import itertools
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.attention import sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention as sdpa

from flashgen.analysis.variant import analyse
from flashgen.compiler.pipeline import device_named
from flashgen.distributed.exchange import counting
from flashgen.ir.shape import Shape
from tools.benchmarks.gpu_speed import mean_milliseconds
from tools.benchmarks.rank_calls import (
    PEERS,
    Calls,
    D,
    Pass,
    Scale,
    Setting,
    bytes_needed,
    captured,
    dealt,
    operator,
    peer,
)
from tools.benchmarks.rank_run import LINK, Run
from tools.simulation.simulate import Simulation, simulate

cuda: Any = torch.cuda


def links(run: Run) -> None:
    """What a rank sends to the next one, all at once."""
    sizes = (1 << 20, 1 << 24, 1 << 28) if run.is_gpu else (1 << 12, 1 << 16)
    rows = []
    to, source = (run.rank + 1) % run.world, (run.rank - 1) % run.world
    for size in sizes:
        sent, taken = (torch.zeros(size, dtype=torch.uint8, device=run.scale.device) for _ in range(2))

        def call(sent: Tensor = sent, taken: Tensor = taken) -> None:
            for work in dist.batch_isend_irecv(
                [dist.P2POp(dist.isend, sent, to), dist.P2POp(dist.irecv, taken, source)]
            ):
                work.wait()

        seconds = milliseconds(run, call, most=0.5) / 1e3
        rows.append((f"{size / 1e6:.1f}", f"{seconds * 1e6:.0f}", f"{size / seconds / 1e9:.1f}"))
        run.link[:] = [size / seconds]
    run.table("links", "Each rank to the next", ["MB", "µs", "GB/s"], rows)


def milliseconds(run: Run, call: Pass, *, most: float = 2.0) -> float:
    """Of the slowest rank: the median of repeats, each begun by all together; about ``most`` seconds of them."""
    call()
    first = float(max(run.all(_timed(run, call, 1))))
    count = max(1, min(20, int(20 / first)))
    repeats = max(2, min(9, int(1e3 * most / (first * count))))
    samples = [_timed(run, call, count) for _ in range(repeats)]
    slowest: list[float] = [max(each) for each in zip(*run.all(samples), strict=True)]
    return statistics.median(slowest)


def _timed(run: Run, call: Pass, count: int) -> float:
    """Milliseconds of a call on this rank. Ranks meet before it, on their devices."""
    meet = torch.zeros(1, device=run.scale.device)
    if not run.is_gpu:
        dist.all_reduce(meet)
        before = time.perf_counter()
        for _ in range(count):
            call()
        return 1e3 * (time.perf_counter() - before) / count
    dist.all_reduce(meet)
    return mean_milliseconds(call, count)


COLUMNS = [
    "variant", "method", "tokens a rank", "pass", "ms", "alone ms", "slowest", "efficiency", "predicted ms",
    "predicted / ms", "MB sent", "sent / needed", "imbalance",
]  # fmt: skip
REMARK = (
    "ms: the slowest rank, medians of repeats that all begin together. alone: the same share of the work on one "
    "device, the mean of ranks; slowest: the rank's that takes longest, by which no call can be faster; efficiency: "
    "alone / ms; of PyTorch's: the whole call by its own kernel on one device, "
    "divided by the ranks. predicted: `flashgen plan --ranks` at the rate of the links above. "
    "MB sent: all ranks together; needed: keys and values that the mask keeps, forward alone. narrow: parts "
    "are written in 16 bits."
)


def times(run: Run) -> None:
    """Every setting, until time is up."""
    rows: list[tuple[Any, ...]] = []
    spent: list[str] = []
    for setting in itertools.islice(filter(run.takes, run.scale.settings()), run.most):
        if setting.method in PEERS and not run.is_gpu:
            continue
        if not run.has(20):
            spent.append(setting.name)
            continue
        try:
            rows += _peer_rows(run, setting) if setting.method in PEERS else _rows(run, setting)
        except Exception as error:
            rows.append((setting.variant, setting.method, setting.tokens, f"{type(error).__name__}: {str(error)[:200]}",
                         *[""] * (len(COLUMNS) - 4)))  # fmt: skip
        if run.is_gpu:
            cuda.empty_cache()
        if run.rank == 0:
            print(*rows[-2:], sep="\n", flush=True)
            run.report.data["times"] = [dict(zip(COLUMNS, row, strict=True)) for row in rows]
            run.report.save()
    left = f" Not run, out of time: {'; '.join(spent)}." if spent else ""
    run.table("times", f"Times on {run.world} ranks", COLUMNS, rows, REMARK + left)


_alone: dict[tuple[str, int, bool], list[float]] = {}  # ms of each rank


def _rows(run: Run, setting: Setting) -> list[tuple[Any, ...]]:
    calls = Calls(setting, run.scale)
    found = []
    needed = sum(bytes_needed(setting, run.scale))
    name = f"{setting.method}{'' if setting.wide else ', narrow'}"
    predicted = _predicted(run, setting)
    for backward in (False, True):
        key = (setting.variant, setting.tokens, backward)
        # Where a call takes seconds it is worth to remember: device clocks move less than that costs.
        if key not in _alone or max(_alone[key]) < 500:
            _alone[key] = run.all(_own_milliseconds(run, calls.alone(backward=backward)))
        alone, slowest = statistics.mean(_alone[key]), max(_alone[key])
        call = calls.over_ranks(backward=backward)
        with counting() as counter:
            call()
        sent = sum(run.all(counter.sent))
        took = milliseconds(run, call)
        said = predicted.get("both" if backward else "forward")
        ratio = "" if backward or setting.method == "ulysses" or not needed else f"{sent / needed:.3f}"
        found.append(
            (setting.variant, name, setting.tokens, "forward+backward" if backward else "forward", f"{took:.3f}",
             f"{alone:.3f}", f"{slowest:.3f}", f"{alone / took:.3f}", f"{said:.3f}" if said else "",
             f"{said / took:.2f}" if said else "", f"{sent / 1e6:.1f}", ratio,
             f"{dealt(setting.variant, run.scale, setting.tokens).imbalance:.1%}")
        )  # fmt: skip
    return found


def _own_milliseconds(run: Run, call: Pass) -> float:
    """Of this rank's: ranks do not wait for each other."""
    call()
    first = float(max(run.all(_timed(run, call, 1))))
    count = max(1, min(20, int(20 / first)))
    return statistics.median(_timed(run, call, count) for _ in range(max(2, min(9, int(2e3 / (first * count))))))


@functools.cache
def _simulated(variant: str, tokens: int, world: int, scale: Scale, link: float) -> Simulation | None:
    op = operator(variant, scale.unit)
    product = cuda.get_device_name() if scale.device.startswith("cuda") else ""
    name = "local" if not product else "h200" if "H200" in product else "h100"
    shape = Shape(1, scale.heads, scale.kv_heads, tokens * world, tokens * world)
    read = {each: x.detach().cpu().numpy() for each, x in captured(variant, scale, tokens * world).items()}
    try:
        return simulate(analyse(op.spec, op.spec.head_dims[0]), device_named(name), shape, world, link, read)
    except Exception:
        return None


def _predicted(run: Run, setting: Setting) -> dict[str, float]:
    """Milliseconds; nothing where no model knows the call."""
    link = run.said(run.link[0] if run.link else LINK)
    found = _simulated(setting.variant, setting.tokens, run.world, run.scale, link)
    methods = [] if found is None else found.methods
    seconds = {each.name: 1e3 * each.seconds for by in methods if by.name == setting.method for each in by.passes}
    if not seconds:
        return {}
    return {"forward": seconds["forward"], "both": sum(seconds.values())}


def _peer_rows(run: Run, setting: Setting) -> list[tuple[Any, ...]]:
    found = []
    with peer(setting, run.scale) as made:
        took = {backward: milliseconds(run, made(backward)) for backward in (False, True)}
    length = setting.tokens * run.world
    whole: dict[bool, float] = {}
    if length <= 1 << 17:  # else it takes long
        shape = (1, run.scale.heads, length, D)
        q, k, v, d_o = (torch.randn(shape, device=run.scale.device, dtype=torch.bfloat16) for _ in range(4))
        leaves = [x.detach().requires_grad_() for x in (q, k, v)]

        def forward() -> object:
            with torch.no_grad():
                return sdpa(q, k, v, is_causal=True)

        def both() -> object:
            return torch.autograd.grad(sdpa(leaves[0], leaves[1], leaves[2], is_causal=True), leaves, d_o)

        with sdpa_kernel(PEERS[setting.method]):
            calls: tuple[tuple[bool, Callable[[], object]], ...] = ((False, forward), (True, both))
            whole = {backward: milliseconds(run, call) / run.world for backward, call in calls}
    for backward, each in took.items():
        alone = whole.get(backward)
        found.append(
            (setting.variant, setting.method, setting.tokens, "forward+backward" if backward else "forward",
             f"{each:.3f}", f"{alone:.3f}" if alone else "", "", f"{alone / each:.3f}" if alone else "", *[""] * 5)
        )  # fmt: skip
    return found
