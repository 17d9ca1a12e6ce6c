"""How well the model of time ranks tiles: predicted beside measured, and Spearman's rank correlation of the two.

    python -m tools.benchmarks.model [--cpu] [--device NAME] [--shape B,H,Hkv,Nq,Nk] [--head-dims 128,64] [--json FILE]

On a GPU: causal attention in bfloat16, medians. On a CPU: in float32 on one thread, the least processor time, which
other work on the machine disturbs least. Each candidate pins its tiles by ``schedule``; all are compiled in parallel,
then take turns. What the planner makes of the pins is what is predicted.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import json
import multiprocessing
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import flashgen
from flashgen.analysis.variant import Variant, analyse
from flashgen.compiler.compiled import assembled, compiled
from flashgen.diagnostics import SpecError
from flashgen.hosts.backends import gpu_at_hand
from flashgen.hosts.cuda import current_device, describe_device
from flashgen.ir.shape import Shape
from flashgen.ir.types import ElementType
from flashgen.language import parse_text
from flashgen.plan.measured import spearman
from flashgen.plan.plan import Part, Tiles
from flashgen.plan.prediction import PassTime
from flashgen.targets.cpu import cost as cpu_cost
from flashgen.targets.cpu.device import local_cpu
from flashgen.targets.cpu.plan import plan_cpu
from flashgen.targets.cpu.target import CpuTarget
from flashgen.targets.device_table import known_devices, product_of
from flashgen.targets.gpu import cost as gpu_cost
from flashgen.targets.gpu.product import Gpu
from flashgen.targets.gpu.recipe import decide
from flashgen.targets.gpu.schedules import Backward, Forward
from flashgen.targets.gpu.tiles import ElementPlan, GpuPlan
from flashgen.targets.registry import GPUS
from flashgen.toolchains.cpp import compile_sources
from flashgen.tuning.tune import paired_times

cuda: Any = torch.cuda
GPU_SHAPE, CPU_SHAPE = Shape(2, 16, 16, 8192, 8192), Shape(1, 3, 3, 1500, 1500)
SECONDS_A_PASS = 20.0

# (B_r, B_c, warps, stages): forward, and backward where there is one. Good ones, and ones that each miss something.
GPU_PINS: tuple[tuple[tuple[int, ...], tuple[int, ...]], ...] = (
    ((192, 96, 12, 2), (64, 128, 8, 2)),
    ((128, 128, 8, 2), (128, 128, 8, 2)),
    ((128, 64, 8, 2), (64, 128, 4, 2)),
    ((128, 64, 4, 1), (64, 128, 8, 1)),
    ((128, 32, 4, 2), (64, 64, 4, 1)),
    ((64, 64, 4, 1), (32, 64, 4, 1)),
    ((64, 32, 4, 1), (32, 32, 2, 1)),
    ((32, 32, 2, 1), (64, 64, 4, 2)),
    ((64, 128, 4, 1), (32, 128, 8, 1)),
    ((64, 128, 4, 2), (64, 64, 4, 2)),
    ((64, 64, 4, 2), (64, 32, 2, 1)),
    ((64, 48, 4, 2), (32, 64, 4, 2)),
)
CPU_PINS = (
    *((128, 64), (64, 64), (128, 128), (32, 128), (64, 16), (16, 64), (32, 32), (16, 16)),
    *((96, 96), (128, 16), (16, 128), (256, 128), (256, 256), (512, 64), (512, 512)),
)


@dataclass(frozen=True)
class Candidate:
    """A spec with pinned tiles, as text: processes that compile it parse it themselves."""

    text: str

    @property
    def variant(self) -> Variant:
        """Its only head dimension."""
        spec = parse_text(self.text).specs[0]
        return analyse(spec, spec.head_dims[0])


@dataclass(frozen=True)
class Ready:
    """A candidate that compiled: what the plan made of it, by pass, and what the model says."""

    candidate: Candidate
    tiles: Mapping[str, Tiles]
    predicted: Mapping[str, PassTime]


@dataclass(frozen=True)
class Row:
    """One tile: what the model says, and seconds as measured."""

    tile: str
    predicted: PassTime
    seconds: float


@dataclass(frozen=True)
class Ranking:
    """One pass of one head dimension."""

    head_dim: int
    name: str
    rows: tuple[Row, ...]

    @property
    def spearman(self) -> float:
        """Of predicted and measured seconds; NaN below two tiles."""
        if len(self.rows) < 2:
            return float("nan")
        return spearman([row.predicted.seconds for row in self.rows], [row.seconds for row in self.rows])

    def to_json(self) -> dict[str, object]:
        """As plain data, with everything that the model adds up."""
        rows = [
            {
                "tile": row.tile,
                "measured": row.seconds,
                "predicted": row.predicted.seconds,
                "kernels": [asdict(kernel) for kernel in row.predicted.kernels],
            }
            for row in self.rows
        ]
        return {"head_dim": self.head_dim, "pass": self.name, "spearman": self.spearman, "rows": rows}


# -- candidates --------------------------------------------------------------------------------------------------------


def gpu_candidates(head_dim: int) -> list[Candidate]:
    """Causal attention in bfloat16."""
    names = ("Br", "Bc", "warps", "stages")
    found = []
    for forward, backward in GPU_PINS:
        pins = [f"{name} = {value}" for name, value in zip(names, forward, strict=True)]
        pins += [f"backward_{name} = {value}" for name, value in zip(names, backward, strict=True)]
        found.append(_candidate(head_dim, "bf16", pins))
    return found


def cpu_candidates(head_dim: int) -> list[Candidate]:
    """Causal attention in float32."""
    return [
        _candidate(head_dim, "f32", [f"Br = {Br} Bc = {Bc} backward_Br = {Br} backward_Bc = {Bc}"])
        for Br, Bc in CPU_PINS
    ]


def _candidate(head_dim: int, dtype: str, pins: Sequence[str]) -> Candidate:
    schedule = " ".join(pins)
    return Candidate(
        f"attention model_d{head_dim} {{ head_dim {head_dim} dtype {dtype} mask causal schedule {{ {schedule} }} }}"
    )


def compiled_for_gpu(candidate: Candidate, target: str) -> ElementPlan | str:
    """Compile into the cache, in a process of its own; the plan that came of it, or why there is none."""
    try:
        (kernel,) = assembled([compiled(candidate.variant, GPUS[target], part=Part(ElementType.BF16))])
    except SpecError as error:
        return str(error.diagnostics[0].message)
    plan = kernel.kernel.plan
    assert isinstance(plan, GpuPlan)
    return plan.by_element[ElementType.BF16]


def ready_for_gpu(candidates: Sequence[Candidate], gpu: Gpu, shape: Shape) -> Iterator[Ready]:
    """Those that compile, with predictions."""
    context = multiprocessing.get_context("spawn")
    workers = min(len(candidates), os.cpu_count() or 1)
    with concurrent.futures.ProcessPoolExecutor(workers, mp_context=context) as pool:
        plans = list(pool.map(compiled_for_gpu, candidates, [gpu.target.name] * len(candidates)))
    for candidate, tiles in zip(candidates, plans, strict=True):
        if isinstance(tiles, str):
            print(f"left out: {candidate.text}: {tiles}")
            continue
        recipe = decide(candidate.variant)
        yield Ready(
            candidate,
            {"forward": tiles.forward, "backward": tiles.backward},
            {name: gpu_cost.pass_time(recipe, tiles, gpu, shape, name) for name in ("forward", "backward")},
        )


def ready_for_cpu(candidates: Sequence[Candidate], shape: Shape) -> Iterator[Ready]:
    """All of them, with predictions."""
    from flashgen.compiler.pipeline import compile_spec

    cores, device = local_cpu().cores, replace(local_cpu(), cores=1)
    kernels = [compile_spec(parse_text(each.text).specs[0], CpuTarget(device))[0] for each in candidates]
    with concurrent.futures.ThreadPoolExecutor(cores) as pool:
        list(pool.map(lambda kernel: compile_sources([kernel.source]), kernels))
    for candidate in candidates:
        variant = candidate.variant
        chosen = plan_cpu(variant, device).of_call(device, ElementType.F32, shape)
        yield Ready(
            candidate,
            {name: tile for name, (_, tile) in chosen.items()},
            {
                name: cpu_cost.pass_time(variant, products, name, tile, device, shape)
                for name, (products, tile) in chosen.items()
            },
        )


# -- measurements ------------------------------------------------------------------------------------------------------


def measured(ready: Sequence[Ready], shape: Shape, head_dim: int, *, on_gpu: bool, seconds: float) -> list[Ranking]:
    """Both passes of one head dimension; candidates whose tiles are alike are timed once."""
    found = []
    for name in ("forward", "backward"):
        distinct: dict[Tiles, Ready] = {}
        for each in ready:
            distinct.setdefault(each.tiles[name], each)
        calls = {
            _describe(tiles): _call(each, name, shape, head_dim, on_gpu=on_gpu) for tiles, each in distinct.items()
        }
        times = gpu_seconds(calls, seconds) if on_gpu else cpu_seconds(calls, seconds)
        rows = [
            Row(what, each.predicted[name], took)
            for (what, took), each in zip(times.items(), distinct.values(), strict=True)
        ]
        found.append(Ranking(head_dim, name, tuple(sorted(rows, key=lambda row: row.seconds))))
    return found


def gpu_seconds(calls: Mapping[str, Callable[[], object]], budget: float) -> dict[str, float]:
    """Medians of rounds in which all take turns."""
    times = paired_times(calls, rounds=11, budget=budget, wait=cuda.synchronize)
    return {each.name: each.seconds.median for each in times}


def cpu_seconds(calls: Mapping[str, Callable[[], object]], budget: float) -> dict[str, float]:
    """The least processor time of a call."""
    least = dict.fromkeys(calls, float("inf"))
    stop, rounds = time.perf_counter() + budget, 0
    while rounds < 3 or (rounds < 25 and time.perf_counter() < stop):
        for name, call in calls.items():
            begin = time.process_time()
            call()
            least[name] = min(least[name], time.process_time() - begin)
        rounds += 1
    return least


def _call(ready: Ready, name: str, shape: Shape, head_dim: int, *, on_gpu: bool) -> Callable[[], object]:
    op = flashgen.loads(ready.candidate.text, backend="cuda" if on_gpu else "cpu")
    device, dtype = ("cuda", torch.bfloat16) if on_gpu else ("cpu", torch.float32)
    generator = torch.Generator(device).manual_seed(1)

    def normal(heads: int, length: int) -> Tensor:
        return torch.randn(shape.batch, heads, length, head_dim, generator=generator, device=device, dtype=dtype)

    q, k, v = (
        normal(shape.heads, shape.q_len),
        normal(shape.kv_heads, shape.kv_len),
        normal(shape.kv_heads, shape.kv_len),
    )
    if name == "forward":
        return lambda: op(q, k, v)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    o, d_o = op(*leaves), normal(shape.heads, shape.q_len)
    return lambda: torch.autograd.grad(o, leaves, d_o, retain_graph=True)


def _describe(tiles: Tiles) -> str:
    text = f"{tiles.Br} × {tiles.Bc}"
    if isinstance(tiles, Forward | Backward):
        text += f", {tiles.warps} warps{' in groups' if tiles.warpgroups else ''}, {tiles.stages} stages"
        text += f", {tiles.producers} warps that copy" if tiles.producers else ""
    return text


def gpu_named(name: str | None) -> Gpu:
    """A device of the table, else the one that PyTorch's current GPU is nearest to by its name and architecture."""
    known = known_devices().gpus
    if name is not None:
        return known[name]
    target, said = gpu_at_hand(), describe_device(current_device())[0].lower()
    words = {each.name: each.name.split("-")[0] for each in known.values() if each.target.name == target.name}
    fitting = [key for key, word in words.items() if word.removeprefix("rtx") in said.replace(" ", "")]
    return known[fitting[0]] if fitting else product_of(target)


