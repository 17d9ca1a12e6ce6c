"""Tiles that GPU kernels visit: the emitted CUDA against brute force, and the bytes that the emulator counts.

The masks are those of ``catalogue.py``. A mask over positions alone is decided exactly; one that reads captured tensors
by what is known of sixteen rows or columns at a time.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import flashgen
from flashgen.analysis.pieces import is_cut
from flashgen.analysis.tiles import TileClass
from flashgen.ir.shape import Shape
from flashgen.ir.types import ElementType
from flashgen.language import parse_file
from flashgen.targets.gpu.emit import emit_cuda
from flashgen.targets.registry import GPUS
from flashgen.verification.verify import verify_case
from tests.analysis.pieces import class_in_pieces
from tests.cuda.helpers import of_type
from tests.masks.catalogue import MASKS
from tests.masks.device import TILES, DeviceMasks
from tests.masks.measure import Masks, exact, problems_of, tensors_of, variant_of
from tests.numeric.helpers import failures

CLASSES = {0: TileClass.EMPTY, 1: TileClass.PARTIAL, 2: TileClass.FULL}
NUMBERS = range(len(MASKS))
NAMES = [mask.name for mask in MASKS]


@pytest.fixture(scope="module")
def masks(repository: Path) -> Masks:
    return Masks(MASKS, repository / ".pytest_cache" / "masks")


@pytest.fixture(scope="module")
def device(masks: Masks, repository: Path) -> DeviceMasks:
    return DeviceMasks(masks, repository / ".pytest_cache" / "masks")


@pytest.mark.parametrize("number", NUMBERS, ids=NAMES)
def test_tiles(number: int, masks: Masks, device: DeviceMasks, rng: np.random.Generator) -> None:
    mask, compiled = MASKS[number], masks.variants[number].keep
    for problem in problems_of(mask):
        tensors = tensors_of(problem, rng)
        keep = masks.keep(number, problem, tensors)
        for rows, columns in TILES:
            found, truth = device.classes(number, problem, rows, columns, tensors), exact(keep, rows, columns)
            assert not np.any((found == 0) & (truth > 0)), (problem, rows, columns)
            assert not np.any((found == 2) & (truth < 2)), (problem, rows, columns)
            if mask.loose is None or is_cut(compiled):
                np.testing.assert_array_equal(found, truth, err_msg=f"{problem} {rows} {columns}")


@pytest.mark.parametrize("number", NUMBERS, ids=NAMES)
def test_the_analysis_finds_the_same_classes(
    number: int, masks: Masks, device: DeviceMasks, rng: np.random.Generator
) -> None:
    keep, problem = masks.variants[number].keep, problems_of(MASKS[number])[-1]
    if not is_cut(keep):
        return  # ranges alone, which test_tightness.py compares
    tensors = tensors_of(problem, rng)
    for rows, columns in ((64, 64), (32, 128)):
        found = device.classes(number, problem, rows, columns, tensors)
        for place, tile in masks.tiles(number, problem, rows, columns):
            assert class_in_pieces(keep, tile) is CLASSES[found[place]], (NAMES[number], tile)


@pytest.mark.parametrize(
    "statements",
    ["layout block 24: I == J or hash(I, J, 3) % 8 == 0", "mask causal and neighborhood_2d(13, 13, 2)"],
    ids=["blocks", "image"],
)
def test_kernels_move_the_bytes_of_those_tiles(statements: str) -> None:
    """Both passes are right, and load what the classes say: no tile for nothing."""
    op = flashgen.loads(f"attention cut {{ head_dim 16 dtype bf16\n {statements} }}", backend="emulator")
    case = verify_case(op, op.spec.head_dims[0], ElementType.BF16, Shape(1, 2, 1, 169, 169))
    assert case.ok, failures(case)
    assert all(each.predicted == each.counted > 0 for each in case.hbm_bytes.values())


@pytest.mark.parametrize("name", ["causal", "alibi", "packed_documents", "gemma2_local", "longformer", "dilated"])
def test_kernels_whose_tiles_ranges_decide_cut_none(repository: Path, name: str) -> None:
    """Their registers are what they were."""
    variant = variant_of(parse_file(repository / "specs" / f"{name}.attn").specs[0])
    assert "by_pieces" not in emit_cuda(of_type(GPUS["sm_90a"].plan(variant))).text
