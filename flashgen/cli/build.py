"""``flashgen build``: writes the generated packages, or says that they are not up to date."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from flashgen.cli.console import note, print_json, progress
from flashgen.cli.options import Constant, json_option, read_names, set_option, spec_arguments


def _targets() -> tuple[str, ...]:
    from flashgen.pipeline import TARGETS

    return TARGETS


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
    type=read_names("target", _targets),
    default=("cpu",),
    show_default="cpu",
    metavar="NAME,...",
    help="What to generate for: cpu, and GPU architectures such as sm_80, whose binaries are made without a GPU.",
)
@set_option
@click.option("--check", is_flag=True, help="Write nothing; exit with 1 if a folder is not what would be written.")
@json_option
def build(
    files: tuple[Path, ...],
    output: Path,
    targets: tuple[str, ...],
    constants: tuple[tuple[str, Constant], ...],
    check: bool,
    as_json: bool,
) -> None:
    """Compile specs: write a Python package of operator and sources for each attention."""
    from flashgen.pipeline import build_file

    built = (
        result
        for file in files
        for result in build_file(file, output=output, targets=targets, constants=dict(constants), check=check)
    )
    results = list(progress(built, "building"))
    stale = [result for result in results if result.changed]
    for lost in dict.fromkeys(sentence for result in results for sentence in result.rejected):
        note(f"passed over: {lost}")
    if not check and "cpu" in targets:
        _warn_without_compiler()
    if as_json:
        print_json(
            [
                {
                    "name": result.name,
                    "folder": str(result.folder),
                    "files": [str(file) for file in result.files],
                    "changed": [str(file) for file in result.changed],
                    "seconds": result.seconds,
                    "rejected": list(result.rejected),
                }
                for result in results
            ]
        )
    else:
        for result in results:
            _print(result.name, result.folder, result.files, result.changed, result.seconds, check=check)
    if check and stale:
        note(
            f"{len(stale)} of {len(results)} folders are not what would be written; run flashgen build without --check"
        )
        sys.exit(1)


def _warn_without_compiler() -> None:
    from flashgen.runtime.compiler import CompilerMissing, find_compiler

    try:
        find_compiler()
    except CompilerMissing as error:
        note(f"warning: nothing was compiled; here the operators run as PyTorch code, which is slow: {error}")


def _print(
    name: str,
    folder: Path,
    files: tuple[Path, ...],
    changed: tuple[Path, ...],
    seconds: float,
    *,
    check: bool,
) -> None:
    if check:
        for file in changed:
            click.echo(f"differs: {file}")
        if not changed:
            click.echo(f"{name}: {folder} is up to date")
        return
    click.echo(f"{name}: {folder} ({len(files)} files, {len(changed)} changed, {seconds:.2f} s)")
    for file in files:
        click.echo(f"  {file.name}")
