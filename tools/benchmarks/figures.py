"""The paper's figures, measured here: run time and memory against N, sizes of blocks, sparsity (Figures 2 and 3).

    python -m tools.benchmarks.figures [--device cpu|cuda] [--only length,chunks,flex,…] [--seconds 660] [--out DIR]
    python -m tools.benchmarks.figures --draw [--out DIR]

The first measures, writes DIR/<device>/<figure>.json as soon as a figure is there, and draws it where matplotlib is
installed; the second draws every such file, wherever it was measured. Both write DIR/README.md, which shows them.
``flashgen bench --sweep`` does the same for any spec.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import json
import multiprocessing
import os
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from flashgen.analysis.variant import analyse
from flashgen.diagnostics import SpecError
from flashgen.ir.shape import Shape
from flashgen.ir.spec import AttentionSpec
from flashgen.ir.types import ElementType
from flashgen.language import parse_file
from flashgen.picture.plotting import PlottingMissing
from flashgen.plan.plan import Part
from flashgen.targets.registry import GPUS
from flashgen.tuning.tune import cuda_is_there
from tools.benchmarks.plots import caption, save_plot
from tools.benchmarks.report import device_name
from tools.benchmarks.sweep import Absent, Found, Point, Sweep
from tools.benchmarks.sweeps import (
    BLOCKS,
    LENGTHS,
    Task,
    block_sweep,
    length_sweep,
    sparsity_sweep,
    task_for,
    totals_sweep,
    with_tile,
)

ROOT = Path(__file__).resolve().parents[2]
FORMATS = ("png", "svg")
MOST_BYTES = 200_000  # of a picture


@dataclass(frozen=True)
class Figure:
    """One figure: what is swept over which spec, its share of the time, and what of the paper it repeats."""

    title: str
    kind: str
    spec: str
    shapes: Mapping[str, Shape]  # by device
    share: float
    peers: tuple[str, ...] = ()
    dropout: float | None = None
    padding: bool = False


_LENGTHS = {"cpu": Shape(1, 1, 1, 0, 0), "cuda": Shape(2, 16, 16, 0, 0)}
FIGURES: Mapping[str, Figure] = {
    "length": Figure(
        "Run time and memory against N, with dropout and a padding mask (the paper's Figure 3)",
        "length",
        "causal",
        _LENGTHS,
        0.55,
        peers=("standard", "sdpa"),
        dropout=0.1,
        padding=True,
    ),
    "chunks": Figure(
        "The same beside attention in chunks (Rabe and Staats), and block-sparse (the paper's Figure 3)",
        "length",
        "causal",
        _LENGTHS,
        0.1,
        peers=("standard", "rabe_staats", "block_sparse"),
        dropout=0.1,
        padding=True,
    ),
    "flex": Figure(
        "The same without dropout, which FlexAttention does not have",
        "length",
        "causal",
        _LENGTHS,
        0.15,
        peers=("sdpa", "flex"),
        padding=True,
    ),
    "blocks": Figure(
        "Run time and HBM bytes against the size of the blocks (Figure 2, left and middle)",
        "blocks",
        "plain",
        {"cpu": Shape(1, 8, 8, 1024, 1024), "cuda": Shape(2, 16, 16, 4096, 4096)},
        0.1,
    ),
    "sparsity": Figure(
        "Run time and HBM bytes against the share of the blocks that are kept (Figure 2, right)",
        "sparsity",
        "plain",
        {"cpu": Shape(1, 2, 2, 8192, 8192), "cuda": Shape(2, 16, 16, 16384, 16384)},
        0.2,
    ),
    "totals": Figure(
        "Flops, HBM bytes and run time (Figure 2, the table on the left)",
        "totals",
        "plain",
        {"cpu": Shape(1, 16, 16, 1024, 1024), "cuda": Shape(64, 16, 16, 1024, 1024)},
        0.05,
        peers=("standard", "rabe_staats"),
    ),
}


# -- measuring ---------------------------------------------------------------------------------------------------------


def measured(name: str, device: str, seconds: float, longest: int) -> Sweep:
    """One figure, in about this time."""
    figure, task = FIGURES[name], task_of(name, device, seconds)
    match figure.kind:
        case "length":
            steps = length_sweep(task, [length for length in LENGTHS if length <= longest])
        case "blocks":
            steps = block_sweep(task, blocks_of(device))
        case "totals":
            steps = totals_sweep(task)
        case _:
            steps = sparsity_sweep(task)
    found = list(_told(name, steps))
    options = [] if figure.dropout is None else [f"dropout {figure.dropout:g}"]
    return Sweep(
        kind=figure.kind,
        spec_name=task.spec.name,
        head_dim=task.setting.head_dim,
        element=task.setting.element,
        device=device_name(device),
        target=task.target.name,
        options=(*options, *(["padding mask"] if figure.padding else [])),
        points=tuple(each for each in found if isinstance(each, Point)),
        absent=tuple(each for each in found if isinstance(each, Absent)),
        of_code=of_code(),
    )


def of_code() -> str:
    """The day, and the commit that runs."""
    day = time.strftime("%Y-%m-%d")
    asked = ["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--abbrev=7"]
    try:
        found = subprocess.run(asked, capture_output=True, text=True, check=False).stdout.strip()
    except OSError:  # there is no git
        found = ""
    return f"{day}, commit {found}" if found else day


def task_of(name: str, device: str, seconds: float) -> Task:
    """What is swept for a figure."""
    figure = FIGURES[name]
    (spec,) = parse_file(ROOT / "specs" / f"{figure.spec}.attn").specs
    return task_for(
        spec,
        figure.shapes[device],
        peers=figure.peers,
        device=device,
        budget=seconds,
        dropout=figure.dropout,
        padding=figure.padding,
    )


def blocks_of(device: str) -> tuple[int, ...]:
    """The sizes of blocks; tiles of 16 leave a GPU's warps without work."""
    return BLOCKS if device == "cpu" else (32, 64, 128)


