"""Tiles in pieces: what ranges decide anyway, where tiles are cut, and that nothing is ever said that is not so."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from flashgen.analysis.constraints import COLUMN, ROW
from flashgen.analysis.pieces import block_sizes, is_cut, stays_open
from flashgen.analysis.simplify import simplify
from flashgen.analysis.tiles import Tile, TileClass, classify
from flashgen.ir.expr import Expr, index
from flashgen.ir.interval import IntRange
from tests.analysis.pieces import class_in_pieces
from tests.ir.expressions import expr
from tests.ir.values import evaluate

CONDITIONS = (
    "i - j < {a}", "i - j >= {a}", "j < {a}", "i >= {a}", "abs(i - j) < {m}", "abs(i - j - {a}) <= {m}",
    "i // {c} == j // {c}", "i // {c} - j // {c} <= 1", "j // {c} < (i + 1) // {c}", "(i - j) % {m} == 1",
    "j % {m} >= {m} - 2", "i % {c} != 0", "2 * j <= i + {a}", "abs(3 * i - 4 * j) < {a}", "abs(i + j - {a}) < {m}",
    "(i // {c} + j // {c}) % 2 == 0", "hash(i // {c}, j // {c}) % 4 == 0", "(i & j) == 0", "(2 * i + j) % {m} == 0",
    "abs(i % {c} - j % {c}) <= 2", "i != {a}", "i - j != {a}", "clamp(i, 5, {a}) >= j", "j >= i // {c} * {c}",
)  # fmt: skip
BY_ANOTHER_DIVISOR = "(2 * i + j) % {m} == 0"
MASKS = 60
TILES = 25


def random_mask(rng: np.random.Generator, conditions: Sequence[str] = CONDITIONS) -> tuple[Expr, bool]:
    """And whether each of its conditions occurs once."""
    chosen = rng.choice(conditions, rng.integers(1, 4))
    numbers = {"a": int(rng.integers(6, 60)), "m": int(rng.integers(2, 9)), "c": int(rng.integers(2, 20))}
    parts = [f"({'not ' if rng.random() < 0.2 else ''}({each.format(**numbers)}))" for each in chosen]
    text = parts[0]
    for part in parts[1:]:
        text = f"({text} {rng.choice(['and', 'or'])} {part})"
    return simplify(expr(text)), len(set(chosen)) == len(chosen)


def random_tile(rng: np.random.Generator) -> Tile:
    (i, j), sizes = rng.integers(0, 60, 2), rng.integers(0, 24, 2)
    zero = IntRange(0, 0)
    return Tile(
        zero, zero, IntRange(int(i), int(i + sizes[0])), IntRange(int(j), int(j + sizes[1])), {"H": 1, "Hkv": 1}
    )


def exact(keep: Expr, tile: Tile) -> TileClass:
    i, j = (np.arange(each.lo, each.hi + 1) for each in (tile.i, tile.j))
    kept = evaluate(keep, {index("i"): i[:, None], index("j"): j[None, :]})
    kept = np.broadcast_to(kept, (len(i), len(j)))
    return TileClass.FULL if kept.all() else TileClass.PARTIAL if kept.any() else TileClass.EMPTY


def test_random_masks(rng: np.random.Generator) -> None:
    """Where ranges are said to decide they do; where they do not, pieces are never wrong."""
    decided = 0
    for _ in range(MASKS):
        keep, _ = random_mask(rng)
        for _ in range(TILES):
            tile = random_tile(rng)
            truth, found, pieces = exact(keep, tile), classify(keep, tile), class_in_pieces(keep, tile)
            assert pieces in (truth, TileClass.PARTIAL), (keep, tile)
            if not is_cut(keep) and not stays_open(keep):
                decided += 1
                assert found is truth, (keep, tile)
    assert decided > MASKS


def test_pieces_decide_most_of_what_ranges_leave_open() -> None:
    """But for conditions that contradict one another (i - j and 2 i + j modulo 3), which no piece of them shows."""
    rng, conditions = np.random.default_rng(0), [each for each in CONDITIONS if each != BY_ANOTHER_DIVISOR]
    open_by_ranges = open_by_pieces = 0
    for _ in range(4 * MASKS):
        keep, each_once = random_mask(rng, conditions)
        for _ in range(TILES if is_cut(keep) and each_once else 0):
            tile = random_tile(rng)
            truth = exact(keep, tile)
            open_by_ranges += classify(keep, tile) is not truth
            open_by_pieces += class_in_pieces(keep, tile) is not truth
    assert open_by_ranges > 100
    assert open_by_ranges > 10 * open_by_pieces


@pytest.mark.parametrize(
    ("mask", "is_open", "cuts"),
    [
        ("i >= j and i - j < 70", False, False),
        ("i >= j and i - j < 60 and (i - j) % 4 == 0", False, False),
        ("abs(i // 32 - j // 32) <= 1", False, False),
        ("hash(i // 32, j // 32) % 4 == 0", True, True),
        ("abs(i // 18 - j // 18) <= 3 and abs(i % 18 - j % 18) <= 3", True, False),
        ("(i & j) == 0", True, True),
    ],
)
def test_what_ranges_decide(mask: str, is_open: bool, cuts: bool) -> None:
    keep = simplify(expr(mask))
    assert (stays_open(keep), is_cut(keep)) == (is_open, cuts)


def test_masks_over_captured_tensors_are_not_cut() -> None:
    assert not stays_open(simplify(expr("id[b, i] == id[b, j] and j % 7 < i % 5", {"id": ("i32", ("B", "Nk"))})))


def test_blocks_of_an_axis() -> None:
    keep = simplify(
        expr("i // 18 == j // 24 and i % 7 < 3 and (i + 1) // 40 > 0 and (j // 10) % 2 == 0 and i % 96 < 5")
    )
    assert block_sizes(keep, ROW) == (96, 40, 18)
    assert block_sizes(keep, COLUMN) == (24, 10)
