"""The page about transformers says what happens: its Python runs in one go."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.documents.pages import blocks


def test_the_page_runs(repository: Path) -> None:
    page = (repository / "docs" / "transformers.md").read_text()
    code = "\n".join(block.text for block in blocks(page, "python"))
    subprocess.run([sys.executable, "-c", code], check=True, timeout=280)