def _told(name: str, steps: Iterator[Found]) -> Iterator[Found]:
    """Says what was measured, as it comes."""
    for each in steps:
        what = "forward+backward" if each.backward else "forward"
        if isinstance(each, Point):
            print(f"{name}: {each.label}, {each.who}, {what}: {1e3 * each.seconds.median:.3f} ms", flush=True)
        else:
            print(f"{name}: {each.label}, no {each.who}: {each.reason}", flush=True)
        yield each


def compiled_ahead(names: Sequence[str]) -> None:
    """Every CUDA kernel of these figures into the cache, all at once: one after the other takes minutes."""
    context = multiprocessing.get_context("spawn")
    wanted: list[tuple[AttentionSpec, ElementType, str]] = []
    for name in names:
        task = task_of(name, "cuda", 0.0)
        wanted.append((task.spec, task.setting.element, task.target.name))
        if name == "blocks":
            tiles = [with_tile(task.spec, task.setting.element, block) for block in blocks_of("cuda")]
            wanted += [(spec, task.setting.element, task.target.name) for spec in tiles]
    with concurrent.futures.ProcessPoolExecutor(min(len(wanted), os.cpu_count() or 1), mp_context=context) as pool:
        list(pool.map(_compile, *zip(*wanted, strict=True)))


def _compile(spec: AttentionSpec, element: ElementType, target: str) -> None:
    from flashgen.compiler.compiled import assembled, compiled

    try:
        assembled([compiled(analyse(spec, spec.head_dims[0]), GPUS[target], part=Part(element))])
    except SpecError as error:  # a tile that does not fit is left out of the figure, with its reason
        print(error.diagnostics[0].message)


# -- drawing -----------------------------------------------------------------------------------------------------------


def draw(sweep: Sweep, path: Path) -> None:
    """PNG and SVG beside the data."""
    for suffix in FORMATS:
        picture = path.with_suffix(f".{suffix}")
        save_plot(sweep, picture)
        if picture.stat().st_size > MOST_BYTES:
            raise SystemExit(f"{picture} takes {picture.stat().st_size} bytes, {MOST_BYTES} are allowed")


