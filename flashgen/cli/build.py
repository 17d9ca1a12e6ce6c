"""``flashgen build``: writes the generated packages, or says that they are not up to date."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from flashgen.cli.console import note, print_json, progress
from flashgen.cli.options import TARGETS, Constant, json_option, set_option, spec_arguments

if TYPE_CHECKING:
    from flashgen.compiler.building import BuildResult


@click.command(short_help="Write the generated operators.")
@spec_arguments
@click.option(
    "-o",
    "--output",
    type=click.Path(file_okay=False, path_type=Path),
    default=Path("generated"),
    show_default=True,
    metavar="DIR",
    help="Each attention becomes the package DIR/<name>/.",
)
@click.option(
    "--target",
    "targets",
    type=TARGETS,
    show_default="sources for cpu, sm_80, sm_90a",
    metavar="NAME,...",
    help="What to generate for: cpu, and GPU architectures such as sm_80. Those that are named get binaries, too, "
    "which NVRTC makes without a GPU.",
)
@set_option
@click.option(
    "--deterministic",
    is_flag=True,
    help="Binaries for GPUs hold the kernels of calls with deterministic=True, too.",
)
@click.option("--check", is_flag=True, help="Write nothing; exit with 1 if a folder is not what would be written.")
@click.option(
    "--force",
    is_flag=True,
    help="Write into a folder that flashgen did not write, and over its files that were edited; touches no others.",
)
@json_option
def build(
    files: tuple[Path, ...],
    output: Path,
    targets: tuple[str, ...] | None,
    constants: tuple[tuple[str, Constant], ...],
    deterministic: bool,
    check: bool,
    force: bool,
    as_json: bool,
) -> None:
    """Compile specs: write a Python package of operator and sources for each attention."""
    from flashgen.compiler.building import build_files

    how = {"check": check, "force": force, "deterministic": deterministic}
    built = build_files(files, output=output, targets=targets, constants=dict(constants), **how)
    results = list(progress(built, "building"))
    stale = [result for result in results if result.changed]
    for lost in dict.fromkeys(sentence for result in results for sentence in result.rejected):
        note(f"passed over: {lost}")
    if not check:
        for sentence in dict.fromkeys(sentence for result in results for sentence in result.left):
            note(f"left out: {sentence}")
        if targets is None or "cpu" in targets:
            _warn_without_compiler()
    if as_json:
        print_json(
            [
                {
                    "name": result.name,
                    "folder": str(result.folder),
                    "files": [str(file) for file in result.files],
                    "changed": [str(file) for file in result.changed],
                    "bytes": result.size,
                    "seconds": result.seconds,
                    "rejected": list(result.rejected),
                    "refusal": result.refusal,
                    "left_out": list(result.left),
                }
                for result in results
            ]
        )
    else:
        for result in results:
            _print(result, check=check)
    for result in results:
        if result.refusal is not None:
            note(f"flashgen build would refuse: {result.refusal}")
    if check and stale:
        note(
            f"{len(stale)} of {len(results)} folders are not what would be written; run flashgen build without --check"
        )
        sys.exit(1)


def _warn_without_compiler() -> None:
    from flashgen.toolchains.cpp import CompilerMissing, find_compiler

    try:
        find_compiler()
    except CompilerMissing as error:
        note(f"warning: nothing was compiled; here the operators run as PyTorch code, which is slow: {error}")


def _print(result: BuildResult, *, check: bool) -> None:
    if check:
        for file in result.changed:
            click.echo(f"differs: {file}")
        if not result.changed:
            click.echo(f"{result.name}: {result.folder} is up to date")
        return
    counted = f"{len(result.files)} files, {len(result.changed)} changed, {result.size / 1e3:.0f} kB"
    click.echo(f"{result.name}: {result.folder} ({counted}, {result.seconds:.2f} s)")
    for file in result.files:
        click.echo(f"  {file.relative_to(result.folder)}")
