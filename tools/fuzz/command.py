"""``flashgen fuzz``: random specs, or random calls of one, against the float64 reference."""

from __future__ import annotations

import dataclasses
import random
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import click

from flashgen.cli.console import note, print_json
from flashgen.cli.options import SPEC_FILE, OneOf, emulated_target_option, json_option, read_seconds

if TYPE_CHECKING:
    from tools.fuzz.campaign import Failure, Summary
    from tools.fuzz.draws import Draw, Machine

_BACKENDS = ("cpu", "emulator", "cuda", "tiled")
_SECONDS = 60.0
_ENOUGH = 20  # specs of which some are judged, whatever the seed
_OF_RANKS = ("cpu", "tiled")
_OF_A_CASE = {"cpu": 240.0, "emulator": 600.0, "cuda": 240.0, "tiled": 240.0}


@click.command(short_help="Judge random specs, or random calls of one.")
@click.argument("file", type=SPEC_FILE, required=False)
@click.option(
    "--backend",
    type=OneOf("backend", lambda: _BACKENDS),
    default="cpu",
    metavar="NAME",
    help="cpu, emulator, cuda, or tiled: as without a compiler (cpu).",
)
@emulated_target_option
@click.option("--seconds", type=read_seconds, metavar="N", default=None, help="How long (60, where no count is given).")
@click.option("--count", type=click.IntRange(min=1), default=None, help="How many specs, or calls of FILE.")
@click.option("--seed", type=click.IntRange(min=0), default=None, help="The first spec's; the next one adds 1.")
@click.option(
    "--ranks",
    type=click.IntRange(min=2, max=16),
    default=None,
    help="Spread calls over so many processes (gloo), with backend cpu or tiled.",
)
@click.option(
    "--doors", is_flag=True, help="Call through flex, flash and modules, too: bit for bit as the op (cpu or tiled)."
)
@click.option(
    "--jobs", type=click.IntRange(min=1), default=None, help="Specs that are judged at a time (2; of ranks 1)."
)
@click.option(
    "--corpus",
    type=click.Path(file_okay=False, path_type=Path),
    default=None,
    help="Keep what is wrong in this folder, as small as it gets, with its inputs.",
)
@click.option(
    "--attempts", type=click.IntRange(min=0), default=120, show_default=True, help="Smaller specs to try for a failure."
)
@json_option
def fuzz(
    file: Path | None,
    backend: str,
    target: str | None,
    seconds: float | None,
    count: int | None,
    seed: int | None,
    ranks: int | None,
    doors: bool,
    jobs: int | None,
    corpus: Path | None,
    attempts: int,
    as_json: bool,
) -> None:
    """Draw random specs and judge each: forward, every gradient, lse, repeats; with FILE random calls of its specs.

    A failure is cut down to a few lines. Where FILE is one that was kept, with its inputs beside it, these are judged
    again. Exits with 1 if something is wrong.
    """
    if file is not None and file.with_suffix(".json").is_file():
        _again(file, as_json=as_json)
        return
    from tools.fuzz.campaign import Limits, Summary, campaign
    from tools.fuzz.draws import Machine
    from tools.fuzz.workers import Workers

    if target is not None and backend != "emulator":
        raise click.UsageError(f"--target is for --backend emulator; '{backend}' runs on the machine at hand")
    if ranks is not None and (backend not in _OF_RANKS or file is not None):
        what = "FILE" if file is not None else f"--backend {backend}"
        raise click.UsageError(f"--ranks is for random specs on {' or '.join(_OF_RANKS)}, not for {what}")
    if doors and (backend not in _OF_RANKS or file is not None or ranks is not None):
        what = "FILE" if file is not None else f"--backend {backend}" if ranks is None else "--ranks"
        raise click.UsageError(f"--doors is for random specs on {' or '.join(_OF_RANKS)}, not for {what}")
    _check_machine(backend)
    machine = Machine(backend, (target or "sm_80") if backend == "emulator" else "")
    first = random.SystemRandom().randrange(2**31) if seed is None else seed
    limits = Limits(count, _SECONDS if seconds is None and count is None else seconds, attempts)
    drawing = _drawing(machine, file, ranks, doors=doors)
    again = f"flashgen fuzz {f'{file} ' if file else ''}--backend {backend}{f' --target {target}' if target else ''}"
    again += f" --ranks {ranks}" if ranks else " --doors" if doors else ""
    note(f"{machine}: seed {first}; '{again} --seed N --count 1' draws one again")
    summary, told = Summary(machine, first), 0
    with (
        tempfile.TemporaryDirectory(prefix="flashgen-fuzz-") as scratch,
        Workers(jobs or (1 if ranks else 2), _OF_A_CASE[backend] * (2 if ranks else 1), Path(scratch)) as workers,
    ):
        try:
            for summary in campaign(workers, machine, first, drawing, limits, corpus):
                for failure in summary.failures[told:]:
                    note(_told(failure))
                told = len(summary.failures)
                if summary.specs % 20 == 0:
                    note(_count(summary))
        except KeyboardInterrupt:
            note("ended by Ctrl-C")
    if as_json:
        print_json(_as_dict(summary))
    else:
        _print(summary)
    if summary.failures:
        sys.exit(1)
    if summary.specs > _ENOUGH and not summary.results:
        raise click.ClickException(f"all {summary.specs} specs were refused: nothing was judged")


