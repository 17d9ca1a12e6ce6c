"""Each definition of the prelude, against the table of the language written in Python."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from flashgen.ir.expr import Load, index
from flashgen.ir.types import ScalarType
from flashgen.language.imports import standard_definitions
from tests.language.helpers import mask, score, spec, value

N, NK, LENGTHS = 14, 17, {"Nq": 14, "Nk": 17, "H": 8}


def near(i: int, j: int) -> bool:
    def clamp(x: int, low: int, high: int) -> int:
        return min(max(x, low), high)

    height, width, r = 4, 4, 1
    rows = abs(clamp(i // width, r, height - 1 - r) - j // width) <= r
    return rows and abs(clamp(i % width, r, width - 1 - r) - j % width) <= r


MASKS: dict[str, Callable[[int, int], bool]] = {
    "causal": lambda i, j: j <= i,
    "causal_lower_right": lambda i, j: j <= i + NK - N,
    "window_left(3)": lambda i, j: i - j < 3,
    "window(3)": lambda i, j: abs(i - j) <= 3,
    "prefix(5)": lambda i, j: j < 5,
    "chunked(4)": lambda i, j: i // 4 == j // 4,
    "dilated(5, 2)": lambda i, j: abs(i - j) <= 5 and (i - j) % 2 == 0,
    "sink_window(2, 3)": lambda i, j: j < 2 or i - j < 3,
    "global_tokens(2)": lambda i, j: i < 2 or j < 2,
    "strided(4)": lambda i, j: i - j < 4 or (i - j) % 4 == 0,
    "fixed(4, 1)": lambda i, j: i // 4 == j // 4 or j % 4 >= 4 - 1,
    "neighborhood_2d(4, 4, 1)": near,
}
LAYOUTS: dict[str, Callable[[int, int], bool]] = {
    "local_global(1, 2)": lambda i, j: abs(i - j) <= 1 or i < 2 or j < 2,
    "butterfly(3)": lambda i, j: i == j or ((i ^ j).bit_count() == 1 and (i ^ j) < 8),
}


@pytest.mark.parametrize("text", MASKS)
def test_mask(text: str) -> None:
    found = mask(text)
    for i in range(N):
        for j in range(NK):
            assert value(found, {"i": i, "j": j, **LENGTHS}) == MASKS[text](i, j), (i, j)


@pytest.mark.parametrize("text", LAYOUTS)
def test_layout(text: str) -> None:
    layout = spec(f"layout block 64: {text}").layout
    assert layout is not None
    for i in range(N):
        for j in range(NK):
            assert value(layout.keep, {"I": i, "J": j}) == LAYOUTS[text](i, j), (i, j)


def test_random_blocks_keep_their_share_and_follow_the_seed() -> None:
    kept = {}
    for seed in (1, 2):
        layout = spec(f"layout block 64: random_blocks(0.25, {seed})").layout
        assert layout is not None
        kept[seed] = [value(layout.keep, {"I": i, "J": j}) for i in range(40) for j in range(40)]
        assert 0.2 < sum(kept[seed]) / 1600 < 0.3
    assert kept[1] != kept[2]


def test_same_document_takes_a_tensor() -> None:
    found = spec("tensor doc: i32[B, Nk] mask same_document(doc)").mask
    b, i, j = index("b"), index("i"), index("j")
    left, right = found.children
    assert left == Load(ScalarType.INT, tensor="doc", indices=(b, i))
    assert right == Load(ScalarType.INT, tensor="doc", indices=(b, j))


def test_scores() -> None:
    slope = score("alibi_slope(h)")
    assert [value(slope, {"h": h, "H": 8}) for h in range(8)] == [2.0 ** -(h + 1) for h in range(8)]
    assert score("softcap(s, 30)") == score("30 * tanh(s / 30)")


def test_the_whole_prelude_is_covered() -> None:
    tested = {text.partition("(")[0] for text in (*MASKS, *LAYOUTS)}
    assert set(standard_definitions()) == tested | {"random_blocks", "same_document", "alibi_slope", "softcap"}
