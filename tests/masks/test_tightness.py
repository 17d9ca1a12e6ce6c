"""Tiles that kernels visit against the fewest that hold a kept pair, over the masks of ``catalogue.py``.

Three ways to the classes of tiles are compared with brute force and with each other: ``keep_range`` as emitted, which
GPUs go by alone; ``find_visits`` of the CPU kernel, which looks at pairs where ranges leave something open; and
``analysis.tiles.classify``, which the planner goes by.
"""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import pytest

from flashgen.analysis.tiles import TileClass, classify, loads_of_kernels
from tests.masks.catalogue import MASKS
from tests.masks.measure import PROBLEMS, TILES, Masks, intervals, problems_of, tensors_of

CLASSES = {0: TileClass.EMPTY, 1: TileClass.PARTIAL, 2: TileClass.FULL}
NUMBERS = range(len(MASKS))
NAMES = [mask.name for mask in MASKS]


@pytest.fixture(scope="module")
def masks(repository: Path) -> Masks:
    return Masks(MASKS, repository / ".pytest_cache" / "masks")


@pytest.mark.parametrize("number", NUMBERS, ids=NAMES)
def test_tiles(number: int, masks: Masks, rng: np.random.Generator) -> None:
    """Never wrong. The CPU visits what brute force does; ranges alone do, too, unless the catalogue says why not."""
    mask = MASKS[number]
    for problem in problems_of(mask):
        tensors = tensors_of(problem, rng)
        for rows, columns in TILES:
            counts = masks.count(number, problem, rows, columns, tensors)
            assert not np.any((counts.ranges == 0) & (counts.exact > 0)), (problem, rows, columns)
            assert not np.any((counts.ranges == 2) & (counts.exact < 2)), (problem, rows, columns)
            np.testing.assert_array_equal(counts.visits, counts.exact, err_msg=f"{problem} {rows} {columns}")
            if mask.loose is None:
                np.testing.assert_array_equal(counts.ranges, counts.exact, err_msg=f"{problem} {rows} {columns}")


@pytest.mark.parametrize("number", NUMBERS, ids=NAMES)
def test_the_analysis_finds_the_same_classes(number: int, masks: Masks, rng: np.random.Generator) -> None:
    mask, problem = MASKS[number], problems_of(MASKS[number])[-1]
    tensors = tensors_of(problem, rng)
    keep, loads = masks.variants[number].keep, loads_of_kernels(tensors)
    for rows, columns in ((48, 64), (33, 20)):
        found = masks.count(number, problem, rows, columns, tensors).ranges
        for place, tile in masks.tiles(number, problem, rows, columns):
            assert classify(keep, tile, loads=loads) is CLASSES[found[place]], (mask.name, tile)


def test_query_tiles_begin_with_the_longest(masks: Masks) -> None:
    """Of equals the last come first: under a causal mask they are the longest by a hair."""
    np.testing.assert_array_equal(masks.longest_first([3, 9, 1, 9, 3]), [3, 1, 4, 0, 2])


@pytest.mark.parametrize("runs", [1, 2, 3, 7, 40])
def test_runs_of_query_tiles_are_even(runs: int, masks: Masks, rng: np.random.Generator) -> None:
    """Each tile is in one run, and no run has more than its share and one tile's work beyond it."""
    for tiles in (1, 2, 8, 33):
        for work in (np.ones(tiles), np.arange(1, tiles + 1), rng.integers(1, 6, tiles) ** 4):
            first = masks.cut_evenly(work, runs)
            assert first[0] == 0
            assert first[-1] == tiles
            assert (np.diff(first) >= 0).all()
            loads = [work[begin:end].sum() for begin, end in itertools.pairwise(first)]
            assert max(loads) <= work.sum() / runs + work.max(), (work, first)


def test_fifty_masks_of_few_intervals_are_decided_by_ranges_alone(masks: Masks) -> None:
    tensors = tensors_of(PROBLEMS[0], np.random.default_rng(1))
    few = [n for n in NUMBERS if MASKS[n].loose is None and 0 < intervals(masks.keep(n, PROBLEMS[0], tensors)) <= 4]
    assert len(few) >= 50
