"""``flashgen bench --sweep``: the paper's experiments as a table, as JSON and as a plot."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import click

from flashgen.cli.console import INTERRUPTED, note, print_json, print_table, progress
from flashgen.cli.options import element_of
from flashgen.ir.shape import Shape
from flashgen.ir.spec import AttentionSpec

if TYPE_CHECKING:
    from tools.benchmarks.sweep import Found, Point, Sweep
    from tools.benchmarks.sweeps import Task

KINDS = ("length", "blocks", "sparsity", "totals")
DEFAULT_SHAPES = {
    "length": Shape(1, 8, 8, 0, 0),
    "blocks": Shape(1, 8, 8, 1024, 1024),
    "sparsity": Shape(1, 4, 4, 8192, 8192),
    "totals": Shape(1, 16, 16, 1024, 1024),
}
DEFAULT_PEERS = {
    "length": ("standard", "rabe_staats", "sdpa", "flex", "block_sparse"),
    "blocks": (),
    "sparsity": (),
    "totals": ("standard", "rabe_staats"),
}
BUDGET = 300.0  # seconds
_AGAINST = {"length": "× flashgen", "blocks": "× planner", "sparsity": "× densest", "totals": "× flashgen"}
_PLACES = {"length": "N", "blocks": "B_r × B_c", "sparsity": "pairs kept", "totals": "B,H,Hkv,Nq,Nk"}


@dataclass(frozen=True)
class Request:
    """What was asked for on the command line; None: the sweep's own default."""

    kind: str
    peers: tuple[str, ...] | None
    dtype: str | None
    shape: Shape | None
    device: str
    backend: str | None
    lengths: tuple[int, ...] | None
    blocks: tuple[int, ...] | None
    budget: float
    dropout: float | None
    padding: bool
    plot: Path | None
    as_json: bool


def run_sweeps(specs: tuple[AttentionSpec, ...], request: Request) -> None:
    """Every spec in turn. An interruption keeps what was measured, and then ends the program."""
    if request.plot is not None:
        from flashgen.picture.plotting import require

        require()
    if request.plot is not None and len(specs) > 1:
        names = ", ".join(spec.name for spec in specs)
        raise click.UsageError(f"the file holds several attentions ({names}); choose one by --name for '--plot'")
    found: dict[str, Sweep] = {}
    interrupted = False
    for spec in specs:
        found[spec.name], interrupted = _run(spec, request)
        if interrupted:
            note("interrupted; this is what was measured until then")
            break
    if request.as_json:
        print_json({name: sweep.to_json() for name, sweep in found.items()})
    for name, sweep in found.items():
        if not request.as_json:
            _print(sweep)
        for reason in dict.fromkeys(f"no {each.who} at {each.label}: {each.reason}" for each in sweep.absent):
            note(f"'{name}': {reason}")
        if request.plot is not None and sweep.points:
            from tools.benchmarks.plots import save_plot

            save_plot(sweep, request.plot)
            note(f"wrote {request.plot}")
    if interrupted:
        sys.exit(INTERRUPTED)


def _run(spec: AttentionSpec, request: Request) -> tuple[Sweep, bool]:
    """The sweep, and whether it was interrupted."""
    from tools.benchmarks.report import device_name
    from tools.benchmarks.sweep import Absent, Point, Sweep

    task = _task(spec, request)
    steps: Iterator[Found] = _generator(request)(task)
    found: list[Found] = []
    interrupted = False
    try:
        for each in progress(steps, f"measuring {spec.name}"):
            found.append(each)  # noqa: PERF402 - each stays when the next is interrupted
    except KeyboardInterrupt:
        interrupted = True
    options = [f"dropout {task.setting.drop:g}"] if task.setting.drop else []
    options += ["padding mask"] if request.padding else []
    sweep = Sweep(
        kind=request.kind,
        spec_name=spec.name,
        head_dim=task.setting.head_dim,
        element=task.setting.element,
        device=device_name(request.device),
        target=task.target.name,
        options=tuple(options),
        points=tuple(each for each in found if isinstance(each, Point)),
        absent=tuple(each for each in found if isinstance(each, Absent)),
    )
    return sweep, interrupted


def _task(spec: AttentionSpec, request: Request) -> Task:
    from tools.benchmarks.sweeps import task_for

    try:
        return task_for(
            spec,
            request.shape or DEFAULT_SHAPES[request.kind],
            element=element_of(spec, request.dtype),
            peers=DEFAULT_PEERS[request.kind] if request.peers is None else request.peers,
            device=request.device,
            backend=request.backend,
            budget=request.budget,
            dropout=request.dropout,
            padding=request.padding,
        )
    except ValueError as error:  # a GPU that nothing is generated for
        raise click.UsageError(str(error)) from error


def _generator(request: Request) -> Callable[[Task], Iterator[Found]]:
    from tools.benchmarks import sweeps

    def steps(task: Task) -> Iterator[Found]:
        match request.kind:
            case "length":
                return sweeps.length_sweep(task, request.lengths or sweeps.LENGTHS)
            case "blocks":
                return sweeps.block_sweep(task, request.blocks or sweeps.BLOCKS)
            case "totals":
                return sweeps.totals_sweep(task)
        return sweeps.sparsity_sweep(task)

    return steps


# -- what is shown -----------------------------------------------------------------------------------------------------


def _print(sweep: Sweep) -> None:
    from tools.benchmarks.plots import caption
    from tools.benchmarks.sweeps import proportional

    multiples = proportional(sweep.points) if sweep.kind == "sparsity" else {}
    columns = [_PLACES[sweep.kind], "pass", "who", "ms", "quartiles", _AGAINST[sweep.kind], "MiB", "HBM MiB"]
    columns += ["× proportional"] if multiples else []
    columns += ["GFLOP"] if sweep.kind == "totals" else []
    rows: list[list[str]] = []
    previous: tuple[str, bool] | None = None
    for point in sweep.points:
        here = (f"{point.series} {point.label}", point.backward)
        if previous is not None and previous[0] != here[0]:
            rows.append([])
        place = (_label(point), "forward+backward" if point.backward else "forward")
        cells = [
            *(place if here != previous else ("", "")),
            point.who,
            f"{point.seconds.median * 1e3:.2f}",
            f"{point.seconds.low * 1e3:.2f}–{point.seconds.high * 1e3:.2f}",
            f"{point.ratio.median:.2f}",
            _mib(point.memory_bytes),
            _mib(point.hbm_bytes),
            *([f"{multiples[point]:.2f}"] if multiples else []),
            *(["" if point.flops is None else f"{point.flops / 1e9:.2f}"] if sweep.kind == "totals" else []),
        ]
        rows.append(cells)
        previous = here
    print_table(f"{sweep.spec_name}, by {sweep.kind}", columns, rows, left=["pass", "who"])
    for line in caption(sweep).splitlines():
        click.echo(line)
    click.echo(
        f"MiB: the peak beyond the inputs. HBM MiB: predicted for {sweep.target}; of 'standard' and "
        "'rabe_staats' as the paper counts."
    )


def _label(point: Point) -> str:
    return f"{point.label} (planner)" if point.series == "planner" else point.label


def _mib(size: int | None) -> str:
    return "" if size is None else f"{size / 2**20:.1f}"
