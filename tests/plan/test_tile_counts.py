"""Counts of tiles: equal to looking at every tile; bytes of a shape: equal to those of a call."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from flashgen.analysis.pieces import is_cut
from flashgen.analysis.tiles import Tile, TileClass, classify, loads_of_kernels
from flashgen.analysis.variant import Variant, analyse
from flashgen.ir.expr import Load, walk
from flashgen.ir.interval import IntRange
from flashgen.ir.shape import Shape
from flashgen.language import parse_file
from flashgen.plan import tile_counts as module
from flashgen.plan.arguments import argument_fields
from flashgen.plan.tile_counts import MaskedCall, counts_of_call, tile_counts
from flashgen.targets.gpu.bytes import bytes_of_call, bytes_of_shape, counted
from flashgen.targets.gpu.launches import backward_launches, forward_launches
from flashgen.targets.registry import GPUS
from tests.analysis.pieces import class_in_pieces
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
        found[b, h, row, column] = order.index(class_in_pieces(keep.keep, tile))
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


CALL_MASKS = {
    "documents": "tensor doc: i32[B, Nk] mask causal and doc[b, i] == doc[b, j]",
    "lengths": "tensor until: i32[B, H] param w: i32 mask j < until[b, h] or i - j == w",
    "tables": "tensor blocks: bool[H, 8, 8] layout block 32: blocks[h, I, J]",
    "bits": "layout block 32: I == J or popcount(I ^ J) == 1",
    "heads": "mask j <= i + 40 * h - 30 * b",
}


@pytest.mark.parametrize("body", CALL_MASKS.values(), ids=CALL_MASKS)
def test_a_call_finds_what_looking_finds(body: str, rng: np.random.Generator) -> None:
    """A shard of something longer, with all that its mask reads: every tile of every head, one by one."""
    keep, shape = variant(f"head_dim 16 {body}").keep, Shape(2, 2, 1, 150, 205)
    sizes = {"B": 3, "H": 4, "Hkv": 2, "Nq": 190, "Nk": 221}
    doc = np.sort(rng.integers(0, 5, (3, 221)), axis=1)
    captured = {"doc": doc, "until": rng.integers(0, 221, (3, 4)), "blocks": rng.random((4, 8, 8)) < 0.2}
    call = MaskedCall(shape, (1, 2, 40, 16), sizes, {"w": -30}, loads_of_kernels(captured))
    for Br, Bc in ((32, 48), (64, 16)):
        counts, found = counts_of_call(keep, call, Br, Bc), np.zeros((2, 2, -(-150 // Br), -(-205 // Bc)), dtype=bool)
        for b, h, row, column in np.ndindex(*found.shape):
            i = IntRange(40 + row * Br, 40 + min(row * Br + Br, 150) - 1)
            j = IntRange(16 + column * Bc, 16 + min(column * Bc + Bc, 205) - 1)
            tile = Tile(IntRange(b + 1, b + 1), IntRange(h + 2, h + 2), i, j, sizes, call.params)
            looked = class_in_pieces(keep, tile) if is_cut(keep) else classify(keep, tile, loads=call.loads)
            found[b, h, row, column] = looked is not TileClass.EMPTY
        rows = np.minimum(Br, 150 - np.arange(0, 150, Br))[:, None]
        assert counts.is_exact
        assert (counts.visited, counts.unknown) == (found.sum(), ())
        assert counts.keys == (found * np.minimum(Bc, 205 - np.arange(0, 205, Bc))).sum()
        assert (counts.rows, counts.groups) == ((found * rows).sum(), (found * -(-rows // 16)).sum())


@pytest.mark.parametrize(("signed", "visited"), [(1, 0), (2, 4)])
def test_a_call_computes_what_no_position_changes(signed: int, visited: int) -> None:
    """Its value, as kernels do: a range of atan(0.0) holds more than 0."""
    keep = variant("head_dim 16 param signed: i32 mask 0.0 != atan(-5.0 + 5.0 * (signed % 2)) + 0.1 - 0.1").keep
    sizes = {"B": 1, "H": 1, "Hkv": 1, "Nq": 20, "Nk": 20}
    call = MaskedCall(Shape(1, 1, 1, 20, 20), (0, 0, 0, 0), sizes, {"signed": signed}, loads_of_kernels({}))
    assert counts_of_call(keep, call, 16, 16).visited == visited


@pytest.mark.parametrize("target", ["sm_80", "sm_90a"])
@pytest.mark.parametrize("name", BY_POSITIONS)
def test_bytes_of_a_shape_are_those_of_a_call(name: str, target: str) -> None:
    """Of each spec of the gallery whose mask follows from positions, forward and backward."""
    each, shape = gallery_variant(name), Shape(2, 2, 1, 150, 205)
    usual = GPUS[target].plan(each)
    plan = replace(usual, elements=usual.elements[:1])
    tiles = plan.own
    values: dict[str, float] = {field.name: 0 for field in argument_fields(each.spec)}
    values |= {"batch": 2, "heads": 2, "kv_heads": 1, "q_len": 150, "kv_len": 205}
    values |= {"lse_parts": 1, "b_total": 2, "h_total": 2, "q_total": 150, "kv_total": 205}
    values |= {f"param_{key}": value for key, value in module.known_params(each.spec.params, shape).items()}
    forward = forward_launches(plan, dropped=False)
    backward = backward_launches(plan, dropped=False, deterministic=False)
    for pass_name, launches in (("forward", forward), ("backward", backward)):
        total: Counter[str] = Counter()
        for by_buffer in bytes_of_shape(plan.recipe, tiles, shape, pass_name).values():
            total.update(by_buffer)
        assert total == bytes_of_call(plan.recipe, tiles, plan.symbol, launches, values, {})
        assert set(total) <= set(counted(each))


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
