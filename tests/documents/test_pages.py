"""Every page of docs/ says what happens: its specs, its Python and its commands are run as they stand."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.conftest import ROOT
from tests.documents.pages import OwnPackages, blocks, run_page

DOCS = ROOT / "docs"
# Run where transformers is (tests/integrations), by test_error_page.py, and compared as a whole by test_site.py.
ELSEWHERE = {"transformers.md", "errors.md", "gallery.md", "notebook.md"}
PAGES = sorted(
    file.name
    for file in DOCS.glob("*.md")
    if file.name not in ELSEWHERE and blocks(file.read_text(encoding="utf-8"), "attn", "python", "console")
)


@pytest.mark.parametrize("name", PAGES)
def test_the_page_runs(
    name: str, specs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(specs, tmp_path / "specs")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    with OwnPackages():
        run_page(DOCS / name, capsys)
