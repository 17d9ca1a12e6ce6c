"""``flashgen tune``: measure the best candidates on the device at hand, and keep the winner for later plans."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from flashgen.cli.console import INTERRUPTED, note, print_json, print_json_error, print_table, progress
from flashgen.cli.options import (
    Constant,
    OneOf,
    check_countable,
    chosen_specs,
    element_of,
    json_option,
    name_option,
    read_seconds,
    set_option,
    shape_option,
    spec_argument,
)
from flashgen.ir.shape import Shape
from flashgen.ir.spec import AttentionSpec
from flashgen.ir.types import ElementType

if TYPE_CHECKING:
    from flashgen.compiler.tile_choices import TunedStore
    from flashgen.plan.measured import MeasuredPass, Tuning
    from flashgen.tuning.tune import Job, Step

DEFAULT_SHAPE = Shape(1, 8, 8, 2048, 2048)
_MOST_PAIRS = 2**25


@click.command(short_help="Measure tiles here and keep the best.")
@spec_argument
@click.option("--device", type=click.Choice(("cpu", "cuda")), default="cpu", show_default=True, help="Where to run.")
@click.option(
    "--dtype",
    type=OneOf("dtype", lambda: ("f32", "bf16", "f16")),
    metavar="NAME",
    help="f32, bf16 or f16; default: the first of the spec.",
)
@click.option(
    "--candidates",
    "most",
    type=click.IntRange(min=1),
    default=8,
    show_default=True,
    metavar="N",
    help="How many tiles to measure beside the planner's choice, for each pass.",
)
@click.option(
    "--seconds",
    type=read_seconds,
    metavar="N",
    default=3.0,
    show_default=True,
    help="What one candidate may take, about.",
)
@click.option("--again", is_flag=True, help="Measure anew what was measured before.")
@name_option
@shape_option
@set_option
@json_option
def tune(
    file: Path,
    device: str,
    dtype: str | None,
    most: int,
    seconds: float,
    again: bool,
    name: str | None,
    shape: Shape | None,
    constants: tuple[tuple[str, Constant], ...],
    as_json: bool,
) -> None:
    """Measure the candidates of a spec on the device at hand, and keep the winner.

    Every candidate takes turns with the planner's choice. Winners are kept by device, spec and class of shapes.
    Calls of later loads take the winner of the nearest class, as long as no size is more than four times as large or as
    small; others take the planner's. Tiles that the spec pins stay as they are. Ctrl-C keeps what was measured, and the
    next run goes on from there.
    """
    from flashgen.compiler.tile_choices import TunedStore
    from flashgen.toolchains.cpp import find_compiler
    from flashgen.tuning.tune import Job, cuda_is_there
    from flashgen.verification import fitting

    if device == "cuda" and not cuda_is_there():
        raise click.BadParameter("PyTorch finds no GPU here", param_hint="'--device'")
    if device == "cpu":
        find_compiler()  # without one nothing runs that has tiles
    store = TunedStore.default()
    found: dict[str, Tuning] = {}
    for spec in chosen_specs(file, name, shape, constants):
        chosen = shape or fitting(spec, DEFAULT_SHAPE, pairs=_MOST_PAIRS)
        if 0 in (chosen.batch, chosen.q_len, chosen.kv_len):
            raise click.BadParameter(f"at {chosen} there is nothing to measure", param_hint="'--shape'")
        check_countable(chosen)
        usual = ElementType.BF16 if device == "cuda" else ElementType.F32
        element = element_of(spec, dtype) or (spec.dtypes or (usual,))[0]
        for head_dim in spec.head_dims:
            job = Job(spec, head_dim, chosen, element, device, most, seconds)
            tuning = _run(job, store, again=again, quiet=as_json)
            if tuning is not None:
                found[f"{spec.name}, head_dim {head_dim}"] = tuning
    if as_json:
        print_json({title: _as_dict(tuning) for title, tuning in found.items()})


def _run(job: Job, store: TunedStore, *, again: bool, quiet: bool) -> Tuning | None:
    """Tune one head dimension and show it; an interruption ends the program after what it has is shown."""
    from flashgen.tuning.tune import tune as steps_of

    spec: AttentionSpec = job.spec
    for version in store.of_other_versions(job.variant, job.identity):
        note(f"'{spec.name}' was tuned by flashgen {version}, too; that is kept, and not used by this version")
    try:
        total = sum(len(found) - 1 for found in job.ranked().values())
    except ValueError as error:  # a GPU that nothing is generated for
        raise click.UsageError(str(error)) from error
    steps: list[Step] = []
    interrupted = False
    try:
        what = f"tuning {spec.name}, head_dim {job.head_dim}"
        for step in progress(steps_of(job, store, again=again), what, total):
            steps.append(step)  # noqa: PERF402 - each stays when the next is interrupted
    except KeyboardInterrupt:
        interrupted = True
    for step in steps:
        if step.measured is None:
            note(f"{step.pass_name} {step.candidate.tile} was left out: {step.reason}")
    recalled = sum(step.recalled for step in steps)
    if recalled:
        note(f"{recalled} of {total} candidates were measured before; --again measures them anew")
    tuning = store.tunings(job.variant, job.identity).get(job.shape_class)
    if tuning is not None and not quiet:
        _print(job, tuning)
    if interrupted:
        said = (
            f"interrupted after {len(steps)} of {total}; what was measured is kept, and the next run goes on from there"
        )
        note(said)
        print_json_error(said, INTERRUPTED)
        sys.exit(INTERRUPTED)
    return tuning


def _print(job: Job, tuning: Tuning) -> None:
    title = f"{job.spec.name}, head_dim {job.head_dim}, {tuning.shape_class}"
    columns = ["pass", "tile", "× planner", "quartiles", "predicted", ""]
    rows: list[tuple[str, ...]] = []
    for name, found in tuning.passes.items():
        mark = "planner, kept" if found.candidates and found.winner is None else "planner"
        rows.append((name, str(found.planner), "1.000", "", "1.000", mark))
        for each in sorted(found.candidates, key=lambda each: each.ratio):
            numbers = (f"{each.ratio:.3f}", f"{each.low:.3f}–{each.high:.3f}", f"{each.predicted:.3f}")
            rows.append(("", str(each.tile), *numbers, "kept" if each == found.winner else ""))
        rows.append(())
    print_table(title, columns, rows, left=["pass", "tile", ""])
    click.echo(f"  measured at {tuning.shape} on {job.identity}")
    for name, found in tuning.passes.items():
        click.echo(f"  {name}: {_verdict(found)}")


def _verdict(found: MeasuredPass) -> str:
    """What is taken, and how far the model was off."""
    if found.winner is None:
        said = f"the planner's choice, {found.planner}, stands: no other tile is faster"
    else:
        said = f"{found.tile} is taken; the planner's choice takes {found.loss:.1%} longer"
    if found.largest_error is not None:
        said += f"; the model is off by a factor of up to {found.largest_error:.2f}"
    if found.rank_correlation is not None:
        said += f"; it ranks the candidates with Spearman's ρ = {found.rank_correlation:.2f}"
        alike = sum(each.low <= 1.0 <= each.high for each in found.candidates)
        if 2 * alike > len(found.candidates):
            said += f", which says little: {alike} of {len(found.candidates)} take as long, as far as times scatter"
    return said


def _as_dict(tuning: Tuning) -> dict[str, object]:
    passes = {
        name: {
            "tile": str(found.tile),
            "loss_of_planner": found.loss,
            "largest_error_of_model": found.largest_error,
            "rank_correlation": found.rank_correlation,
        }
        for name, found in tuning.passes.items()
    }
    return {"found": passes, "tuning": tuning.to_json()}
