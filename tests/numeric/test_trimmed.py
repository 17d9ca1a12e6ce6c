"""Keys that the forward pass on CPUs leaves out at the border of a mask: results are those of the dense formula."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import flashgen
from tests.numeric.helpers import assert_close, normal

# Borders at either end, between rows of one strip, strips inside of a tile that keep nothing, and what is captured.
MASKS = {
    "window": "mask causal and i - j < 37",
    "two windows": "mask (i - j >= 3 and i - j < 9) or (j - i > 40 and j - i < 45)",
    "corner": "mask i < 17 or j >= 61",
    "documents": "tensor doc: i32[Nk]  mask causal and doc[i] == doc[j]",
}


@pytest.mark.parametrize("mask", MASKS.values(), ids=list(MASKS))
def test_borders_inside_of_strips(mask: str) -> None:
    op = flashgen.loads(f"attention trimmed {{ head_dim 24  {mask}  schedule {{ Br = 64  Bc = 64 }} }}", backend="cpu")
    assert "trimmed = true" in op.sources[0].text
    has_documents = "doc" in mask
    for length, first in ((150, 0),) if has_documents else ((150, 0), (61, 64), (1, 30)):
        q, k, v = (normal(1, 2, rows, 24, seed=n) for n, rows in enumerate((length, 150, 150)))
        given: dict[str, Any] = {"doc": torch.arange(150, dtype=torch.int32) // 23} if has_documents else {}
        if not has_documents:
            given = {"q_start": first, "q_total": 150 + first}
        o, lse = op(q, k, v, return_lse=True, **given)
        truth, lse_truth = op.reference(q, k, v, return_lse=True, dtype=torch.float64, **given)
        assert_close(o, truth, 1e-6)
        assert torch.equal(lse.isfinite(), lse_truth.isfinite())
        assert_close(lse[lse.isfinite()], lse_truth[lse_truth.isfinite()], 1e-6)


@pytest.mark.parametrize("mask", ["", "mask (i - j) % 3 == 0"], ids=["plain", "dilated"])
def test_what_ranges_do_not_cut_is_not_trimmed(mask: str) -> None:
    op = flashgen.loads(f"attention whole {{ head_dim 24  {mask} }}", backend="cpu")
    assert "trimmed = true" not in op.sources[0].text
