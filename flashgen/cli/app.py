"""The command group, and the one place where a user's mistake becomes a message and an exit code.

Exit codes: 0 fine, 1 the spec or the result is wrong, 2 wrong usage. Results go to stdout, all else to stderr.
"""

from __future__ import annotations

import errno
import io
import sys
import warnings
from typing import Any

import click

from flashgen.cli.build import build, check, import_
from flashgen.cli.console import (
    INTERRUPTED,
    JSON_WANTED,
    exit_code,
    fail,
    is_plain,
    note,
    print_json_error,
    show_diagnostics,
    tool,
    tools,
)
from flashgen.cli.machine import cache, completion, devices, doctor
from flashgen.cli.options import VARIABLE
from flashgen.cli.plan import plan
from flashgen.cli.show import show
from flashgen.cli.verify import tune, verify
from flashgen.diagnostics import SpecError
from flashgen.version import __version__

# Of RuntimeErrors of torch.
_TOO_LARGE = ("allocate memory", "Storage size calculation overflowed", "Overflow when unpacking")


class Commands(click.Group):
    """A group that turns the library's errors into messages and exit codes."""

    def main(self, *args: Any, **extra: Any) -> Any:
        """Run a process. Characters that a terminal's encoding lacks, and names that are no text, are escaped."""
        for stream in (sys.stdout, sys.stderr):
            if isinstance(stream, io.TextIOWrapper):
                stream.reconfigure(errors="backslashreplace")
        return super().main(*args, **{"complete_var": VARIABLE, **extra})

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Those of the package, and the tools of a checkout."""
        return sorted({*super().list_commands(ctx), *(name for name, _ in tools())})

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """A command by its name; tools are looked for where the package has none of this name."""
        found = super().get_command(ctx, cmd_name) or tool(cmd_name)
        return found if isinstance(found, click.Command) else None  # "plan --ranks" names a part of a command

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Notes for errors how the results are to be printed."""
        ctx.meta[JSON_WANTED] = "--json" in args
        ctx.color = False if is_plain() else ctx.color
        return super().parse_args(ctx, args)

    def invoke(self, ctx: click.Context) -> object:
        """Run the command. An error that nobody can expect of a user passes through, with its traceback."""
        try:
            with warnings.catch_warnings():
                warnings.showwarning = lambda message, *_, **__: note(f"warning: {message}")
                return super().invoke(ctx)
        except SpecError as error:
            show_diagnostics(error.diagnostics, error.sources)
            code = exit_code(error.diagnostics)
            print_json_error(error.diagnostics[0].message, code, error.diagnostics)
            ctx.exit(code)
        except click.ClickException as error:
            print_json_error(error.format_message(), error.exit_code)
            raise  # click says it on stderr
        except KeyboardInterrupt:
            fail("interrupted", INTERRUPTED)
        except (click.exceptions.Exit, click.Abort, BrokenPipeError):
            raise  # click knows what to do
        except Exception as error:
            explained = _explained(error)
            if explained is None:
                raise
            fail(*explained)


def _explained(error: Exception) -> tuple[str, int] | None:
    """A message and an exit code: 1 where the result is wrong, 2 where the machine lacks something or refuses."""
    from flashgen.compiler.package.folder import FolderRefused
    from flashgen.picture.plotting import PlottingMissing
    from flashgen.targets.device_table import DeviceFileError
    from flashgen.toolchains.cpp import CompileFailed, CompilerMissing

    if isinstance(error, CompileFailed):
        return str(error), 1
    if isinstance(error, CompilerMissing | DeviceFileError | FolderRefused | PlottingMissing):
        return str(error), 2
    if isinstance(error, OSError):
        unnamed = "what was to be written: " if error.errno in (errno.ENOSPC, errno.EFBIG, errno.EDQUOT) else ""
        place = f"'{error.filename}': " if error.filename else unnamed
        return f"{place}{error.strerror or error}", 2
    if isinstance(error, MemoryError) or any(words in str(error) for words in _TOO_LARGE):
        return "there is not enough memory for this; choose a smaller --shape", 2
    return None


@click.group(cls=Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="flashgen")
def main() -> None:
    """Compile attention specs (.attn) to PyTorch operators."""


for command in (check, build, verify, plan, show, tune, import_, devices, cache, doctor, completion):
    main.add_command(command)
