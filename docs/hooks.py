"""Hooks of MkDocs: pages of the repository outside of docs/, and formulas.

Pages link to files beside docs/ as the repository lays them out (``../specs/LANGUAGE.md``), so that links work where
the repository is read, too. ``on_files`` brings what is linked into the site, under its path in the repository;
``on_page_markdown`` rewrites the links. ``on_page_content`` turns formulas (LaTeX between dollars) into MathML, which
browsers draw by themselves.
"""

from __future__ import annotations

import html
import posixpath
import re
from pathlib import Path
from typing import TYPE_CHECKING

from latex2mathml.converter import convert
from mkdocs.structure.files import File

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files
    from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parent.parent
# Pages of the navigation that stand elsewhere, whether a page links to them or not.
OUTSIDE = (
    "specs/LANGUAGE.md",
    "flashgen/ARCHITECTURE.md",
    "tools/benchmarks/README.md",
    "CONTRIBUTING.md",
    "CHANGELOG.md",
)
_LINK = re.compile(r"(?<=\]\()([^)#\s]+)(?=(?:#[^)]*)?\))")
_FORMULA = re.compile(r'<(span|div) class="arithmatex">\\[(\[](.*?)\\[)\]]</\1>', re.DOTALL)


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add what the pages link to outside of docs/, and what those link to."""
    waiting = [*OUTSIDE, *(f"docs/{file.src_uri}" for file in files.documentation_pages())]
    seen = set(waiting)
    while waiting:
        path = waiting.pop()
        if not path.startswith("docs/"):
            files.append(File.generated(config, path, abs_src_path=str(ROOT / path)))
        if path.endswith(".md"):
            linked = {_target(path, link) for link in _LINK.findall((ROOT / path).read_text(encoding="utf-8"))}
            new = {each for each in linked - seen if (ROOT / each).is_file() and not each.startswith("docs/")}
            seen |= new
            waiting += sorted(new)
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:  # noqa: ARG001
    """Links between files of the repository, as the site lays them out."""
    uri = page.file.src_uri
    path = f"docs/{uri}" if (ROOT / "docs" / uri).is_file() else uri

    def moved(match: re.Match[str]) -> str:
        target = _target(path, match[1])
        if "://" in match[1] or not (ROOT / target).exists():
            return match[1]
        return posixpath.relpath(target.removeprefix("docs/"), posixpath.dirname(uri) or ".")

    return _LINK.sub(moved, markdown)


def on_page_content(content: str, page: Page, config: MkDocsConfig, files: Files) -> str:  # noqa: ARG001
    """Formulas as MathML; one on lines of its own is a paragraph."""

    def written(match: re.Match[str]) -> str:
        formula = html.unescape(match[2])
        return f"<p>{convert(formula, display='block')}</p>" if match[1] == "div" else convert(formula)

    return _FORMULA.sub(written, content)


def _target(path: str, link: str) -> str:
    """The path in the repository that a link of a page leads to."""
    return posixpath.normpath(posixpath.join(posixpath.dirname(path), link))
