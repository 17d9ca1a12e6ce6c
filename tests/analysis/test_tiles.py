"""Tile classes against brute force: the prelude's masks and layouts, captured tensors, random conditions."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flashgen.analysis.bounds import known_symbols
from flashgen.analysis.levels import observed_loads
from flashgen.analysis.tiles import Tile, TileClass, by_position, classify, loads_of
from flashgen.ir.build import apply
from flashgen.ir.expr import Expr, Load, Symbol, SymbolKind, index, literal, size, substitute
from flashgen.ir.interval import INT_MAX, INT_MIN, IntRange
from flashgen.ir.spec import HeadDim, Layout
from flashgen.ir.text import text
from flashgen.ir.types import ScalarType
from tests.ir.expressions import LAYOUTS, PRELUDE, expr, formula
from tests.ir.strategies import conditions_on_positions
from tests.ir.values import evaluate

NQ, NK, BLOCK = 96, 112, 16
VALUES: dict[str, Expr | float] = {
    "w": 20, "p": 40, "c": 32, "r": 3, "n": 10, "l": 24, "height": 8, "width": 14, "g": 1, "k": 2, "seed": 5,
}  # fmt: skip
TENSORS = {"doc": ("i32", ("B", "Nk")), "valid": ("bool", ("B", "Nk"))}
SIZES = {"B": 2, "H": 4, "Hkv": 2, "Nq": NQ, "Nk": NK}
DOC = np.sort(np.random.default_rng(0).integers(0, 5, (2, NK)), axis=1)
ARRAYS = {"doc": DOC, "valid": np.arange(NK)[None] < np.array([[70], [112]])}

# Masks whose classes are exact: PARTIAL only where pairs really differ.
EXACT = {"causal", "causal_lower_right", "window_left", "window", "prefix", "chunked", "same_document"}


def tiles() -> Iterator[tuple[Tile, slice, slice]]:
    for first_i in range(0, NQ, BLOCK):
        for first_j in range(0, NK, BLOCK):
            i, j = IntRange(first_i, min(first_i + BLOCK, NQ) - 1), IntRange(first_j, min(first_j + BLOCK, NK) - 1)
            b = IntRange(1, 1)
            yield Tile(b, IntRange(2, 2), i, j, SIZES), slice(i.lo, i.hi + 1), slice(j.lo, j.hi + 1)


def dense(keep: Expr, block: int = 1) -> Any:
    return over(keep, np.arange(NQ)[:, None], np.arange(NK)[None, :], block)


def on_tile(keep: Expr, tile: Tile) -> Any:
    return over(keep, np.arange(tile.i.lo, tile.i.hi + 1)[:, None], np.arange(tile.j.lo, tile.j.hi + 1)[None, :])


def over(keep: Expr, i: Any, j: Any, block: int = 1) -> Any:
    values: dict[Expr, Any] = {index("i"): i, index("j"): j, index("b"): np.array(1), index("h"): np.array(2)}
    values |= {size(name): np.array(value) for name, value in SIZES.items()}
    for name, position in (("I", i), ("J", j)):
        values[Symbol(ScalarType.INT, name=name, kind=SymbolKind.BLOCK)] = position // block
    return np.broadcast_to(evaluate(keep, values, tensors=ARRAYS), np.broadcast_shapes(i.shape, j.shape))


def over_positions(layout: Layout) -> Expr:
    """The condition of a layout on pairs of positions."""
    return substitute(layout.keep, known_symbols(HeadDim(1, 1), layout))


def truth(pairs: Any) -> TileClass:
    if pairs.all():
        return TileClass.FULL
    return TileClass.PARTIAL if pairs.any() else TileClass.EMPTY


@pytest.mark.parametrize("name", PRELUDE)
def test_prelude_masks(name: str) -> None:
    keep = formula(name, TENSORS, **VALUES)
    expected = dense(keep)
    decided = 0
    for tile, rows, columns in tiles():
        found, right = classify(keep, tile, loads=loads_of(ARRAYS)), truth(expected[rows, columns])
        assert found in (right, TileClass.PARTIAL)
        assert name not in EXACT or found is right
        decided += found is not TileClass.PARTIAL
    assert decided > 0 or name == "neighborhood_2d"


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("block", [16, 32])
def test_layouts_are_exact_on_whole_blocks(name: str, block: int) -> None:
    layout = Layout(block, formula(name, None, **(VALUES | {"w": 1, "p": 0.3})))
    expected = dense(layout.keep, block)
    for tile, rows, columns in tiles():
        assert classify(over_positions(layout), tile) is truth(expected[rows, columns])


def test_mask_and_layout_together() -> None:
    layout = Layout(16, expr("I == J or J == 0"))
    keep = expr("j <= i")
    expected = dense(keep) & dense(layout.keep, 16)
    for tile, rows, columns in tiles():
        assert classify(apply("and", keep, over_positions(layout)), tile) is truth(expected[rows, columns])


def test_loads() -> None:
    keep = expr("valid[b, j] and doc[b, i] == doc[b, j]", TENSORS)
    expected = dense(keep)
    for tile, rows, columns in tiles():
        assert classify(keep, tile, loads=loads_of(ARRAYS)) is truth(expected[rows, columns])
        assert classify(keep, tile) is TileClass.PARTIAL


def test_params_and_key_heads() -> None:
    limit = Symbol(ScalarType.INT, name="limit", kind=SymbolKind.PARAM)
    cut = Symbol(ScalarType.FLOAT, name="cut", kind=SymbolKind.PARAM)
    tile = next(iter(tiles()))[0]
    known = Tile(tile.b, tile.h, tile.i, tile.j, SIZES, {"limit": 16, "cut": 15.5})
    assert classify(expr("j < limit and j < cut", limit=limit, cut=cut), known) is TileClass.FULL
    assert classify(expr("j < limit", limit=limit), tile) is TileClass.PARTIAL
    assert classify(expr("hkv == 1"), tile) is TileClass.FULL


SOME = [each for each in tiles() if (each[0].i.lo, each[0].j.lo) in {(0, 0), (16, 96), (48, 48), (80, 0), (32, 16)}]


@settings(max_examples=250)
@given(conditions_on_positions(3))
def test_random_conditions(keep: Expr) -> None:
    for tile, _, _ in SOME:
        found = classify(keep, tile)
        if found is not TileClass.PARTIAL:
            assert found is truth(on_tile(keep, tile)), (text(keep), tile)


@st.composite
def bounds_on_positions(draw: st.DrawFn, depth: int) -> Expr:
    """Any logic over bounds on i, j and i - j, as users write them."""
    if depth == 0:
        i, j = index("i"), index("j")
        sums = st.sampled_from([i, j, apply("sub", i, j), apply("sub", j, i)])
        left, right = draw(st.sampled_from([(draw(sums), literal(draw(st.integers(-40, 110)))), (i, j)]))
        moved = apply("add", right, literal(draw(st.integers(-30, 30))))
        return apply(draw(st.sampled_from(("lt", "le", "gt", "ge", "eq", "ne"))), left, moved)
    inner = bounds_on_positions(depth - 1)
    joined = apply(draw(st.sampled_from(("and", "or", "eq"))), draw(inner), draw(inner))
    return draw(st.sampled_from([joined, apply("not", joined)]))


@settings(max_examples=200)
@given(bounds_on_positions(2))
def test_logic_over_bounds_on_positions_is_decided_exactly(keep: Expr) -> None:
    """Unions whose parts abut, overlap or leave a gap; intersections that no pair satisfies."""
    for tile, _, _ in SOME:
        assert classify(keep, tile) is truth(on_tile(keep, tile)), (text(keep), tile)


SIZE = Symbol(ScalarType.INT, name="c", kind=SymbolKind.PARAM)
BLOCKS = (
    "i // c == j // c", "j <= i and i // c == j // c", "(i + Nk - Nq) // c == j // c", "i // c - j // c <= 1",
    "max(i // c - j // c, j // c - i // c) <= 1", "i // c != j // c", "j // c < 3", "j // c + i // 16 < 5",
    "i // c + j // c == 3", "j // c == 1",
)  # fmt: skip
BESIDE = ("j <= i", "i - j < 20", "(i - j) % 9 == 0", "j // 3 % 2 == 1", "i + j < 90", "2 * i - j < 30", "i // c >= 2")


@st.composite
def masks_of_blocks(draw: st.DrawFn) -> Expr:
    """Any logic over blocks of c positions and what else masks bound."""
    keep: Expr | None = None
    for texts in draw(st.permutations([BLOCKS, BESIDE, BLOCKS + BESIDE]))[: draw(st.integers(1, 3))]:
        part = expr(draw(st.sampled_from(texts)), c=SIZE)
        part = apply("not", part) if draw(st.booleans()) else part
        keep = part if keep is None else apply(draw(st.sampled_from(("and", "or"))), keep, part)
    assert keep is not None
    return keep


def with_size(tile: Tile, c: int) -> Tile:
    return Tile(tile.b, tile.h, tile.i, tile.j, SIZES, {"c": c})


@settings(max_examples=200)
@given(masks_of_blocks(), st.sampled_from((2, 7, 16, 24, 64, 1000)))
def test_blocks_whose_size_a_call_gives_have_the_tiles_of_a_constant(keep: Expr, c: int) -> None:
    constant = substitute(keep, {SIZE: literal(c)})
    for tile, _, _ in SOME:
        assert classify(keep, with_size(tile, c)) is classify(constant, tile), (text(keep), tile)


@settings(max_examples=200)
@given(masks_of_blocks(), st.sampled_from((1, 5, INT_MAX, 0, -1, -5, -24, -1000, INT_MIN)))
def test_blocks_of_any_size(keep: Expr, c: int) -> None:
    """A param may be any int; where it is not known, nothing is known of blocks."""
    constant = substitute(keep, {SIZE: literal(c)})
    for tile, _, _ in SOME:
        right = truth(on_tile(constant, tile))
        for found in (classify(keep, with_size(tile, c)), classify(constant, tile), classify(keep, tile)):
            assert found in (right, TileClass.PARTIAL), (text(keep), tile)


def test_a_negative_size_is_as_good() -> None:
    keep = expr("j <= i and i // c == j // c and j // 3 % 2 == 1", c=SIZE)
    for c in (-16, -24):
        for tile, _, _ in SOME:
            constant = substitute(keep, {SIZE: literal(c)})
            assert classify(keep, with_size(tile, c)) is truth(on_tile(constant, tile))


@settings(max_examples=100)
@given(conditions_on_positions(3))
def test_what_holds_for_a_range_holds_for_its_parts(keep: Expr) -> None:
    """Kernels settle a whole range of key tiles by one evaluation."""
    i = IntRange(0, 15)
    for lo, hi in ((0, 111), (16, 79), (32, 47)):
        whole = classify(keep, Tile(IntRange(0, 0), IntRange(0, 0), i, IntRange(lo, hi), SIZES))
        parts = {
            classify(keep, Tile(IntRange(0, 0), IntRange(0, 0), i, IntRange(first, min(first + 15, hi)), SIZES))
            for first in range(lo, hi, 16)
        }
        if whole is not TileClass.PARTIAL:
            assert parts == {whole}


@pytest.mark.parametrize(
    ("place", "is_run"),
    [("i", True), ("i - 3", True), ("(i + 2) // 8", True), ("hash(i, 3) % 5", False), ("i % 5", False), ("-i", False)],
)
def test_elements_that_rows_do_not_read_are_left_out(place: str, is_run: bool) -> None:
    """Kernels look at the elements of sixteen rows, which need not be all between the least and the largest index."""
    tensors = {"t": ("bool", ("Nq",))}
    (load,) = observed_loads(expr(f"t[{place}]", tensors))[0]
    marks = np.arange(NQ) % 3 == 0
    keep, seen = by_position(expr(f"t[{place}]", tensors), {"t": marks}, SIZES, {})
    assert isinstance(keep, Load)
    assert (keep == load) == is_run
    if not is_run:
        read = evaluate(load, {index("i"): np.arange(NQ)}, tensors={"t": marks})
        assert (seen[keep.tensor] == read).all()
