"""``flashgen verify``, ``tune``: errors against the float64 reference, beside PyTorch's; tiles measured here."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from flashgen.cli.console import INTERRUPTED, note, print_json, print_json_error, print_table, progress
from flashgen.cli.options import (
    Constant,
    OneOf,
    backend_option,
    check_countable,
    chosen_specs,
    element_of,
    emulated_target_option,
    json_option,
    loaded_operators,
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
    from flashgen.verification import Case, F8Case, F8Row, Row

    _Errors = tuple[float | str, ...]
    _Case = tuple[tuple[object, ...], Sequence[tuple[Row | F8Row, _Errors]]]


@click.command(short_help="Compare results with the float64 reference.")
@spec_argument
@name_option
@backend_option
@emulated_target_option
@shape_option
@click.option(
    "--order",
    type=click.IntRange(1, 2),
    default=1,
    help="2: tangents and gradients of gradients, too.",
)
@click.option("--f8", is_flag=True, help="q, k and v of 8 bits, too, as where dtype names f8e4m3.")
@set_option
@json_option
def verify(
    file: Path,
    name: str | None,
    backend: str | None,
    target: str | None,
    shape: Shape | None,
    order: int,
    f8: bool,
    constants: tuple[tuple[str, Constant], ...],
    as_json: bool,
) -> None:
    """Run a spec forward and backward and compare with the float64 reference.

    With --order 2 also tangents of o and lse (t_o, t_lse) and gradients of gradients (ddq, …, dd_o, dd_lse); a line
    says which kernels ran.

    For q, k and v of 8 bits a table has the error against float64, beside that of bfloat16 and that of one factor a
    tensor. What the op adds to the rounding of its inputs has a tolerance.

    Exits with 1 if a result is beyond tolerance.
    """
    from flashgen import verification

    reports: dict[str, list[Case]] = {}
    narrow: dict[str, list[F8Case]] = {}
    for op in loaded_operators(file, name, backend, shape, constants, target):
        shapes = (shape,) if shape else verification.default_shapes(op.spec)
        device = "cuda" if backend == "cuda" else "cpu"
        steps = verification.verify(op, shapes, device=device, order=order)
        reports[op.spec.name] = list(progress(steps, f"verifying {op.spec.name}"))
        if f8 and not op.spec.takes_f8:
            raise click.UsageError(f"--f8: '{op.spec.name}' names no f8e4m3 in its dtype statement")
        if f8 or (op.spec.takes_f8 and op.spec.dtypes is not None):
            of_8_bits = verification.verify_f8(op, shapes, device=device)
            narrow[op.spec.name] = list(progress(of_8_bits, f"verifying {op.spec.name} of 8 bits"))
    rows: list[Row | F8Row] = [row for cases in reports.values() for case in cases for row in case.rows]
    rows += [row for f8_cases in narrow.values() for f8_case in f8_cases for row in f8_case.rows]
    failed = sum(not row.ok for row in rows)
    if as_json:
        found: dict[str, list[dict[str, object]]] = {}
        for title, cases in reports.items():
            moved = [{name: dataclasses.asdict(each) for name, each in case.hbm_bytes.items()} for case in cases]
            both = zip(cases, moved, strict=True)
            found[title] = [_as_dict(x, x.dtype, hbm_bytes=y, derived_by=x.derived_by) for x, y in both]
            found[title] += [_as_dict(x, "f8e4m3", wide=str(x.wide)) for x in narrow.get(title, ())]
        print_json(found)
    else:
        for title, cases in reports.items():
            _print(title, cases)
            if title in narrow:
                _print_f8(title, narrow[title])
    note(f"{len(rows) - failed} of {len(rows)} tensors within tolerance")
    if failed:
        sys.exit(1)


def _print(title: str, cases: Sequence[Case]) -> None:
    columns = ["head_dim", "dtype", "B,H,Hkv,Nq,Nk", "tensor", "flashgen", "PyTorch", "tolerance"]
    places = [(case.head_dim, case.dtype, case.shape) for case in cases]
    errors = [[(row, (row.error, row.baseline, row.tolerance)) for row in case.rows] for case in cases]
    _print_errors(title, columns, zip(places, errors, strict=True))
    for derived_by in dict.fromkeys(case.derived_by for case in cases if case.derived_by is not None):
        tangents, gradients = derived_by
        note(f"tangents by {tangents}; gradients of gradients by {gradients}")
    if any(case.hbm_bytes for case in cases):
        columns = ["head_dim", "dtype", "B,H,Hkv,Nq,Nk", "pass", "predicted", "counted"]
        rows = [
            (str(case.head_dim), str(case.dtype), str(case.shape), name, f"{moved.predicted:,}", f"{moved.counted:,}")
            for case in cases
            for name, moved in case.hbm_bytes.items()
        ]
        print_table("bytes between the kernels and the GPU's memory", columns, rows, left=["dtype", "pass"])


def _print_f8(title: str, cases: Sequence[F8Case]) -> None:
    columns = ["head_dim", "B,H,Hkv,Nq,Nk", "tensor", "8 bits", "wider", "a factor a tensor"]
    columns += ["own rounding", "tolerance"]
    places = [(case.head_dim, case.shape) for case in cases]
    errors = [
        [(x, (x.error, f"{x.wide:.1e} ({case.wide})", x.per_tensor, x.rounding, x.tolerance)) for x in case.rows]
        for case in cases
    ]
    _print_errors(f"{title} of 8 bits", columns, zip(places, errors, strict=True))


def _print_errors(title: str, columns: Sequence[str], cases: Iterable[_Case]) -> None:
    """A line for each row; the first one of a case says which case it is."""
    lines: list[tuple[str, ...]] = []
    for place, rows in cases:
        places = list(map(str, place))
        for row, errors in rows:
            numbers = (each if isinstance(each, str) else f"{each:.1e}" for each in errors)
            lines.append((*places, row.tensor, *numbers, "ok" if row.ok else "FAIL"))
            places = [""] * len(places)
        lines.append(())
    title = f"{title}: relative error against the float64 reference"
    print_table(title, [*columns, ""], lines, left=["dtype", "tensor", ""])


def _as_dict(case: Case | F8Case, dtype: object, **more: object) -> dict[str, object]:
    return {
        "head_dim": str(case.head_dim),
        "dtype": str(dtype),
        "shape": dataclasses.astuple(case.shape),
        "tensors": [{**dataclasses.asdict(row), "ok": row.ok} for row in case.rows],
        **more,
    }


# flashgen tune --------------------------------------------------------------------------------------------------------


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
        print_json({title: _tuning_as_dict(tuning) for title, tuning in found.items()})


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
        _print_tuning(job, tuning)
    if interrupted:
        said = (
            f"interrupted after {len(steps)} of {total}; what was measured is kept, and the next run goes on from there"
        )
        note(said)
        print_json_error(said, INTERRUPTED)
        sys.exit(INTERRUPTED)
    return tuning


def _print_tuning(job: Job, tuning: Tuning) -> None:
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


def _tuning_as_dict(tuning: Tuning) -> dict[str, object]:
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
