"""Pictures of masks: classes and shares against every pair, at sizes where every pair can be looked at."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from flashgen.analysis.tiles import TileClass
from flashgen.compiler.pipeline import check_file
from flashgen.ir.shape import Shape
from flashgen.ir.spec import AttentionSpec
from flashgen.language import parse_text
from flashgen.picture.mask import MaskPicture, coarser, mask_picture
from flashgen.picture.paint import PALETTE, paint
from flashgen.verification.inputs import realistic_captured

MASKS: dict[str, Callable[[int, int, int], bool]] = {
    "true": lambda i, j, n: True,
    "causal": lambda i, j, n: j <= i,
    "causal and window_left(37)": lambda i, j, n: 0 <= i - j < 37,
    "dilated(60, 3)": lambda i, j, n: abs(i - j) <= 60 and (i - j) % 3 == 0,
    "global_tokens(5) or window(20)": lambda i, j, n: i < 5 or j < 5 or abs(i - j) <= 20,
    "j < Nk - 100": lambda i, j, n: j < n - 100,
    "false": lambda i, j, n: False,
}


def spec_of(statements: str) -> AttentionSpec:
    (spec,) = parse_text(f"attention a {{ head_dim 16 {statements} }}").specs
    return spec


def drawn(statements: str, shape: Shape, Br: int = 32, Bc: int = 16, **more: Any) -> MaskPicture:
    spec = spec_of(statements)
    return mask_picture(spec, spec.head_dims[0], shape, Br, Bc, **more)


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("lengths", [(150, 150), (97, 203), (1, 130)])
def test_every_class_and_share_is_right(mask: str, lengths: tuple[int, int]) -> None:
    q_len, kv_len = lengths
    picture = drawn(f"mask {mask}", Shape(1, 1, 1, q_len, kv_len))
    pairs = np.array([[MASKS[mask](i, j, kv_len) for j in range(kv_len)] for i in range(q_len)])
    assert picture.exact
    assert picture.kept_share == pytest.approx(pairs.mean(), rel=1e-6)
    for row, classes in enumerate(picture.classes):
        for column, found in enumerate(classes):
            tile = pairs[row * 32 : (row + 1) * 32, column * 16 : (column + 1) * 16]
            if found != TileClass.PARTIAL:
                assert tile.all() if found == TileClass.FULL else not tile.any(), (row, column)
    assert sum(picture.counts.values()) == picture.classes.size
    visited = list(picture.order())
    assert visited == sorted(visited)
    assert len(visited) == picture.counts["FULL"] + picture.counts["PARTIAL"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_captured_tensors_of_few_bits_and_views(dtype: torch.dtype) -> None:
    gate = torch.rand(130).to(dtype)
    declared = "f32" if dtype is torch.float32 else "bf16"
    statements, shape = f"tensor gate: {declared}[Nk] mask gate[j] > 0.5", Shape(1, 1, 1, 97, 130)
    picture = drawn(statements, shape, captured={"gate": gate})
    assert picture.kept_share == pytest.approx((gate > 0.5).double().mean().item(), rel=1e-6)
    other = drawn(statements, shape, captured={"gate": torch._neg_view(-gate)})
    assert np.array_equal(picture.classes, other.classes)


def test_intervals_are_settled_as_tightly_as_by_looking() -> None:
    picture = drawn("mask causal and window_left(37)", Shape(1, 1, 1, 256, 256))
    pairs = np.array([[0 <= i - j < 37 for j in range(256)] for i in range(256)])
    tiles = pairs.reshape(8, 32, 16, 16).any(axis=(1, 3))
    assert ((picture.classes != TileClass.EMPTY) == tiles).all()


def test_a_million_tokens_take_no_longer_than_their_picture() -> None:
    start = time.perf_counter()
    picture = drawn("mask causal and window_left(4096)", Shape(1, 8, 8, 2**20, 2**20), 128, 64)
    assert time.perf_counter() - start < 20
    assert picture.kept.size <= 512 * 512
    assert not picture.exact
    assert picture.kept_share == pytest.approx(4096 / 2**20, rel=0.1)
    assert picture.grouped == (64, 128)


def test_a_sampled_share_does_not_follow_a_pattern() -> None:
    picture = drawn("mask (i - j) % 8 == 0", Shape(1, 1, 1, 8192, 8192), 128, 64, pixels=128)
    assert picture.kept_share == pytest.approx(1 / 8, rel=0.05)


def test_heads_have_pictures_of_their_own() -> None:
    shape = Shape(1, 2, 1, 64, 64)
    shares = [drawn("mask j < 16 * (h + 1)", shape, head=head).kept_share for head in (0, 1)]
    assert shares == [pytest.approx(0.25), pytest.approx(0.5)]
    assert drawn("mask j < 16 * (h + 1)", shape).varies == ("heads",)


def test_captured_tensors_are_drawn_with_a_seed() -> None:
    statements, shape = "tensor doc: i32[B, Nk] mask same_document(doc)", Shape(1, 1, 1, 300, 300)
    first, again, other = (drawn(statements, shape, seed=seed) for seed in (0, 0, 1))
    assert first.drawn == ("doc",)
    assert (first.kept == again.kept).all()
    assert (first.kept != other.kept).any()


def test_a_tensor_that_the_mask_does_not_read_is_not_made() -> None:
    spec = spec_of("tensor bias: f32[H, Nq, Nk] score s + bias[h, i, j] mask causal")
    picture = mask_picture(spec, spec.head_dims[0], Shape(1, 64, 64, 2**20, 2**20), 128, 64)
    assert picture.drawn == ()


def test_booleans_are_padding_and_trees() -> None:
    spec = spec_of("tensor valid: bool[B, Nk] tensor tree: bool[Nq, Nq] mask valid[b, j] and tree[i, min(j, Nq - 1)]")
    shape = Shape(3, 1, 1, 20, 50)
    found = realistic_captured(spec, shape, spec.head_dims[0])
    valid, tree = found["valid"], found["tree"]
    assert (valid[:, 1:] <= valid[:, :-1]).all()
    assert valid[:, :25].all()
    assert tree.diagonal().all()
    assert not tree.triu(1).any()
    # An ancestor's ancestors are one's own.
    assert ((tree.float() @ tree.float() > 0) == tree).all()
    assert torch.equal(found["valid"], realistic_captured(spec, shape, spec.head_dims[0])["valid"])


def test_pixels_have_the_colours_of_their_classes() -> None:
    picture = drawn("mask causal", Shape(1, 1, 1, 64, 64), 16, 16)
    colors = PALETTE[paint(picture, 64, 64)]
    full, empty = colors[40, 5], colors[5, 40]
    assert tuple(full) == (30, 77, 122)
    assert tuple(empty) == (246, 246, 246)
    assert tuple(colors[10, 5]) == (79, 155, 217)
    assert tuple(colors[5, 10]) == (248, 222, 184)


def test_coarser_cells_are_partial_where_they_disagree() -> None:
    classes = np.array([[2, 2, 0], [2, 2, 2], [0, 0, 1]], np.uint8)
    assert coarser(classes).tolist() == [[2, 1], [0, 1]]


def test_the_pictures_of_the_gallery_are_those_of_the_specs(repository: Path, specs: Path) -> None:
    from PIL import Image

    from examples import gallery

    files = sorted(specs.glob("*.attn"))
    assert {file.stem for file in files} == {file.stem for file in gallery.FOLDER.glob("*.png")}
    assert sum(file.stat().st_size for file in gallery.FOLDER.glob("*.png")) < 400_000
    for name in ("causal", "longformer", "packed_documents", "sparse_butterfly"):
        shown = np.asarray(Image.open(gallery.FOLDER / f"{name}.png").convert("RGB"))
        expected = PALETTE[paint(gallery.picture(specs / f"{name}.attn"), *shown.shape[:2])]
        assert (shown == expected).all(), f"docs/gallery/{name}.png is not up to date: make gallery"


def test_head_dimensions_of_the_gallery_are_drawn(specs: Path) -> None:
    (spec,) = check_file(specs / "mla.attn").specs
    assert mask_picture(spec, spec.head_dims[0], Shape(1, 1, 1, 32, 32), 16, 16).kept_share == pytest.approx(33 / 64)
