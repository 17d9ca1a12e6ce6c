"""Bytes to text: what is refused, and how a place in it is named."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from flashgen.diagnostics import Diagnostic, SpecError
from flashgen.language import parse_file, parse_text

GOOD = "attention a { head_dim 64 }\n"


def refused(tmp_path: Path, content: bytes) -> Diagnostic:
    path = tmp_path / "x.attn"
    path.write_bytes(content)
    with pytest.raises(SpecError) as caught:
        parse_file(path)
    (diagnostic,) = caught.value.diagnostics
    assert diagnostic.span is not None
    assert diagnostic.span.file == str(path)
    assert f"x.attn:{diagnostic.span.line}:{diagnostic.span.column}: error[{diagnostic.code}]" in str(caught.value)
    return diagnostic


@pytest.mark.parametrize(
    ("content", "code", "place"),
    [
        (b"\x7fELF\x02\x01\x01\x00\x00", "E003", (1, 8)),
        (b"attention a {\n  head_dim \xff\n}", "E003", (2, 12)),
        ("attention ä { }".encode("latin-1"), "E003", (1, 11)),
        (GOOD.encode("utf-16"), "E003", (1, 1)),
        (b"attention a { head_dim 64 }\n\x00", "E003", (2, 1)),
        (b"", "E009", (1, 1)),
        (b"\xef\xbb\xbf", "E009", (1, 1)),
        (b"# only words\n", "E009", (1, 1)),
        (b"x" * ((1 << 20) + 1), "E002", (1, 1)),
        (b"\xff" * 10_000_000, "E002", (1, 1)),
    ],
)
def test_refused(tmp_path: Path, content: bytes, code: str, place: tuple[int, int]) -> None:
    diagnostic = refused(tmp_path, content)
    assert diagnostic.span is not None
    assert (diagnostic.code, diagnostic.span.line, diagnostic.span.column) == (code, *place)


def test_missing_file_and_directory(tmp_path: Path) -> None:
    for path in (tmp_path / "no.attn", tmp_path, Path("/dev/null/x"), Path("a\0b")):
        with pytest.raises(SpecError) as caught:
            parse_file(path)
        assert [each.code for each in caught.value.diagnostics] == ["E001"]
        str(caught.value)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_unreadable_file(tmp_path: Path) -> None:
    path = tmp_path / "x.attn"
    path.write_text(GOOD)
    path.chmod(0)
    with pytest.raises(SpecError) as caught:
        parse_file(path)
    assert [each.code for each in caught.value.diagnostics] == ["E001"]


@pytest.mark.parametrize("newline", ["\n", "\r\n", "\r"])
def test_newlines_and_byte_order_mark(tmp_path: Path, newline: str) -> None:
    path = tmp_path / "x.attn"
    path.write_bytes(("\ufeff" + "attention a {\n head_dim 64 # x\n mask nope\n}".replace("\n", newline)).encode())
    with pytest.raises(SpecError) as caught:
        parse_file(path)
    assert [str(each.span).rpartition("x.attn")[2] for each in caught.value.diagnostics] == [":3:7"]


def test_text_is_held_to_the_same_limits() -> None:
    for text, code in (("\0", "E003"), ("x" * (2 << 20), "E002"), ("", "E009")):
        with pytest.raises(SpecError) as caught:
            parse_text(text)
        assert [each.code for each in caught.value.diagnostics] == [code]


@pytest.mark.parametrize(
    "name", ["alibi", "albi", "specs/alibi.attn", " ./my specs/a.attn\n", r"C:\specs\a.attn", "a-b"]
)
def test_a_name_in_place_of_a_text(name: str) -> None:
    with pytest.raises(SpecError) as caught:
        parse_text(name)
    (found,) = caught.value.diagnostics
    assert found.code == "E009"
    assert f'write flashgen.load("{name.strip()}")' in found.hints[0]


@pytest.mark.parametrize("text", ["attention", "# causal.attn", '"masks.attn"', "4", "mask causal"])
def test_what_is_no_name_is_read(text: str) -> None:
    with pytest.raises(SpecError) as caught:
        parse_text(text)
    assert "flashgen.load" not in str(caught.value)


def test_lone_surrogates_in_text() -> None:
    with pytest.raises(SpecError) as caught:
        parse_text("attention a { head_dim 64 \ud800 }")
    str(caught.value).encode()
