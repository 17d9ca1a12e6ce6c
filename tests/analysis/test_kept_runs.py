"""What a line keeps, as runs of positions: which masks tell, and that runs say what the mask does."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from flashgen.analysis.kept import Blocks, Run, fits_position, kept_runs
from flashgen.analysis.ranging import Linear
from flashgen.analysis.simplify import simplify
from flashgen.ir.expr import Expr, Symbol, SymbolKind, index, size
from flashgen.ir.interval import INT_MAX, INT_MIN
from flashgen.ir.types import ScalarType
from tests.ir.expressions import expr
from tests.ir.values import evaluate

NQ, NK = 37, 41
SIZE = Symbol(ScalarType.INT, name="c", kind=SymbolKind.PARAM)
TENSORS = {"doc": ("i32", ("B", "Nk")), "first": ("i32", ("B", "Nq")), "end": ("i32", ("B", "Nk"))}
GENERATOR = np.random.default_rng(5)
VALUES = {
    "doc": np.sort(GENERATOR.integers(0, 5, (2, NK))),
    "first": GENERATOR.integers(-3, NK, (2, NQ)),
    "end": GENERATOR.integers(0, NQ + 4, (2, NK)),
}
# Of a mask, how many runs rows and columns have; None: a look at each pair.
MASKS: dict[str, tuple[int | None, int | None]] = {
    "j <= i": (1, 1),
    "j <= i + Nk - Nq": (1, 1),
    "abs(i - j) <= 5": (1, 1),
    "j <= i and i - j < 7": (1, 1),
    "j <= i or j < 9": (2, 2),
    "j < 4 or j <= i and i - j < 6": (2, 2),
    "j <= i and (i < 20 or j >= 5)": (2, 2),
    "j <= 2 * i": (1, None),
    "j // 8 < 3": (1, None),
    "j >= first[b, i]": (1, None),
    "j >= first[b, i] and j <= i": (1, None),
    "i < end[b, j]": (None, 1),
    "i % 3 == 0 and j <= i": (1, None),
    "j % 3 == 0 or j <= i": (None, 2),
    "doc[b, i] == doc[b, j]": (None, None),
    "i // 8 == j // 8": (1, 1),
    "j <= i and i // 8 - j // 8 <= 2": (1, 1),
    "(i + Nk - Nq) // 8 == j // 8": (1, 1),
    "first[b, i] // 8 < j // 8 or j // 8 == 1": (2, None),
    "(i + first[b, i]) // 8 == j // 8": (1, None),
    "(j + end[b, 0]) // 8 == 2": (None, None),
    "abs(i - j) <= 9 and (i - j) % 2 == 0": (None, None),
    "i < 7": (None, 1),
    "abs(i - j) == 3 or abs(i - j) == 6": (None, None),
}


@pytest.mark.parametrize("text", MASKS)
def test_runs_keep_what_the_mask_keeps(text: str) -> None:
    keep = simplify(expr(text, TENSORS))
    for axis, expected in zip((index("j"), index("i")), MASKS[text], strict=True):
        runs = kept_runs(keep, axis)
        assert (None if runs is None else len(runs)) == expected
        for b in range(2):
            values = _values(b)
            kept = np.broadcast_to(evaluate(keep, values, tensors=VALUES), (NQ, NK))
            found = kept if runs is None else np.logical_or.reduce([_of_run(run, axis, values) for run in runs])
            assert np.array_equal(np.broadcast_to(found, kept.shape), kept)


@pytest.mark.parametrize("c", [1, 7, 64, 1000, INT_MAX, 0, -1, -7, -1000, INT_MIN])
@pytest.mark.parametrize(
    "text",
    [
        "i // c == j // c",
        "j <= i and i // c == j // c",
        "(i + Nk - Nq) // c == j // c",
        "j <= i and i // c - j // c <= 1",
        "i // c - j // c >= 1 or j // c == 0",
        "first[b, i] // c == j // c and i // c > -2",
    ],
)
def test_blocks_of_any_size(text: str, c: int) -> None:
    """A param may be any int; of a size of 0 all positions are in block 0, of a negative one blocks fall."""
    keep = simplify(expr(text, TENSORS, c=SIZE))
    runs = kept_runs(keep, index("j"))
    assert runs is not None
    for b in range(2):
        values = {SIZE: np.array(c), **_values(b)}
        kept = np.broadcast_to(evaluate(keep, values, tensors=VALUES), (NQ, NK))
        found = np.logical_or.reduce([_of_run(run, index("j"), values) for run in runs])
        assert np.array_equal(np.broadcast_to(found, kept.shape), kept)


def test_ends_that_may_leave_32_bits() -> None:
    """A param may be any int: its ends are taken in 64 bits; a comparison that wraps is asked for each pair."""
    window = Symbol(ScalarType.INT, name="w", kind=SymbolKind.PARAM)
    far = simplify(expr("i - j < w", w=window))
    runs = kept_runs(far, index("j"))
    assert runs is not None
    assert not fits_position(runs[0].least[0])
    assert window in runs[0].least[0].terms
    assert fits_position(Linear(-5, {index("i"): 1}))
    assert not fits_position(Linear(INT_MAX, {size("Nk"): 1}))
    assert kept_runs(simplify(expr("first[b, i] + 5 > j + w", TENSORS, w=window)), index("j")) is None


def _values(b: int) -> dict[Expr, Any]:
    positions: dict[Expr, Any] = {index("i"): np.arange(NQ)[:, None], index("j"): np.arange(NK)[None, :]}
    return {index("b"): np.array(b), size("Nq"): np.array(NQ), size("Nk"): np.array(NK), **positions}


def _of_run(run: Run, axis: Symbol, values: dict[Expr, Any]) -> np.ndarray:
    position = values[axis]
    kept = np.ones((NQ, NK), bool)
    for end in run.least:
        kept &= position >= _sum(end, values)
    for end in run.most:
        kept &= position <= _sum(end, values)
    for blocks in run.blocks:
        kept &= _of_blocks(blocks, position, values)
    for total in run.not_negative:
        kept &= _sum(total, values) >= 0
    for truth in run.truths:
        kept &= evaluate(truth.condition, values, tensors=VALUES) == truth.value
    return kept


def _of_blocks(blocks: Blocks, position: Any, values: dict[Expr, Any]) -> Any:
    shifted, size = position + _sum(blocks.shift, values), int(evaluate(blocks.size, values, tensors=VALUES))
    number = np.floor_divide(shifted, size) if size else np.zeros_like(shifted)
    found = [_sum(end, values) <= number for end in blocks.least] + [number <= _sum(end, values) for end in blocks.most]
    return np.logical_and.reduce(np.broadcast_arrays(*found))


def _sum(total: Linear, values: dict[Expr, Any]) -> Any:
    terms = (c * evaluate(atom, values, tensors=VALUES).astype(np.int64) for atom, c in total.terms.items())
    return sum(terms, np.array(total.constant))
