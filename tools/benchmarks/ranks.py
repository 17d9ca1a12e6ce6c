"""Attention over the GPUs of one host: checked against one of them, then timed, in one call.

    torchrun --nproc-per-node 2 -m tools.benchmarks.ranks OUT [--seconds 300]
        [--only build,check,links,trace,times,graphs] [--variants window,documents]
    python -m tools.benchmarks.ranks OUT --ranks 2 --device cpu

bfloat16, D 128, H 32/8, one sequence. Beside each time: the same share of the work on one device alone, bytes sent
against those that the mask needs, what ``flashgen plan --ranks`` predicts. Every section writes its part of
OUT/report.md and OUT/report.json when it ends, so that a run that is cut off keeps what it had. On CPUs, by gloo, all
of it is tried at shapes that say nothing of time.
"""

from __future__ import annotations

import argparse
import os
import socket
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import spawn

from tools.benchmarks.rank_builds import build
from tools.benchmarks.rank_calls import SPECS, Setting
from tools.benchmarks.rank_checks import CHECK_SHAPE, CHECKED, TOLERANCE, errors
from tools.benchmarks.rank_run import CPU, GPU, Run
from tools.benchmarks.rank_times import links, times
from tools.benchmarks.rank_traces import COLUMNS as TRACED
from tools.benchmarks.rank_traces import Traced, graph_error, traced
from tools.benchmarks.report import Report

cuda: Any = torch.cuda

# -- correctness -------------------------------------------------------------------------------------------------------


def check(run: Run) -> None:
    """Outputs and all gradients of every method against float64: twice one device's error, or a tolerance, at most."""
    rows = []
    for dtype, tolerance in TOLERANCE.items():
        for name in CHECKED:
            if not run.has(30):
                rows.append((name, "", str(dtype), "out of time", "", "", ""))
                continue
            for method in ("ring", "all_gather", "ulysses"):
                try:
                    found: Mapping[str, tuple[float, float]] | str = errors(name, method, dtype, run.scale.device)
                except Exception as error:
                    found = f"{type(error).__name__}: {str(error)[:300]}"
                every = run.all(found)
                words = next((each for each in every if isinstance(each, str)), None)
                if words is not None:
                    rows.append((name, method, str(dtype), "FAILED", words, "", ""))
                    continue
                worst = {key: tuple(max(each[key][n] for each in every) for n in (0, 1)) for key in every[0]}
                allowed = {key: max(tolerance, 2 * alone) for key, (_, alone) in worst.items()}
                key = max(worst, key=lambda each: worst[each][0] / allowed[each])
                far, alone = worst[key]
                verdict = "ok" if far <= allowed[key] else "WRONG"
                rows.append((name, method, str(dtype), verdict, key, f"{far:.1e}", f"{alone:.1e}"))
    remark = f"B 2, H 4, {CHECK_SHAPE.q_len} positions, D 64. Largest error over largest value, of all ranks."
    columns = ["spec", "method", "dtype", "", "worst", "error", "one device's"]
    run.table("check", "Against float64: o, lse, dq, dk, dv, gradients of captured values", columns, rows, remark)


# -- where the time goes -----------------------------------------------------------------------------------------------


def trace(run: Run) -> None:
    """Kernels of calls by kind, on each rank."""
    rows: list[tuple[Any, ...]] = []
    longest: dict[str, Any] = {}
    if not run.is_gpu:
        return
    tokens = run.scale.tokens[0]
    methods = ("ring", "all_gather")
    settings = [Setting(variant, method, tokens) for variant in ("window", "documents", "causal") for method in methods]
    for setting in filter(run.takes, settings):
        variant, method = setting.variant, setting.method
        for backward in (False, True):
            if not run.has(20):
                return
            for rank, each in enumerate(run.all(_traced(setting, run, backward=backward))):
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


def on_rank(out: Path, seconds: float, only: str, device: str, most: int, variants: tuple[str, ...]) -> None:
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
    run = Run(scale, report, rank, dist.get_world_size(), [], most, variants, tuple(only.split(",")))
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
    parser.add_argument("--variants", default="", help="those that are timed and traced, with commas; default: all")
    parser.add_argument("--ranks", type=int, help="where it is not torchrun that starts them; default: every GPU, or 2")
    given = parser.parse_args()
    variants = tuple(filter(None, given.variants.split(",")))
    if unknown := set(variants) - set(SPECS):
        parser.error(f"--variants: no {', '.join(sorted(unknown))}; there are {', '.join(SPECS)}")
    arguments = (given.out, given.seconds, given.only, given.device, given.most, variants)
    if "RANK" in os.environ:
        on_rank(*arguments)
        return
    world = given.ranks or (cuda.device_count() if given.device == "cuda" else 2)
    meet = f"127.0.0.1:{_free_port()}"
    spawn(_spawned, (world, meet, *arguments), nprocs=world)  # type: ignore[no-untyped-call]


if __name__ == "__main__":
    main()