def write_page(out: Path) -> None:
    """OUT/README.md: every figure that there is, and how it was made."""
    lines = [
        "# Figures",
        "",
        "The experiments of the FlashAttention paper (Dao et al., 2022, arXiv:2205.14135). Below each picture stand",
        "the spec, the machine and the commit that was measured; kernels may have changed since. The numbers are in",
        "the data. `make figures` measures and draws a CPU's, `python -m tools.benchmarks.figures --device cuda` a",
        "GPU's; `--draw` draws data again.",
    ]
    for device, heading in (("cuda", "GPU"), ("cpu", "CPU")):
        for name, figure in FIGURES.items():
            lines += ["", f"## {heading}: {figure.title}", ""]
            data = out / device / f"{name}.json"
            if not data.is_file():
                lines += ["Unmeasured."]
                continue
            sweep = Sweep.from_json(json.loads(data.read_text(encoding="utf-8")))
            place = f"{device}/{name}"
            lines += [f"![{heading}: {name}]({place}.png)", ""]
            lines += [f"{caption(sweep)}. [SVG]({place}.svg), [data]({place}.json)."]
            lines += ["", *totals_table(sweep)] if figure.kind == "totals" else []
            lines += ["", left_out(sweep)] if sweep.absent else []
    (out / "README.md").write_text("\n".join(lines) + "\n", encoding="utf-8")


def left_out(sweep: Sweep) -> str:
    """What was not measured, and why, in a sentence; at each place for the first reason."""
    reasons: dict[tuple[str, str], dict[str, None]] = {}
    for each in sweep.absent:
        why = "it would take more time than there was" if "it would take about" in each.reason else each.reason
        reasons.setdefault((each.who, why), {})[each.label] = None
    told = (f"{who} at {', '.join(labels)} ({why})" for (who, why), labels in reasons.items())
    return f"Not measured: {'; '.join(told)}."


def totals_table(sweep: Sweep) -> list[str]:
    """The table on the left of Figure 2 in Markdown: forward with backward, a column for each that was measured."""
    points = [point for point in sweep.points if point.backward]
    lines = ["| forward + backward | " + " | ".join(point.who for point in points) + " |"]
    lines.append("|---|" + "---|" * len(points))
    cells: dict[str, Sequence[float | None]] = {
        "GFLOP of the matrix products": [None if point.flops is None else point.flops * 1e-9 for point in points],
        f"HBM bytes, predicted for {sweep.target} (GB)": [
            None if point.hbm_bytes is None else point.hbm_bytes * 1e-9 for point in points
        ],
        "run time (ms)": [1e3 * point.seconds.median for point in points],
    }
    for name, values in cells.items():
        lines.append(f"| {name} | {' | '.join('' if value is None else f'{value:.3g}' for value in values)} |")
    return lines


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, draw, and write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--only", type=lambda text: tuple(text.split(",")), default=tuple(FIGURES))
    parser.add_argument("--seconds", type=float, default=660.0, help="for all figures together")
    parser.add_argument("--longest", type=int, default=LENGTHS[-1], help="N of the sweep over lengths")
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "figures")
    parser.add_argument("--draw", action="store_true", help="measure nothing; draw what was measured before")
    chosen = parser.parse_args(arguments)
    if unknown := set(chosen.only) - set(FIGURES):
        parser.error(f"there is no figure {', '.join(sorted(unknown))}; known: {', '.join(FIGURES)}")
    if chosen.device == "cuda" and not chosen.draw and not cuda_is_there():
        parser.error("PyTorch finds no GPU here")
    begin = time.perf_counter()
    if not chosen.draw:
        if chosen.device == "cuda":
            compiled_ahead(chosen.only)
        whole = sum(FIGURES[name].share for name in chosen.only)
        for name in chosen.only:
            spent = time.perf_counter() - begin
            left = max(chosen.seconds - spent, 1.0) * FIGURES[name].share / whole
            whole -= FIGURES[name].share
            sweep = measured(name, chosen.device, left, chosen.longest)
            path = chosen.out / chosen.device / f"{name}.json"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps(sweep.to_json(), indent=1) + "\n", encoding="utf-8")
    try:
        for path in sorted(chosen.out.glob("*/*.json")):
            draw(Sweep.from_json(json.loads(path.read_text(encoding="utf-8"))), path)
    except PlottingMissing as error:
        print(f"{error}; the data is there, and `--draw` draws it where matplotlib is")
    write_page(chosen.out)
    print(f"{chosen.out}: {time.perf_counter() - begin:.0f} s")


if __name__ == "__main__":
    main()
