"""What `make docs` builds is whole: navigation, links between pages, the gallery, the commands.

All of it without the libraries that build the site.
"""

from __future__ import annotations

import re
import tomllib
import unicodedata
from pathlib import Path

import pytest

from examples.gallery_page import PAGE, page
from flashgen.cli import main
from tests.conftest import ROOT

DOCS = ROOT / "docs"
CONFIGURATION = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
ARCHITECTURE = "flashgen/ARCHITECTURE.md"
CONTRIBUTING = "CONTRIBUTING.md"
ELSEWHERE = ("README.md", "CHANGELOG.md", "tools/benchmarks/README.md", "specs/LANGUAGE.md", ARCHITECTURE, CONTRIBUTING)
PAGES = sorted(file.relative_to(ROOT).as_posix() for file in DOCS.rglob("*.md"))


def entries(key: str) -> list[str]:
    """The pages under a key of mkdocs.yml, a list of YAML or a block of patterns."""
    section = re.search(rf"^{key}:.*\n((?:[ #].*\n)+)", CONFIGURATION, re.MULTILINE)
    assert section
    return re.findall(r"[\w/]+\.md$", section[1], re.MULTILINE)


def test_every_page_has_its_place_in_the_navigation() -> None:
    listed = entries("nav")
    assert len(listed) == len(set(listed))
    for entry in listed:
        assert (DOCS / entry).is_file() or (ROOT / entry).is_file(), entry
    assert {f"docs/{each}" for each in listed + entries("exclude_docs")} >= set(PAGES)


@pytest.mark.parametrize("document", [*ELSEWHERE, *PAGES])
def test_every_link_leads_somewhere(document: str) -> None:
    file = ROOT / document
    for target, anchor in re.findall(r"\]\(([^)#\s]*)(?:#([^)\s]*))?\)", without_code(file.read_text())):
        if "://" in target:
            continue
        linked = file.parent / target if target else file
        # A site has pages; folders are shown by a host of repositories.
        there = linked.exists() if document == "README.md" else linked.is_file()
        assert there, f"{document} links to '{target}'"
        if anchor:
            assert anchor in anchors(linked), f"{document} links to '{target}#{anchor}'"


def without_code(text: str) -> str:
    return re.sub(r"^```.*?^```$|`[^`\n]*`", "", text, flags=re.MULTILINE | re.DOTALL)


def anchors(file: Path) -> set[str]:
    """The anchors of a page's headings, as MkDocs and GitHub make them."""
    text = re.sub(r"^```.*?^```$", "", file.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    found = set()
    for title in re.findall(r"^#+ (.*)$", text, re.MULTILINE):
        plain = unicodedata.normalize("NFKD", title).encode("ascii", "ignore").decode().lower()
        found.add(re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", plain).strip()))
    return found


def test_the_gallery_is_that_of_the_specs(specs: Path) -> None:
    assert PAGE.read_text(encoding="utf-8") == page(specs), "docs/gallery.md is not up to date: make gallery"


def test_every_command_is_described() -> None:
    described = (DOCS / "commands.md").read_text(encoding="utf-8")
    for name in main.commands:
        missing = (
            f"docs/commands.md has no row or no section 'flashgen {name}'; UPDATE_EXPECTED=1 fills in what it prints"
        )
        assert f"[`flashgen {name}" in described, missing
        assert f"## flashgen {name}\n\n```console\n$ flashgen {name} --help\n" in described, missing


def test_what_contributors_are_told_to_touch_and_run_is_there() -> None:
    """Files and folders in quotes and in commands, targets of make, commits."""
    text = (ROOT / CONTRIBUTING).read_text(encoding="utf-8")
    quoted = re.findall(r"`([^`\n]+)`", re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL))
    commands = [
        line.split("#")[0]
        for block in re.findall(r"^```\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
        for line in block.splitlines()
    ]
    places = [each for part in (*quoted, *commands) for each in part.split() if re.match(r"(\w+)/", each)]
    places += [each for each in quoted if re.fullmatch(r"[\w.-]+\.(md|toml|yaml)", each)]
    assert len(places) > 40
    for place in places:
        assert (ROOT / place).exists(), f"{CONTRIBUTING} names '{place}'"
    for part in quoted:
        for name in re.findall(r"^(\w+\.(?:py|h|cuh))$", part):
            assert list(ROOT.glob(f"flashgen/**/{name}")) or list(ROOT.glob(f"templates/**/{name}")), name
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for target in re.findall(r"\bmake ([a-z-]+)", text):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), f"{CONTRIBUTING} says 'make {target}'"
    assert len(re.sub(r"\|[-|]+\|", "", text).split()) <= 900


def test_the_architecture_can_be_read_in_one_sitting() -> None:
    text = (ROOT / ARCHITECTURE).read_text(encoding="utf-8")
    assert len(text.split()) <= 1500
    (picture,) = re.findall(r"^```\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    assert "──parse──▶" in picture
    rooms = [room for row in re.findall(r"^\| (\*\*.*?) \|", text, re.MULTILINE) for room in re.findall(r"(\w+)/", row)]
    contract = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["importlinter"][
        "contracts"
    ][0]
    for layer in contract["layers"]:  # from the top; rooms of one floor in any order
        floor = {room.removeprefix("flashgen.") for room in layer.split(" | ")}
        assert set(rooms[: len(floor)]) == floor
        rooms = rooms[len(floor) :]
    assert not rooms


def test_what_is_checked_before_a_commit_is_what_the_gate_checks() -> None:
    """The same ruff, and exceptions of clang-format for headers that there are."""
    hooks = (ROOT / ".pre-commit-config.yaml").read_text(encoding="utf-8")
    (pinned,) = re.findall(r"^ruff==(.+)$", (ROOT / "constraints.txt").read_text(encoding="utf-8"), re.MULTILINE)
    assert set(re.findall(r"\[ruff==(.+)\]", hooks)) == {pinned}
    excluded = [
        f"templates/{folder}/{name}.{suffix}"
        for folder, names, suffix in re.findall(r"^ +([\w/]+)/\(?([\w|]+)\)?\\\.(h|cuh)\|?$", hooks, re.MULTILINE)
        for name in names.split("|")
    ]
    assert len(excluded) > 20
    for header in excluded:
        assert (ROOT / header).is_file(), f".pre-commit-config.yaml excludes '{header}'"
