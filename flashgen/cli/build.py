"""``flashgen check``, ``build``, ``import``: diagnostics; generated packages; the spec that a mod means."""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from flashgen.cli.console import (
    diagnostic_as_dict,
    exit_code,
    near_matches,
    note,
    print_json,
    progress,
    show_diagnostics,
)
from flashgen.cli.options import (
    TARGETS,
    Constant,
    checked_arguments,
    json_option,
    near_files,
    set_option,
    spec_arguments,
)
from flashgen.diagnostics import Diagnostic, Source, SpecError
from flashgen.language.statements import MAX_HEAD_DIM

if TYPE_CHECKING:
    from flashgen.compiler.building import BuildResult
    from flashgen.compiler.reading import Verdict


@click.command(short_help="Check specs and print diagnostics.")
@checked_arguments
@set_option
@click.option(
    "--target",
    "targets",
    type=TARGETS,
    show_default="all are asked, and one has to take it",
    metavar="NAME,...",
    help="Ask these alone whether they take a spec; all of them have to.",
)
@json_option
def check(
    files: tuple[Path, ...],
    constants: tuple[tuple[str, Constant], ...],
    targets: tuple[str, ...] | None,
    as_json: bool,
) -> None:
    """Check specs and print every diagnostic.

    Every target is asked what it refuses: that is a warning where another takes the spec. Exits with 1 if there is an
    error; warnings alone exit with 0.
    """
    from flashgen.compiler.pipeline import check_file

    everything: list[dict[str, object]] = []
    errors = warnings = 0
    codes = set[int]()
    for file in files:
        names: tuple[str, ...] = ()
        verdicts: list[Verdict] = []
        diagnostics: Sequence[Diagnostic]
        sources: Sequence[Source]
        try:
            checked = check_file(file, dict(constants), targets, verdicts.append)
        except SpecError as error:
            hint = near_files(file).strip()
            diagnostics, sources = error.diagnostics, error.sources
            if hint:
                diagnostics = [replace(each, hints=(*each.hints, hint)) for each in diagnostics]
        else:
            names = tuple(spec.name for spec in checked.specs)
            diagnostics, sources = checked.warnings, checked.sources
        codes.add(exit_code(diagnostics))
        found = sum(diagnostic.severity == "error" for diagnostic in diagnostics)
        errors += found
        warnings += len(diagnostics) - found
        everything.append(
            {
                "file": str(file),
                "attentions": names,
                "diagnostics": [diagnostic_as_dict(entry) for entry in diagnostics],
                "targets": [
                    {
                        "target": each.target,
                        "attention": each.attention,
                        "takes": each.takes,
                        "refused": [diagnostic_as_dict(entry) for entry in each.refused],
                        "left_out": [diagnostic_as_dict(entry) for entry in each.left_out],
                    }
                    for each in verdicts
                ],
            }
        )
        if not as_json:
            # Where there is no spec to say anything about, a file that cannot be read, it is wrong usage.
            is_unread = any(each.code == "E001" for each in diagnostics)
            show_diagnostics(diagnostics, sources, err=is_unread)
    if as_json:
        print_json({"files": everything, "errors": errors, "warnings": warnings})
    note(f"{_count(len(files), 'file')} checked: {_count(errors, 'error')}, {_count(warnings, 'warning')}")
    sys.exit(min(codes - {0}, default=0))  # a wrong spec (1) weighs more than wrong usage (2)


def _count(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"


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


# From mods of FlexAttention -------------------------------------------------------------------------------------------


@click.command(name="import", short_help="Print the spec that a mod of FlexAttention means.")
@click.argument("mods", metavar="MODULE:FUNCTION...", nargs=-1, required=True)
@click.option(
    "--head-dim", type=click.IntRange(1, MAX_HEAD_DIM), default=64, show_default=True, help="The head dimension."
)
@click.option("--score", "kind", flag_value="score", help="FUNCTION is a score_mod, whatever its arguments.")
@click.option("--mask", "kind", flag_value="mask", help="FUNCTION is a mask_mod, whatever its arguments.")
@click.option("--name", help="The name of the attention.  [default: that of the functions]")
@json_option
def import_(mods: tuple[str, ...], head_dim: int, kind: str | None, name: str | None, as_json: bool) -> None:
    """Print the spec that one or two mods mean: a score_mod, a mask_mod, or both.

    A function with five arguments (score, b, h, q_idx, kv_idx) is a score_mod, one with four a mask_mod. MODULE is
    looked for here and where Python finds modules. Captured numbers become params with their values as defaults.
    """
    found: dict[str, Any] = {}
    for place in mods:
        mod = _loaded(place)
        role = f"{kind or _kind(place, mod)}_mod"
        if role in found:
            raise click.UsageError(f"'{place}' is another {role}; combine mods in Python")
        found[role] = mod
    from flashgen.flex import to_spec
    from flashgen.flex.specs import check_name

    if name is not None:
        try:
            check_name(name)
        except ValueError as error:
            raise click.UsageError(str(error)) from None
    text = to_spec(**found, head_dim=head_dim, name=name)
    if as_json:
        print_json({"spec": text})
    else:
        click.echo(text, nl=False)


def _loaded(place: str) -> Any:
    module, colon, names = place.partition(":")
    if not colon or not module or not names:
        raise click.UsageError(f"'{place}' is not of the form module:function")
    file = Path(module)
    if file.suffix == ".py":
        raise click.UsageError(f"'{module}' is a file; name the module: {'.'.join(file.with_suffix('').parts)}:{names}")
    sys.path.insert(0, str(Path.cwd()))
    try:
        found: Any = importlib.import_module(module)
    except ImportError as error:
        raise click.UsageError(f"module '{module}' cannot be imported: {error}") from None
    except Exception as error:
        raise click.UsageError(f"module '{module}' fails when imported: {type(error).__name__}: {error}") from None
    finally:
        sys.path.pop(0)
    for each in names.split("."):
        if not hasattr(found, each):
            raise click.UsageError(f"'{module}' has no '{names}'.{near_matches(each, dir(found))}")
        found = getattr(found, each)
    if not callable(found):
        raise click.UsageError(f"'{place}' is {type(found).__name__}, not a function")
    return found


def _kind(place: str, mod: Any) -> str:
    try:
        arguments = list(inspect.signature(mod).parameters.values())
    except (TypeError, ValueError):
        raise click.UsageError(f"the arguments that '{place}' takes are not known (--score, --mask)") from None
    places = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    count = sum(each.default is each.empty and each.kind in places for each in arguments)
    if count not in (4, 5):
        taken = "any number of" if any(each.kind is each.VAR_POSITIONAL for each in arguments) else count
        known = "a mask_mod takes 4, a score_mod 5 (--score, --mask)"
        raise click.UsageError(f"'{place}' takes {taken} argument{'s' * (taken != 1)}; {known}")
    return "score" if count == 5 else "mask"
