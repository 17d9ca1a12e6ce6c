"""The page of errors: every code has a section, whose example gives that code and whose cure gives no diagnostic.

A section holds an example (a spec, commands, or a mod), what is shown, and the cure: the example mended, or which line
is another one, or goes. ``UPDATE_EXPECTED=1`` writes into the page what is shown; read it before you commit it.
"""

from __future__ import annotations

import os
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from flashgen.diagnostics import CODES, SpecError
from flashgen.flex import to_spec
from tests.cli.helpers import flashgen
from tests.conftest import ROOT
from tests.documents.pages import Block, blocks, run_console, run_python

PAGE = ROOT / "docs" / "errors.md"
PACKAGE = ROOT / "flashgen"
KEPT = "Nothing reports this code today."
_MENDED = re.compile(r"Line\s(\d+)\smended:\s`(.+?)`\.|Mended\swithout\sline\s(\d+)\.", re.DOTALL)
_SECTION = re.compile(r"^### ([EW]\d{3}): (.*)\n((?:(?!##).*\n)*)", re.MULTILINE)


def sections() -> dict[str, tuple[str, str]]:
    """By code: its words, and its text."""
    return {code: (words, text) for code, words, text in _SECTION.findall(PAGE.read_text(encoding="utf-8"))}


SECTIONS = sections()
REPORTED = [code for code, (_, text) in SECTIONS.items() if KEPT not in text]


def test_every_code_has_its_section_in_the_words_of_the_catalogue() -> None:
    assert {code: words for code, (words, _) in SECTIONS.items()} == dict(CODES)


def test_what_nothing_reports_is_reported_by_nothing() -> None:
    sources = "".join(file.read_text(encoding="utf-8") for file in PACKAGE.rglob("*.py"))
    for code in set(CODES) - set(REPORTED):
        assert not re.search(rf'\(\s*"{code}"', sources), f"{code} is reported: docs/errors.md needs an example"


@pytest.fixture
def folder(specs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the gallery, as a reader's clone has it."""
    (tmp_path / "specs").symlink_to(specs)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "100")
    return tmp_path


@pytest.mark.parametrize("code", REPORTED)
def test_the_example_gives_the_code_and_the_cure_does_not(code: str, folder: Path) -> None:
    text = SECTIONS[code][1]
    example, *rest = blocks(text)
    if example.language == "console":
        shown, expected, cures = run_console(example), example.text, rest
    else:
        shown, expected, cures = diagnostics(example), rest[0].text, rest[1:]
    if "UPDATE_EXPECTED" in os.environ:
        page = PAGE.read_text(encoding="utf-8")
        PAGE.write_text(page.replace(text, text.replace(expected, shown, 1)), encoding="utf-8")
    else:
        assert shown == expected
    assert code in shown
    cures += [mended(example, each) for each in _MENDED.finditer(text)]
    for cure in cures:
        told = run_console(cure) if cure.language == "console" else diagnostics(cure)
        assert not re.search(r"[EW]\d{3}", told), told
    assert cures or code in ("E002", "E008", "E010"), "a cure, where an example is not made by a command"


def mended(example: Block, cure: re.Match[str]) -> Block:
    """The example with the line that the page writes in the place of another, or without one."""
    lines = example.text.splitlines()
    at = int(cure[1] or cure[3]) - 1
    indent = lines[at][: -len(lines[at].lstrip())]
    lines[at : at + 1] = [indent + " ".join(cure[2].split())] if cure[2] else []
    return replace(example, text="\n".join(lines) + "\n")


def diagnostics(block: Block) -> str:
    """What ``flashgen check`` says of a spec, or the error of a Python block and of the ``mod`` that it defines."""
    if block.language == "attn":
        Path("spec.attn").write_text(block.text, encoding="utf-8")
        return flashgen("check", "spec.attn").stdout
    names: dict[str, Any] = {"__name__": "page"}
    try:
        run_python(replace(block, line=1), "mods", names)
        if "mod" in names:
            to_spec(score_mod=names["mod"])
    except SpecError as error:
        return str(error).replace(f"{Path.cwd()}/mods_1.py", "mods.py") + "\n"
    return ""
