"""A spec printed is the spec again."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from flashgen.ir.text import spec_text
from flashgen.language import parse_file, parse_text

GALLERY = sorted((Path(__file__).parents[2] / "specs").glob("*.attn"))


@pytest.mark.parametrize("file", GALLERY, ids=lambda file: file.stem)
def test_the_gallery_is_printed_and_read_again(file: Path) -> None:
    for spec in parse_file(file).specs:
        (again,) = parse_text(spec_text(spec)).specs
        assert replace(spec, constants=()) == again


def test_what_occurs_twice_gets_a_name() -> None:
    text = "attention a { head_dim 16 let d = abs(i - j) * 3 // (i + 1) score s + d * d mask d < 9 }"
    (spec,) = parse_text(text).specs
    assert spec_text(spec).count("//") == 1
    assert replace(parse_text(spec_text(spec)).specs[0]) == spec
