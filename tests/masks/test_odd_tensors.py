"""Elements that ranges have to read as kernels do: none at all, NaN, ints of 64 bits, indices past the last."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import flashgen
from flashgen.analysis.tiles import classify, loads_of, loads_of_kernels
from flashgen.hosts.emulated import recording
from flashgen.verification.hbm import hbm_bytes
from flashgen.verification.inputs import Inputs
from tests.masks.catalogue import BATCH, HEADS, Mask
from tests.masks.measure import Masks, Problem
from tests.masks.test_tightness import CLASSES

PROBLEM = Problem(150, 301, 20, 7)
MASKS = (
    Mask("empty", "layout block 32: 1 <= coarse[J, 0]", ("coarse",)),
    Mask("empty by the pair", "layout block 32: coarse[J, I] < 1", ("coarse",)),
    Mask("NaN", "mask time[b, j] > 5.0", ("time",)),
    Mask("64 bits", "mask wide[b, j] > 0", ("wide",)),
    Mask("past the last", "layout block 16: blocks[h, I, J]", ("blocks",)),
)


def tensors(rng: np.random.Generator) -> dict[str, Any]:
    """Of the problem: some times are NaN, lower halves of ints differ in sign from the whole."""
    length = PROBLEM.totals[1]
    time = rng.standard_normal((BATCH, length)).astype(np.float32)
    time[:, rng.integers(0, length, 3)] = np.nan
    wide = np.where(rng.random((BATCH, length)) < 0.01, 2**32 - 7, -(2**31) - 5)
    wide[:, length // 2 :] = 2**31
    blocks = np.zeros((HEADS, 2, 3), bool)
    blocks[:, 1, rng.integers(0, 3)] = True
    return {"coarse": np.zeros((0, HEADS), np.int64), "time": time, "wide": wide, "blocks": blocks}


@pytest.fixture(scope="module")
def masks(repository: Path) -> Masks:
    return Masks(MASKS, repository / ".pytest_cache" / "masks")


@pytest.mark.parametrize("number", range(len(MASKS)), ids=[mask.name for mask in MASKS])
def test_the_analysis_finds_the_classes_of_kernels(number: int, masks: Masks, rng: np.random.Generator) -> None:
    given, keep = tensors(rng), masks.variants[number].keep
    # Room for the element that stands for those of an empty tensor.
    held = given | {"coarse": np.lib.stride_tricks.as_strided(np.zeros(1, np.int64), (0, HEADS), (0, 0))}
    for rows, columns in ((48, 64), (16, 16), (128, 128)):
        found = masks.count(number, PROBLEM, rows, columns, held).ranges
        for place, tile in masks.tiles(number, PROBLEM, rows, columns):
            assert classify(keep, tile, loads=loads_of_kernels(given)) is CLASSES[found[place]], tile
            # What is there says no less than what kernels know.
            known = classify(keep, tile, loads=loads_of(given))
            assert known is CLASSES[found[place]] or found[place] == 1, tile


def test_rows_that_read_by_several_indices_see_their_elements_and_no_box() -> None:
    """By bytes: a tile of whose rows none is kept is not visited, whatever lies between their elements."""
    text = "attention crossed { head_dim 16 dtype bf16 tensor t: bool[Nq, Nq] tensor u: bool[2, Nq] tensor at: i64[Nk] "
    op = flashgen.loads(
        f"{text} mask t[i, Nq - 1 - i] and t[at[j], j] and u[hash(at[i], 3) % 2, i] }}", backend="emulator"
    )
    q, k, v = (torch.randn(1, 2, 300, 16, dtype=torch.bfloat16) for _ in range(3))
    t = torch.rand(300, 300) < 0.5
    rows, at = torch.arange(300), torch.randint(0, 300, (300,))
    t[rows, 299 - rows] = rows // 128 != 1
    t[at, rows] = rows // 64 != 2
    captured: dict[str, Any] = {"t": t, "u": torch.ones(2, 300, dtype=torch.bool), "at": at}
    with recording() as counted, torch.no_grad():
        op(q, k, v, **captured)
    (moved,) = hbm_bytes(op, Inputs(q, k, v, captured, {}, q, torch.zeros(1, 2, 300)), counted).values()
    assert moved.predicted == moved.counted
