"""``flashgen bench``: times against peers, taken in the same run."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from flashgen.cli.console import note, print_json, print_table, progress
from flashgen.cli.options import (
    Constant,
    OneOf,
    SomeOf,
    backend_option,
    chosen_specs,
    element_of,
    json_option,
    loaded_operators,
    name_option,
    picture_path,
    read_numbers,
    read_seconds,
    set_option,
    shape_option,
    spec_argument,
)
from flashgen.ir.shape import Shape
from tools.benchmarks.sweep_command import BUDGET, KINDS, Request, run_sweeps
from tools.benchmarks.sweep_command import DEFAULT_PEERS as SWEEP_PEERS

if TYPE_CHECKING:
    from flashgen.tuning.tune import Spread
    from tools.benchmarks.bench import Comparison

PEER_NAMES = ("sdpa", "standard", "rabe_staats", "flex", "dense")
BLOCK_SPARSE = "block_sparse"  # flashgen itself: it computes less
DEFAULT_PEERS = ("sdpa", "dense")  # FlexAttention compiles for half a minute


@click.command(short_help="Time against PyTorch in the same run.")
@spec_argument
@click.option(
    "--vs",
    "peers",
    type=SomeOf("peer", lambda: (*PEER_NAMES, BLOCK_SPARSE)),
    default=None,
    show_default=f"{','.join(DEFAULT_PEERS)}; by length {','.join(SWEEP_PEERS['length'])}",
    metavar="NAME,...",
    help="Whom to compare with.",
)
@click.option("--device", type=click.Choice(("cpu", "cuda")), default="cpu", show_default=True, help="Where to run.")
@click.option(
    "--sweep", type=click.Choice(KINDS), default=None, help="Measure by length, blocks or sparsity, or all totals."
)
@click.option("--lengths", type=read_numbers("length"), default=None, metavar="N,...", help="Of the sweep by length.")
@click.option("--blocks", type=read_numbers("block"), default=None, metavar="N,...", help="Of the sweep by blocks.")
@click.option(
    "--budget",
    type=read_seconds,
    default=None,
    metavar="SECONDS",
    help=f"What a sweep may take, about; default: {BUDGET:g}.",
)
@click.option(
    "--dropout",
    type=click.FloatRange(min=0, max=1, max_open=True),
    default=None,
    metavar="P",
    help="Sweep with this drop probability instead of the spec's.",
)
@click.option("--padding", is_flag=True, help="Sweep with a padding mask beside the spec's own.")
@click.option(
    "--plot",
    type=picture_path,
    default=None,
    metavar="FILE",
    help="Draw the sweep into a .png, .svg or .pdf.",
)
@click.option(
    "--dtype",
    type=OneOf("dtype", lambda: ("f32", "bf16", "f16")),
    default=None,
    metavar="NAME",
    help="f32, bf16 or f16; default: the first of the spec.",
)
@name_option
@backend_option
@shape_option
@set_option
@json_option
def bench(
    file: Path,
    peers: tuple[str, ...] | None,
    device: str,
    sweep: str | None,
    lengths: tuple[int, ...] | None,
    blocks: tuple[int, ...] | None,
    budget: float | None,
    dropout: float | None,
    padding: bool,
    plot: Path | None,
    dtype: str | None,
    name: str | None,
    backend: str | None,
    shape: Shape | None,
    constants: tuple[tuple[str, Constant], ...],
    as_json: bool,
) -> None:
    """Time a spec forward, and forward with backward, beside its peers.

    Peers are sdpa, flex (compiled FlexAttention), standard (the paper's Algorithm 0), rabe_staats (chunks of sqrt(Nk)
    keys under checkpoints) and dense (any spec by PyTorch's operators). All take turns with a float32 matrix product
    of 2048 x 2048, and every speed is a share of its speed. Ratios are medians over rounds, with quartiles.

    --sweep draws the paper's figures: run time and memory by length (block_sparse is flashgen with a butterfly of
    blocks), run time and HBM bytes by the size of blocks, run time by the share of blocks kept, and as totals flops,
    HBM bytes and run time of one shape. Ctrl-C keeps what was measured.
    """
    from flashgen.tuning.tune import cuda_is_there

    if peers is not None and BLOCK_SPARSE in peers and sweep != "length":
        raise click.UsageError(f"'{BLOCK_SPARSE}' computes other pairs than the spec: it belongs to --sweep length")

    if device == "cuda" and not cuda_is_there():
        raise click.BadParameter("PyTorch finds no GPU here", param_hint="'--device'")
    if sweep is not None:
        request = Request(
            kind=sweep,
            peers=peers,
            dtype=dtype,
            shape=shape,
            device=device,
            backend=backend,
            lengths=lengths,
            blocks=blocks,
            budget=BUDGET if budget is None else budget,
            dropout=dropout,
            padding=padding,
            plot=plot,
            as_json=as_json,
        )
        run_sweeps(chosen_specs(file, name, None if sweep == "length" else shape, constants), request)
        return
    of_sweeps = {"--plot": plot, "--dropout": dropout, "--padding": padding or None, "--lengths": lengths}
    for option, given in {**of_sweeps, "--blocks": blocks, "--budget": budget}.items():
        if given is not None:
            raise click.UsageError(f"'{option}' belongs to a sweep: add --sweep {', '.join(KINDS)}")
    from tools.benchmarks.bench import bench as compare

    everything: dict[str, list[Comparison]] = {}
    for op in loaded_operators(file, name, backend, shape, constants):
        steps = compare(op, shape=shape, dtype=element_of(op.spec, dtype), peers=peers or DEFAULT_PEERS, device=device)
        everything[op.spec.name] = list(progress(steps, f"timing {op.spec.name}"))
    if as_json:
        print_json({name: [_as_dict(entry) for entry in entries] for name, entries in everything.items()})
        return
    for title, comparisons in everything.items():
        _print(title, comparisons)
        for peer, reason in dict.fromkeys(pair for entry in comparisons for pair in entry.absent):
            note(f"no {peer} for '{title}': {reason}")
        for entry in comparisons:
            for peer, seconds in () if entry.backward else entry.first_call_seconds:
                note(f"{peer} at head_dim {entry.head_dim} compiled for {seconds:.1f} s, outside the times")


def _print(title: str, comparisons: Sequence[Comparison]) -> None:
    columns = ["head_dim", "dtype", "B,H,Hkv,Nq,Nk", "pass", "who", "ms", "quartiles", "× flashgen", "quartiles"]
    columns += ["GFLOP/s", *dict.fromkeys(f"of {entry.gemm_name}" for entry in comparisons[:1])]
    rows: list[tuple[str, ...]] = []
    for entry in comparisons:
        place = (str(entry.head_dim), str(entry.dtype), str(entry.shape), _pass_name(entry))
        for times in entry.times:
            numbers = (
                f"{times.seconds.median * 1e3:.2f}",
                _quartiles(times.seconds, 1e3),
                f"{times.ratio.median:.2f}",
                _quartiles(times.ratio, 1.0),
                f"{entry.speed(times) / 1e9:.1f}",
                f"{entry.of_gemm(times):.0%}",
            )
            rows.append((*place, times.name, *numbers))
            place = ("", "", "", "")
        rows.append(())
    print_table(title, columns, rows, left=["dtype", "pass", "who"])
    if comparisons:
        speeds = sorted(entry.gemm_speed / 1e9 for entry in comparisons)
        rounds = sorted(entry.gemm.rounds for entry in comparisons)
        first = comparisons[0]
        note(
            f"{first.gemm_name}: {speeds[0]:.0f} to {speeds[-1]:.0f} GFLOP/s; {first.threads} threads; "
            f"medians of {rounds[0]} to {rounds[-1]} rounds; FLOPs of the pairs that the mask keeps"
        )


def _quartiles(spread: Spread, factor: float) -> str:
    return f"{spread.low * factor:.2f}–{spread.high * factor:.2f}"


def _pass_name(entry: Comparison) -> str:
    return "forward+backward" if entry.backward else "forward"


def _as_dict(entry: Comparison) -> dict[str, object]:
    return {
        "head_dim": str(entry.head_dim),
        "dtype": str(entry.dtype),
        "shape": dataclasses.astuple(entry.shape),
        "pass": _pass_name(entry),
        "flops": entry.flops,
        "threads": entry.threads,
        "times": [
            dataclasses.asdict(times) | {"gflops": entry.speed(times) / 1e9, "of_gemm": entry.of_gemm(times)}
            for times in entry.times
        ],
        "gemm": {
            **dataclasses.asdict(entry.gemm.seconds),
            "name": entry.gemm_name,
            "gflops": entry.gemm_speed / 1e9,
        },
        "first_call_seconds": dict(entry.first_call_seconds),
        "absent": dict(entry.absent),
    }
