"""What rows say of comparisons holds of their meaning."""

from __future__ import annotations

import itertools

import pytest

from flashgen.ir.operators import OPERATORS, Operator

COMPARISONS = [row for row in OPERATORS.values() if row.is_comparison]


def value(row: Operator, x: int, y: int) -> bool:
    assert row.fold.ints is not None
    return bool(row.fold.ints(x, y))


def test_which_operators_compare() -> None:
    assert {row.name for row in COMPARISONS} == {"lt", "le", "gt", "ge", "eq", "ne"}


@pytest.mark.parametrize("row", COMPARISONS, ids=lambda row: row.name)
def test_opposites_and_flipped_ones(row: Operator) -> None:
    opposite, flipped = OPERATORS[row.opposite], OPERATORS[row.flipped]
    for x, y in itertools.product((-1, 0, 1), repeat=2):
        assert value(opposite, x, y) is not value(row, x, y)
        assert value(flipped, y, x) is value(row, x, y)
