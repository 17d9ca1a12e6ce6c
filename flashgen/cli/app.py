"""The command group, and the one place where a user's mistake becomes a message and an exit code.

Exit codes: 0 fine, 1 the spec or the result is wrong, 2 wrong usage. Results go to stdout, all else to stderr.
"""

from __future__ import annotations

import warnings

import click

from flashgen.cli.bench import bench
from flashgen.cli.build import build
from flashgen.cli.check import check
from flashgen.cli.console import exit_code, fail, note, show_diagnostics
from flashgen.cli.machine import cache, devices
from flashgen.cli.plan import plan
from flashgen.cli.show import show
from flashgen.cli.tune import tune
from flashgen.cli.verify import verify
from flashgen.diagnostics import SpecError
from flashgen.version import __version__


class Commands(click.Group):
    """A group that turns the library's errors into messages and exit codes."""

    def invoke(self, ctx: click.Context) -> object:
        """Run the command. An error that nobody can expect of a user passes through, with its traceback."""
        try:
            with warnings.catch_warnings():
                warnings.showwarning = _show_warning
                return super().invoke(ctx)
        except SpecError as error:
            show_diagnostics(error.diagnostics, error.sources)
            ctx.exit(exit_code(error.diagnostics))
        except (click.ClickException, click.exceptions.Exit, click.Abort, BrokenPipeError):
            raise  # click knows what to do
        except Exception as error:
            explained = _explained(error)
            if explained is None:
                raise
            fail(*explained)


def _explained(error: Exception) -> tuple[str, int] | None:
    """A message and an exit code: 1 where the result is wrong, 2 where the machine lacks something or refuses."""
    from flashgen.picture.plotting import PlottingMissing
    from flashgen.plan.device_table import DeviceFileError
    from flashgen.runtime.compiler import CompileFailed, CompilerMissing

    if isinstance(error, CompileFailed):
        return str(error), 1
    if isinstance(error, CompilerMissing | DeviceFileError | PlottingMissing):
        return str(error), 2
    if isinstance(error, OSError):
        place = f"'{error.filename}': " if error.filename else ""
        return f"{place}{error.strerror or error}", 2
    if isinstance(error, MemoryError) or "allocate memory" in str(error):  # torch raises a RuntimeError
        return "there is not enough memory for this; choose a smaller --shape", 2
    return None


@click.group(cls=Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="flashgen")
def main() -> None:
    """Compile attention specs (.attn) to PyTorch operators."""


for command in (check, build, verify, plan, show, bench, tune, devices, cache):
    main.add_command(command)


def _show_warning(message: Warning | str, *_place: object, **_more: object) -> None:
    note(f"warning: {message}")
