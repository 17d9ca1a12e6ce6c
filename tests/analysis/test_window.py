"""How many keys a row keeps at most, against counting."""

from __future__ import annotations

import numpy as np
import pytest

from flashgen.analysis.kept import window_width
from flashgen.analysis.simplify import simplify
from flashgen.ir.expr import index
from tests.ir.expressions import expr
from tests.ir.values import evaluate

LENGTH = 200


@pytest.mark.parametrize(
    ("mask", "width"),
    [
        ("j <= i and i - j < 37", 37),
        ("abs(i - j) < 20", 39),
        ("i - j >= 3 and i - j <= 7", 5),
        ("i == j or i - j == 50", 2),
        ("j <= i and i - j < 37 and i - j < 12", 12),
        ("i - j > 5 and i - j < 2", 0),
        ("j <= i", None),
        ("j <= i and (i - j < 12 or j < 4)", None),
        ("j <= i and (i - j) % 3 == 0", None),
        ("True", None),
    ],
)
def test_width(mask: str, width: int | None) -> None:
    keep = simplify(expr(mask))
    assert window_width(keep) == width
    if width is not None:
        kept = evaluate(keep, {index("i"): np.asarray(LENGTH // 2), index("j"): np.arange(LENGTH)})
        assert np.sum(kept) == width
