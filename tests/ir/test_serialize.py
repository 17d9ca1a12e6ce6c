"""Specs as data: an equal spec comes back, through JSON."""

import json
from pathlib import Path

import pytest

from flashgen.ir.serialize import spec_from_data, spec_to_data
from flashgen.language import parse_file, parse_text

GALLERY = sorted((Path(__file__).parents[2] / "specs").glob("*.attn"))


@pytest.mark.parametrize("file", GALLERY, ids=lambda file: file.stem)
def test_gallery_specs_come_back_equal(file: Path) -> None:
    for spec in parse_file(file).specs:
        again = spec_from_data(json.loads(json.dumps(spec_to_data(spec))))
        assert again == spec
        assert (again.statements, again.sources) == (spec.statements, spec.sources)


def test_infinities_and_shared_nodes_come_back() -> None:
    body = "let x2 = s * s let x4 = x2 + x2 let x8 = x4 + x4 score (x8 + x8 if i != j else -inf) schedule { Br = 64 }"
    spec = parse_text(f"attention a {{ head_dim 16 const x = 1e-30 {body} }}").specs[0]
    data = spec_to_data(spec)
    assert spec_from_data(data) == spec
    assert len(data["nodes"]) < 30
