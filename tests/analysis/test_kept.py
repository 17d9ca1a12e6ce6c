"""The mask as alternatives of bounds: what common masks come to, what may wrap, and that nothing runs away."""

from __future__ import annotations

from typing import Any

import numpy as np

from flashgen.analysis.constraints import Term
from flashgen.analysis.kept import MOST_TERMS, kept_terms
from flashgen.analysis.simplify import simplify
from flashgen.analysis.tiles import Tile, TileClass, classify, loads_of
from flashgen.ir.build import apply
from flashgen.ir.expr import Expr, index, literal
from flashgen.ir.interval import INT_MAX, IntRange
from tests.ir.expressions import expr
from tests.ir.values import evaluate

TENSORS = {"id": ("i32", ("B", "Nk"))}


def parts(keep: Expr) -> tuple[tuple[Term, ...], tuple[Term, ...]]:
    return kept_terms(simplify(keep)), kept_terms(simplify(keep), False)


def test_a_causal_window_is_one_bound_on_the_distance() -> None:
    (term,), dropped = parts(expr("j <= i and i - j < 128"))
    (bound,) = term.bounds
    assert bound.form.is_distance
    assert [limit.constant for limit in (*bound.least, *bound.most)] == [0, 127]
    assert len(dropped) == 2


def test_the_negation_of_windows_that_abut_has_no_gap() -> None:
    """i - j below 0 or from 75 on: nothing between the two windows is left."""
    _, dropped = parts(expr("0 <= i - j and (i - j < 30 or (30 <= i - j and i - j < 75))"))
    ends = sorted(tuple(x.constant for x in (*bound.least, *bound.most)) for t in dropped for bound in t.bounds)
    assert ends == [(-1,), (75,)]


def test_minima_maxima_and_choices_come_apart() -> None:
    distances = ("max(i - j, j - i) < 8", "abs(i - j) < 8", "i - j < 8 and j - i < 8")
    assert len({parts(expr(each)) for each in distances}) == 1
    chosen, written_out = expr("j < (i if i < 9 else 20)"), expr("(i < 9 and j < i) or (i >= 9 and j < 20)")
    assert parts(chosen)[0] == parts(written_out)[0]


def test_a_block_of_keys_is_a_bound_on_the_key() -> None:
    assert parts(expr("j // 16 < 3")) == parts(expr("j < 48"))
    assert parts(expr("2 <= j // 16")) == parts(expr("32 <= j"))


def test_what_can_never_hold_has_no_alternatives() -> None:
    assert parts(expr("i - j > 2 and i - j < 2"))[0] == ()
    assert parts(expr("i - j > 2 or i - j < 5"))[1] == ()


def test_sums_that_wrap() -> None:
    """Kernels compute modulo 2**32; a bound over the integers would say the opposite there."""
    keep = simplify(expr("id[b, i] + 5 > id[b, j] - 5", TENSORS))
    ids = (INT_MAX - np.arange(64)[::-1]).astype(np.int64)[None]
    values: dict[Expr, Any] = {
        index("b"): np.array(0),
        index("i"): np.arange(64)[:, None],
        index("j"): np.arange(64)[None, :],
    }
    kept = evaluate(keep, values, tensors={"id": ids})
    assert kept.any()
    assert not kept.all()
    zero, sizes = IntRange(0, 0), {"B": 1, "H": 1, "Hkv": 1, "Nq": 64, "Nk": 64}
    for first in range(0, 64, 8):
        for start in range(0, 64, 8):
            tile = Tile(zero, zero, IntRange(first, first + 7), IntRange(start, start + 7), sizes)
            found, pairs = classify(keep, tile, loads=loads_of({"id": ids})), kept[first : first + 8, start : start + 8]
            assert found is not TileClass.EMPTY or not pairs.any()
            assert found is not TileClass.FULL or pairs.all()


def test_long_and_deep_conditions_stay_small() -> None:
    """Where there are too many alternatives a part is left to its range."""
    distance = apply("sub", index("i"), index("j"))
    windows = [
        apply("and", apply("ge", distance, literal(20 * n)), apply("lt", distance, literal(20 * n + 9)))
        for n in range(40)
    ]
    union, exclusive, choice = windows[0], windows[0], distance
    for window in windows[1:]:
        union = apply("or", union, window)
        exclusive = apply("ne", exclusive, window)
        choice = apply("max", choice, apply("where", window, distance, index("j")))
    for keep in (union, exclusive, apply("lt", choice, literal(5))):
        assert all(0 < len(terms) <= MOST_TERMS for terms in parts(keep))
