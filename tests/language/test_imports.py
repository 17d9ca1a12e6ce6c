"""Imports, from the disk and from given texts."""

from __future__ import annotations

from pathlib import Path

import pytest

from flashgen.diagnostics import SpecError
from flashgen.language import parse_file, parse_text

MAIN = 'import "lib/masks.attn"\nattention a { head_dim 64   mask near(3) and early }\n'
MASKS = 'import "base.attn"\ndef near(w) = distance <= w\ndef early = i < 5\nattention ignored { no sense }\n'.replace(
    "attention ignored { no sense }", "attention ignored { head_dim 32 }"
)
BASE = "def distance = abs(i - j)\n"


def write(folder: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")


def test_paths_are_relative_to_the_importing_file(tmp_path: Path) -> None:
    write(tmp_path, {"main.attn": MAIN, "lib/masks.attn": MASKS, "lib/base.attn": BASE})
    file = parse_file(tmp_path / "main.attn")
    assert [each.name for each in file.specs] == ["a"]
    assert [Path(each.name).name for each in file.sources] == ["main.attn", "masks.attn", "base.attn"]
    assert file.sources[1].text == MASKS
    assert file.specs[0].sources == file.sources


def test_given_texts_stand_in_for_the_disk() -> None:
    found = parse_text(MAIN, "specs/main.attn", imports={"specs/lib/masks.attn": MASKS, "specs/lib/base.attn": BASE})
    assert found.specs == parse_text(MAIN, "main.attn", imports={"lib/masks.attn": MASKS, "lib/base.attn": BASE}).specs
    again = parse_text(
        found.sources[0].text,
        found.sources[0].name,
        imports={source.name: source.text for source in found.sources[1:]},
    )
    assert again == found


def codes(main: str, imports: dict[str, str]) -> list[str]:
    with pytest.raises(SpecError) as caught:
        parse_text(main, "main.attn", imports=imports)
    str(caught.value)
    return [each.code for each in caught.value.diagnostics]


def test_only_the_definitions_of_the_file_itself_come_in() -> None:
    files = {"lib/masks.attn": MASKS, "lib/base.attn": BASE}
    assert codes(MAIN.replace("early", "distance < 3"), files) == ["E101"]


def test_a_file_may_be_imported_by_two_ways() -> None:
    main = 'import "one.attn" import "two.attn" import "base.attn" attention a { head_dim 64 mask one and two }'
    files = {
        "one.attn": 'import "base.attn" def one = distance < 1',
        "two.attn": 'import "base.attn" def two = distance < 2',
        "base.attn": BASE,
    }
    assert len(parse_text(main, imports=files).sources) == 4


def test_errors_inside_an_imported_file_point_there() -> None:
    with pytest.raises(SpecError) as caught:
        parse_text(MAIN, "main.attn", imports={"lib/masks.attn": MASKS, "lib/base.attn": "def distance = abs(x -)"})
    assert [str(each.span) for each in caught.value.diagnostics] == ["lib/base.attn:1:23"]
    assert "def distance = abs(x -)" in str(caught.value)


def test_a_missing_file_hides_what_it_would_have_defined() -> None:
    assert codes(MAIN, {}) == ["E011"]
    assert "did you mean 'lib/mask.attn'" in message(MAIN, {"lib/mask.attn": ""})


def message(main: str, imports: dict[str, str]) -> str:
    with pytest.raises(SpecError) as caught:
        parse_text(main, "main.attn", imports=imports)
    return str(caught.value)


def test_circles() -> None:
    files = {"b.attn": 'import "c.attn" def b1 = 1', "c.attn": 'import "b.attn" def c1 = 2'}
    assert codes('import "b.attn" attention a { head_dim 64 }', files) == ["E012"]
    assert codes('import "main.attn" attention a { head_dim 64 }', {"main.attn": ""}) == ["E012"]


def test_too_many_files() -> None:
    files = {f"f{n}.attn": f'import "f{n + 1}.attn"' for n in range(200)}
    assert codes('import "f0.attn" attention a { head_dim 64 }', files) == ["E011"]


@pytest.mark.parametrize("content", [b"\xff\xfe\x00", b"\x00", b"def a = \xe9", b"x" * (2 << 20)])
def test_imported_bytes_that_are_no_spec(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "b.attn").write_bytes(content)
    (tmp_path / "a.attn").write_text('import "b.attn" attention a { head_dim 64 }')
    with pytest.raises(SpecError) as caught:
        parse_file(tmp_path / "a.attn")
    assert [each.code for each in caught.value.diagnostics] == ["E011"]
    assert "b.attn" in str(caught.value)


def test_collisions() -> None:
    main = 'import "b.attn" def x1 = 3 attention a { head_dim 64 score s * x1 }'
    assert codes(main, {"b.attn": "def x1 = 2"}) == ["E104"]
    assert codes('import "b.attn" attention a { head_dim 64 }', {"b.attn": "def causal = 2"}) == ["E105"]
