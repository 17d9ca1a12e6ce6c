"""Captured ints in indices: taken where the literal is, at every value that stays inside, with one kernel for all."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from flashgen.flex import create_block_mask, flex_attention, to_spec
from flashgen.flex.ops import compiled
from tests.flex.helpers import assert_close, inputs, judged

W, SHIFT = 6, 3
BLOCKS = torch.rand(2, 4, 4, 4, generator=torch.Generator().manual_seed(0)) > 0.4
BLOCKS |= torch.eye(4, dtype=torch.bool)


class Sides:
    """Holds a size, as modules do."""

    width = 6


def with_argument(width: int, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
    return BLOCKS[b, h, i // width, j // width]


MODS: dict[str, Any] = {
    "a global": lambda b, h, i, j: BLOCKS[b, h, i // W, j // W],
    "a default argument": lambda b, h, i, j, width=6: BLOCKS[b, h, i // width, j // width],
    "a partial": partial(with_argument, 6),
    "a class": lambda b, h, i, j: BLOCKS[b, h, i // Sides.width, j // Sides.width],
    "a shift": lambda b, h, i, j: BLOCKS[b, h, i >> SHIFT, j >> SHIFT],
    "a remainder": lambda b, h, i, j: BLOCKS[b, h, (i % W) // 2, (j % W) // 2],
    "floor_divide": lambda b, h, i, j: BLOCKS[b, h, torch.floor_divide(i, W), torch.div(j, W, rounding_mode="floor")],
    "a product": lambda b, h, i, j: BLOCKS[b, h, i * W // 36, j * W // 36],
    "a negative size": lambda b, h, i, j: BLOCKS[b, h, i // -W, j // -W],
}


@pytest.mark.parametrize("name", MODS)
def test_indices_by_captured_sizes(name: str) -> None:
    q, k, v = inputs()
    mask = create_block_mask(MODS[name], 2, 4, 24, 24)
    assert_close(flex_attention(q, k, v, None, mask, backend="reference"), judged(q, k, v, None, MODS[name])[0])


def test_the_kernel_has_the_index_of_the_literal() -> None:
    assert "mask BLOCKS[b, h, i // W, j // W]" in to_spec(mask_mod=MODS["a global"])
    assert "mask BLOCKS[b, h, i % W // 2, j % W // 2]" in to_spec(mask_mod=MODS["a remainder"])


def test_other_values_compile_nothing_and_are_checked() -> None:
    q, k, v = inputs()

    def attended(width: int) -> None:
        def mod(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
            return BLOCKS[b, h, i // width, j // width]

        o = flex_attention(q, k, v, None, create_block_mask(mod, 2, 4, 24, 24), backend="reference")
        assert_close(o, judged(q, k, v, None, mod)[0])

    attended(6)
    before = compiled.cache_info().misses
    for width in (7, 9, 24, 6):
        attended(width)
    with pytest.raises(
        ValueError, match=r"'i // width' of tensor 'BLOCKS' is 4, .*width = 5\).*clamp\(i // width, 0, 3\)"
    ):
        attended(5)
    assert compiled.cache_info().misses == before


def test_a_map_of_blocks_in_a_kernel() -> None:
    q, k, v = inputs()
    o = flex_attention(q, k, v, None, create_block_mask(MODS["a global"], 2, 4, 24, 24))
    assert_close(o, judged(q, k, v, None, MODS["a global"])[0])
