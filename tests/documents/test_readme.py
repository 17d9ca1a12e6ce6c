"""What the README shows is what happens: its commands come first, its spec is the gallery's, its Python runs."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.documents.pages import OwnPackages, blocks, run_page


@pytest.fixture(scope="module")
def readme(repository: Path) -> Path:
    return repository / "README.md"


def test_the_two_commands_come_first(readme: Path) -> None:
    first = blocks(readme.read_text())[0].text
    assert [line.split("#")[0].strip() for line in first.splitlines()] == ["make demo", "make test"]


def test_its_spec_is_that_of_the_gallery(readme: Path, specs: Path) -> None:
    (shown,) = blocks(readme.read_text(), "attn")
    assert shown.text in (specs / "alibi.attn").read_text()


def test_it_runs(
    readme: Path, specs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(specs, tmp_path / "specs")
    monkeypatch.chdir(tmp_path)
    with OwnPackages():
        names = run_page(readme, capsys)
    assert names["slope"].grad is not None


def test_it_says_what_decides_and_no_more(readme: Path) -> None:
    assert len(readme.read_text().splitlines()) <= 120
