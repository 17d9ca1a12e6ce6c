"""What the README shows is what happens: its specs, its diagnostic, its Python, its gallery, its commands."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from flashgen.cli import main
from flashgen.language import parse_text
from tests.cli.helpers import flashgen_process


@pytest.fixture(scope="module")
def readme(repository: Path) -> str:
    return (repository / "README.md").read_text()


def blocks(page: str, language: str = "") -> list[str]:
    """The code blocks of one language."""
    return re.findall(rf"^```{language}\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)


def test_the_two_commands_come_first(readme: str) -> None:
    first = blocks(readme)[0]
    assert [line.split("#")[0].strip() for line in first.splitlines()] == ["make demo", "make test"]


def test_every_spec_is_that_of_the_gallery(readme: str, specs: Path) -> None:
    shown = [block for block in blocks(readme) if block.startswith("attention ")]
    assert len(shown) >= 2
    for block in shown:
        (spec,) = parse_text(block).specs
        assert block in (specs / f"{spec.name}.attn").read_text()


def test_the_diagnostic_is_real(readme: str, tmp_path: Path) -> None:
    (shown,) = (block for block in blocks(readme) if block.startswith("$ flashgen check"))
    command, _, output = shown.partition("\n")
    alibi = next(block for block in blocks(readme) if block.startswith("attention alibi"))
    (tmp_path / command.split()[-1]).write_text(alibi.replace("mask causal\n", "mask causall\n"))
    outcome = flashgen_process(*command.split()[2:], folder=tmp_path)
    assert outcome.stdout == output
    assert outcome.code == 1


def test_the_python_runs(readme: str, specs: Path, tmp_path: Path) -> None:
    shutil.copytree(specs, tmp_path / "specs")
    build = next(block for block in blocks(readme) if block.startswith("$ flashgen build"))
    assert flashgen_process(*build.split("#")[0].split()[2:], folder=tmp_path).code == 0
    (python,) = blocks(readme, "python")
    code = (
        f"import sys; sys.path.insert(0, '.')\n{python}\nassert slope.grad is not None and lse.shape == o.shape[:3]\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=tmp_path, timeout=200)


def test_the_gallery_is_complete(readme: str, specs: Path) -> None:
    listed = re.findall(r"^\| \[(\w+)\]\(specs/\w+\.attn\) \|", readme, re.MULTILINE)
    assert listed == sorted(file.stem for file in specs.glob("*.attn"))


def test_every_command_is_described(readme: str) -> None:
    for name in main.commands:
        assert f"`flashgen {name}" in readme, name


@pytest.mark.parametrize(
    "document", ["README.md", "CHANGELOG.md", "benchmarks/README.md", "specs/LANGUAGE.md", "flashgen/ARCHITECTURE.md"]
)
def test_every_link_leads_somewhere(repository: Path, document: str) -> None:
    page = repository / document
    for target in re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", page.read_text()):
        if "://" not in target:
            assert (page.parent / target).exists(), f"{document} links to '{target}'"
