"""``flashgen completion``: what a shell needs to complete commands, options, names and files; and what completes them.

A shell asks ``flashgen`` itself, by an environment variable that click reads. What it prints then is the answer, so
that nothing may be raised or said on the way: who does not know completes nothing.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

import click
from click.shell_completion import CompletionItem, get_completion_class

from flashgen.store import gallery

VARIABLE = "_FLASHGEN_COMPLETE"
SHELLS = ("bash", "zsh", "fish")
_BEHIND_BASH = """
# A folder is not the end of a name.
_flashgen() {
    _flashgen_completion "$@"
    if [[ ${#COMPREPLY[@]} -eq 1 && ${COMPREPLY[0]} == */ ]]; then compopt -o nospace; fi
}
complete -o nosort -F _flashgen flashgen
"""


@click.command(short_help="Print what completes commands in a shell.")
@click.argument("shell", type=click.Choice(SHELLS))
@click.pass_context
def completion(ctx: click.Context, shell: str) -> None:
    """Print the code that completes commands, options, names of the gallery, targets, devices and files in a shell.

    \b
    bash, in ~/.bashrc:  eval "$(flashgen completion bash)"
    zsh, in ~/.zshrc:    eval "$(flashgen completion zsh)"
    fish, once:          flashgen completion fish > ~/.config/fish/completions/flashgen.fish

    In ~/.zshrc the line stands behind the one that runs compinit.
    """  # noqa: D301 - click reads \b as what it is
    found = get_completion_class(shell)
    assert found is not None
    text = found(ctx.find_root().command, {}, "flashgen", VARIABLE).source()
    click.echo(text + (_BEHIND_BASH if shell == "bash" else ""))


def names(known: Iterable[str], incomplete: str, help_text: str | None = None) -> list[CompletionItem]:
    """Those that begin like this."""
    return [CompletionItem(name, help=help_text) for name in known if name.startswith(incomplete)]


def spec_files(incomplete: str) -> list[CompletionItem]:
    """Specs of the gallery by name, and files."""
    files = CompletionItem(incomplete, type="file")
    plain = names(gallery.names(), incomplete, "a spec that comes with flashgen")
    if not plain:
        return [files]
    if not os.environ.get(VARIABLE, "").startswith("bash"):
        return [*plain, files]
    return plain + names(_here(), incomplete)  # bash forgets names where it is told to look for files


def _here() -> list[str]:
    found = sorted(each for each in Path().iterdir() if not each.name.startswith("."))
    return [f"{each}/" if each.is_dir() else str(each) for each in found if each.is_dir() or each.suffix == ".attn"]