def show(ranking: Ranking) -> None:
    """A table in Markdown."""
    print(f"\n{ranking.name}, D {ranking.head_dim}: Spearman's rank correlation {ranking.spearman:.2f}\n")
    print("| tile | measured ms | predicted ms | predicted / measured |")
    print("|---|---|---|---|")
    for row in ranking.rows:
        predicted = row.predicted.seconds
        cells = (row.tile, f"{1e3 * row.seconds:.3f}", f"{1e3 * predicted:.3f}", f"{predicted / row.seconds:.2f}")
        print(f"| {' | '.join(cells)} |")


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and print; ``--json`` writes the same as data."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cpu", action="store_true", help="measure the CPU though there is a GPU")
    parser.add_argument("--device", help="take the figures of this device of the table")
    parser.add_argument("--shape", type=Shape.parse, help="B,H,Hkv,Nq,Nk")
    parser.add_argument("--head-dims", type=lambda text: [int(each) for each in text.split(",")], default=[128, 64])
    parser.add_argument("--candidates", type=int, help="the first so many of each list")
    parser.add_argument("--seconds", type=float, default=SECONDS_A_PASS, help="for each pass of each head dimension")
    parser.add_argument("--json", type=Path, help="write the numbers here")
    chosen = parser.parse_args(arguments)
    on_gpu = bool(cuda.is_available()) and not chosen.cpu
    shape = chosen.shape or (GPU_SHAPE if on_gpu else CPU_SHAPE)
    if not on_gpu:
        torch.set_num_threads(1)
    begin = time.perf_counter()
    rankings: list[Ranking] = []
    for head_dim in chosen.head_dims:
        if on_gpu:
            candidates = gpu_candidates(head_dim)[: chosen.candidates]
            ready = list(ready_for_gpu(candidates, gpu_named(chosen.device), shape))
        else:
            ready = list(ready_for_cpu(cpu_candidates(head_dim)[: chosen.candidates], shape))
        rankings += measured(ready, shape, head_dim, on_gpu=on_gpu, seconds=chosen.seconds)
        for ranking in rankings[-2:]:
            show(ranking)
    print(f"\n{shape}, {time.perf_counter() - begin:.0f} s in all")
    if chosen.json:
        content = {"shape": str(shape), "rankings": [each.to_json() for each in rankings]}
        chosen.json.write_text(json.dumps(content, indent=2))


if __name__ == "__main__":
    main()
