"""The plan of the house: imports run downwards however they are written, and sizes only fall.

``lint-imports`` has the floors. It sees imports at the top of a module and inside functions; here are those for types
and by name, too. A change that makes a number of ``BUDGET`` smaller writes the smaller one down.
"""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import pytest

from tests.conftest import ROOT

BUDGET = {
    "lines of the package": 54_986,
    "lines of templates": 24_685,
    "Jinja statements": 281,
    "lines of generated packages": 3_136,
    "calls of decide": 1,
    "modules at the top level": 3,
    "lines of the longest module": 450,
    "words of documentation": 49_914,
}
COMMITTED = ("alibi",)
WITH_PAGES = ("docs", "flashgen", "specs", "tests", "tools")
MODULES = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
    for path in (ROOT / "flashgen").rglob("*.py")
}


def lines(paths: Iterable[Path]) -> int:
    return sum(path.read_bytes().count(b"\n") for path in paths)


@functools.cache
def measured() -> Mapping[str, int]:
    templates = [path for path in (ROOT / "templates").rglob("*") if path.is_file() and path.suffix != ".pyc"]
    generated = (path for name in COMMITTED for path in (ROOT / "generated" / name).iterdir())  # headers are templates
    pages = [*ROOT.glob("*.md"), *(page for room in WITH_PAGES for page in (ROOT / room).rglob("*.md"))]
    statements = (re.findall(r"\{%-?\s*(?!end)\w+", path.read_text()) for path in templates if path.suffix == ".jinja")
    return {
        "lines of the package": lines(MODULES.values()),
        "lines of templates": lines(templates),
        "Jinja statements": sum(map(len, statements)),
        "lines of generated packages": lines(path for path in generated if path.is_file() and path.suffix != ".pyc"),
        "calls of decide": sum(len(re.findall(r"(?<!def )\bdecide\(", path.read_text())) for path in MODULES.values()),
        "modules at the top level": len(list((ROOT / "flashgen").glob("*.py"))),
        "lines of the longest module": max(lines([path]) for path in MODULES.values()),
        "words of documentation": sum(len(page.read_text(encoding="utf-8").split()) for page in pages),
    }


@pytest.mark.parametrize("what", BUDGET)
def test_sizes_only_fall(what: str) -> None:
    found = measured()[what]
    assert found <= BUDGET[what], f"{what}: {found}; the budget is {BUDGET[what]}. Take something away for what you add"


def test_no_module_imports_what_imports_it() -> None:
    """Nor for types, inside a function, or by its name."""
    graph = {module: set(imported(module, path)) - {module} for module, path in MODULES.items()}
    while True:
        ends = {module for module, targets in graph.items() if not targets}
        if not ends:
            break
        graph = {module: targets - ends for module, targets in graph.items() if module not in ends}
    assert not graph, f"these import each other: {', '.join(sorted(graph))}"


def imported(module: str, path: Path) -> Iterator[str]:
    """The modules that a module names; the package itself is none."""
    for node in ast.walk(ast.parse(path.read_text())):
        match node:
            case ast.Import(names=names):
                found = [each.name for each in names]
            case ast.ImportFrom(module=str(base), names=names, level=0):
                found = [each if (each := f"{base}.{name.name}") in MODULES else base for name in names]
            case ast.Constant(value=str(text)) if text in MODULES:
                found = [text]
            case _:
                continue
        for each in found:
            known = next((name for name in _prefixes(each) if name in MODULES), "flashgen")
            if known not in ("flashgen", module):
                yield known


def _prefixes(name: str) -> Iterator[str]:
    while name:
        yield name
        name = name.rpartition(".")[0]


def test_the_check_sees_every_way_to_import(tmp_path: Path) -> None:
    text = """
from typing import TYPE_CHECKING
if TYPE_CHECKING:
    from flashgen.op.op import BaseOp
def late():
    import flashgen.cli.app
    return importlib.import_module("flashgen.picture.html"), __import__("flashgen.nn")
"""
    (tmp_path / "module.py").write_text(text)
    found = set(imported("flashgen.low", tmp_path / "module.py"))
    assert found == {"flashgen.op.op", "flashgen.cli.app", "flashgen.picture.html", "flashgen.nn"}
