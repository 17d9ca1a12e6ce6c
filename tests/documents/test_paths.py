"""Files that comments and docstrings name are where they say."""

from __future__ import annotations

import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
# A file that is named, not a member (`x.h`) and not part of another name.
_PATH = re.compile(r"(?<![\w/.<{*-])((?:[\w-]+/)+[\w.-]+|\w{2,}(?:\.\w+)?)\.(py|h|cuh|cpp|jinja|toml|lark)\b(?!\()")
_COMMENT = re.compile(r"//[^\n]*|\{#.*?#\}", re.DOTALL)


def comments_of_templates(path: Path) -> Iterator[str]:
    yield from _COMMENT.findall(path.read_text(encoding="utf-8"))


def comments_of_python(path: Path) -> Iterator[str]:
    """Comments, and strings that stand alone in a line."""
    found = tokenize.generate_tokens(io.StringIO(path.read_text(encoding="utf-8")).readline)
    yield from (
        token.string
        for token in found
        if token.type == tokenize.COMMENT or (token.type == tokenize.STRING and token.string.startswith('"""'))
    )


def is_there(name: str, named_in: Path) -> bool:
    """From the root, the package, the templates or the folder of who names it; a bare name may be anywhere."""
    if "/" not in name:
        return any(any((ROOT / top).rglob(name)) for top in ("flashgen", "templates", "tests"))
    return any(
        (start / name).is_file()
        for start in (ROOT, ROOT / "flashgen", ROOT / "templates", named_in.parent, named_in.parents[1])
    )


def missing(path: Path, texts: Iterator[str]) -> list[str]:
    return [found[0] for text in texts for found in _PATH.finditer(text) if not is_there(found[0], path)]


def test_paths_in_templates() -> None:
    paths = [each for each in (ROOT / "templates").rglob("*") if each.is_file()]
    assert len(paths) > 50
    assert not {
        str(path.relative_to(ROOT)): gone for path in paths if (gone := missing(path, comments_of_templates(path)))
    }


def test_paths_in_docstrings() -> None:
    paths = sorted((ROOT / "flashgen").rglob("*.py"))
    assert not {
        str(path.relative_to(ROOT)): gone for path in paths if (gone := missing(path, comments_of_python(path)))
    }


@pytest.mark.parametrize(
    ("comment", "gone"),
    [
        ("// flashgen/plan/cuda_launches.py says the same.", ["flashgen/plan/cuda_launches.py"]),
        ("// flashgen/targets/gpu/launches.py says the same.", []),
        ("{#- Context: emit/cuda.py. -#}", ["emit/cuda.py"]),
        ("// of x.h and c.j", []),
    ],
)
def test_what_counts_as_a_path(comment: str, gone: list[str]) -> None:
    assert missing(ROOT / "templates/cuda/kernel.cu.jinja", iter([comment])) == gone
