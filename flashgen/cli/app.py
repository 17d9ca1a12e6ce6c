"""The command group, and the one place where a user's mistake becomes a message and an exit code.

Exit codes: 0 fine, 1 the spec or the result is wrong, 2 wrong usage. Results go to stdout, all else to stderr.
"""

from __future__ import annotations

import warnings

import click

from flashgen.cli.bench import bench
from flashgen.cli.build import build
from flashgen.cli.check import check
from flashgen.cli.console import exit_code, fail, near_matches, note, show_diagnostics
from flashgen.cli.machine import cache, devices
from flashgen.cli.plan import plan
from flashgen.cli.verify import verify
from flashgen.diagnostics import SpecError
from flashgen.version import __version__


class Commands(click.Group):
    """A group that suggests near matches and turns the library's errors into messages."""

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Find the command; where there is none, name those that are spelled alike."""
        if args and self.get_command(ctx, args[0]) is None and not args[0].startswith("-"):
            ctx.fail(f"No such command '{args[0]}'.{near_matches(args[0], self.list_commands(ctx))}")
        return super().resolve_command(ctx, args)

    def invoke(self, ctx: click.Context) -> object:
        """Run the command; a wrong spec exits with 1, a file that cannot be read or written with 2."""
        from flashgen.runtime.compiler import CompileFailed, CompilerMissing

        try:
            with warnings.catch_warnings():
                warnings.showwarning = _show_warning
                return super().invoke(ctx)
        except SpecError as error:
            show_diagnostics(error.diagnostics, error.sources)
            ctx.exit(exit_code(error.diagnostics))
        except CompilerMissing as error:
            fail(str(error), code=2)
        except CompileFailed as error:
            fail(str(error), code=1)
        except BrokenPipeError:
            raise  # click ends the process quietly
        except OSError as error:
            place = f"'{error.filename}': " if error.filename else ""
            fail(f"{place}{error.strerror or error}", code=2)


@click.group(cls=Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="flashgen")
def main() -> None:
    """Compile attention specs (.attn) to PyTorch operators."""


for command in (check, build, verify, plan, bench, devices, cache):
    main.add_command(command)


def _show_warning(message: Warning | str, *_place: object, **_more: object) -> None:
    note(f"warning: {message}")