def _again(file: Path, *, as_json: bool) -> None:
    """Judge what was kept, on the machines that it failed on."""
    from tools.fuzz.corpus import read_entry
    from tools.fuzz.workers import Workers

    try:
        kept = read_entry(file)
    except ValueError as error:
        raise click.UsageError(str(error)) from error
    with (
        tempfile.TemporaryDirectory(prefix="flashgen-fuzz-") as scratch,
        Workers(1, max(_OF_A_CASE.values()), Path(scratch)) as workers,
    ):
        found = {str(case.machine): workers.judge(case) for case in kept.cases}
    if as_json:
        print_json({machine: dataclasses.asdict(verdict) for machine, verdict in found.items()})
    else:
        for machine, verdict in found.items():
            said = [f"{each.kind}: {each.detail}" for each in verdict.findings] or [verdict.refused or "ok"]
            click.echo(f"{machine}: {'; '.join(said)}")
    if any(verdict.findings for verdict in found.values()):
        sys.exit(1)


def _check_machine(backend: str) -> None:
    """Raise where this one has no GPU, or no compiler, that a backend needs."""
    from flashgen.hosts.backends import gpu_at_hand
    from flashgen.toolchains.cpp import find_compiler

    if backend in ("cpu", "emulator"):
        find_compiler()
    if backend != "cuda":
        return
    try:
        gpu_at_hand()
    except ValueError as error:
        raise click.UsageError(str(error)) from error


def _drawing(machine: Machine, file: Path | None, ranks: int | None, *, doors: bool) -> Callable[[int], Draw]:
    """What a seed means: a spec, or calls of one of the file's."""
    from tools.fuzz.doors import draw_through_doors
    from tools.fuzz.draws import ELEMENTS, draw, draw_of_file
    from tools.fuzz.rank_draws import draw_over_ranks

    if doors:
        return lambda seed: draw_through_doors(seed, machine)
    if ranks is not None:
        return lambda seed: draw_over_ranks(seed, machine, ranks)
    if file is None:
        return lambda seed: draw(seed, machine)
    from flashgen.compiler.pipeline import check_file

    specs, path = check_file(file).specs, str(file.resolve())

    def of_file(seed: int) -> Draw:
        spec = specs[seed % len(specs)]
        elements = tuple(map(str, spec.dtypes)) if spec.dtypes else ELEMENTS
        return draw_of_file(seed, machine, path, spec.name, elements, dropout=spec.dropout is not None)

    return of_file


def _told(failure: Failure) -> str:
    where = f", kept as {failure.kept}" if failure.kept else ""
    what = f"seed {failure.seed}: {failure.kind}: {failure.detail}"
    return f"{what}\n{failure.text}\non {', '.join(failure.machines)}{where}\n"


def _count(summary: Summary) -> str:
    return (
        f"{summary.specs} specs in {summary.seconds:.0f} s: {len(summary.failures)} wrong, "
        f"{summary.specs - summary.judged} refused, {summary.results} results of which {summary.borderline} borderline"
    )


def _print(summary: Summary) -> None:
    click.echo(f"{summary.machine}, seed {summary.seed}: {_count(summary)}")
    for name, counts in (("ran", summary.kinds), ("refused", summary.refused)):
        for what, times in counts.most_common():
            click.echo(f"{name} {times:6d}  {what}")
    for failure in summary.failures:
        click.echo(f"wrong, seed {failure.seed}: {failure.kind}: {failure.detail.splitlines()[0]}")


def _as_dict(summary: Summary) -> dict[str, object]:
    return {
        "backend": summary.machine.backend,
        "target": summary.machine.target,
        "seed": summary.seed,
        "seconds": summary.seconds,
        "specs": summary.specs,
        "judged": summary.judged,
        "results": summary.results,
        "borderline": summary.borderline,
        "refused": dict(summary.refused),
        "kinds": dict(summary.kinds),
        "failures": [
            {**dataclasses.asdict(each), "kept": None if each.kept is None else str(each.kept)}
            for each in summary.failures
        ],
    }
