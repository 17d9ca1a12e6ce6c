"""Many boxes at once against one tile at a time: masks of the catalogue, specs of the gallery, any condition."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flashgen.analysis.ranging import LoadRange
from flashgen.analysis.simplify import simplify
from flashgen.analysis.tiles import Boxes, Tile, TileClass, classify, classify_boxes, classify_tiles, loads_of
from flashgen.analysis.variant import analyse
from flashgen.ir.expr import Expr, Load, walk
from flashgen.ir.interval import IntRange
from flashgen.ir.text import text
from flashgen.language import parse_file, parse_text
from tests.analysis.pieces import class_in_pieces
from tests.ir.expressions import expr
from tests.ir.strategies import conditions_on_positions
from tests.masks.catalogue import MASKS, Mask
from tests.numeric.helpers import GALLERY, SPECS

SIZES = {"B": 2, "H": 4, "Hkv": 2, "Nq": 700, "Nk": 900, "D": 64, "Dv": 64}


def random_boxes(
    count: int, rng: np.random.Generator, sizes: dict[str, int], params: dict[str, bool | int | float]
) -> Boxes:
    """Of every size, from one pair to all of them."""

    def ends(length: int) -> tuple[np.ndarray, np.ndarray]:
        first, extent = rng.integers(0, length, count), 2.0 ** rng.uniform(0, np.log2(length), count)
        return first, np.minimum(first + extent.astype(np.int64), length) - 1

    (first_i, last_i), (first_j, last_j) = ends(sizes["Nq"]), ends(sizes["Nk"])
    b, h = rng.integers(0, sizes["B"], count), rng.integers(0, sizes["H"], count)
    return Boxes(b, h, first_i, last_i, first_j, last_j, sizes, params)


def assert_alike(keep: Expr, boxes: Boxes, loads: LoadRange | None = None) -> None:
    """Each box is of the class of its tile."""
    columns = (boxes.b, boxes.h, boxes.first_i, boxes.last_i, boxes.first_j, boxes.last_j)
    found, of_tiles = classify_boxes(keep, boxes, loads), classify_tiles(keep, boxes)
    for number, (b, h, *ends) in enumerate(zip(*(column.tolist() for column in columns), strict=True)):
        i, j = IntRange(*ends[:2]), IntRange(*ends[2:])
        tile = Tile(IntRange(b, b), IntRange(h, h), i, j, boxes.sizes, boxes.params)
        assert TileClass(found[number]) is classify(keep, tile, loads=loads), (text(keep), tile)
        if not any(isinstance(node, Load) for node in walk(keep)):
            assert TileClass(of_tiles[number]) is class_in_pieces(keep, tile), (text(keep), tile)


@pytest.mark.parametrize("mask", MASKS, ids=[mask.name for mask in MASKS])
def test_masks_of_the_catalogue(mask: Mask, rng: np.random.Generator) -> None:
    variant = analyse((spec := parse_text(mask.spec).specs[0]), spec.head_dims[0])
    assert_alike(variant.keep, random_boxes(60, rng, SIZES, dict(mask.params)))


@pytest.mark.parametrize("name", GALLERY)
def test_specs_of_the_gallery(name: str, rng: np.random.Generator) -> None:
    """At lengths of today; params are known."""
    spec = parse_file(SPECS / f"{name}.attn").specs[0]
    keep, sizes = analyse(spec, spec.head_dims[0]).keep, SIZES | {"Nq": 65_536, "Nk": 70_000}
    params: dict[str, bool | int | float] = {each.name: 3 for each in spec.params}
    assert_alike(keep, random_boxes(40, rng, sizes, params))


def test_captured_tensors_that_are_known(rng: np.random.Generator) -> None:
    """Of ints, bools and floats, by row, by column and by pair, one in the index of another."""
    declared = {"doc": ("i32", ("B", "Nk")), "valid": ("bool", ("Nk",)), "t": ("f32", ("Nq",)), "at": ("i32", ("Nq",))}
    loads = loads_of(
        {
            "doc": np.sort(rng.integers(0, 6, (2, 900)), axis=1),
            "valid": rng.random(900) < 0.7,
            "t": rng.normal(size=700).astype(np.float32),
            "at": rng.integers(0, 900, 700),
        }
    )
    for written in (
        "j <= i and doc[b, i] == doc[b, j]",
        "valid[j] or t[i] > 0.5",
        "valid[at[i]] and j < at[i]",
        "doc[b, at[i]] != doc[b, j]",
    ):
        assert_alike(simplify(expr(written, declared)), random_boxes(150, rng, SIZES, {}), loads)


@settings(max_examples=60)
@given(conditions_on_positions(3), st.integers(0, 2**31))
def test_random_conditions(keep: Expr, drawn: int) -> None:
    assert_alike(keep, random_boxes(12, np.random.default_rng(drawn), SIZES, {}))


def test_sums_that_wrap(rng: np.random.Generator) -> None:
    """A bound that may leave 32 bits in one box holds in another."""
    keep = expr("i * 1000000 + 2000000000 > j * 1000000")
    assert_alike(keep, random_boxes(200, rng, SIZES, {}))


def test_floats_keep_the_sign_of_zero(rng: np.random.Generator) -> None:
    """1 / (i * -0.0) is -inf, 1 / (i * 0.0) is inf: ranges of one are not remembered for the other."""
    for keep in (expr("1.0 / (i * -0.0) < 0.0"), expr("1.0 / (i * 0.0) < 0.0")):
        assert_alike(keep, random_boxes(20, rng, SIZES, {}))


def test_no_boxes() -> None:
    none = np.zeros(0, np.int64)
    found = classify_boxes(expr("(i ^ j) % 3 == 1"), Boxes(none, none, none, none, none, none, SIZES, {}))
    assert found.shape == (0,)
