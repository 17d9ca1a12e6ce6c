"""Counts of tiles: equal to looking at every tile, and to the bytes that are predicted tile by tile."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from flashgen.analysis.pieces import classify_in_pieces
from flashgen.analysis.tiles import Tile, TileClass
from flashgen.analysis.variant import Variant, analyse
from flashgen.ir.expr import Load, walk
from flashgen.ir.interval import IntRange
from flashgen.ir.shape import Shape
from flashgen.language import parse_file
from flashgen.plan import tile_counts as module
from flashgen.plan.arguments import argument_fields
from flashgen.plan.cuda_bytes import backward_traffic, forward_traffic
from flashgen.plan.cuda_devices import TARGETS
from flashgen.plan.cuda_launches import backward_launches, forward_launches
from flashgen.plan.cuda_planner import plan_cuda
from flashgen.plan.cuda_traffic import COUNTED, traffic
from flashgen.plan.tile_counts import tile_counts
from tests.numeric.helpers import GALLERY, SMALL_CONSTANTS, SPECS
from tests.plan.test_planner import variant

SHAPE = Shape(2, 2, 1, 200, 301)


def gallery_variant(name: str) -> Variant:
    spec = parse_file(SPECS / f"{name}.attn", SMALL_CONSTANTS.get(name, {})).specs[0]
    return analyse(spec, spec.head_dims[0])


def by_positions() -> list[str]:
    """The specs whose masks read nothing that only a call knows."""
    return [
        name
        for name in GALLERY
        if not any(isinstance(node, Load) for node in walk(gallery_variant(name).keep))
        and not any(param.default is None for param in gallery_variant(name).spec.params)
    ]


BY_POSITIONS = by_positions()


def classes(keep: Variant, shape: Shape, Br: int, Bc: int) -> np.ndarray:
    """Every tile of every head, looked at: 0 empty, 1 partial, 2 full."""
    sizes = {"B": shape.batch, "H": shape.heads, "Hkv": shape.kv_heads, "Nq": shape.q_len, "Nk": shape.kv_len}
    found = np.zeros((shape.batch, shape.heads, -(-shape.q_len // Br), -(-shape.kv_len // Bc)), dtype=int)
    for b, h, row, column in np.ndindex(*found.shape):
        tile = Tile(
            IntRange(b, b),
            IntRange(h, h),
            IntRange(row * Br, min(row * Br + Br, shape.q_len) - 1),
            IntRange(column * Bc, min(column * Bc + Bc, shape.kv_len) - 1),
            sizes,
        )
        order = (TileClass.EMPTY, TileClass.PARTIAL, TileClass.FULL)
        found[b, h, row, column] = order.index(classify_in_pieces(keep.keep, tile))
    return found


@pytest.mark.parametrize(
    "body",
    [
        "head_dim 16",
        "head_dim 16 mask causal",
        "head_dim 16 mask causal and window_left(50)",
        "head_dim 16 mask window(20) or global_tokens(3)",
        "head_dim 16 layout block 32: I == J or popcount(I ^ J) == 1",
        "head_dim 16 mask j <= i + 40 * h - 30 * b",
        "head_dim 16 mask j > 1000",
    ],
)
@pytest.mark.parametrize(("Br", "Bc"), [(32, 48), (64, 16)])
def test_halving_finds_what_looking_finds(body: str, Br: int, Bc: int) -> None:
    each = variant(body)
    counts, every = tile_counts(each, SHAPE, Br, Bc), classes(each, SHAPE, Br, Bc)
    assert counts.is_exact
    assert (counts.partial, counts.full, counts.total) == ((every == 1).sum(), (every == 2).sum(), every.size)
    visited = every > 0
    keys = np.minimum(Bc, SHAPE.kv_len - np.arange(0, SHAPE.kv_len, Bc))
    rows = np.minimum(Br, SHAPE.q_len - np.arange(0, SHAPE.q_len, Br))
    assert counts.keys == (visited * keys).sum()
    assert counts.rows == (visited * rows[:, None]).sum()
    assert counts.groups == (visited * -(-rows[:, None] // 16)).sum()
    np.testing.assert_allclose(counts.row_tiles, visited.sum(3).mean((0, 1)))
    np.testing.assert_allclose(counts.column_tiles, visited.sum(2).mean((0, 1)))


@pytest.mark.parametrize("target", ["sm_80", "sm_90a"])
@pytest.mark.parametrize("name", BY_POSITIONS)
def test_bytes_are_those_of_every_tile(name: str, target: str) -> None:
    """Of each spec of the gallery whose mask follows from positions, forward and backward."""
    each, shape = gallery_variant(name), Shape(2, 2, 1, 150, 205)
    plan = plan_cuda(each, TARGETS[target])
    tiles = plan.elements[0]
    values: dict[str, float] = {field.name: 0 for field in argument_fields(each.spec)}
    values |= {"batch": 2, "heads": 2, "kv_heads": 1, "q_len": 150, "kv_len": 205}
    values |= {"b_total": 2, "h_total": 2, "q_total": 150, "kv_total": 205}
    values |= {f"param_{key}": value for key, value in module._known_params(each.spec.params, shape).items()}
    forward = forward_launches("s", each, plan, tiles.element, dropped=False)
    backward = backward_launches("s", each, plan, tiles.element, dropped=False, deterministic=False)
    for launches, quick in ((forward, forward_traffic), (backward, backward_traffic)):
        expected = traffic(each, tiles, "s", launches, values, {})
        total: dict[str, int] = {}
        for by_buffer in quick(each, tiles, shape).values():
            for buffer, size in by_buffer.items():
                total[buffer] = total.get(buffer, 0) + size
        assert total == expected
        assert set(total) <= set(COUNTED)


def test_what_only_a_call_knows_is_named() -> None:
    each = variant("head_dim 16 tensor doc: i32[B, Nk] param w: i32 mask causal and doc[b, i] == doc[b, j] and j > w")
    counts = tile_counts(each, SHAPE, 64, 64)
    assert counts.unknown == ("doc", "w")
    assert counts.full == 0
    assert counts.visited == tile_counts(variant("head_dim 16 mask causal"), SHAPE, 64, 64).visited


def test_defaults_of_params_are_known() -> None:
    counts = tile_counts(variant("head_dim 16 param w: i32 = Nk // 4 mask causal and i - j < w"), SHAPE, 32, 32)
    expected = tile_counts(variant(f"head_dim 16 mask causal and window_left({SHAPE.kv_len // 4})"), SHAPE, 32, 32)
    assert counts.unknown == ()
    assert (counts.full, counts.partial) == (expected.full, expected.partial)


def test_long_sequences_are_sampled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Work follows the budget; the estimate stays near what every tile says."""
    each, shape = variant("head_dim 16 mask causal and window_left(900)"), Shape(1, 1, 1, 4096, 4096)
    exact = tile_counts(each, shape, 64, 64)
    assert exact.is_exact
    module._counted.cache_clear()
    monkeypatch.setattr(module, "MOST_CLASSIFIED", 300)
    sampled = tile_counts(each, shape, 64, 64)
    module._counted.cache_clear()
    assert not sampled.is_exact
    assert sampled.visited == pytest.approx(exact.visited, rel=0.1)
    assert sampled.rows == pytest.approx(exact.rows, rel=0.1)
    assert sampled.column_tiles.sum() == pytest.approx(exact.column_tiles.sum(), rel=0.1)


def test_a_million_keys_take_no_time() -> None:
    counts = tile_counts(variant("head_dim 16 mask causal"), Shape(1, 1, 1, 2**20, 2**20), 128, 128)
    assert counts.kept_fraction == pytest.approx(0.5, rel=0.02)


def test_shipped_specs_are_found() -> None:
    assert len(BY_POSITIONS) > len(GALLERY) // 2
    assert Path(SPECS).is_dir()
