"""The pages of the documentation as what they show: specs, Python, commands with their output.

A page is run from top to bottom in a folder of its own, as a reader would:

    ```attn                    is a file without errors and warnings; with title="NAME" it is written to NAME, too
    ```python                  goes on where the page's Python ended before
    ```console                 commands after "$ ", with exit code 0 or an error that is shown; below stands the output
    ```text title="prints"     has been printed by the page's Python
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from flashgen.compiler.pipeline import check_file
from tests.cli.helpers import flashgen

_BLOCK = re.compile(r"^```(\w*)(?: title=\"(.*?)\")?\n(.*?)^```$", re.MULTILINE | re.DOTALL)
# A command and what is printed, which may be nothing.
_COMMAND = re.compile(r"^\$ (.*)\n((?:(?!\$ ).*\n)*)", re.MULTILINE)
_UPDATE = "UPDATE_EXPECTED" in os.environ


@dataclass(frozen=True)
class Block:
    """One fenced block; ``line`` is that of its first line in the page."""

    language: str
    title: str
    text: str
    line: int


def blocks(page: str, *languages: str) -> list[Block]:
    """The blocks of a page, of these languages or all."""
    found = [
        Block(match[1], match[2] or "", match[3], page.count("\n", 0, match.start(3)) + 1)
        for match in _BLOCK.finditer(page)
    ]
    return [block for block in found if not languages or block.language in languages]


def run_page(page: Path, capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    """Run a page in the current folder, and return the names that its Python has at the end.

    ``UPDATE_EXPECTED=1`` writes into the page what its commands print; read it before you commit it.
    """
    text = page.read_text(encoding="utf-8")
    names: dict[str, Any] = {"__name__": "page"}
    printed = ""
    for number, block in enumerate(blocks(text)):
        place = f"{page.name}:{block.line}"
        if block.language == "attn":
            file = Path(block.title or f"block_{number}.attn")
            file.write_text(block.text, encoding="utf-8")
            assert not check_file(file).warnings, place
        elif block.language == "python":
            run_python(block, page.stem, names)
            printed += capsys.readouterr().out
        elif block.language == "console":
            shown = run_console(block)
            assert shown == block.text or _UPDATE, place
            text = text.replace(f"```console\n{block.text}```", f"```console\n{shown}```")
        elif block.title == "prints":
            assert block.text in printed, place
    if _UPDATE:
        page.write_text(text, encoding="utf-8")
    return names


def run_python(block: Block, stem: str, names: dict[str, Any]) -> None:
    """Run Python of a page; lines are those of the page, in tracebacks and in flashgen's own messages."""
    file = Path(f"{stem}_{block.line}.py").absolute()
    source = "\n" * (block.line - 1) + block.text
    file.write_text(source, encoding="utf-8")
    exec(compile(source, str(file), "exec"), names)


def run_console(block: Block) -> str:
    """The block with what its commands print now, where it shows what they print."""
    lines = []
    for command, output in _COMMAND.findall(block.text):
        words = shlex.split(command, comments=True)
        if words[0] == "flashgen" and "|" not in words:
            done = flashgen(*words[1:])
            code, stdout, stderr = done.code, done.stdout, done.stderr
        else:
            defined = f'flashgen() {{ {shlex.quote(sys.executable)} -m flashgen "$@"; }}\n{command}'
            shell = subprocess.run(defined, shell=True, capture_output=True, text=True, timeout=60, check=False)
            code, stdout, stderr = shell.returncode, shell.stdout, shell.stderr
        assert code == 0 or output, f"{command}: {stderr}"
        lines += [f"$ {command}\n", (stdout + stderr if output else "")]
    return "".join(lines)


class OwnPackages:
    """While it lasts, ``generated`` is what a page has built in the current folder, not the repository's."""

    def __enter__(self) -> None:
        self._path = list(sys.path)
        self._modules = self._take()
        sys.path.insert(0, str(Path.cwd()))

    def __exit__(self, *_: object) -> None:
        self._take()
        sys.modules.update(self._modules)
        sys.path[:] = self._path

    @staticmethod
    def _take() -> dict[str, Any]:
        names = [name for name in sys.modules if name.partition(".")[0] == "generated"]
        return {name: sys.modules.pop(name) for name in names}
