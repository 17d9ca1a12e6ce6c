"""Attention over the GPUs of one host: checked against one of them, then timed, in one call.

    torchrun --nproc-per-node 2 -m benchmarks.ranks OUT [--seconds 300] [--only build,check,links,trace,times,graphs]
    python -m benchmarks.ranks OUT --ranks 2 --device cpu

bfloat16, D 128, H 32/8, one sequence. Beside each time: the same share of the work on one device alone, bytes sent
against those that the mask needs, what ``flashgen plan --ranks`` predicts. Every section writes its part of
OUT/report.md and OUT/report.json when it ends, so that a run that is cut off keeps what it had. On CPUs, by gloo, all
of it is tried at shapes that say nothing of time.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import functools
import itertools
import multiprocessing
import os
import socket
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.multiprocessing.spawn import spawn
from torch.nn.attention import sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention as sdpa

import flashgen
from benchmarks.gpu_speed import mean_milliseconds
from benchmarks.rank_calls import (
    PEERS,
    SPECS,
    Calls,
    D,
    Pass,
    Scale,
    Setting,
    bytes_needed,
    dealt,
    operator,
    peer,
    text_of,
)
from benchmarks.rank_checks import CHECK_SHAPE, CHECKED, TOLERANCE, checked_text, errors
from benchmarks.rank_traces import COLUMNS as TRACED
from benchmarks.rank_traces import Traced, graph_error, traced
from benchmarks.report import Report
from flashgen.analysis.variant import analyse
from flashgen.distributed.exchange import counting
from flashgen.distributed.partial import Partial
from flashgen.distributed.simulate import Simulation, simulate
from flashgen.gpu_backend import CudaProvider
from flashgen.gpu_calls import ELEMENTS, RowsOf
from flashgen.ir.shape import Shape
from flashgen.pipeline import device_named
from flashgen.runtime.signature import TORCH_DTYPES

cuda: Any = torch.cuda

GPU = Scale(32, 8, (32768, 8192, 131072), "cuda", 4096)
CPU = Scale(4, 2, (128, 64), "cpu", 64)
WORKERS = min(os.cpu_count() or 1, 32)
LINK = 450e9  # bytes a second, where none was measured


@dataclass(frozen=True)
class Run:
    """What every section knows. Rank 0 alone writes the report."""

    scale: Scale
    report: Report
    rank: int
    world: int
    link: list[float]  # bytes a second, once measured
    most: int  # rows of times

    @property
    def is_gpu(self) -> bool:
        """Else all is tried on CPUs."""
        return self.scale.device.startswith("cuda")

    def said(self, value: Any) -> Any:
        """What rank 0 says."""
        found = [value]
        dist.broadcast_object_list(found, 0)
        return found[0]

    def all(self, value: Any) -> list[Any]:
        """What every rank says."""
        found: list[Any] = [None] * self.world
        dist.all_gather_object(found, value)
        return found

    def has(self, seconds: float) -> bool:
        """Whether so much time is left, as rank 0 sees it."""
        return bool(self.said(self.report.seconds_left() > seconds))

    def table(self, name: str, title: str, columns: Sequence[str], rows: Sequence[Any], remark: str = "") -> None:
        """A section of the page, and its data."""
        if self.rank == 0:
            self.report.data[name] = [dict(zip(columns, row, strict=True)) for row in rows]
            self.report.table(title, columns, rows, remark)


# -- build -------------------------------------------------------------------------------------------------------------


def build(run: Run) -> None:
    """Compiles kernels side by side, so that no rank waits for a compiler later."""
    if not run.is_gpu:
        return
    if run.rank == 0:
        start = time.monotonic()
        jobs = [(name, text_of(name, GPU.unit), (torch.bfloat16,), _long(run), False) for name in SPECS]
        jobs += [
            (f"{name}, checked", checked_text(name), (dtype,), (CHECK_SHAPE,), name == "dropped")
            for name in CHECKED
            for dtype in TOLERANCE
        ]
        wanted = [(*job[1:], which) for job in jobs for which in ("forward", "backward")]
        failed = []
        context = multiprocessing.get_context("spawn")
        with concurrent.futures.ProcessPoolExecutor(WORKERS, context) as pool:
            for job, result in [(job, pool.submit(compile_one, *job)) for job in wanted]:
                try:
                    result.result()
                except Exception as error:
                    failed.append(f"{job[0]}: {type(error).__name__}: {str(error)[:300]}")
        text = f"## Compiled\n\n{len(wanted)} parts in {time.monotonic() - start:.0f} s by {WORKERS} processes."
        run.report.text("\n\n".join([text, *failed]))
    dist.barrier()


def _long(run: Run) -> tuple[Shape, ...]:
    return tuple(
        Shape(1, heads, kv, rows, keys)
        for tokens in run.scale.tokens
        for heads, kv, rows, keys in (
            (run.scale.heads, run.scale.kv_heads, tokens, tokens),
            (run.scale.heads, run.scale.kv_heads, tokens // 2, tokens),
            (run.scale.heads // run.world, max(run.scale.kv_heads // run.world, 1), tokens * run.world,
             tokens * run.world),
        )
    )  # fmt: skip


def compile_one(text: str, dtypes: Sequence[torch.dtype], shapes: Sequence[Shape], dropped: bool, which: str) -> None:
    """One pass of a spec and of its parts, for these shapes."""
    op = flashgen.loads(text, backend="cuda")
    codes = {TORCH_DTYPES[element]: code for code, element in enumerate(ELEMENTS)}
    for spec, rows in ((op.spec, RowsOf.DENSE), (Partial(op).inner.spec, RowsOf.PARTS)):
        provider = CudaProvider(spec, rows=rows)
        for dtype in dtypes:
            for shape in shapes:
                values = {
                    "element": codes[dtype], "batch": shape.batch, "heads": shape.heads, "kv_heads": shape.kv_heads,
                    "q_len": shape.q_len, "kv_len": shape.kv_len, "dropout_threshold": int(dropped), "deterministic": 0,
                }  # fmt: skip
                name: Any = which
                provider.of_call(spec.head_dims[0], 0, name, values)


# -- correctness -------------------------------------------------------------------------------------------------------


def check(run: Run) -> None:
    """Outputs and all gradients of every method against one device."""
    rows = []
    for dtype, tolerance in TOLERANCE.items():
        for name in CHECKED:
            if not run.has(30):
                rows.append((name, "", str(dtype), "out of time", "", ""))
                continue
            for method in ("ring", "all_gather", "ulysses"):
                try:
                    found: Mapping[str, float] | str = errors(name, method, dtype, run.scale.device)
                except Exception as error:
                    found = f"{type(error).__name__}: {str(error)[:300]}"
                every = run.all(found)
                words = next((each for each in every if isinstance(each, str)), None)
                if words is not None:
                    rows.append((name, method, str(dtype), "FAILED", words, ""))
                    continue
                worst = {key: max(each[key] for each in every) for key in every[0]}
                key = max(worst, key=lambda each: worst[each])
                verdict = "ok" if worst[key] <= tolerance else "WRONG"
                rows.append((name, method, str(dtype), verdict, key, f"{worst[key]:.1e}"))
    remark = f"B 2, H 4, {CHECK_SHAPE.q_len} positions, D 64. Largest error over largest value, of all ranks."
    columns = ["spec", "method", "dtype", "", "worst", "error"]
    run.table("check", "Against one device: o, lse, dq, dk, dv, gradients of captured values", columns, rows, remark)


# -- times -------------------------------------------------------------------------------------------------------------


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
    "variant", "method", "tokens a rank", "pass", "ms", "alone ms", "efficiency", "predicted ms", "predicted / ms",
    "MB sent", "sent / needed", "imbalance",
]  # fmt: skip
REMARK = (
    "ms: the slowest rank, medians of repeats that all begin together. alone: the same share of the work on one "
    "device, the mean of ranks; efficiency: alone / ms; of PyTorch's: the whole call by its own kernel on one device, "
    "divided by the ranks. predicted: `flashgen plan --ranks` at the rate of the links above; documents as if all were "
    "one. MB sent: all ranks together; needed: keys and values that the mask keeps, forward alone. narrow: parts "
    "are written in 16 bits."
)


def times(run: Run) -> None:
    """Every setting, until time is up."""
    rows: list[tuple[Any, ...]] = []
    spent: list[str] = []
    for setting in itertools.islice(run.scale.settings(), run.most):
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


_alone: dict[tuple[str, int, bool], float] = {}


def _rows(run: Run, setting: Setting) -> list[tuple[Any, ...]]:
    calls = Calls(setting, run.scale)
    found = []
    needed = sum(bytes_needed(setting, run.scale))
    name = f"{setting.method}{'' if setting.wide else ', narrow'}"
    predicted = _predicted(run, setting)
    for backward in (False, True):
        key = (setting.variant, setting.tokens, backward)
        # Where a call takes seconds it is worth to remember: device clocks move less than that costs.
        if key not in _alone or _alone[key] < 500:
            _alone[key] = statistics.mean(run.all(_own_milliseconds(run, calls.alone(backward=backward))))
        call = calls.over_ranks(backward=backward)
        with counting() as counter:
            call()
        sent = sum(run.all(counter.sent))
        took = milliseconds(run, call)
        said = predicted.get("both" if backward else "forward")
        ratio = "" if backward or setting.method == "ulysses" or not needed else f"{sent / needed:.3f}"
        found.append(
            (setting.variant, name, setting.tokens, "forward+backward" if backward else "forward", f"{took:.3f}",
             f"{_alone[key]:.3f}", f"{_alone[key] / took:.3f}", f"{said:.3f}" if said else "",
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
    try:
        return simulate(analyse(op.spec, op.spec.head_dims[0]), device_named(name), shape, world, link)
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
             f"{each:.3f}", f"{alone:.3f}" if alone else "", f"{alone / each:.3f}" if alone else "", *[""] * 5)
        )  # fmt: skip
    return found


# -- where the time goes -----------------------------------------------------------------------------------------------


def trace(run: Run) -> None:
    """Kernels of calls by kind, on each rank."""
    rows: list[tuple[Any, ...]] = []
    longest: dict[str, Any] = {}
    if not run.is_gpu:
        return
    tokens = run.scale.tokens[0]
    for variant, method in (("window", "ring"), ("documents", "ring"), ("causal", "ring"), ("causal", "all_gather")):
        for backward in (False, True):
            if not run.has(20):
                return
            for rank, each in enumerate(run.all(_traced(Setting(variant, method, tokens), run, backward=backward))):
                what = "forward+backward" if backward else "forward"
                cells = [each, *[""] * (len(TRACED) - 1)] if isinstance(each, str) else each.row
                rows.append((variant, method, what, rank, *cells))
                named = each if isinstance(each, str) else {"kernels": each.longest, "functions": each.functions}
                longest[f"{variant}, {method}, {what}, rank {rank}"] = named
    run.report.data["traces"] = longest
    remark = (
        f"{tokens} tokens a rank, one call under torch.profiler, ms. Attention: kernels of specs; travel: NCCL's, which"
        " wait for other ranks, too; idle: no kernel ran; host: to start a call, not traced; host alone: of the same "
        "work on one device."
    )
    run.table("trace", "Where the time goes", ["variant", "method", "pass", "rank", *TRACED], rows, remark)


def _traced(setting: Setting, run: Run, *, backward: bool) -> Traced | str:
    try:
        return traced(setting, run.scale, backward=backward)
    except Exception as error:
        return f"{type(error).__name__}: {str(error)[:200]}"


def graphs(run: Run) -> None:
    """Calls that CUDA graphs hold, replayed with other numbers."""
    if not run.is_gpu:
        return
    rows = []
    scale = replace(run.scale, unit=512)
    for variant in ("causal", "documents", "window"):
        for method in ("ring", "all_gather", "ulysses"):
            for backward in (False, True):
                try:
                    far: Any = graph_error(Setting(variant, method, 2048), scale, backward=backward)
                except Exception as error:
                    far = f"{type(error).__name__}: {str(error)[:200]}"
                every = run.all(far)
                words = next((each for each in every if isinstance(each, str)), None)
                said = words or f"{max(every):.1e}"
                is_right = words is None and max(every) <= TOLERANCE[torch.bfloat16]
                verdict = "ok" if is_right else "WRONG" if words is None else "FAILED"
                rows.append((variant, method, "forward+backward" if backward else "forward", verdict, said))
                if words is not None:  # what NCCL does after a capture that failed is unknown
                    run.table("graphs", "CUDA graphs", ["variant", "method", "pass", "", "error"], rows)
                    return
    remark = "2048 tokens a rank. Captured, then replayed twice with other numbers, beside calls without a graph."
    run.table("graphs", "CUDA graphs", ["variant", "method", "pass", "", "error"], rows, remark)


SECTIONS: Mapping[str, Callable[[Run], None]] = {
    "build": build,
    "check": check,
    "links": links,
    "trace": trace,
    "times": times,
    "graphs": graphs,
}


def section(run: Run, name: str) -> None:
    """One section on every rank; what fails is reported."""
    start = time.monotonic()
    try:
        SECTIONS[name](run)
    except Exception:
        run.report.text(f"## {name}, rank {run.rank}\n\nFAILED\n\n```\n{traceback.format_exc()}\n```")
    run.report.data.setdefault("seconds", {})[name] = time.monotonic() - start
    if run.rank == 0:
        run.report.save()


def on_rank(out: Path, seconds: float, only: str, device: str, most: int) -> None:
    """All sections on this rank, of a group that the environment describes."""
    stop = time.monotonic() + seconds
    rank = int(os.environ["RANK"])
    os.environ.setdefault("NCCL_NVLS_ENABLE", "0")  # NVLink multicast
    if device == "cuda":
        local = int(os.environ.get("LOCAL_RANK", rank))
        cuda.set_device(local)
        dist.init_process_group("nccl", timeout=timedelta(seconds=300), device_id=torch.device("cuda", local))
    else:
        torch.set_num_threads(1)
        dist.init_process_group("gloo", timeout=timedelta(seconds=120))
    scale = GPU if device == "cuda" else CPU
    report = Report(out if rank == 0 else out / f"rank{rank}", stop)
    run = Run(scale, report, rank, dist.get_world_size(), [], most)
    if rank == 0:
        product = cuda.get_device_name() if device == "cuda" else "CPUs"
        versions = f"torch {torch.__version__}, {dist.get_backend()}, Python {sys.version.split()[0]}"
        report.data["environment"] = {"device": product, "ranks": run.world, "versions": versions, **asdict(scale)}
        report.text(f"# Attention over {run.world} ranks on {product}\n\n{versions}; H {scale.heads}/{scale.kv_heads}")
    for name in only.split(","):
        if run.has(15):
            section(run, name)
        elif rank == 0:
            report.text(f"## {name}\n\nNot run: out of time.")
    dist.destroy_process_group()


def _spawned(rank: int, world: int, meet: str, *given: Any) -> None:
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world)}
    os.environ |= dict(zip(("MASTER_ADDR", "MASTER_PORT"), meet.split(":"), strict=True))
    on_rank(*given)


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def main() -> None:
    """Under torchrun one rank; alone all of them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="the folder for report.md and report.json")
    parser.add_argument("--seconds", type=float, default=300.0, help="stop starting new work after this")
    parser.add_argument("--only", default=",".join(SECTIONS), help="sections, with commas between them")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda" if cuda.is_available() else "cpu")
    parser.add_argument("--most", type=int, default=1000, help="calls that are timed, those that matter most first")
    parser.add_argument("--ranks", type=int, help="where it is not torchrun that starts them; default: every GPU, or 2")
    given = parser.parse_args()
    arguments = (given.out, given.seconds, given.only, given.device, given.most)
    if "RANK" in os.environ:
        on_rank(*arguments)
        return
    world = given.ranks or (cuda.device_count() if given.device == "cuda" else 2)
    meet = f"127.0.0.1:{_free_port()}"
    spawn(_spawned, (world, meet, *arguments), nprocs=world)  # type: ignore[no-untyped-call]


if __name__ == "__main__":
    main()
