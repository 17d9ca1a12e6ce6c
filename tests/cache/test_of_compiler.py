"""What the compiler keeps for itself: the grammar's tables and compiled templates, as good as fresh ones."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import jinja2
import pytest
from lark import Lark

from flashgen.diagnostics import Source
from flashgen.emit.environment import environment
from flashgen.language.parser import grammar, parse
from flashgen.store.cache import Cache, key_of

TEXT = "attention a { head_dim 16  score s * (1 +  mask causal }\nattention b { head_dimm 8  let x = -2^-i ? 1 }"


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("FLASHGEN_CACHE_DIR", str(tmp_path / "cache"))
    grammar.cache_clear()
    environment.cache_clear()
    yield
    grammar.cache_clear()
    environment.cache_clear()


def parsed(text: str) -> str:
    """The tree and the errors, as a process finds them that has just started."""
    grammar.cache_clear()
    return repr(parse(Source("a.attn", text)))


def test_stored_tables_parse_as_fresh_ones(specs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    texts = [file.read_text(encoding="utf-8") for file in sorted(specs.glob("*.attn"))[:5]]
    fresh = [parsed(text) for text in (TEXT, *texts)]
    assert "Diagnostic(" in fresh[0]

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("the tables are there")

    monkeypatch.setattr(Lark, "__init__", refuse)
    assert [parsed(text) for text in (TEXT, *texts)] == fresh


def test_damaged_tables_are_built_anew() -> None:
    fresh = parsed(TEXT)
    (stored,) = Cache.of_compiler().root.rglob("grammar.tables")
    stored.write_bytes(stored.read_bytes()[:-10])
    assert parsed(TEXT) == fresh
    assert Cache.of_compiler().read(stored.parent.name, stored.name) is not None


def test_templates_are_compiled_once(monkeypatch: pytest.MonkeyPatch) -> None:
    first = environment().get_template("cpu/arguments.h.jinja").render(fields=(), arguments=(), results=())
    environment.cache_clear()

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("the template is there")

    monkeypatch.setattr(jinja2.Environment, "_parse", refuse)
    assert environment().get_template("cpu/arguments.h.jinja").render(fields=(), arguments=(), results=()) == first


def test_keys_tell_lists_apart() -> None:
    keys = {key_of(), key_of(""), key_of("", ""), key_of("a", "b"), key_of("ab"), key_of("a", b"bc"), key_of("ab", "c")}
    assert len(keys) == 7
    assert key_of("ä") == key_of("ä".encode())
